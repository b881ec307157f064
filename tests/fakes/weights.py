"""Tiny random models with Mamba layers: configurations, and the shapes of their weights by published names."""

import collections
import json

import numpy as np
from safetensors.numpy import save_file

HIDDEN, VOCAB = 48, 96
SHARED = dict(hidden_size=HIDDEN, vocab_size=VOCAB, dtype="float32", hidden_act="silu", eos_token_id=[2, 3])


def mamba1(inner, states, rank, width=4, normed=False):
    norms = dict(dt_layernorm=rank, b_layernorm=states, c_layernorm=states) if normed else {}
    return {
        "in_proj.weight": (2 * inner, HIDDEN),
        "conv1d.weight": (inner, 1, width),
        "conv1d.bias": (inner,),
        "x_proj.weight": (rank + 2 * states, inner),
        "dt_proj.weight": (inner, rank),
        "dt_proj.bias": (inner,),
        "A_log": (inner, states),
        "D": (inner,),
        "out_proj.weight": (HIDDEN, inner),
        **{f"{name}.weight": (size,) for name, size in norms.items()},
    }


def mamba2(heads, head_dim, states, groups, width=4, norm=True):
    inner, channels = heads * head_dim, heads * head_dim + 2 * groups * states
    return {
        "in_proj.weight": (inner + channels + heads, HIDDEN),
        "conv1d.weight": (channels, 1, width),
        "conv1d.bias": (channels,),
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "out_proj.weight": (HIDDEN, inner),
        **({"norm.weight": (inner,)} if norm else {}),
    }


def attention(heads, kv_heads, dim):
    sizes = dict(q=heads * dim, k=kv_heads * dim, v=kv_heads * dim)
    return {f"{name}_proj.weight": (size, HIDDEN) for name, size in sizes.items()} | {
        "o_proj.weight": (HIDDEN, heads * dim)
    }


def gated_mlp(size):
    return {
        "gate_proj.weight": (size, HIDDEN),
        "up_proj.weight": (size, HIDDEN),
        "down_proj.weight": (HIDDEN, size),
    }


def under(prefix, *parts):
    return {f"{prefix}.{name}": shape for part in parts for name, shape in part.items()}


def norm(name):
    return {f"{name}.weight": (HIDDEN,)}


def falcon_mamba():
    config = dict(
        model_type="falcon_mamba", num_hidden_layers=2, state_size=6, time_step_rank="auto", expand=2, conv_kernel=3,
        layer_norm_epsilon=1e-5, mixer_rms_eps=0.05, tie_word_embeddings=True,
    )  # fmt: skip
    layers = [
        under(f"backbone.layers.{n}", norm("norm"), under("mixer", mamba1(2 * HIDDEN, 6, 3, width=3))) for n in range(2)
    ]
    return config, [{"backbone.embeddings.weight": (VOCAB, HIDDEN)}, norm("backbone.norm_f"), *layers]


def jamba():
    config = dict(
        model_type="jamba", num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, intermediate_size=40,
        rms_norm_eps=1e-3, attn_layer_period=4, attn_layer_offset=2, expert_layer_period=2, expert_layer_offset=1,
        num_experts=5, num_experts_per_tok=2, mamba_d_state=6, mamba_dt_rank=4, mamba_expand=1,
    )  # fmt: skip

    def layer(n):
        mixer = under("self_attn", attention(6, 2, 8)) if n == 2 else under("mamba", mamba1(HIDDEN, 6, 4, normed=True))
        experts = [under(f"experts.{e}", gated_mlp(40)) for e in range(5)]
        feed_forward = [{"router.weight": (5, HIDDEN)}, *experts] if n % 2 else [gated_mlp(40)]
        norms = norm("input_layernorm"), norm("pre_ff_layernorm")
        return under(f"model.layers.{n}", mixer, under("feed_forward", *feed_forward), *norms)

    return config, [*ends("final_layernorm"), *map(layer, range(4))]


def ends(final, head=True):
    outer = {"model.embed_tokens.weight": (VOCAB, HIDDEN)} | ({"lm_head.weight": (VOCAB, HIDDEN)} if head else {})
    return outer, norm(f"model.{final}")


def granitemoehybrid(num_local_experts=6):
    config = dict(
        model_type="granitemoehybrid", num_hidden_layers=3, layer_types=["mamba", "attention", "mamba"],
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=20, shared_intermediate_size=32,
        rms_norm_eps=1e-5, rope_theta=1e3, position_embedding_type="rope", mamba_n_heads=6, mamba_d_head="auto",
        mamba_d_state=10, mamba_n_groups=2, mamba_d_conv=4, mamba_expand=2, num_local_experts=num_local_experts,
        num_experts_per_tok=3, embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.6,
        logits_scaling=0.7, tie_word_embeddings=True,
    )  # fmt: skip

    def layer(n):
        mixer = under("self_attn", attention(4, 2, 12)) if n == 1 else under("mamba", mamba2(6, 16, 10, 2))
        shared = {"shared_mlp.input_linear.weight": (64, HIDDEN), "shared_mlp.output_linear.weight": (HIDDEN, 32)}
        experts = {
            "block_sparse_moe.router.layer.weight": (num_local_experts, HIDDEN),
            "block_sparse_moe.input_linear.weight": (num_local_experts, 40, HIDDEN),
            "block_sparse_moe.output_linear.weight": (num_local_experts, HIDDEN, 20),
        }
        norms = norm("input_layernorm"), norm("post_attention_layernorm")
        return under(f"model.layers.{n}", mixer, shared, experts if num_local_experts else {}, *norms)

    return config, [*ends("norm", head=False), *map(layer, range(3))]


def falcon_h1(mamba_rms_norm=False):
    config = dict(
        model_type="falcon_h1", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=10,
        intermediate_size=40, rms_norm_eps=1e-5, rope_theta=1e5, mamba_d_ssm=60, mamba_n_heads=6, mamba_d_head=10,
        mamba_d_state=12, mamba_n_groups=2, mamba_d_conv=4, mamba_rms_norm=mamba_rms_norm,
        mamba_norm_before_gate=False, embedding_multiplier=2.0, lm_head_multiplier=0.8, key_multiplier=0.6,
        attention_in_multiplier=0.9, attention_out_multiplier=1.2, ssm_in_multiplier=1.3, ssm_out_multiplier=0.7,
        ssm_multipliers=[0.7, 1.3, 0.6, 1.6, 0.8], mlp_multipliers=[0.9, 0.6],
    )  # fmt: skip
    layers = [
        under(
            f"model.layers.{n}", under("mamba", mamba2(6, 10, 12, 2, norm=mamba_rms_norm)), norm("input_layernorm"),
            under("self_attn", attention(4, 2, 10)), under("feed_forward", gated_mlp(40)), norm("pre_ff_layernorm"),
        )
        for n in range(2)
    ]  # fmt: skip
    return config, [*ends("final_layernorm"), *layers]


def nemotron_h():
    """Nemotron-H as published: a pattern of letters, a draft head beside the model, and experts in groups."""
    config = dict(
        model_type="nemotron_h", hybrid_override_pattern="M-M*ME", num_hidden_layers=6, mamba_num_heads=4,
        mamba_head_dim=8, ssm_state_size=10, n_groups=2, conv_kernel=4, num_attention_heads=4, num_key_value_heads=1,
        attention_head_dim=6, intermediate_size=40, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=20,
        moe_shared_expert_intermediate_size=24, layer_norm_epsilon=1e-5, routed_scaling_factor=1.7,
        n_group=4, topk_group=2, mlp_hidden_act="relu2",
    )  # fmt: skip
    mlp = lambda size: {"up_proj.weight": (size, HIDDEN), "down_proj.weight": (HIDDEN, size)}
    experts = [under(f"experts.{e}", mlp(20)) for e in range(8)]
    gate = {"gate.weight": (8, HIDDEN), "gate.e_score_correction_bias": (8,)}
    mixers = {
        "M": mamba2(4, 8, 10, 2),
        "*": attention(4, 1, 6),
        "-": mlp(40),
        "E": dict(collections.ChainMap(gate, under("shared_experts", mlp(24)), *experts)),
    }
    layers = [
        under(f"backbone.layers.{n}", norm("norm"), under("mixer", mixers[kind]))
        for n, kind in enumerate(config["hybrid_override_pattern"])
    ]
    outer = {"backbone.embeddings.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    return config, [outer, norm("backbone.norm_f"), norm("mtp.layers.0.norm"), *layers]


def zamba2(num_mem_blocks=1):
    """Three layers hear a shared block, without adapters of its attention and without a rotation."""
    config = dict(
        model_type="zamba2", num_hidden_layers=4, layers_block_type=["hybrid", "mamba", "hybrid", "hybrid"],
        num_attention_heads=4, intermediate_size=40, hidden_act="gelu", rms_norm_eps=1e-4, n_mamba_heads=6,
        mamba_d_state=10, mamba_ngroups=2, mamba_expand=2, num_mem_blocks=num_mem_blocks, adapter_rank=5,
        use_shared_attention_adapter=False, use_mem_rope=False, tie_word_embeddings=False,
    )  # fmt: skip
    hybrid = [0, 2, 3]

    def block(number):
        sizes = dict(q=2 * HIDDEN, k=2 * HIDDEN, v=2 * HIDDEN)
        attn = {f"self_attn.{name}_proj.weight": (size, 2 * HIDDEN) for name, size in sizes.items()}
        attn["self_attn.o_proj.weight"] = (HIDDEN, 2 * HIDDEN)
        norms = {"input_layernorm.weight": (2 * HIDDEN,), "pre_ff_layernorm.weight": (HIDDEN,)}
        mlp = {"gate_up_proj.weight": (80, HIDDEN), "down_proj.weight": (HIDDEN, 40)}
        for turn in range(number, len(hybrid), num_mem_blocks):
            mlp |= {f"gate_up_proj_adapter_list.{turn}.{half}.weight": ((5, HIDDEN), (80, 5))[half] for half in (0, 1)}
        return under("shared_transformer", attn, norms, under("feed_forward", mlp))

    def layer(n):
        mamba = under("mamba", mamba2(6, 16, 10, 2)), norm("input_layernorm")
        if n not in hybrid:
            return under(f"model.layers.{n}", *mamba)
        turn = hybrid.index(n)
        shared = [block(turn)] if turn < num_mem_blocks else []
        return under(f"model.layers.{n}", {"linear.weight": (HIDDEN, HIDDEN)}, under("mamba_decoder", *mamba), *shared)

    return config, [*ends("final_layernorm"), *map(layer, range(4))]


def draw(rng, name, shape):
    """A random tensor: states neither vanish nor blow up, and no norm is all ones, no bias all zeros."""
    value = rng.normal(size=shape)
    if name.endswith("norm.weight") or name.endswith("norm_f.weight") or name.endswith(".D"):
        value = 1 + 0.3 * value
    elif name.endswith("A_log"):
        value = rng.uniform(-2.5, 0.5, shape)
    elif name.endswith(("dt_bias", "dt_proj.bias")):
        value = value - 2
    elif name.endswith(("embed_tokens.weight", "embeddings.weight")):
        value = value.copy()
    elif name.endswith("bias"):
        value = 0.3 * value
    elif "adapter" in name:  # It adds to what it adapts.
        value = value * 0.4 * shape[-1] ** -0.5
    else:
        value = value * 1.2 * shape[-1] ** -0.5
    return value.astype(np.float32)


def write(path, make, **options):
    """Writes the model that `make(**options)` describes; returns its configuration and its float32 tensors by name."""
    config, parts = make(**options)
    config, rng = SHARED | config, np.random.default_rng(5)
    tensors = {name: draw(rng, name, shape) for part in parts for name, shape in part.items()}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return config, tensors
