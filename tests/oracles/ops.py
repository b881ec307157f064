"""The ops of pallas_kernels in NumPy float64: one row at a time, token by token from the equation."""

import numpy as np


def causal_conv1d(x, history, weight, bias, silu):
    """Convolves one row with the inputs before it.

    Args:
        x: inputs [tokens, channels].
        history: the inputs before them [width - 1, channels].
        weight: taps [width, channels].
        bias: [channels] or None.
        silu: whether the outputs go through a SiLU.

    Returns:
        Outputs [tokens, channels], and all inputs [width - 1 + tokens, channels], the history first.
    """
    inputs = np.concatenate([history, x]).astype(np.float64)
    width = weight.shape[0]
    out = np.zeros(x.shape, np.float64)
    for t in range(len(x)):
        y = np.zeros(x.shape[1]) if bias is None else bias.astype(np.float64)
        for j in range(width):
            y = y + weight[j].astype(np.float64) * inputs[t + j]
        out[t] = y / (1 + np.exp(-y)) if silu else y
    return out, inputs


def gates(a, b, A_log, dt_bias, lower_bound=None, beta_max=1):
    """The log decay g and the step size beta of the gated delta rule.

    Args:
        a: [tokens, heads], or [tokens, heads, key_dim] for a decay per key channel.
        b: [tokens, heads].
        A_log: [heads].
        dt_bias: of the shape of `a` without tokens.
        lower_bound: the bound of g under the bounded gate; None for the softplus gate.
        beta_max: the largest beta.

    Returns:
        g of the shape of `a`, and beta [tokens, heads].
    """
    a, b, A_log, dt_bias = (np.asarray(x, np.float64) for x in (a, b, A_log, dt_bias))
    rate = np.exp(A_log)[:, None] if a.ndim == 3 else np.exp(A_log)
    with np.errstate(invalid="ignore"):  # padding tokens are NaN
        f = a + dt_bias
        g = -rate * np.logaddexp(0, f) if lower_bound is None else lower_bound / (1 + np.exp(-rate * f))
        return g, beta_max / (1 + np.exp(-b))


def normalise(x):
    """Scales the vectors in the last axis to unit length."""
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


def gated_delta_rule(q, k, v, g, beta, state, scale, l2norm=True):
    """Runs the gated delta rule over one row.

    Args:
        q: queries [tokens, key_heads, key_dim].
        k: keys, as q.
        v: values [tokens, value_heads, value_dim].
        g: log decays [tokens, value_heads], or [tokens, value_heads, key_dim] for a decay per key channel.
        beta: step sizes [tokens, value_heads].
        state: [value_heads, value_dim, key_dim].
        scale: a factor of the queries.
        l2norm: whether queries and keys are scaled to unit length first.

    Returns:
        Outputs of the shape of v, and a list of the states after each token.
    """
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    if l2norm:
        q, k = normalise(q), normalise(k)
    repeats = v.shape[1] // k.shape[1]
    outs, states = np.zeros(v.shape), []
    for t in range(len(v)):
        state = state.copy()
        for h in range(v.shape[1]):
            key, query = k[t, h // repeats], q[t, h // repeats] * scale
            S = state[h] * np.exp(g[t, h])  # one decay, or one for each key channel
            S = S + beta[t, h] * np.outer(v[t, h] - S @ key, key)
            state[h] = S
            outs[t, h] = S @ query
        states.append(state)
    return outs, states


def gated_delta_rule_entries(q, k, v, g, beta, state, scale, l2norm=True):
    """Runs the gated delta rule over one row, with the corrections that a ring of deferred states keeps.

    Args:
        All arguments are those of `gated_delta_rule`, with a decay per head.

    Returns:
        Outputs of the shape of v, a list of the states after each token, and corrections of the shape of v: what the token
        adds to a state is the outer product of its correction and its raw key.
    """
    outs, states = gated_delta_rule(q, k, v, g, beta, state, scale, l2norm)
    repeats = v.shape[1] // k.shape[1]
    corrections = np.zeros(v.shape)
    for t in range(len(v)):
        before = np.asarray(states[t - 1] if t else state, np.float64)
        for h in range(v.shape[1]):
            key = k[t, h // repeats].astype(np.float64)
            factor = 1 / np.sqrt(key @ key + 1e-6) if l2norm else 1.0
            S = before[h] * np.exp(g[t, h])
            corrections[t, h] = factor * beta[t, h] * (v[t, h] - S @ (factor * key))
    return outs, states, corrections


def selective_state_update(x, dt, A, B, C, state, D=None, z=None, dt_bias=None, dt_softplus=True):
    """Runs the recurrence of Mamba 1 and 2 over one row. It is the oracle of selective_scan and ssd, too.

    Args:
        x: inputs [tokens, heads, head_dim].
        dt: step sizes [tokens, heads] or [tokens, heads, head_dim].
        A: rates [heads] or [heads, head_dim, state_dim].
        B: [tokens, groups, state_dim].
        C: [tokens, groups, state_dim].
        state: [heads, head_dim, state_dim].
        D: factor of the inputs that skip the state, [heads], [heads, head_dim] or None.
        z: gate of the shape of x, or None.
        dt_bias: [heads], [heads, head_dim] or None.
        dt_softplus: whether the step sizes go through a softplus.

    Returns:
        Outputs of the shape of x, and a list of the states after each token.
    """
    x, dt, A, B, C, state = (np.asarray(v, np.float64) for v in (x, dt, A, B, C, state))
    outs, states = np.zeros(x.shape), []
    for t in range(len(x)):
        state = state.copy()
        for h in range(x.shape[1]):
            group = h // (x.shape[1] // B.shape[1])
            for p in range(x.shape[2]):
                of_channel = lambda v, h=h, p=p: float(v[h, p] if v.ndim == 2 else v[h])
                step = of_channel(dt[t])
                if dt_bias is not None:
                    step += of_channel(np.asarray(dt_bias, np.float64))
                if dt_softplus:
                    step = np.logaddexp(0, step)
                rate = A[h, p] if A.ndim == 3 else A[h]
                state[h, p] = np.exp(rate * step) * state[h, p] + step * x[t, h, p] * B[t, group]
                y = state[h, p] @ C[t, group]
                if D is not None:
                    y += of_channel(np.asarray(D, np.float64)) * x[t, h, p]
                if z is not None:
                    y *= z[t, h, p] / (1 + np.exp(-float(z[t, h, p])))
                outs[t, h, p] = y
        states.append(state)
    return outs, states


def paged_attention(q, keys, values, computed, scale=None):
    """Attends the tokens of one row to all keys up to their own position.

    Args:
        q: queries [tokens, heads, key_dim].
        keys: the row's keys from position 0 on [positions, kv_heads, key_dim].
        values: the row's values [positions, kv_heads, value_dim].
        computed: the position of the first token.
        scale: a factor of the scores; key_dim ** -0.5 if None.

    Returns:
        Outputs [tokens, heads, value_dim].
    """
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    repeats = q.shape[1] // keys.shape[1]
    out = np.zeros((*q.shape[:2], values.shape[2]))
    for t in range(len(q)):
        seen = computed + t + 1
        for h in range(q.shape[1]):
            scores = keys[:seen, h // repeats] @ q[t, h] * (q.shape[2] ** -0.5 if scale is None else scale)
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ values[:seen, h // repeats]
    return out


def choose_experts(
    logits,
    top_k,
    scores="softmax",
    bias=None,
    groups=1,
    top_groups=1,
    renormalise=True,
    scale=1.0,
    valid=None,
    shared=0,
    shared_gate=False,
):
    """Chooses the experts of each token, by sorting. See the op's arguments.

    Returns:
        Experts and weights, [tokens, top_k + shared] each.
    """
    logits = np.asarray(logits, np.float64)
    gates = 1 / (1 + np.exp(-logits[:, -1:])) if shared_gate else 1.0
    logits = logits[:, : logits.shape[1] - shared_gate]
    tokens, experts = logits.shape
    size = experts // groups
    every = np.broadcast_to(experts + np.arange(shared), (tokens, shared))
    chosen = np.full((tokens, top_k + shared), -1)
    weights = np.concatenate([np.zeros((tokens, top_k)), np.ones((tokens, shared)) * gates], axis=1)
    for t in range(tokens):
        if valid is not None and not valid[t]:
            continue
        powers = np.exp(logits[t] - logits[t].max())
        score = powers / powers.sum() if scores == "softmax" else 1 / (1 + np.exp(-logits[t]))
        choice = score if bias is None else score + np.asarray(bias, np.float64)
        of_groups = choice.reshape(groups, size)
        kept = np.argsort(-np.sort(of_groups, axis=1)[:, -2:].sum(axis=1), kind="stable")[:top_groups]
        allowed = np.where(np.isin(np.arange(experts) // size, kept), choice, -np.inf)
        own = np.argsort(-allowed, kind="stable")[:top_k]
        chosen[t] = [*own, *every[t]]
        weights[t, :top_k] = score[own] * scale / (score[own].sum() if renormalise else 1)
    return chosen, weights


def mixture_of_experts(x, up, down, chosen, weights, activation="swiglu"):
    """The weighted sum of each token's experts, one token and one expert at a time.

    Args:
        x: inputs [tokens, hidden].
        up: first weights [experts, up_size, hidden].
        down: second weights [experts, hidden, size].
        chosen: experts [tokens, top_k]; -1 for none.
        weights: [tokens, top_k].
        activation: "swiglu" or "relu2".

    Returns:
        [tokens, hidden].
    """
    x, up, down, weights = (np.asarray(v, np.float64) for v in (x, up, down, weights))
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for expert, weight in zip(chosen[t], weights[t], strict=True):
            if expert < 0:
                continue
            middle = up[expert] @ x[t]
            if activation == "swiglu":
                gate, middle = np.split(middle, 2)
                middle = middle * gate / (1 + np.exp(-gate))
            else:
                middle = np.maximum(middle, 0) ** 2
            out[t] += weight * (down[expert] @ middle)
    return out


def linear(x, weight, bias=None, is_gated=False):
    """Computes x weight^T + bias, and silu(gate) * up of its halves if it is gated. [tokens, outputs]"""
    out = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    if bias is not None:
        out = out + np.asarray(bias, np.float64)
    if is_gated:
        gate, up = np.split(out, 2, axis=1)
        out = gate / (1 + np.exp(-gate)) * up
    return out


def add_rms_norm(x, addend, weight, epsilon, offset=0.0, scale=1.0):
    """Computes x + scale * (sum of addend over its first axis), and its root-mean-square norm. Two [tokens, channels]."""
    x, addend, weight = (np.asarray(array, np.float64) for array in (x, addend, weight))
    total, normed = x + scale * addend.sum(axis=0), np.zeros(x.shape)
    for t, token in enumerate(total):
        normed[t] = token / np.sqrt(np.mean(token**2) + epsilon) * (offset + weight)
    return total, normed


def gated_rms_norm(x, gate, weight, epsilon, activation):
    """Normalises each head of [tokens, channels], as many channels as there are weights, and gates it."""
    x, gate, weight = (np.asarray(array, np.float64) for array in (x, gate, weight))
    out, dim = np.zeros(x.shape), len(weight)
    for t, token in enumerate(x):
        for head in range(len(token) // dim):
            place = slice(head * dim, (head + 1) * dim)
            scaled = token[place] / np.sqrt(np.mean(token[place] ** 2) + epsilon) * weight
            out[t, place] = scaled / (1 + np.exp(-gate[t, place]))
    return out * gate if activation == "silu" else out


def rotate(x, cos, sin, weight, epsilon, offset):
    """Normalises one head of one token and rotates its pairs of dims, (i, i + pairs), as complex numbers.

    Args:
        x: [dim].
        cos: cosines of the angles [pairs]; None for no rotation.
        sin: sines of the angles [pairs].
        weight: weights of the norm [dim], or None.
        epsilon: added to the mean square.
        offset: added to the weights.

    Returns:
        [dim].
    """
    x = np.asarray(x, np.float64)
    if weight is not None:
        x = x / np.sqrt(np.mean(x * x) + epsilon) * (offset + np.asarray(weight, np.float64))
    if cos is None:
        return x
    pairs = len(cos)
    turned = (x[:pairs] + 1j * x[pairs : 2 * pairs]) * (np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64))
    return np.concatenate([turned.real, turned.imag, x[2 * pairs :]])
