"""Layers in NumPy float64, token by token from the equations.

`x` is the layer's inputs [tokens, hidden] of one sequence. `w` holds the layer's weights by the names that they are
published with, which depend on the family.
"""

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, epsilon):
    """Scales the last axis to a root mean square of one, without a weight."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def under(w, prefix):
    """The weights whose names start with `prefix`, without it."""
    return {name.removeprefix(f"{prefix}."): value for name, value in w.items() if name.startswith(f"{prefix}.")}


def project(w, name, x):
    """The product with the weight `name`, and its bias if there is one."""
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def convolve(w, x):
    """A convolution from a window of zeros, through a SiLU, and its inputs [width - 1 + tokens, channels]."""
    taps = w["conv1d.weight"][:, 0].T
    inputs = np.concatenate([np.zeros((len(taps) - 1, x.shape[1])), x])
    y = sum(tap * inputs[j : j + len(x)] for j, tap in enumerate(taps))
    return silu(y + w.get("conv1d.bias", 0.0)), inputs


def select(x, dt, A, B, C, D):
    """The recurrence of Mamba 1 and 2.

    Args:
        x: inputs [tokens, heads, channels].
        dt: step sizes, of the shape of x.
        A: rates [heads, channels, states].
        B: [tokens, heads, states].
        C: [tokens, heads, states].
        D: factor of the inputs that skip the state.

    Returns:
        Outputs of the shape of x, and the state after each token [tokens, heads, channels, states].
    """
    state, outs, states = np.zeros(A.shape), [], []
    for x_t, dt_t, B_t, C_t in zip(x, dt, B, C, strict=True):
        state = np.exp(dt_t[..., None] * A) * state + (dt_t * x_t)[..., None] * B_t[:, None]
        outs.append((state * C_t[:, None]).sum(-1) + D * x_t)
        states.append(state)
    return np.stack(outs), np.stack(states)


def mamba1(w, x, *, norm_epsilon=None):
    """A Mamba 1 mixer: outputs [tokens, hidden], the inputs of its convolution, and the state after each token."""
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


def mamba2(w, x, *, state_dim, epsilon, norm=True, norm_before_gate=False, multipliers=None, min_dt=0.0):
    """A Mamba 2 mixer; it returns what `mamba1` returns.

    Some models of transformers clamp the step sizes of a prompt from below; `min_dt` is that bound.
    """
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
    x, dt = x.reshape(len(x), heads, -1), np.maximum(np.logaddexp(0, dt + w["dt_bias"]), min_dt)[..., None]
    A = np.broadcast_to(-np.exp(w["A_log"])[:, None, None], (heads, x.shape[2], state_dim))
    y, states = select(x, np.broadcast_to(dt, x.shape), A, of_heads(B), of_heads(C), w["D"][:, None])
    y = y.reshape(len(y), inner)
    if not norm:
        return project(w, "out_proj", y * silu(z)), inputs, states
    y = y if norm_before_gate else y * silu(z)
    y = rms(y.reshape(len(y), groups, -1), epsilon).reshape(y.shape) * w["norm.weight"]
    return project(w, "out_proj", y * silu(z) if norm_before_gate else y), inputs, states


def delta_net(w, qkv, z, a, b, key_heads, out_norm, epsilon, beta_scale=1.0):
    """A gated delta net from its projections to its gated outputs [tokens, value_heads * value_dim]."""
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


def kimi_delta_attention(x, w, heads, epsilon, state, window, lower_bound=None):
    """Kimi delta attention, which decays each key channel by itself.

    Args:
        x: inputs [tokens, hidden].
        w: weights by their published names.
        heads: number of heads.
        epsilon: of the norm of the outputs.
        state: [heads, value_dim, key_dim].
        window: the last inputs of the convolution [width - 1, 3 * channels].
        lower_bound: the bound of the log decay; None for a softplus gate.

    Returns:
        Outputs [tokens, hidden], a list of the states after each token, and the window after the last one.
    """
    product = lambda x, name: x @ w[name + ".weight"].T
    low_rank = lambda x, name: (
        product(product(x, f"{name}_a_proj"), f"{name}_b_proj")
        if f"{name}_a_proj.weight" in w
        else product(x, f"{name}_proj")
    )
    split = lambda y: y.reshape(heads, -1)
    taps = np.concatenate([w[f"{name}_conv1d.weight"] for name in "qkv"])[:, 0]
    rate = np.exp(w["A_log"].reshape(heads, 1))
    outs, states = [], []
    for token in x:
        window = np.vstack([window, np.concatenate([product(token, f"{name}_proj") for name in "qkv"])])
        mixed = np.sum(window[-taps.shape[1] :] * taps.T, 0)
        window = window[1:]
        q, k, v = (split(y) for y in np.split(mixed * sigmoid(mixed), 3))
        q, k = (y / np.sqrt(np.sum(y * y, -1, keepdims=True) + 1e-6) for y in (q, k))
        f = split(low_rank(token, "f") + w["dt_bias"])
        g = -rate * np.logaddexp(0, f) if lower_bound is None else lower_bound * sigmoid(rate * f)
        beta = sigmoid(product(token, "b_proj"))
        state = state.copy()
        for h in range(heads):
            state[h] *= np.exp(g[h])
            state[h] += beta[h] * np.outer(v[h] - state[h] @ k[h], k[h])
        states.append(state)
        o = np.einsum("hvk,hk->hv", state, q) * q.shape[1] ** -0.5
        o = rms(o, epsilon) * w["o_norm.weight"] * sigmoid(split(low_rank(token, "g")))
        outs.append(product(o.reshape(-1), "o_proj"))
    return np.array(outs), states, window


def rotate(x, theta):
    """Rotates heads [tokens, heads, dim] by their positions; a pair is a channel of the first half and one of the second."""
    half = x.shape[2] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    sin, cos = np.sin(angle), np.cos(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(q, k, v):
    """Causal attention [tokens, heads * dim] over heads [tokens, heads, dim]; several query heads share a key head."""
    k, v = (np.repeat(y, q.shape[1] // y.shape[1], axis=1) for y in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
    weights = softmax(np.where(np.tri(len(q), dtype=bool), scores, -np.inf))
    return np.einsum("hij,jhd->ihd", weights, v).reshape(len(q), -1)


def attention(w, x, heads, kv_heads, *, scale=None, theta=None, key_scale=1.0):
    """A layer of grouped causal attention, which is rotated if there is a theta."""
    of = lambda name, number: project(w, name, x).reshape(len(x), number, -1)
    q, k, v = of("q_proj", heads), of("k_proj", kv_heads), of("v_proj", kv_heads)
    k = k * key_scale
    q, k = (q, k) if theta is None else (rotate(q, theta), rotate(k, theta))
    k, v = (np.repeat(y, heads // kv_heads, axis=1) for y in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    scores = np.exp(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
    out = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), v)
    return project(w, "o_proj", out.reshape(len(x), -1))


def multi_head_latent_attention(x, w, heads, nope, rope, history, rope_theta=None):
    """Multi-head latent attention, with keys and values made in full from their latents.

    Args:
        x: inputs [tokens, hidden].
        w: weights by their published names.
        heads: number of heads.
        nope: channels of a head that are not rotated.
        rope: channels of a head that are. A pair of neighbours rotates as a complex number.
        history: latents and rotated keys of the tokens before x [length, rank + rope].
        rope_theta: None for no rotation.

    Returns:
        Outputs [tokens, hidden], and the history with the tokens of x appended.
    """
    product = lambda x, name: x @ w[name + ".weight"].T
    rank = w["kv_b_proj.weight"].shape[1]
    rotate = lambda y, position: y
    if rope_theta is not None:
        speed = rope_theta ** (-np.arange(rope // 2) / (rope // 2))

        def rotate(y, position):
            turned = (y[..., 0::2] + 1j * y[..., 1::2]) * np.exp(1j * position * speed)
            return np.concatenate([turned.real, turned.imag], -1)

    outs = []
    for token in x:
        position = len(history)
        if "q_proj.weight" in w:
            q = product(token, "q_proj")
        else:
            q = product(rms(product(token, "q_a_proj"), 1e-6) * w["q_a_layernorm.weight"], "q_b_proj")
        q = q.reshape(heads, nope + rope)
        q = np.concatenate([q[:, :nope], rotate(q[:, nope:], position)], 1)
        kv = product(token, "kv_a_proj_with_mqa")
        new = np.concatenate([rms(kv[:rank], 1e-6) * w["kv_a_layernorm.weight"], rotate(kv[rank:], position)])
        history = np.vstack([history, new])
        expanded = product(history[:, :rank], "kv_b_proj").reshape(len(history), heads, -1)
        keys = np.concatenate([expanded[:, :, :nope], np.repeat(history[:, None, rank:], heads, 1)], 2)
        scores = np.einsum("hd,lhd->hl", q, keys) / np.sqrt(nope + rope)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out = np.einsum("hl,lhd->hd", weights / weights.sum(1, keepdims=True), expanded[:, :, nope:])
        if "g_proj.weight" in w:
            out = out * sigmoid(product(token, "g_proj"))[:, None]
        outs.append(product(out.reshape(-1), "o_proj"))
    return np.array(outs), history


def gated_mlp(w, x, gate_scale=1.0):
    return project(w, "down_proj", silu(project(w, "gate_proj", x) * gate_scale) * project(w, "up_proj", x))


def mixture(x, scores, k, expert, *, chosen_by=None, normalise=True):
    """Sends each token to its k best experts and adds up what they return, weighted by their scores.

    Args:
        x: inputs [tokens, hidden].
        scores: [tokens, experts].
        k: experts for each token.
        expert: a function of an expert's number and of tokens.
        chosen_by: what ranks the experts, if it is not the scores.
        normalise: whether the weights of a token's experts add up to one.
    """
    chosen = np.argsort(-(scores if chosen_by is None else chosen_by), axis=1)[:, :k]
    out = np.zeros_like(expert(0, x))
    for token, experts in enumerate(chosen):
        weights = scores[token, experts]
        weights = weights / weights.sum() if normalise else weights
        for e, weight in zip(experts, weights, strict=True):
            out[token] += weight * expert(e, x[token : token + 1])[0]
    return out


def feed_forward(config, w, x):
    """The feed-forward layer of Qwen: dense, or experts beside a shared one."""
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
