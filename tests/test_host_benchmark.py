"""The benchmark of the host's time runs, and its rows have all parts of a step."""

import json

from benchmarks import host
from mamba_align_jax.engine import program, runner


def test_rows_have_all_parts(tmp_path, capsys):
    file = tmp_path / "host.jsonl"
    rows = host.main(["--rows=2", "--rows=5", "--drafts=1", "--steps=4", f"--json={file}", "--commit=abc"])
    assert rows == [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["case"], row["rows"], row["drafts"]) for row in rows] == [
        ("host decode 2", 2, 1),
        ("host decode 5", 5, 1),
    ]
    for row in rows:
        times = {name: value for name, value in row.items() if name.endswith("_us")}
        assert times.keys() == {f"{name}_us" for name in ("step", "busy", "plan", "dispatch", "note", "read")}
        assert all(value > 0 for value in times.values())
    assert capsys.readouterr().out.count("host decode") == 2
    assert runner.run_step is program.run_step
