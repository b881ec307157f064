"""The gated delta rule in NumPy float64, token by token from the equation."""

import numpy as np


def gates(a, b, A_log, dt_bias, lower_bound=None, beta_max=1):
    """a [tokens, heads] or, with a decay per key channel, [tokens, heads, key_dim]; dt_bias likewise."""
    a, b, A_log, dt_bias = (np.asarray(x, np.float64) for x in (a, b, A_log, dt_bias))
    rate = np.exp(A_log)[:, None] if a.ndim == 3 else np.exp(A_log)
    with np.errstate(invalid="ignore"):  # NaN in padding tokens
        f = a + dt_bias
        g = -rate * np.logaddexp(0, f) if lower_bound is None else lower_bound / (1 + np.exp(-rate * f))
        return g, beta_max / (1 + np.exp(-b))


def normalise(x):
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


def gated_delta_rule(q, k, v, g, beta, state, scale, l2norm=True):
    """One row: q, k [tokens, key_heads, key_dim], v [tokens, value_heads, value_dim], g [tokens, value_heads] or
    [tokens, value_heads, key_dim] -> outputs, state after each token."""
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    if l2norm:
        q, k = normalise(q), normalise(k)
    repeats = v.shape[1] // k.shape[1]
    outs, states = np.zeros(v.shape), []
    for t in range(len(v)):
        state = state.copy()
        for h in range(v.shape[1]):
            key, query = k[t, h // repeats], q[t, h // repeats] * scale
            S = state[h] * np.exp(g[t, h])  # one number, or one per column
            S = S + beta[t, h] * np.outer(v[t, h] - S @ key, key)
            state[h] = S
            outs[t, h] = S @ query
        states.append(state)
    return outs, states
