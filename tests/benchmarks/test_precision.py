"""The benchmark of precision has every architecture and sees only rounding."""

import json

import numpy as np
import pytest
from flax import nnx

from benchmarks import (
    precision,
)
from benchmarks.report import table
from mamba_align_jax import models


def test_precision_measures_every_architecture():
    assert {models.ARCHITECTURES[name] for name in precision.MODELS} == set(models.ARCHITECTURES.values())
    for name in precision.MODELS:
        model = nnx.eval_shape(
            lambda name=name, make=models.ARCHITECTURES[name].Model: make(precision.configuration(name), nnx.Rngs(0))
        )
        assert model.state_groups()


@pytest.mark.deep
def test_precision_sees_only_rounding_and_names_ops_without_a_kernel(tmp_path, monkeypatch, capsys):
    """Errors have the size of rounding. Decode steps continue from the states of the prompts."""
    monkeypatch.setitem(precision.MODELS, "mamba2", dict(num_heads=2, head_dim=16, n_groups=1, state_size=256))
    monkeypatch.setattr(precision, "_SIZES", dict(vocab_size=64, hidden_size=32, num_hidden_layers=1))
    compiled, compile_ = [], precision.Pass.compile
    monkeypatch.setattr(precision.Pass, "compile", lambda run: (compiled.append(run), compile_(run))[1])
    file = tmp_path / "precision.jsonl"
    options = ["--model=mamba2", "--prompt=21", "--decode=3", f"--json={file}", "--commit=abc"]
    (row,) = precision.main(options)
    assert json.loads(file.read_text()) == row
    assert (row["model"], row["tokens"], row["commit"]) == ("mamba2", 4 * 24, "abc")
    assert 1e-4 < row["rms_error"] < 0.03
    assert 0.8 < row["top1_agreement"] <= 1
    assert 0 <= row["largest_loss"] < 0.2
    squares = [row[f"{part}_rms_error"] ** 2 for part in ("prefill", "decode")]
    assert min(squares) < row["rms_error"] ** 2 < max(squares)
    assert row["ops_float32"] == [
        "causal_conv1d.prefill", "causal_conv1d.update", "rms_norm.add_rms_norm", "selective_state_update.update",
        "ssd.prefill",
    ]  # fmt: skip
    # Four tiles of 64 x 256 float32 do not fit in a GPU's shared memory.
    assert (row["xla_ops_float32"], row["xla_ops_bfloat16"]) == (["ssd.prefill"], [])
    assert "without a kernel: ssd.prefill of float32" in capsys.readouterr().out
    assert "| - |" not in table(file).splitlines()[-1]
    *_, exact = compiled
    np.testing.assert_allclose(exact.run(), exact.run([3, 24]), atol=1e-5)
