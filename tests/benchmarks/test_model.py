"""The benchmark of a model: scripted drafts, and complete rows of steps and prompts."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    model,
    model_floor,
    scripted,
)
from benchmarks.reading import read_rows
from benchmarks.report import tables


def test_scripted_drafts_are_right_as_often_as_the_script_says():
    """The scripted model follows its rule whatever its weights, and each number of drafts is right equally often."""
    drafter, length = scripted.ScriptedDrafter(512), 4000
    history = jnp.asarray(np.random.default_rng(0).integers(0, 512, (1, length)), jnp.int32)
    rows, lengths = jnp.broadcast_to(history, (length - 1, length)), jnp.arange(1, length, dtype=jnp.int32)
    drafts, counts = drafter.propose(rows, lengths, 3)
    assert (np.asarray(counts) == 3).all()
    wanted, found = history[0, : length - 1], []
    for place in range(3):
        wanted = scripted.following(wanted, 512)
        found.append(np.asarray(drafts[:, place] == wanted))
    right = np.stack(found).sum(axis=0)
    assert (np.diff(np.stack(found).astype(int), axis=0) <= 0).all()
    assert np.bincount(right).min() > 0.2 * length


POOLS = ["--num-state-blocks=100", "--num-kv-pages=400"]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_rows_of_decode_and_verify_steps_are_complete(name, monkeypatch):
    cases = (
        model_floor.Case("decode", 2, 64),
        model_floor.Case("decode", 2, 64, draws=True),
        model_floor.Case("verify", 3, 64, drafts=3),
    )
    monkeypatch.setattr(model, "CASES", cases)
    sizes = ["--max-model-len=600", "--max-num-seqs=4", "--max-num-batched-tokens=128", *POOLS]
    sizes += ["--steps=16", "--warm-up=20"]
    decode, drawn, verify = model.main([f"--model={name}", *sizes])
    prefix = "moe " if name == "tiny-moe" else ""
    names = [f"{prefix}{case}" for case in ("decode 2x64", "decode 2x64 drawn", "verify K3 3x64")]
    assert [row["case"] for row in (decode, drawn, verify)] == names
    # Two tokens choose two to four of the eight experts; each number of accepted tokens is as frequent as the others.
    assert ("experts_per_layer" in decode) == (name == "tiny-moe")
    assert 2 <= decode.get("experts_per_layer", 3) <= 4
    assert 2 < verify["tokens_per_row"] < 3
    for row in (decode, drawn, verify):
        assert row["ratio"] > 1
        # The host starts a step and waits for the one before within a step.
        assert min(row["start_us"], row["wait_us"]) > 0
        assert row["start_us"] + row["wait_us"] < row["step_us_max"]
        assert row["first_step_us"] > 0


@pytest.mark.deep
def test_rows_of_models_are_complete(tmp_path):
    sizes = ["--max-model-len=1100", "--max-num-seqs=2", "--max-num-batched-tokens=128", *POOLS]
    (row,) = model.main(["--model=tiny", "--case=prompt 512", f"--json={tmp_path / 'rows.jsonl'}", *sizes])
    assert row["ratio"] == 1e3 * row["ttft_ms"] / row["floor_us"] > 1
    assert [*read_rows(tmp_path / "rows.jsonl")] == [json.loads(json.dumps(row))]
    assert "prompt 512" in tables([row])["models"]
