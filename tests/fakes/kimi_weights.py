"""Tiny random models of Kimi Linear and Ling 3, with the names and the configuration fields that they are published with."""

import json
import re

import numpy as np
from safetensors.numpy import save_file

# The model in tests/data is as transformers saves it. These have the published fields and names, and other sizes.
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
# The fields that `oracles.models.kimi` reads, by Kimi's names.
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
    """Float32 tensors by transformers' names, each expert with tensors of its own."""
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
    """The published name of a tensor that transformers calls `name`."""
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


def write_random(path, config, seed=5):
    """Writes a random model with the published names; returns its tensors by transformers' names."""
    kind = config["model_type"]
    tensors = random_tensors(config | ORACLE[kind], KINDS[kind], np.random.default_rng(seed))
    named = {published(name, kind): value for name, value in tensors.items()}
    if kind == "bailing_hybrid":
        named["model.layers.2.eh_proj.weight"] = np.ones(3, np.float32)  # a draft head
    write(path, config, named)
    return tensors
