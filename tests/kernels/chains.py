"""Small chains of products with drawn operands, and the equation that they must compute."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from kernels import chain_in_numpy
from oracles.layers import silu
from oracles.ops import add_rms_norm, gated_rms_norm, linear

from benchmarks.workloads import product_chain as named
from benchmarks.workloads.product_chain import EPSILON, OFFSET, SCALE, Case, Mixture
from pallas_kernels.product_chain import Experts, GatedNorm, Norm

CASES = [case for case in named.CASES if not case.is_convolved]  # the others are in test_convolved_chains.py
SMALL = [case for case in CASES if case.name in ("small sums", "product after product")]
WITH_EXPERTS = [
    Case("few experts", (256, "norm", Mixture(8, 2, 256, 256), "norm", 384), 512, (256, 128)),
    Case("no shared expert", ("norm", Mixture(40, 3, 256, 256, 0, False), "norm"), 256, dtype="float16", splits=2),
    Case("two shared experts", (256, "norm", Mixture(130, 10, 512, 256, 2, False, False), "norm", 64), 512),
    Case("all experts", (256, "norm", Mixture(4, 4, 768, 256), "norm"), 256),
    Case("twice", (256, "norm", Mixture(16, 5, 256, 256), "norm", 256, "norm", Mixture(16, 6, 256, 256), "norm"), 256),
]
# Shapes that one launch runs: splits and `parts`, norms first, last and in the middle, few outputs and many inputs.
ODD = [
    Case("one block", (256, 4), 256, (4,)),
    Case("parts within few blocks", (512, "norm", 20), 768, (4, 12, 4)),
    Case("many splits", (128, "norm"), 12800),
    Case("fewer blocks than CTAs", (256, "norm", ("gated", 256), 128), 256),
    Case("norm of splits, then sums", ("norm", 384), 256, splits=3),
    Case("two norms in a row of layers", (256, "norm", ("gated", 512), 256, "norm"), 512, dtype="float16"),
    Case("ends with a norm", (256, "norm"), 512),
    Case("splits of a normed result", (1024, "norm", 8), 2048),
]
WITH_GATED_NORM = [
    Case("gated by silu", (("silu", 128), 256, "norm", 384), 1024, (256, 128)),
    Case("gated by a sigmoid, in splits", (("sigmoid", 128), 128, "norm"), 4096),
    Case("heads of 64 channels", (("silu", 64), ("gated", 512), 128, "norm"), 768, dtype="float16"),
    Case("gated, to experts", (("silu", 128), 256, "norm", Mixture(8, 2, 256, 256), "norm", 64), 512),
    Case("heads of 2 channels", (("sigmoid", 2), 512, "norm", 64), 256),
]
# Chains of several tokens begin and end with a product, and their blocks have eight outputs.
OF_TOKENS = [
    Case("sums of splits", (256, "norm", 384), 4096),
    Case("parts of one block", (256, "norm", ("gated", 512), 256, "norm", 32), 512, (8, 16, 8)),
    Case("three products", (512, 768, 256), 256, (256,), dtype="float16"),
    Case("more pairs than threads", (5120, "norm", 64), 256),
    Case("many splits", (256, "norm", 264), 12800, (264,)),
    Case("heads of 128 channels", (("silu", 128), 256, "norm", 384), 1024, (256, 128)),
    Case("heads of 256 channels", (("sigmoid", 256), 512, "norm", 64), 5120, dtype="float16"),
    Case("sums of four splits", (256, "norm", 1024, 256), 512),
    Case("heads of 32 channels", (("sigmoid", 32), ("gated", 256), 256, "norm", 64), 768, (64,)),
]
# Products in another order change logits by less than this, relative to the largest one.
CLEAR = 0.02


def draw(rng, case, tokens=1):
    """Returns the arguments of a case, at about unit scale after each step.

    Large weights hold 65,536 numbers in random order. Drawing each of the 800 million weights of 257 experts would take
    ten times as long.
    """

    def make(shape, dtype, deviation):
        size = math.prod(shape)
        numbers = (deviation * rng.standard_normal(min(size, 2**16), np.float32)).astype(jnp.dtype(dtype))
        if size > len(numbers):
            numbers = numbers[rng.integers(0, 2**16, size, np.uint16)]
        return jnp.asarray(numbers.reshape(shape))

    return case.arguments(make, tokens)


changed = dataclasses.replace


def clearness(logits, top_k):
    """Returns by how much the last chosen expert's logit exceeds the next one, relative to the largest logit."""
    ordered = np.sort(logits)[::-1]
    gap = np.inf if top_k == len(logits) else ordered[top_k - 1] - ordered[top_k]
    return gap / np.abs(logits).max()


def mixture(x, step, rounded):
    """Runs a mixture of experts in float64. Returns the sum, and how clear the choice is: see `CLEAR`."""
    assert np.asarray(step.valid).all()
    sums, clear = [], np.inf
    for token in x:
        logits = rounded(np.asarray(step.router, np.float64) @ token)
        chosen, weights = chain_in_numpy.choice(logits, step)
        up, down = (np.asarray(weight[jnp.asarray(chosen)], np.float64) for weight in (step.up, step.down))
        gates, values = np.split(up @ token, 2, axis=1)
        hidden = rounded(silu(gates) * values)
        sums.append(sum(w * own_down @ own for own_down, w, own in zip(down, weights, hidden, strict=True)))
        clear = min(clear, clearness(logits[: step.routed], step.top_k))
    return np.stack(sums), clear


def oracle(x, steps, residual, dtype):
    """Runs the steps in float64, with what a step hands to the next one rounded to `dtype`.

    Returns the results, the residual stream, and how clear the choices of experts are: see `CLEAR`.
    """
    rounded = lambda y: np.asarray(jnp.asarray(y, dtype), np.float64)
    clear = np.inf
    for number, step in enumerate(steps):
        if isinstance(step, Experts):
            x, own = mixture(rounded(x), step, rounded)
            clear = min(clear, own)
            continue
        if isinstance(step, GatedNorm):
            x = gated_rms_norm(x, step.gate, step.weight, EPSILON, step.activation)
        elif isinstance(step, Norm):
            addend = np.asarray(x, np.float64)
            addend = addend if addend.ndim == 3 else addend[None]
            total, _ = add_rms_norm(residual, addend, step.weight, EPSILON, OFFSET, SCALE)
            residual = rounded(total)
            zero = np.zeros((1, *residual.shape))
            _, x = add_rms_norm(residual, zero, step.weight, EPSILON, OFFSET)
        else:
            x = linear(x, step.weight, is_gated=step.is_gated)
        if number + 1 < len(steps) and not isinstance(steps[number + 1], Norm):
            x = rounded(x)
    return x, residual, clear


def drawn_clearly(rng, case, tokens=1):
    """Returns the arguments of a case and what the oracle computes of them. All choices of experts are clear.

    Inputs are drawn until they are, with the same weights.
    """
    x, steps, residual = draw(rng, case, tokens)
    while True:
        *wanted, clear = oracle(x, steps, residual, case.dtype)
        if clear > CLEAR:
            return (x, steps, residual), wanted
        x = jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype)


def whole(out):
    """Joins the arrays of `parts`, or adds up partial sums."""
    if isinstance(out, tuple):
        return np.concatenate([np.asarray(part, np.float64) for part in out], axis=1)
    return np.asarray(out, np.float64).sum(axis=0) if out.ndim == 3 else np.asarray(out, np.float64)
