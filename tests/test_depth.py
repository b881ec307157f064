"""A full run goes on as a quick one after `--deep-minutes`, and says what it left out."""

import math
import re
import subprocess
import sys
from pathlib import Path

import depth
import pytest

ROOT = Path(depth.__file__).parent.parent


@pytest.mark.parametrize(
    ("value", "seconds", "is_full"), [(True, math.inf, True), (True, 600, True), (True, 0, False), (False, 600, False)]
)
def test_a_run_is_full_for_a_time(monkeypatch, value, seconds, is_full):
    monkeypatch.setattr(depth, "_end", depth._end)
    depth.set_full(value, seconds)
    assert depth.is_full() == is_full
    assert depth.examples(2, 3) == (3 if is_full else 2)


def test_any_file_comes_first_in_the_order_of_some_text():
    """So over several commits, whose hashes are the texts, the deep tests of each file are run."""
    files = [f"tests/test_{number}.py" for number in range(20)]
    in_order = lambda text: sorted(files, key=lambda file: depth.place(file, text))
    assert in_order("0") == in_order("0") != in_order("1")
    assert {in_order(str(number))[0] for number in range(200)} == set(files)


@pytest.mark.parametrize(
    ("options", "is_said"), [(["--depth=full", "--deep-minutes=0"], True), (["--depth=quick"], False)]
)
def test_deep_tests_that_come_too_late_are_counted(options, is_said):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    command += ["tests/benchmarks/test_processes.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = "2 deep tests were left out, because 0 minutes had passed" in run.stdout
    assert said == is_said, run.stdout + run.stderr
    assert ("were left out" in run.stdout) == is_said
    assert int(re.search(r"^(\d+) s of CPU time$", run.stdout, re.MULTILINE)[1]) > 0
    assert ("2 skipped" if is_said else "2 deselected") in run.stdout
