"""The benchmark of moving prefixes runs, and its rows have all rates. Their sizes need a GPU."""

import json

import pytest

from benchmarks import transfer

pytestmark = pytest.mark.usefixtures("one_program")


def test_rows_have_all_rates(tmp_path, capsys):
    file, sizes = (
        tmp_path / "transfer.jsonl",
        ["--model=tiny", "--tokens", "130", "200", "--interval=64", "--repeats=1"],
    )
    rows = transfer.main([*sizes, f"--json={file}", "--commit=abc"])
    assert rows == [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["case"], row["states"], row["cached_tokens"]) for row in rows] == [
        ("transfer tiny 2 layers 130 tokens", 2, 128),
        ("transfer tiny 2 layers 200 tokens", 3, 192),
    ]
    for row in rows:
        assert (row["devices"], row["to_devices"], row["commit"]) == (1, 1, "abc")
        rates = [value for name, value in row.items() if name.endswith(("_ms", "_gb_per_s"))]
        assert len(rates) == 8
        assert all(value >= 0 for value in rates)
        assert row["bytes"] > 8 * row["cached_tokens"]
    assert capsys.readouterr().out.count("transfer tiny") == 2


@pytest.mark.deep
def test_a_prefix_that_does_not_arrive_is_noticed(monkeypatch):
    monkeypatch.setattr(transfer.Engine, "import_prefix", lambda *_: 64)
    with pytest.raises(AssertionError, match="did not move whole"):
        transfer.main(["--model=tiny", "--tokens=130", "--repeats=1"])
