"""The benchmark of the host's time runs, and its rows have all parts of a step."""

import json

import pytest

from benchmarks import host
from mamba_align_jax.engine.device import program, runner


def test_rows_have_all_parts(tmp_path, capsys):
    file = tmp_path / "host.jsonl"
    rows = host.main(["--rows=2", "--rows=5", "--admit=3", "--drafts=1", "--steps=4", f"--json={file}", "--commit=abc"])
    assert rows == [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["case"], row["rows"], row["drafts"]) for row in rows] == [
        ("host decode 2", 2, 1),
        ("host decode 5", 5, 1),
        ("host admit 3 of 16", 16, 1),
    ]
    *decode, admit = ({name: value for name, value in row.items() if name.endswith("_us")} for row in rows)
    for times in decode:
        assert times.keys() == {f"{name}_us" for name in ("step", "busy", "plan", "dispatch", "note", "read")}
    assert admit.keys() == {"add_us", "step_us"}
    assert all(value > 0 for times in (*decode, admit) for value in times.values())
    out = capsys.readouterr().out
    assert (out.count("host decode"), out.count("host admit")) == (2, 1)
    assert runner.run_step is program.run_step


@pytest.mark.parametrize("count", [1, 4])
def test_admitted_requests_have_the_prefix_from_the_cache(count, monkeypatch):
    monkeypatch.setattr(runner, "run_step", host.instant_step)
    engines, make = [], host.make_engine
    monkeypatch.setattr(host, "make_engine", lambda *arguments: engines.append(make(*arguments)) or engines[-1])
    host.time_admissions(count, 6, 0, 3)
    (engine,) = engines
    requests = engine.scheduler.running
    assert len(requests) == 6
    # The first ones computed the prefix themselves, and those that entered later have it from them.
    assert sum(request.num_cached == 4096 for request in requests) >= min(3 * count, 5)
