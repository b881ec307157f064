"""Models with gated delta nets and no reference agree with the equations in float64.

Their sizes, head ratios, layer patterns, tied output layers, rotations, routers and fused experts differ from the models
in tests/data.
"""

import json
import weakref

import jax
import numpy as np
import pytest
from fakes import delta_net_weights, weights
from fakes.driver import ATOL, DATA, Driver
from flax import nnx
from oracles import models as oracles
from safetensors.numpy import load_file, save_file

from mamba_align_jax.models import load_model, olmo_hybrid, qwen3_next
from mamba_align_jax.models.tensor_files import StoredTensor

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")

REFERENCES = {"olmo_hybrid": oracles.olmo, "qwen3_5_text": oracles.qwen, "qwen3_next": oracles.qwen}
# One of them runs under policy "pre_copy"; the models with references run under "copy_free".
OTHERS = {
    delta_net_weights.olmo_hybrid: (oracles.olmo, "copy_free"),
    delta_net_weights.qwen3_5: (oracles.qwen, "pre_copy"),
    delta_net_weights.qwen3_5_moe: (oracles.qwen, "copy_free"),
    delta_net_weights.qwen3_next: (oracles.qwen, "copy_free"),
}


def exact(tensors):
    return {name: value.astype(np.float64) for name, value in tensors.items()}


@pytest.mark.parametrize("name", REFERENCES)
def test_oracle_is_transformers(name):
    path = DATA / name
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    arrays = np.load(path / "reference.npz")
    logits = REFERENCES[name](config, exact(tensors), arrays["tokens"][0])
    np.testing.assert_allclose(logits, arrays["logits"], atol=3e-5, rtol=0)


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_logits_match_the_oracle(make, tmp_path):
    config, tensors = weights.write(tmp_path, make)
    tokens = np.random.default_rng(7).integers(0, weights.VOCAB, 69, dtype=np.int32)
    oracle, policy = OTHERS[make]
    wanted = oracle(config, exact(tensors), tokens)
    assert 0.3 < np.std(wanted) < 30
    driver = Driver(load_model(tmp_path), policy, one_program=True)
    atol = ATOL * max(1.0, float(np.std(wanted)))
    close = lambda got, begin: np.testing.assert_allclose(got, wanted[begin : begin + len(got)], atol=atol, rtol=0)
    out = driver.step(prefill={0: tokens[:43], 1: tokens[:64]})
    close(out[0], 0)
    close(out[1], 0)
    out = driver.step(decode={0: [tokens[43], tokens[44], 0]}, prefill={1: tokens[64:], 2: tokens[:5]}, accepted={0: 2})
    close(out[0][:2], 43)
    close(out[1], 64)
    close(out[2], 0)
    driver.add(3, computed=64, like=1)
    out = driver.step(decode={0: tokens[45:46], 2: tokens[5:8]}, prefill={3: tokens[64:68]}, accepted={2: 3})
    close(out[0], 45)
    close(out[2], 5)
    close(out[3], 64)


@pytest.mark.gpu
@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_logits_of_compiled_kernels_match_the_oracle(make, tmp_path):
    with jax.default_matmul_precision("highest"):
        test_logits_match_the_oracle(make, tmp_path)


def parameters(path):
    return jax.tree.leaves(nnx.state(load_model(path), nnx.Param))


def rewrite(path, rename):
    """Renames the tensors in a folder: `rename(name, value)` returns what replaces each."""
    tensors = {}
    for name, value in load_file(path / "model.safetensors").items():
        tensors |= rename(name, value)
    save_file(tensors, path / "model.safetensors")


def test_separate_and_fused_experts_load_the_same_model(tmp_path):
    config, _ = weights.write(tmp_path, delta_net_weights.qwen3_5_moe)
    assert config.pop("model_type") == "qwen3_5_moe_text"
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
    # The hub nests the text model.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": config}))
    rewrite(tmp_path, lambda name, value: {name.replace("model.", "model.language_model.", 1): value})
    assert all(map(np.array_equal, parameters(tmp_path), together))
    rewrite(tmp_path, lambda name, value: {name.replace("language_model.", ""): value})
    short = "model.layers.1.mlp.experts.6.up_proj.weight"
    rewrite(tmp_path, lambda name, value: {} if name == short else {name: value})
    with pytest.raises(ValueError, match=f"tensor '{short}' is missing, 1 in all"):
        load_model(tmp_path)
    rewrite(tmp_path, lambda name, value: {name: value} | ({short: value[:19].copy()} if "6.gate_proj" in name else {}))
    with pytest.raises(ValueError, match=r"must make an array of shape \[8, 40, 48\], got \[\[20, 48\], "):
        load_model(tmp_path)


def test_released_and_saved_names_of_olmo_load_the_same_model(tmp_path):
    """transformers saves one convolution and its own names of norms; released weights have three and other names."""
    weights.write(tmp_path, delta_net_weights.olmo_hybrid)
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


def test_progress_is_called_after_each_parameter(tmp_path):
    weights.write(tmp_path, delta_net_weights.qwen3_next)
    calls = []
    model = load_model(tmp_path, progress=lambda *counts: calls.append(counts))
    total = len(jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert calls == [(n, total) for n in range(1, total + 1)]


def test_tensors_are_read_one_at_a_time(tmp_path, monkeypatch):
    """Host memory holds one parameter and its sources, not all 21 tensors of a layer's experts."""
    weights.write(tmp_path, delta_net_weights.qwen3_5_moe, fused=False)
    alive, most = set(), []
    read = StoredTensor.read

    def tracked(tensor):
        array = read(tensor)
        alive.add(tensor.name)
        weakref.finalize(array, alive.remove, tensor.name)
        most.append(sum(".experts." in name for name in alive))
        return array

    monkeypatch.setattr(StoredTensor, "read", tracked)
    load_model(tmp_path)
    assert 1 <= max(most) <= 3


def test_fields_of_configurations():
    make = lambda architecture, sizes, **fields: architecture.Config.from_dict(weights.SHARED | sizes()[0] | fields)
    # Qwen3-Next was released with its rotation among the other fields.
    flat = dict(rope_parameters=None, rope_theta=7.0, partial_rotary_factor=0.75, layer_types=None)
    qwen = make(qwen3_next, delta_net_weights.qwen3_next, **flat, full_attention_interval=2)
    assert (qwen.rope_theta, qwen.partial_rotary_factor, qwen.eos_token_id) == (7.0, 0.75, (2, 3))
    assert qwen.layer_types == ("linear_attention", "full_attention", "linear_attention")
    assert [qwen.is_sparse(n) for n in range(3)] == [True, False, True]
    # The released OLMo-Hybrid has no rotation, and some of its sizes follow from others.
    left_out = dict.fromkeys(("num_key_value_heads", "head_dim", *delta_net_weights.delta_dims(0, 0, 0, 0, 0)))
    olmo = make(olmo_hybrid, delta_net_weights.olmo_hybrid, rope_parameters={"rope_theta": None}, **left_out)
    assert (olmo.rope_theta, olmo.num_key_value_heads, olmo.head_dim) == (0.0, 4, 12)
    assert (olmo.linear_num_key_heads, olmo.linear_num_value_heads) == (4, 4)
    assert (olmo.linear_key_head_dim, olmo.linear_value_head_dim, olmo.linear_conv_kernel_dim) == (9, 18, 4)
    assert make(olmo_hybrid, delta_net_weights.olmo_hybrid, rope_parameters=None).rope_theta == 1e4
    with pytest.raises(ValueError, match="linear_use_gate must be one of"):
        make(olmo_hybrid, delta_net_weights.olmo_hybrid, linear_use_gate=False)
