"""The commands for a machine with a GPU: what they say of a run, whole or cut off, and how they share its memory."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # as the commands are started

import files  # noqa: E402
import record  # noqa: E402
import run  # noqa: E402
import sanitizer  # noqa: E402
import soaks  # noqa: E402

TESTS = """
import os, time, pytest
pytestmark = pytest.mark.gpu
def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.large_pool
def test_large(): pytest.skip("no room")
def test_hangs(): time.sleep(1000)
"""


@pytest.fixture
def outcomes(tmp_path):
    """Writes a file of outcomes, as a run leaves it, and returns it."""

    def write(*lines):
        file = tmp_path / "tests.jsonl"
        begin = dict(kind="tests", commit="abc", began=time.time() - 10)
        file.write_text("".join(json.dumps(line) + "\n" for line in (begin, *lines)))
        return file

    return write


ONE = dict(test="a::one", outcome="passed", seconds=1.0, text="")
TWO = dict(test="a::two", outcome="failed", seconds=1.0, text="E  1 is not 2")


def test_a_run_that_is_cut_off_names_its_failures_and_what_was_running(outcomes, capsys):
    file = outcomes(
        dict(collected=4), dict(started="a::one"), ONE, dict(started="a::two"), TWO, dict(started="a::three")
    )
    with file.open("a") as torn:
        torn.write('{"test": "a::thr')
    row = run.row_of(file)
    assert row | dict(seconds=0) == dict(
        kind="tests",
        commit="abc",
        passed=1,
        failed=1,
        skipped=0,
        seconds=0,
        not_run=2,
        cut_off=True,
        failures=["a::two"],
    )
    said = capsys.readouterr().out
    assert "E  1 is not 2" in said
    assert "FAILED a::two" in said
    assert "2 tests had not ended. These were running:\n  a::three" in said


def test_a_run_that_ended_is_not_cut_off(outcomes):
    row = run.row_of(outcomes(dict(collected=2), ONE, TWO, dict(ended=True)))
    assert (row["cut_off"], row["not_run"], row["passed"]) == (False, 0, 1)


def test_a_stopped_run_has_written_its_outcomes(tmp_path):
    """The real command, pytest and plugin, over tests that pass, fail, skip and hang."""
    (tmp_path / "test_some.py").write_text(TESTS)
    file = tmp_path / "rows.jsonl"
    command = [
        sys.executable,
        HERE / "run.py",
        "--commit=abc",
        f"--out={tmp_path / 'out'}",
        f"--json={file}",
        "--limit=300",
    ]
    command += ["--", "-c", record.ROOT / "pyproject.toml", f"--rootdir={tmp_path}", "-p", "no:randomly", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        outcomes = tmp_path / "out" / "tests.jsonl"
        ended = lambda: len(run.read(outcomes)[0]) if outcomes.exists() else 0
        while ended() < 3 and process.poll() is None:
            time.sleep(0.2)
        process.terminate()
        said, _ = process.communicate()
    row = record.last("tests", file)
    assert (row["passed"], row["failed"], row["skipped"], row["cut_off"], row["commit"]) == (1, 1, 1, True, "abc")
    assert row["failures"] == ["test_some.py::test_fails"]
    assert "assert 1 == 2" in said
    assert "test_some.py::test_hangs" in said
    assert process.returncode == 1


@pytest.mark.parametrize(("total_gb", "processors"), [(150.7, 16), (85.0, 16), (25.0, 4)])
def test_shares_fit_into_the_memory(total_gb, processors):
    small, large_share, small_share = run.shares(total_gb, processors)
    processes = run.LARGE_PROCESSES + small
    held = run.LARGE_PROCESSES * large_share * total_gb + small * small_share * total_gb + processes * run.OUTSIDE_GB
    assert 1 <= small <= processors
    assert held <= total_gb or small == 1


def test_a_row_says_how_many_files_of_kernels_have_changed(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    assert record.summary(file) == "GPU: no row says that the tests have run on one"
    row = dict(kind="tests", date="2026-01-02", gpu="H", commit="abc", passed=3, failed=0, cut_off=False, failures=[])
    record.append(row, file)
    record.append(row | dict(kind="soak", commit="def"), file)
    monkeypatch.setattr(record, "output_of", lambda *command: "a.py\nb.py" if "abc" in command else None)
    assert record.summary(file) == (
        "GPU: H, 2026-01-02: 3 passed, 0 failed; commit abc, 2 files of kernels have changed since"
    )
    monkeypatch.setattr(record, "output_of", lambda *command: None)
    assert "which is not in this clone" in record.summary(file)


def test_what_the_sanitizer_finds_is_read_from_its_log():
    check = sanitizer.Check("memcheck", Path(), 0.0, None, None)
    log = "========= Invalid __global__ write of size 4 bytes\n=========     at write(int *)+0x60\n"
    log += "========= Error: Race reported between Read access at f+0x1 in a.py:3\n=========     and Write access at f+0x2\n"
    check.read(sanitizer.Job("a.py"), log + "========= ERROR SUMMARY: 2 errors\n")
    assert check.errors == 2
    assert [finding.split(" ", 2)[0] for finding in check.findings] == ["a.py:", "a.py:"]
    assert "write(int *)" in check.findings[0]
    assert "Write access at f+0x2" in check.findings[1]


def test_a_test_in_which_the_tool_itself_dies_twice_is_not_checked(monkeypatch, tmp_path):
    check = sanitizer.Check("memcheck", tmp_path, time.monotonic() + 100, None, None)
    runs = []

    def process(command, log, seconds):
        runs.append(command)
        log.write_text("")
        file = next(Path(each.partition("=")[2]) for each in command if each.startswith("--outcomes="))
        lines = (
            [dict(started="a.py::two")]
            if len(runs) < 3
            else [dict(started="a.py::three"), TWO | dict(test="a.py::three")]
        )
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return -11 if len(runs) < 3 else 0

    monkeypatch.setattr(check, "process", process)
    check.do(0, sanitizer.Job("a.py"))
    assert check.tool_died == ["a.py::two"]
    assert check.died == []
    assert [command[-1] for command in runs] == ["a.py", "a.py::two", "a.py"]
    assert "--deselect=a.py::two" in runs[2]
    assert list(check.outcomes) == ["a.py::three"]


def test_a_soak_goes_on_with_the_seed_after_its_last_one(tmp_path):
    part = dict(
        name="stub", requests=5, steps=9, wrong=0, ties=1, leaked=0, seconds=2.0, host_bytes=10**9, device_bytes=None
    )
    done = [[part | dict(seed=7), part | dict(seed=9, host_bytes=2 * 10**9)], [part | dict(seed=8, wrong=1)], []]
    options = soaks.argparse.Namespace(processes=3)
    row = soaks.row_of(done, [0, 0, None], options, 7, 10.4)
    assert (row["requests"], row["wrong"], row["process_seconds"], row["next_seed"]) == (15, 1, 6, 10)
    assert row["host_gb"] == [1.0, 2.0]
    assert row["failures"] == ["stub, seed 8", "process 2 ended with None"]


def test_a_soak_goes_on_from_the_recorded_rows_wherever_its_own_row_goes(tmp_path, monkeypatch):
    recorded, begun = tmp_path / "recorded.jsonl", []
    recorded.write_text(json.dumps(dict(kind="soak", next_seed=16)) + "\n" + json.dumps(dict(kind="tests")) + "\n")
    monkeypatch.setattr(soaks.record, "RESULTS", recorded)

    def start(number, options, seed):
        begun.append(seed + number)
        return tmp_path / "nothing", subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(soaks, "start", start)
    soaks.main(["--processes=2", f"--out={tmp_path}", f"--json={tmp_path / 'own.jsonl'}", "--commit=none"])
    assert begun == [16, 17]
    assert json.loads((tmp_path / "own.jsonl").read_text())["first_seed"] == 16


def test_no_file_of_a_gpu_run_needs_the_server():
    """A machine with a GPU may not have the extra `serve`, and importing a file imports the conftest of its folder."""
    assert [file for file in files.in_folder(HERE.parent) if file.parent.name == "serve"] == []
