"""What the README shows runs."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(*arguments):
    environment = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment
    ).stdout


def test_the_engine_in_ten_lines():
    lines = run("-c", BLOCKS[0]).splitlines()
    cached = [int(line.split()[0]) for line in lines if "prompt tokens were cached" in line]
    assert cached[0] == 0
    assert all(count > 0 for count in cached[1:])


def test_the_foreign_step_is_the_example_and_the_example_runs():
    """And imports neither engine nor flax."""
    example = ROOT / "examples" / "foreign_step.py"
    assert BLOCKS[1] in example.read_text()
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
