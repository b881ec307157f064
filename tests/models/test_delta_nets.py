"""Other checkpoints of the gated-delta-net models than those with references, against the equations in float64.

Other sizes, head ratios, layer patterns, tied heads, rotations and routers; fused experts; names as transformers has them.
"""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from models import delta_nets, tiny
from models.driver import ATOL, DATA, Driver
from safetensors.numpy import load_file, save_file

from mamba_align_jax.models import load_model

REFERENCES = {"olmo_hybrid": delta_nets.olmo, "qwen3_5_text": delta_nets.qwen, "qwen3_next": delta_nets.qwen}
OTHERS = {
    delta_nets.olmo_hybrid: delta_nets.olmo,
    delta_nets.qwen3_5: delta_nets.qwen,
    delta_nets.qwen3_5_moe: delta_nets.qwen,
    delta_nets.qwen3_next: delta_nets.qwen,
}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """One program runs a few steps: compiling it well would take longer."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def exact(tensors):
    return {name: value.astype(np.float64) for name, value in tensors.items()}


@pytest.mark.parametrize("name", REFERENCES)
def test_float64_is_transformers(name):
    path = DATA / name
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    arrays = np.load(path / "reference.npz")
    logits = REFERENCES[name](config, exact(tensors), arrays["tokens"][0])
    np.testing.assert_allclose(logits, arrays["logits"], atol=3e-5, rtol=0)


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_logits(make, tmp_path):
    config, tensors = tiny.write(tmp_path, make)
    tokens = np.random.default_rng(7).integers(0, tiny.VOCAB, 69, dtype=np.int32)
    wanted = OTHERS[make](config, exact(tensors), tokens)
    assert 0.3 < np.std(wanted) < 30
    driver = Driver(load_model(tmp_path), one_program=True)
    atol = ATOL * max(1.0, float(np.std(wanted)))
    close = lambda got, begin: np.testing.assert_allclose(got, wanted[begin : begin + len(got)], atol=atol, rtol=0)
    out = driver.step(prefill={0: tokens[:43], 1: tokens[:64]})
    close(out[0], 0)
    close(out[1], 0)
    out = driver.step(decode={0: [tokens[43], tokens[44], 0]}, prefill={1: tokens[64:], 2: tokens[:5]}, accepted={0: 2})
    close(out[0][:2], 43)
    close(out[1], 64)
    close(out[2], 0)
    out = driver.step(decode={0: tokens[45:46], 2: tokens[5:8]}, accepted={2: 3})
    close(out[0], 45)
    close(out[2], 5)


def parameters(path):
    return jax.tree.leaves(nnx.state(load_model(path), nnx.Param))


def rewrite(path, rename):
    """The checkpoint with other names, and some tensors put together."""
    tensors = {}
    for name, value in load_file(path / "model.safetensors").items():
        tensors |= rename(name, value)
    save_file(tensors, path / "model.safetensors")


def test_experts_of_their_own_and_together(tmp_path):
    tiny.write(tmp_path, delta_nets.qwen3_5_moe)
    together = parameters(tmp_path)

    def apart(name, value):
        prefix, _, part = name.partition(".experts.")
        if not part:
            return {name: value}
        parts = {"gate_proj": value[:, :20], "up_proj": value[:, 20:]} if part == "gate_up_proj" else {part: value}
        return {
            f"{prefix}.experts.{e}.{key}.weight": each[e].copy()
            for key, each in parts.items()
            for e in range(len(value))
        }

    rewrite(tmp_path, apart)
    assert all(map(np.array_equal, parameters(tmp_path), together))
    short = "model.layers.1.mlp.experts.6.up_proj.weight"
    rewrite(tmp_path, lambda name, value: {} if name == short else {name: value})
    with pytest.raises(ValueError, match=f"tensor '{short}' is missing, 1 in all"):
        load_model(tmp_path)
    rewrite(tmp_path, lambda name, value: {name: value} | ({short: value[:19].copy()} if "6.gate_proj" in name else {}))
    with pytest.raises(ValueError, match=r"must make an array of shape \[7, 48, 40\], got \[\[20, 48\], "):
        load_model(tmp_path)


def test_released_and_saved_names_of_olmo(tmp_path):
    """One convolution and transformers' own names of norms, or three convolutions and the released ones."""
    tiny.write(tmp_path, delta_nets.olmo_hybrid)
    ours = parameters(tmp_path)
    released = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}

    def rename(name, value):
        *path, module, leaf = name.split(".")
        return {".".join([*path, released.get(module, module), leaf]): value}

    rewrite(tmp_path, rename)
    assert all(map(np.array_equal, parameters(tmp_path), ours))
    tensors = load_file(tmp_path / "model.safetensors")

    def join(name, value):
        convs = [tensors[name.replace("q_conv1d", f"{part}_conv1d")] for part in "qkv"] if "q_conv1d" in name else None
        if convs:
            return {name.replace("q_conv1d", "conv1d"): np.concatenate(convs)}
        return {} if "_conv1d" in name else {name: value}

    rewrite(tmp_path, join)
    assert all(map(np.array_equal, parameters(tmp_path), ours))


def test_progress(tmp_path):
    tiny.write(tmp_path, delta_nets.qwen3_next)
    progress = []
    model = load_model(tmp_path, advance=lambda *counts: progress.append(counts))
    total = len(jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert progress == [(n, total) for n in range(1, total + 1)]
