"""The benchmark of a process per device runs on simulated devices, and its rows say that the tokens are equal."""

import json
import re

import pytest

from benchmarks import processes

SIZES = ["--cpu", "--model=tiny", "--devices=2", "--rows=2", "--context=512", "--steps=4"]


@pytest.mark.deep
def test_several_processes_generate_the_tokens_of_one(tmp_path, capfd):
    file = tmp_path / "processes.jsonl"
    rows = processes.main([*SIZES, f"--json={file}", "--commit=abc"])
    assert rows == [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["processes"], row["case"].split()[0], row["sums"]) for row in rows] == [
        (2, "async", "xla"), (2, "sync", "xla"), (1, "async", "xla"), (1, "sync", "xla"),
    ]  # fmt: skip
    assert all(row["agreement"] == 1 and row["engine_us"] > 0 and row["commit"] == "abc" for row in rows)
    assert "process 1 of 2" in capfd.readouterr().err


@pytest.mark.deep
def test_process_that_is_not_done_in_time_says_where_it_is(capfd):
    assert processes.main([*SIZES, "--limit=0.5"]) == []
    found = capfd.readouterr()
    # The processes reach their limits one after the other. The later one may first notice that it lost the other.
    statuses = json.loads(re.search(r"2 processes ended with (.*)", found.out)[1])
    assert 1 in statuses
    assert 0 not in statuses
    assert "1 process ended with [1]" in found.out
    assert "Timeout" in found.err
