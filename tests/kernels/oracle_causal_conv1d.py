"""The causal convolution in NumPy float64, token by token from the equation."""

import numpy as np


def causal_conv1d(x, history, weight, bias, silu):
    """One row: x [tokens, channels], history [width-1, channels] -> outputs, and all inputs (history first)."""
    inputs = np.concatenate([history, x]).astype(np.float64)
    width = weight.shape[0]
    out = np.zeros(x.shape, np.float64)
    for t in range(len(x)):
        y = np.zeros(x.shape[1]) if bias is None else bias.astype(np.float64)
        for j in range(width):
            y = y + weight[j].astype(np.float64) * inputs[t + j]
        out[t] = y / (1 + np.exp(-y)) if silu else y
    return out, inputs
