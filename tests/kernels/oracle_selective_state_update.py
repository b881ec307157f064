"""The selective state space recurrence in NumPy float64, token by token from the equation."""

import numpy as np


def selective_state_update(x, dt, A, B, C, state, D=None, z=None, dt_bias=None, dt_softplus=True):
    """One row: x [tokens, heads, head_dim], dt [tokens, heads(, head_dim)], A [heads(, head_dim, state_dim)], B and C
    [tokens, groups, state_dim], D and dt_bias [heads(, head_dim)] -> outputs, state after each token.
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
