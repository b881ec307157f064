"""Tiny random models with gated delta nets: configurations and the shapes of their weights."""

from fakes.weights import HIDDEN, VOCAB, attention, gated_mlp, norm, under


def shapes(config, linear, experts=None, separate_norms=False):
    """The configuration and the shapes of a model: `linear` of each delta net, `experts` of each sparse layer."""
    c, dim = config, config["head_dim"]
    full = attention(c["num_attention_heads"], c["num_key_value_heads"], dim)
    if separate_norms:
        full |= {f"{p}_norm.weight": full[f"{p}_proj.weight"][:1] for p in "qk"}
    else:
        full |= {
            "q_proj.weight": (2 * full["q_proj.weight"][0], HIDDEN),
            "q_norm.weight": (dim,),
            "k_norm.weight": (dim,),
        }

    def layer(n, kind):
        mixer = under("linear_attn", linear) if kind == "linear_attention" else under("self_attn", full)
        last = "post_feedforward_layernorm" if separate_norms and kind == "full_attention" else "input_layernorm"
        sparse = experts and n not in c.get("mlp_only_layers", ()) and not (n + 1) % c.get("decoder_sparse_step", 1)
        mlp = under("mlp", experts if sparse else gated_mlp(c.get("intermediate_size")))
        return under(f"model.layers.{n}", mixer, mlp, norm(last), norm("post_attention_layernorm"))

    head = {} if c.get("tie_word_embeddings") else {"lm_head.weight": (VOCAB, HIDDEN)}
    outer = {"model.embed_tokens.weight": (VOCAB, HIDDEN)} | head
    return config, [outer, norm("model.norm"), *(layer(n, kind) for n, kind in enumerate(c["layer_types"]))]


def delta_dims(key_heads, value_heads, key_dim, value_dim, width):
    return dict(
        linear_num_key_heads=key_heads, linear_num_value_heads=value_heads, linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim, linear_conv_kernel_dim=width,
    )  # fmt: skip


def delta_shapes(config, names):
    """Shapes of a delta net. `names(key channels, value channels, heads)` gives the sizes of its projections."""
    heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * value_dim
    sizes = names(keys, values, heads)
    return {f"{name}.weight": (size, HIDDEN) for name, size in sizes.items()} | {"A_log": (heads,), "dt_bias": (heads,)}


def qwen_delta_shapes(config, names):
    c, w = config, delta_shapes(config, names)
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
    return w | {
        "conv1d.weight": (channels, 1, c["linear_conv_kernel_dim"]),
        "norm.weight": (c["linear_value_head_dim"],),
        "out_proj.weight": (HIDDEN, values),
    }


PLAIN = lambda keys, values, heads: dict(
    in_proj_qkv=2 * keys + values, in_proj_z=values, in_proj_a=heads, in_proj_b=heads
)


def qwen3_5():
    config = dict(
        model_type="qwen3_5_text", num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=24,
        layer_types=["full_attention", "linear_attention", "linear_attention"], intermediate_size=40, rms_norm_eps=1e-4,
        rope_parameters=dict(rope_type="default", rope_theta=1e3, partial_rotary_factor=0.5), tie_word_embeddings=True,
        **delta_dims(1, 3, 8, 24, 3),
    )  # fmt: skip
    return shapes(config, qwen_delta_shapes(config, PLAIN))


def sparse(experts, size, shared, fused):
    each = [under(f"experts.{e}", gated_mlp(size)) for e in range(experts)]
    if fused:
        each = [{"experts.gate_up_proj": (experts, 2 * size, HIDDEN), "experts.down_proj": (experts, HIDDEN, size)}]
    gates = {"gate.weight": (experts, HIDDEN), "shared_expert_gate.weight": (1, HIDDEN)}
    return gates | under("shared_expert", gated_mlp(shared)) | {k: v for part in each for k, v in part.items()}


def qwen3_5_moe(fused=True):
    config = dict(
        model_type="qwen3_5_moe_text", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        layer_types=["linear_attention", "full_attention"], rms_norm_eps=1e-6, num_experts=7, num_experts_per_tok=2,
        moe_intermediate_size=20, shared_expert_intermediate_size=12,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
        **delta_dims(2, 2, 16, 12, 4),
    )  # fmt: skip
    return shapes(config, qwen_delta_shapes(config, PLAIN), sparse(7, 20, 12, fused))


def qwen3_next():
    config = dict(
        model_type="qwen3_next", num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"], intermediate_size=40, rms_norm_eps=1e-5,
        num_experts=5, num_experts_per_tok=3, moe_intermediate_size=16, shared_expert_intermediate_size=24,
        norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[1],
        rope_parameters=dict(rope_type="default", rope_theta=1e5, partial_rotary_factor=0.5),
        **delta_dims(2, 6, 8, 12, 4),
    )  # fmt: skip
    interleaved = lambda keys, values, heads: dict(in_proj_qkvz=2 * keys + 2 * values, in_proj_ba=2 * heads)
    return shapes(config, qwen_delta_shapes(config, interleaved), sparse(5, 16, 24, fused=False))


def olmo_hybrid():
    config = dict(
        model_type="olmo_hybrid", num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, head_dim=12,
        layer_types=["linear_attention", "full_attention", "linear_attention"], intermediate_size=40, rms_norm_eps=1e-3,
        linear_allow_neg_eigval=False, rope_parameters=dict(rope_type="default", rope_theta=1e4),
        tie_word_embeddings=True, **delta_dims(2, 4, 12, 20, 4),
    )  # fmt: skip
    parts = lambda keys, values, heads: dict(
        q_proj=keys, k_proj=keys, v_proj=values, g_proj=values, a_proj=heads, b_proj=heads
    )
    w = delta_shapes(config, parts)
    convs = {f"{part}_conv1d.weight": (w[f"{part}_proj.weight"][0], 1, 4) for part in "qkv"}
    w |= {"o_norm.weight": (20,), "o_proj.weight": (HIDDEN, 80)} | convs
    return shapes(config, w, separate_norms=True)
