"""The code on the pages runs."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(*arguments):
    environment = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment
    ).stdout


@pytest.mark.deep
def test_the_engine_in_ten_lines():
    out = run("-c", blocks("README.md")[0])
    first, *others = (
        int(count) for count in re.findall(r"^(\d+) of \d+ prompt tokens were cached:$", out, re.MULTILINE)
    )
    assert first == 0
    assert len(others) == 2
    assert all(count > 0 for count in others)


@pytest.mark.deep
def test_the_quickstart():
    first, second, stats, answer = run("-c", "".join(blocks("docs/quickstart.md")[:2])).splitlines()
    assert first.startswith("0 cached;")
    assert int(second.split()[0]) >= 64
    assert "hit_requests=1" in stats
    assert 0 < len(answer) <= 16


@pytest.mark.deep
def test_the_foreign_step_is_the_example_and_the_example_runs():
    """It imports neither the engine nor flax."""
    example = ROOT / "examples" / "foreign_step.py"
    assert blocks("README.md")[1] in example.read_text()
    out = run(
        "-c",
        f"import runpy, sys; runpy.run_path({str(example)!r}, run_name='__main__');"
        "print([name for name in sys.modules if name.startswith(('flax', 'mamba_align_jax.engine'))])",
    )
    assert out.count("tokens right") == 2
    assert out.splitlines()[-1] == "[]"


def test_a_model_keeps_its_answers_when_its_cache_is_swapped(capsys):
    runpy.run_path(str(ROOT / "examples" / "own_cache.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert re.findall(r"(\d+) of \d+ tokens were cached; the same 20 tokens", out) == ["0", "32", "32"]
