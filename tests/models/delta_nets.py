"""Gated-delta-net models in NumPy float64, on weights by their published names, and tiny random checkpoints of them."""

import numpy as np
from models.float64 import causal_lm, convolve, gated_mlp, mixture, project, rms, rotate, silu, softmax, under
from models.tiny import HIDDEN, VOCAB, attention, norm
from models.tiny import gated_mlp as mlp_shapes
from models.tiny import under as prefixed


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def delta_net(w, qkv, z, a, b, key_heads, out_norm, epsilon, beta_scale=1.0):
    """Gated outputs [tokens, value channels] of projections before the convolution."""
    tokens, value_heads = len(z), len(w["A_log"])
    keys = (qkv.shape[1] - z.shape[1]) // 2
    q, k, v = np.split(convolve(w, qkv)[0], [keys, 2 * keys], axis=1)

    def normed(y):
        y = y.reshape(tokens, key_heads, -1)
        return np.repeat(y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6), value_heads // key_heads, axis=1)

    q, k, v = normed(q), normed(k), v.reshape(tokens, value_heads, -1)
    decay = np.exp(-np.exp(w["A_log"]) * np.logaddexp(0, a + w["dt_bias"]))
    beta, state, out = beta_scale * sigmoid(b), np.zeros((value_heads, k.shape[2], v.shape[2])), np.zeros(v.shape)
    for t in range(tokens):
        state = state * decay[t, :, None, None]
        change = beta[t, :, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t, :, :, None] * change[:, None]
        out[t] = np.einsum("hkv,hk->hv", state, q[t]) * k.shape[2] ** -0.5
    return (rms(out, epsilon) * out_norm).reshape(z.shape) * silu(z)


def attend(q, k, v):
    """Causal attention of heads [tokens, heads, dim], queries in groups."""
    k, v = (np.repeat(y, q.shape[1] // y.shape[1], axis=1) for y in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
    weights = softmax(np.where(np.tri(len(q), dtype=bool), scores, -np.inf))
    return np.einsum("hij,jhd->ihd", weights, v).reshape(len(q), -1)


def feed_forward(config, w, x):
    """Qwen's, dense or sparse, of tokens [tokens, hidden]."""
    if "gate.weight" not in w:
        return gated_mlp(w, x)

    def expert(e, x):
        if "experts.gate_up_proj" not in w:
            return gated_mlp(under(w, f"experts.{e}"), x)
        gate, up = np.split(x @ w["experts.gate_up_proj"][e].T, 2, axis=1)
        return (silu(gate) * up) @ w["experts.down_proj"][e].T

    renormalise = config.get("norm_topk_prob", True)
    scores = softmax(project(w, "gate", x))
    out = mixture(x, scores, config["num_experts_per_tok"], expert, normalise=renormalise)
    return out + sigmoid(project(w, "shared_expert_gate", x)) * gated_mlp(under(w, "shared_expert"), x)


def qwen(config, tensors, tokens):
    """Qwen3.5 and Qwen3-Next, dense or sparse."""
    # Norms are stored as offsets from one, but for those of the delta nets.
    offset = lambda name: name.endswith("norm.weight") and "linear_attn" not in name
    tensors = {name: value + 1 if offset(name) else value for name, value in tensors.items()}
    epsilon, key_heads = config["rms_norm_eps"], config["linear_num_key_heads"]
    rope = config["rope_parameters"]

    def linear(w, x):
        if "in_proj_qkv.weight" in w:
            qkv, z, b, a = (project(w, f"in_proj_{part}", x) for part in ("qkv", "z", "b", "a"))
        else:
            keys, ratio = config["linear_key_head_dim"], config["linear_num_value_heads"] // key_heads
            values, flat = ratio * config["linear_value_head_dim"], lambda y: y.reshape(len(x), -1)
            heads = project(w, "in_proj_qkvz", x).reshape(len(x), key_heads, -1)
            *qkv, z = map(flat, np.split(heads, np.cumsum([keys, keys, values]), axis=2))
            qkv = np.concatenate(qkv, axis=1)
            b, a = map(flat, np.split(project(w, "in_proj_ba", x).reshape(len(x), key_heads, -1), 2, axis=2))
        return project(w, "out_proj", delta_net(w, qkv, z, a, b, key_heads, w["norm.weight"], epsilon))

    def full(w, x):
        heads = lambda name: project(w, name, x).reshape(len(x), -1, config["head_dim"] * (1 + (name == "q_proj")))
        (q, gate), k = np.split(heads("q_proj"), 2, axis=2), heads("k_proj")
        q, k = rms(q, epsilon) * w["q_norm.weight"], rms(k, epsilon) * w["k_norm.weight"]
        dims = int(config["head_dim"] * rope["partial_rotary_factor"])
        turn = lambda y: np.concatenate([rotate(y[..., :dims], rope["rope_theta"]), y[..., dims:]], axis=-1)
        return project(w, "o_proj", attend(turn(q), turn(k), heads("v_proj")) * sigmoid(gate.reshape(len(x), -1)))

    def layer(_, w, x):
        mixer = (linear, "linear_attn") if "linear_attn.A_log" in w else (full, "self_attn")
        x = x + mixer[0](under(w, mixer[1]), rms(x, epsilon) * w["input_layernorm.weight"])
        return x + feed_forward(config, under(w, "mlp"), rms(x, epsilon) * w["post_attention_layernorm.weight"])

    return causal_lm(config, tensors, tokens, layer)


def olmo(config, tensors, tokens):
    epsilon, theta = config["rms_norm_eps"], config["rope_parameters"].get("rope_theta")
    released = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    for old, new in released.items():
        tensors = {name.replace(old, new): value for name, value in tensors.items()}

    def linear(w, x):
        qkv = np.concatenate([project(w, f"{part}_proj", x) for part in "qkv"], axis=1)
        w = w | {"conv1d.weight": np.concatenate([w[f"{part}_conv1d.weight"] for part in "qkv"])}
        z, a, b = (project(w, f"{part}_proj", x) for part in "gab")
        scale = 1 + config["linear_allow_neg_eigval"]
        return project(
            w, "o_proj", delta_net(w, qkv, z, a, b, config["linear_num_key_heads"], w["o_norm.weight"], 1e-5, scale)
        )

    def full(w, x):
        heads = lambda y, number: y.reshape(len(x), number, -1)
        q, k = (rms(project(w, f"{part}_proj", x), epsilon) * w[f"{part}_norm.weight"] for part in "qk")
        q, k = heads(q, config["num_attention_heads"]), heads(k, config["num_key_value_heads"])
        q, k = (rotate(q, theta), rotate(k, theta)) if theta else (q, k)
        return project(w, "o_proj", attend(q, k, heads(project(w, "v_proj", x), config["num_key_value_heads"])))

    def layer(_, w, x):
        norm = lambda name, y: rms(y, epsilon) * w[f"{name}.weight"]
        mlp = lambda y: gated_mlp(under(w, "mlp"), y)
        if "linear_attn.A_log" in w:
            x = x + linear(under(w, "linear_attn"), norm("input_layernorm", x))
            return x + mlp(norm("post_attention_layernorm", x))
        x = x + norm("post_attention_layernorm", full(under(w, "self_attn"), x))
        return x + norm("post_feedforward_layernorm", mlp(x))

    return causal_lm(config, tensors, tokens, layer)


def shapes(config, linear, experts=None, separate_norms=False):
    """Shapes of a model by its configuration: `linear` those of a delta net, `experts` those of a sparse layer."""
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
        mixer = prefixed("linear_attn", linear) if kind == "linear_attention" else prefixed("self_attn", full)
        last = "post_feedforward_layernorm" if separate_norms and kind == "full_attention" else "input_layernorm"
        sparse = experts and n not in c.get("mlp_only_layers", ()) and not (n + 1) % c.get("decoder_sparse_step", 1)
        mlp = prefixed("mlp", experts if sparse else mlp_shapes(c.get("intermediate_size")))
        return prefixed(f"model.layers.{n}", mixer, mlp, norm(last), norm("post_attention_layernorm"))

    head = {} if c.get("tie_word_embeddings") else {"lm_head.weight": (VOCAB, HIDDEN)}
    outer = {"model.embed_tokens.weight": (VOCAB, HIDDEN)} | head
    return config, [outer, norm("model.norm"), *(layer(n, kind) for n, kind in enumerate(c["layer_types"]))]


def delta_dims(key_heads, value_heads, key_dim, value_dim, width):
    return dict(
        linear_num_key_heads=key_heads, linear_num_value_heads=value_heads, linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim, linear_conv_kernel_dim=width,
    )  # fmt: skip


def delta_shapes(config, names):
    """A delta net's, `names` giving its projections' shapes from the numbers of key and value channels and heads."""
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
    each = [prefixed(f"experts.{e}", mlp_shapes(size)) for e in range(experts)]
    if fused:
        each = [{"experts.gate_up_proj": (experts, 2 * size, HIDDEN), "experts.down_proj": (experts, HIDDEN, size)}]
    gates = {"gate.weight": (experts, HIDDEN), "shared_expert_gate.weight": (1, HIDDEN)}
    return gates | prefixed("shared_expert", mlp_shapes(shared)) | {k: v for part in each for k, v in part.items()}


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
