"""Random models of Kimi Linear and Ling 3, as they are published, against NumPy float64."""

import itertools
import json
import re

import jax
import numpy as np
import pytest
from flax import nnx
from models.driver import ATOL, DATA, Driver
from models.oracle_kimi import decode
from safetensors.numpy import load_file, save_file

from mamba_align_jax.models import bailing_hybrid, kimi_linear, load_model

CHECKPOINT = DATA / "kimi_linear"


# Everything that transformers' checkpoint has otherwise: configurations and names as published, other head counts.
SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=40, dtype="float32")
KIMI = SIZES | dict(
    model_type="kimi_linear", num_hidden_layers=2, first_k_dense_replace=1, model_max_length=512, rms_norm_eps=1e-5,
    linear_attn_config=dict(head_dim=8, num_heads=3, short_conv_kernel_size=3, kda_layers=[2], full_attn_layers=[1]),
    num_attention_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7,
    num_experts=6, num_experts_per_token=2, moe_intermediate_size=24, num_shared_experts=2, num_expert_group=2, topk_group=1,
    moe_renormalize=False, routed_scaling_factor=1.5, moe_layer_freq=1, mla_use_nope=True, rope_theta=10000.0,
    moe_router_activation_func="sigmoid", num_nextn_predict_layers=0, eos_token_id=[3, 4],
)  # fmt: skip
LING = SIZES | dict(
    model_type="bailing_hybrid", num_hidden_layers=2, layer_group_size=2, first_k_dense_replace=1, rms_norm_eps=1e-4,
    head_dim=10, num_attention_heads=2, short_conv_kernel_size=4, kda_safe_gate=True, kda_lower_bound=-3.0,
    kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7, rope_theta=500.0, max_position_embeddings=512,
    num_experts=12, num_experts_per_tok=3, moe_intermediate_size=16, n_shared_experts=1, n_group=4, topk_group=2,
    norm_topk_prob=True, routed_scaling_factor=2.5, num_nextn_predict_layers=1,
)  # fmt: skip
# Kimi's names of the fields that the oracle goes by.
ORACLE = {
    "kimi_linear": dict(linear_num_heads=3, linear_head_dim=8, linear_conv_kernel_dim=3, rope_theta=None),
    "bailing_hybrid": dict(
        linear_num_heads=2, linear_head_dim=10, linear_conv_kernel_dim=4, lower_bound=-3.0, num_experts_per_token=3,
        num_shared_experts=1, num_expert_group=4, moe_renormalize=True,
    ),
}  # fmt: skip
KINDS = {
    "kimi_linear": ["full_attention", "linear_attention"],
    "bailing_hybrid": ["linear_attention", "full_attention"],
}


def random_tensors(c, kinds, rng):
    """Float32 tensors by transformers' names of the modules, experts apart."""
    w, hidden, kimi = {}, c["hidden_size"], c["model_type"] == "kimi_linear"
    heads, dim, latent = c["linear_num_heads"], c["linear_head_dim"], c["kv_lora_rank"]
    rope, attention_heads = c["qk_rope_head_dim"], c["num_attention_heads"]

    def put(name, *shape):
        noise = rng.normal(size=shape)
        w[name] = (1 + noise / 5 if len(shape) == 1 else noise * shape[-1] ** -0.5).astype(np.float32)

    def low_rank(name, out, size):
        for part, shape in (("_a", (size, hidden)), ("_b", (out, size))) if size else (("", (out, hidden)),):
            put(f"{name}{part}_proj.weight", *shape)

    def mlp(name, size):
        put(f"{name}.gate_proj.weight", size, hidden)
        put(f"{name}.up_proj.weight", size, hidden)
        put(f"{name}.down_proj.weight", hidden, size)

    put("model.embed_tokens.weight", c["vocab_size"], hidden)
    w["model.embed_tokens.weight"] *= hidden**0.5
    for n, kind in enumerate(kinds):
        layer, mixer = f"model.layers.{n}", f"model.layers.{n}.self_attn"
        put(f"{layer}.input_layernorm.weight", hidden)
        put(f"{layer}.post_attention_layernorm.weight", hidden)
        if kind == "linear_attention":
            for part in "qkv":
                put(f"{mixer}.{part}_proj.weight", heads * dim, hidden)
                put(f"{mixer}.{part}_conv1d.weight", heads * dim, 1, c["linear_conv_kernel_dim"])
            for gate in "fg":
                low_rank(f"{mixer}.{gate}", heads * dim, dim if kimi else None)
            put(f"{mixer}.b_proj.weight", heads, hidden)
            put(f"{mixer}.A_log", heads)
            put(f"{mixer}.dt_bias", heads * dim)
            put(f"{mixer}.o_norm.weight", dim)
            put(f"{mixer}.o_proj.weight", hidden, heads * dim)
        else:
            out, rank = attention_heads * (c["qk_nope_head_dim"] + rope), c.get("q_lora_rank")
            low_rank(f"{mixer}.q", out, rank)
            if rank:
                put(f"{mixer}.q_a_layernorm.weight", rank)
            put(f"{mixer}.kv_a_proj_with_mqa.weight", latent + rope, hidden)
            put(f"{mixer}.kv_a_layernorm.weight", latent)
            put(f"{mixer}.kv_b_proj.weight", attention_heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent)
            if not kimi:
                put(f"{mixer}.g_proj.weight", attention_heads, hidden)
            put(f"{mixer}.o_proj.weight", hidden, attention_heads * c["v_head_dim"])
        if n < c["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        put(f"{layer}.mlp.gate.weight", c["num_experts"], hidden)
        put(f"{layer}.mlp.gate.e_score_correction_bias", c["num_experts"])
        for expert in range(c["num_experts"]):
            mlp(f"{layer}.mlp.experts.{expert}", c["moe_intermediate_size"])
        mlp(f"{layer}.mlp.shared_experts", c["num_shared_experts"] * c["moe_intermediate_size"])
    put("model.norm.weight", hidden)
    put("lm_head.weight", c["vocab_size"], hidden)
    return w


def published(name, kind):
    """The name that a published checkpoint has."""
    if kind == "bailing_hybrid":
        name = name.replace(".embed_tokens.", ".word_embeddings.").replace(".self_attn.", ".attention.")
        name = name.replace(".1.attention.o_proj.", ".1.attention.dense.")
        return name.replace(".e_score_correction_bias", ".expert_bias")
    if "experts" in name or ".mlp.gate." in name:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    expert = re.fullmatch(r"(.*\.experts\.\d+)\.(\w+)\.weight", name)
    return (
        f"{expert[1]}.{ {'gate_proj': 'w1', 'up_proj': 'w3', 'down_proj': 'w2'}[expert[2]] }.weight" if expert else name
    )


def write(path, config, tensors):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module", params=[KIMI, LING], ids=["kimi_linear", "bailing_hybrid"])
def other(request, tmp_path_factory):
    """Configuration, tensors by transformers' names, and the directory as published."""
    config, kind = request.param, request.param["model_type"]
    tensors = random_tensors(config | ORACLE[kind], KINDS[kind], np.random.default_rng(5))
    named = {published(name, kind): value for name, value in tensors.items()}
    if kind == "bailing_hybrid":
        named["model.layers.2.eh_proj.weight"] = np.ones(3, np.float32)  # a draft head
    return config, tensors, write(tmp_path_factory.mktemp(kind), config, named)


def test_other_models_in_every_kind_of_row(other, rng):
    """One program: a sequence by verify rows of which parts stand, another in chunks, then resumed in another slot."""
    config, tensors, path = other
    kind = config["model_type"]
    tokens = rng.integers(0, 96, 75).astype(np.int32)
    wanted = decode(tensors, config | ORACLE[kind], KINDS[kind], tokens)
    driver, at, ends = Driver(load_model(path), one_program=True), 0, [0, 31, 33, 64, 71]
    for (begin, end), accepted in zip(itertools.pairwise(ends), [3, 1, 2, 3], strict=True):
        drafts = [*tokens[at : at + accepted], *(tokens[at + accepted : at + 3] + 1) % 96]
        out = driver.step(decode={0: drafts}, prefill={1: tokens[begin:end]}, accepted={0: accepted})
        np.testing.assert_allclose(out[0][:accepted], wanted[at : at + accepted], atol=ATOL, rtol=0)
        np.testing.assert_allclose(out[1], wanted[begin:end], atol=ATOL, rtol=0)
        at += accepted
    driver.add(2, computed=64, like=1)
    out = driver.step(decode={1: tokens[71:72]}, prefill={2: tokens[64:]})
    np.testing.assert_allclose(out[1], wanted[71:72], atol=ATOL, rtol=0)
    np.testing.assert_allclose(out[2], wanted[64:], atol=ATOL, rtol=0)


def test_both_styles_of_names_load(other, tmp_path):
    config, tensors, path = other
    a, b = (jax.tree.leaves(nnx.state(load_model(p))) for p in (path, write(tmp_path / "saved", config, tensors)))
    assert len(a) == len(b)
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_configurations():
    kimi, ling = kimi_linear.Config.from_dict(KIMI), bailing_hybrid.Config.from_dict(LING)
    assert list(kimi.layer_types) == KINDS["kimi_linear"]
    assert kimi.mlp_layer_types == ("dense", "sparse")
    assert (kimi.linear_num_heads, kimi.linear_head_dim, kimi.linear_conv_kernel_dim) == (3, 8, 3)
    assert (kimi.rope_theta, kimi.kda_lower_bound, kimi.max_position_embeddings, kimi.eos_token_id) == (
        None,
        None,
        512,
        3,
    )
    assert list(ling.layer_types) == KINDS["bailing_hybrid"]
    assert (ling.linear_num_heads, ling.linear_head_dim, ling.kda_lower_bound, ling.rope_theta) == (2, 10, -3.0, 500.0)
    assert (ling.num_expert_group, ling.num_experts_per_token, ling.num_shared_experts) == (4, 3, 1)
    assert bailing_hybrid.Config.from_dict(LING | {"kda_safe_gate": False}).kda_lower_bound is None
    bare = {
        name: value for name, value in LING.items() if name not in ("n_group", "topk_group", "routed_scaling_factor")
    }
    other = bailing_hybrid.Config.from_dict(bare | {"num_experts": 16})
    assert (other.num_expert_group, other.topk_group, other.routed_scaling_factor) == (8, 4, 2.5)
    # As transformers saves them.
    saved = json.loads((CHECKPOINT / "config.json").read_text())
    again = kimi_linear.Config.from_dict(saved)
    assert (again.layer_types[4], again.mlp_layer_types[:2]) == ("full_attention", ("dense", "sparse"))
    assert (again.linear_num_heads, again.linear_head_dim, again.num_experts_per_token) == (4, 16, 3)
    defaults = {name: value for name, value in saved.items() if not name.endswith("layer_types")}
    assert kimi_linear.Config.from_dict(defaults) == again
    assert kimi_linear.Config.from_dict(KIMI | {"num_experts": None}).mlp_layer_types == ("dense",) * 2
    rotated = bailing_hybrid.Config.from_dict(LING | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    assert rotated.rope_theta == 7.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (KIMI | {"mla_use_nope": False}, "mla_use_nope must be one of (True,), got False"),
        (KIMI | {"moe_router_activation_func": "softmax"}, "moe_router_activation_func must be one of ('sigmoid',)"),
        (KIMI | {"num_expert_group": 4}, "num_expert_group must cut 6 experts into groups of two or more, got 4"),
        (KIMI | {"num_experts_per_token": None}, "config.json must have 'num_experts_per_token'"),
        (KIMI | {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": []}}, "layer_types must name 2 layers"),
        (KIMI | {"linear_attn_config": {}}, "config.json must have 'linear_num_heads'"),
        (KIMI | {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name 2 layers"),
        (LING | {"rope_scaling": {"type": "yarn"}}, "type must be one of ('default', 'mrope'), got 'yarn'"),
        (LING | {"kv_lora_rank": None}, "config.json must have 'kv_lora_rank'"),
    ],
)
def test_configurations_that_are_not_supported(config, message):
    architecture = kimi_linear if config["model_type"] == "kimi_linear" else bailing_hybrid
    with pytest.raises(ValueError, match=re.escape(message)):
        architecture.Config.from_dict(config)


def test_tensors_that_do_not_fit(other, tmp_path):
    config, _, path = other
    tensors = load_file(path / "model.safetensors")
    expert = next(name for name in tensors if ".experts.3." in name)
    layer = expert.split(".")[2]
    with pytest.raises(ValueError, match=re.escape(f"tensor {expert!r} is missing")):
        load_model(write(tmp_path, config, {name: value for name, value in tensors.items() if name != expert}))
    with pytest.raises(ValueError, match=rf"tensors '.*' to '.*\.{layer}\..*' must make an array of shape"):
        load_model(write(tmp_path, config, tensors | {expert: tensors[expert][:-1]}))
    with pytest.raises(ValueError, match=r"tensor 'model.layers.9.x' has no place in"):
        load_model(write(tmp_path, config, tensors | {"model.layers.9.x": np.ones(1, np.float32)}))
