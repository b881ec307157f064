"""More requests fit into memory with deferred states."""

from benchmarks import (
    memory,
)
from benchmarks.reading import read_rows


def test_deferred_states_of_more_requests_fit_where_rows_have_drafts(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = memory.main(["--model", "qwen3.5-4b", "--drafts", "3", "--json", str(file)])
    assert read_rows(file) == rows
    fits = {(row["count"], row["policy"]): row["requests_that_fit"] for row in rows}
    for count, gain in (("reserved, synchronous", 2.1), ("reserved, asynchronous", 1.8), ("held", 2.5)):
        assert fits[count, "deferred"] >= gain * fits[count, "copy_free"]
    first, *_ = rows
    assert first["requests_that_fit"] * first["blocks"] * first["block_bytes"] <= 40e9
    # A verify row holds its running column and one for each draft.
    assert 4 <= memory.mean_held(memory.make_spec("tiny", "copy_free", 3, 512), tokens=2000) < 4.1
