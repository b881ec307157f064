"""The benchmark of prompts beside decoding requests runs with both configurations, and its rows have both times."""

import json

import pytest

from benchmarks import interference


@pytest.mark.deep
def test_rows_have_the_times_of_both(tmp_path, monkeypatch):
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, num_state_blocks=40, num_kv_pages=200)
    monkeypatch.setattr(interference, "CONFIGURATION", sizes)
    file = tmp_path / "rows.jsonl"
    given = ("--model=tiny", "--rows=2", "--context=9", "--prompt=40", "--interval=0.05", "--count=2")
    rows = interference.main([*given, f"--json={file}", "--commit=abc"])
    assert rows == [json.loads(line) for line in file.read_text().splitlines()]
    assert [row.get("configuration") for row in rows] == [None, "defaults"]
    assert [row["max_num_batched_tokens"] for row in rows] == [64, 512]
    for row in rows:
        assert 0 < row["itl_ms_p50"] <= row["itl_ms_p99"] <= row["itl_ms_max"]
        assert 0 < row["ttft_ms_mean"] <= row["ttft_ms_p99"]
