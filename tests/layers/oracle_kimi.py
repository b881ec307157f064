"""Kimi's layers in NumPy float64, a token at a time from the equations, by a checkpoint's names of the weights."""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, weight, epsilon):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + epsilon) * weight


def kimi_delta_attention(x, w, heads, epsilon, state, window, lower_bound=None):
    """Tokens [n, hidden] from a state [heads, dim, dim] (values by keys) and a window of the last inputs of the convolution
    [width - 1, 3 * channels] -> outputs, state after each token, window after the last."""
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
        o = rms(o, w["o_norm.weight"], epsilon) * sigmoid(split(low_rank(token, "g")))
        outs.append(product(o.reshape(-1), "o_proj"))
    return np.array(outs), states, window


def multi_head_latent_attention(x, w, heads, nope, rope, history, rope_theta=None):
    """Tokens [n, hidden] behind those whose latents and positional keys are `history` [length, rank + rope] -> outputs and
    the history with the tokens' own. Keys and values are made in full; a pair of dims rotates as a complex number."""
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
            q = product(rms(product(token, "q_a_proj"), w["q_a_layernorm.weight"], 1e-6), "q_b_proj")
        q = q.reshape(heads, nope + rope)
        q = np.concatenate([q[:, :nope], rotate(q[:, nope:], position)], 1)
        kv = product(token, "kv_a_proj_with_mqa")
        new = np.concatenate([rms(kv[:rank], w["kv_a_layernorm.weight"], 1e-6), rotate(kv[rank:], position)])
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
