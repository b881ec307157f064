"""Mamba mixers in NumPy float64, token by token from the equations, on weights by their published names."""

import functools
import json

import numpy as np
from safetensors.numpy import load_file


def silu(x):
    return x / (1 + np.exp(-x))


def rms(x, epsilon):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


def project(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def convolve(w, x):
    """silu of the convolution over [tokens, channels] from a window of zeros, and all inputs, the window ahead."""
    taps = w["conv1d.weight"][:, 0].T
    inputs = np.concatenate([np.zeros((len(taps) - 1, x.shape[1])), x])
    y = sum(tap * inputs[j : j + len(x)] for j, tap in enumerate(taps))
    return silu(y + w.get("conv1d.bias", 0.0)), inputs


def select(x, dt, A, B, C, D):
    """The recurrence over x, dt [tokens, heads, channels], A [heads, channels, states], B, C [tokens, heads, states]."""
    state, outs, states = np.zeros(A.shape), [], []
    for x_t, dt_t, B_t, C_t in zip(x, dt, B, C, strict=True):
        state = np.exp(dt_t[..., None] * A) * state + (dt_t * x_t)[..., None] * B_t[:, None]
        outs.append((state * C_t[:, None]).sum(-1) + D * x_t)
        states.append(state)
    return np.stack(outs), np.stack(states)


def mamba1(w, x, *, norm_epsilon=None):
    """Outputs [tokens, hidden], inputs of the convolution with its window, and the state after each token."""
    x, z = np.split(project(w, "in_proj", x), 2, axis=1)
    x, inputs = convolve(w, x)
    states, rank = w["A_log"].shape[1], w["dt_proj.weight"].shape[1]
    parts = np.split(project(w, "x_proj", x), [rank, rank + states], axis=1)
    if norm_epsilon is not None:
        norms = (w.get(f"{name}_layernorm.weight", 1.0) for name in ("dt", "b", "c"))
        parts = [rms(part, norm_epsilon) * norm for part, norm in zip(parts, norms, strict=True)]
    dt, B, C = parts
    dt = np.logaddexp(0, project(w, "dt_proj", dt))
    y, states = select(x[:, None], dt[:, None], -np.exp(w["A_log"])[None], B[:, None], C[:, None], w["D"])
    return project(w, "out_proj", y[:, 0] * silu(z)), inputs, states


def mamba2(w, x, *, state_dim, epsilon, norm=True, norm_before_gate=False, multipliers=None, least_dt=0.0):
    """As `mamba1`. `least_dt` is where transformers clamps the steps of prompts in some models."""
    heads, inner = len(w["A_log"]), w["out_proj.weight"].shape[1]
    groups = (w["conv1d.weight"].shape[0] - inner) // (2 * state_dim)
    sizes = inner, inner, groups * state_dim, groups * state_dim, heads
    projected = project(w, "in_proj", x)
    if multipliers is not None:
        projected = projected * np.repeat(multipliers, sizes)
    z, xBC, dt = np.split(projected, [inner, projected.shape[1] - heads], axis=1)
    xBC, inputs = convolve(w, xBC)
    x, B, C = np.split(xBC, [inner, inner + sizes[2]], axis=1)
    of_heads = lambda v: np.repeat(v.reshape(len(v), groups, state_dim), heads // groups, axis=1)
    x, dt = x.reshape(len(x), heads, -1), np.maximum(np.logaddexp(0, dt + w["dt_bias"]), least_dt)[..., None]
    A = np.broadcast_to(-np.exp(w["A_log"])[:, None, None], (heads, x.shape[2], state_dim))
    y, states = select(x, np.broadcast_to(dt, x.shape), A, of_heads(B), of_heads(C), w["D"][:, None])
    y = y.reshape(len(y), inner)
    if not norm:
        return project(w, "out_proj", y * silu(z)), inputs, states
    y = y if norm_before_gate else y * silu(z)
    y = rms(y.reshape(len(y), groups, -1), epsilon).reshape(y.shape) * w["norm.weight"]
    return project(w, "out_proj", y * silu(z) if norm_before_gate else y), inputs, states


def rotate(x, theta):
    """Heads [tokens, heads, dim] by their positions, in halves."""
    half = x.shape[2] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    sin, cos = np.sin(angle), np.cos(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(w, x, heads, kv_heads, *, scale=None, theta=None, key_scale=1.0):
    """Grouped causal attention, rotated if there is a theta."""
    of = lambda name, number: project(w, name, x).reshape(len(x), number, -1)
    q, k, v = of("q_proj", heads), of("k_proj", kv_heads), of("v_proj", kv_heads)
    k = k * key_scale
    q, k = (q, k) if theta is None else (rotate(q, theta), rotate(k, theta))
    k, v = (np.repeat(y, heads // kv_heads, axis=1) for y in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    scores = np.exp(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
    out = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), v)
    return project(w, "o_proj", out.reshape(len(x), -1))


def gated_mlp(w, x, gate_scale=1.0):
    return project(w, "down_proj", silu(project(w, "gate_proj", x) * gate_scale) * project(w, "up_proj", x))


def mixture(x, scores, k, expert, *, chosen_by=None, normalise=True):
    """The sum of each token's k experts, weighted by their scores."""
    chosen = np.argsort(-(scores if chosen_by is None else chosen_by), axis=1)[:, :k]
    out = np.zeros_like(expert(0, x))
    for token, experts in enumerate(chosen):
        weights = scores[token, experts]
        weights = weights / weights.sum() if normalise else weights
        for e, weight in zip(experts, weights, strict=True):
            out[token] += weight * expert(e, x[token : token + 1])[0]
    return out


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def under(w, prefix):
    return {name.removeprefix(f"{prefix}."): value for name, value in w.items() if name.startswith(f"{prefix}.")}


def causal_lm(config, tensors, tokens, layer, *, prefix="model", embedding="embed_tokens", norm="norm", epsilon=None):
    """Logits [tokens, vocab] of `layer(number, weights, x)` after layer, and norm and head behind them."""
    w = under(tensors, prefix)
    x = w[f"{embedding}.weight"][np.asarray(tokens)] * config.get("embedding_multiplier", 1.0)
    for number in range(len({name.split(".")[1] for name in w if name.startswith("layers.")})):
        x = layer(number, under(w, f"layers.{number}"), x)
    x = rms(x, epsilon or config["rms_norm_eps"]) * w[f"{norm}.weight"]
    return x @ tensors.get("lm_head.weight", w[f"{embedding}.weight"]).T


def falcon_mamba(config, tensors, tokens):
    def layer(_, w, x):
        normed = rms(x, config["layer_norm_epsilon"]) * w["norm.weight"]
        return x + mamba1(under(w, "mixer"), normed, norm_epsilon=config["mixer_rms_eps"])[0]

    names = dict(prefix="backbone", embedding="embeddings", norm="norm_f", epsilon=config["layer_norm_epsilon"])
    return causal_lm(config, tensors, tokens, layer, **names)


def nemotron_h(config, tensors, tokens, least_dt=0.0, trace=None):
    """`trace` is a list that takes each Mamba layer's inputs of the convolution and states."""
    relu2 = lambda w, x: project(w, "down_proj", np.maximum(project(w, "up_proj", x), 0) ** 2)

    def moe(w, x):
        scores = 1 / (1 + np.exp(-project(w, "gate", x)))
        inner = project(w, "fc1_latent_proj", x) if "fc1_latent_proj.weight" in w else x
        expert = lambda e, x: relu2(under(w, f"experts.{e}"), x)
        by = scores + w["gate.e_score_correction_bias"]
        groups = by.reshape(len(by), config.get("n_group", 1), -1)
        best_two = np.sort(groups)[..., -2:].sum(-1)
        kept = best_two >= np.sort(best_two)[:, [-config.get("topk_group", 1)]]
        by = np.where(kept[..., None], groups, -np.inf).reshape(by.shape)
        out = mixture(
            inner,
            scores,
            config["num_experts_per_tok"],
            expert,
            chosen_by=by,
            normalise=config.get("norm_topk_prob", True),
        )
        out = out * config["routed_scaling_factor"]
        out = project(w, "fc2_latent_proj", out) if "fc1_latent_proj.weight" in w else out
        return out + relu2(under(w, "shared_experts"), x)

    def mamba(w, x):
        out, *states = mamba2(w, x, state_dim=config["ssm_state_size"], epsilon=epsilon, least_dt=least_dt)
        if trace is not None:
            trace.append(states)
        return out

    epsilon = config["layer_norm_epsilon"]
    mixers = {
        "linear_attention": mamba,
        "full_attention": lambda w, x: attention(w, x, config["num_attention_heads"], config["num_key_value_heads"]),
        "mlp": relu2,
        "moe": moe,
    }

    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    kinds = config.get("layers_block_type") or [names[letter] for letter in config["hybrid_override_pattern"]]

    def layer(number, w, x):
        return x + mixers[kinds[number]](under(w, "mixer"), rms(x, epsilon) * w["norm.weight"])

    names = dict(prefix="backbone", embedding="embeddings", norm="norm_f", epsilon=epsilon)
    return causal_lm(config, tensors, tokens, layer, **names)


def read(path):
    """A checkpoint's configuration, and its tensors in float64."""
    tensors = load_file(path / "model.safetensors")
    return json.loads((path / "config.json").read_text()), {name: t.astype(np.float64) for name, t in tensors.items()}


def greedy(decode, prompt, length):
    """The prompt, and what `decode`'s logits say behind it, up to a length."""
    tokens = [*prompt]
    while len(tokens) < length:
        tokens.append(decode(tokens)[-1].argmax())
    return np.array(tokens)


def without_clamp(path, arrays):
    """A reference of Nemotron-H in place of the one of transformers, of the same prompts but for keys and values."""
    decode, trace = functools.partial(nemotron_h, *read(path)), []
    tokens, long = arrays["prompt"][0].tolist(), arrays["long_tokens"][0]
    decode(tokens, trace=trace)
    layers = sorted(
        name.removesuffix("conv0") for name in arrays if name.startswith("prompt") and name.endswith("conv0")
    )
    states = {}
    for layer, (inputs, after) in zip(layers, trace, strict=True):
        states |= {f"{layer}conv0": inputs[-4:].T[None], f"{layer}rec0": after[-1][None]}
    tokens = greedy(decode, tokens, 69)
    new = {"tokens": tokens[None], "logits": decode(tokens), "long_last_logits": decode(long)[-16:]}
    return arrays | states | new


@functools.cache
def reference(path):
    """What a checkpoint's reference holds. transformers clamps the steps of Nemotron-H's prompts, as nobody else does."""
    arrays = dict(np.load(path / "reference.npz"))
    return without_clamp(path, arrays) if path.name == "nemotron_h" else arrays


def jamba(config, tensors, tokens):
    epsilon = config["rms_norm_eps"]

    def feed_forward(w, x):
        if "router.weight" not in w:
            return gated_mlp(w, x)
        scores = softmax(project(w, "router", x))
        expert = lambda e, x: gated_mlp(under(w, f"experts.{e}"), x)
        return mixture(x, scores, config["num_experts_per_tok"], expert, normalise=False)

    def layer(_, w, x):
        normed = rms(x, epsilon) * w["input_layernorm.weight"]
        if "self_attn.q_proj.weight" in w:
            heads = config["num_attention_heads"], config["num_key_value_heads"]
            x = x + attention(under(w, "self_attn"), normed, *heads)
        else:
            x = x + mamba1(under(w, "mamba"), normed, norm_epsilon=epsilon)[0]
        return x + feed_forward(under(w, "feed_forward"), rms(x, epsilon) * w["pre_ff_layernorm.weight"])

    return causal_lm(config, tensors, tokens, layer, norm="final_layernorm")


def granitemoehybrid(config, tensors, tokens):
    epsilon, scale = config["rms_norm_eps"], config["residual_multiplier"]

    def fused(into, out, x):
        gate, up = np.split(x @ into.T, 2, axis=1)
        return (silu(gate) * up) @ out.T

    def feed_forward(w, x):
        out = fused(w["shared_mlp.input_linear.weight"], w["shared_mlp.output_linear.weight"], x)
        if "block_sparse_moe.router.layer.weight" in w:
            w = under(w, "block_sparse_moe")
            expert = lambda e, x: fused(w["input_linear.weight"][e], w["output_linear.weight"][e], x)
            # The softmax of the chosen ones alone: that of all of them, made to sum to one.
            out = out + mixture(x, softmax(project(w, "router.layer", x)), config["num_experts_per_tok"], expert)
        return out

    def layer(_, w, x):
        normed = rms(x, epsilon) * w["input_layernorm.weight"]
        if "self_attn.q_proj.weight" in w:
            heads = config["num_attention_heads"], config["num_key_value_heads"]
            theta = config["rope_theta"] if config["position_embedding_type"] == "rope" else None
            scores = dict(scale=config["attention_multiplier"], theta=theta)
            out = attention(under(w, "self_attn"), normed, *heads, **scores)
        else:
            out = mamba2(under(w, "mamba"), normed, state_dim=config["mamba_d_state"], epsilon=epsilon)[0]
        x = x + scale * out
        return x + scale * feed_forward(w, rms(x, epsilon) * w["post_attention_layernorm.weight"])

    return causal_lm(config, tensors, tokens, layer) / config["logits_scaling"]


def falcon_h1(config, tensors, tokens):
    c, epsilon = config, config["rms_norm_eps"]

    def layer(_, w, x):
        normed = rms(x, epsilon) * w["input_layernorm.weight"]
        mamba = mamba2(
            under(w, "mamba"), normed * c["ssm_in_multiplier"], state_dim=c["mamba_d_state"], epsilon=epsilon,
            norm=c["mamba_rms_norm"], norm_before_gate=c["mamba_norm_before_gate"], multipliers=c["ssm_multipliers"],
        )[0]  # fmt: skip
        attended = attention(
            under(w, "self_attn"), normed * c["attention_in_multiplier"], c["num_attention_heads"],
            c["num_key_value_heads"], theta=c["rope_theta"], key_scale=c["key_multiplier"],
        )  # fmt: skip
        x = x + mamba * c["ssm_out_multiplier"] + attended * c["attention_out_multiplier"]
        gate, down = c["mlp_multipliers"]
        return x + down * gated_mlp(under(w, "feed_forward"), rms(x, epsilon) * w["pre_ff_layernorm.weight"], gate)

    return causal_lm(config, tensors, tokens, layer, norm="final_layernorm") * c["lm_head_multiplier"]
