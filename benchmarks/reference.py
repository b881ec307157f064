"""The prefill ops for one row in NumPy float64, token by token from their equations, to measure errors."""

import numpy as np


def causal_conv1d(x: np.ndarray, history: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns the outputs of x [tokens, channels] after history [width - 1, channels], without bias and with SiLU."""
    inputs = np.concatenate([history, x])
    y = sum(tap * inputs[j : j + len(x)] for j, tap in enumerate(weight))
    return y / (1 + np.exp(-y))


def gated_delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, state: np.ndarray
) -> np.ndarray:
    """Returns the outputs, of the shape of v, from a state [value_heads, value_dim, key_dim].

    It normalises q and k and scales q by key_dim ** -0.5. q and k are [tokens, key_heads, key_dim], v [tokens,
    value_heads, value_dim], g [tokens, value_heads] or [tokens, value_heads, key_dim], beta [tokens, value_heads].
    """
    heads, _, key_dim = state.shape
    q, k = (x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, heads // x.shape[1], axis=1)[:, :, None, :] for x in (q * key_dim**-0.5, k))
    decay = np.exp(g).reshape(len(g), heads, 1, -1)
    out = np.empty(v.shape)
    for t in range(len(v)):
        state = decay[t] * state
        correction = beta[t, :, None] * (v[t] - np.sum(state * k[t], -1))
        state = state + correction[:, :, None] * k[t]
        out[t] = np.sum(state * q[t], -1)
    return out


def state_space(
    x: np.ndarray,
    dt: np.ndarray,
    A: np.ndarray,
    B: np.ndarray,
    C: np.ndarray,
    state: np.ndarray,
    D: np.ndarray,
    dt_bias: np.ndarray,
    z: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the outputs, of the shape of x, from a state [heads, head_dim, state_dim]. It applies a softplus to dt.

    x and z are [tokens, heads, head_dim], B and C [tokens, groups, state_dim]. Per head or per channel: dt is [tokens,
    heads] or [tokens, heads, head_dim], D and dt_bias are [heads] or [heads, head_dim], and A is [heads] or [heads,
    head_dim, state_dim].
    """
    heads = state.shape[0]

    def per_channel(v, ndim):
        return v[..., None] if v.ndim < ndim else v

    dt = per_channel(np.logaddexp(0, dt + dt_bias), 3)
    D, A = per_channel(D, 2), A if A.ndim == 3 else A[:, None, None]
    B, C = (np.repeat(v, heads // v.shape[1], axis=1)[:, :, None, :] for v in (B, C))
    out = np.empty(x.shape)
    for t in range(len(x)):
        state = np.exp(A * dt[t][..., None]) * state + (dt[t] * x[t])[..., None] * B[t]
        out[t] = np.sum(state * C[t], -1) + D * x[t]
    return out if z is None else out * z / (1 + np.exp(-z))
