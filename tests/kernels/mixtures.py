"""Small mixtures of experts, and the equation that they must compute."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from kernels.common import assert_close
from oracles import ops as oracle

from pallas_kernels.mixture_of_experts.config import Config, Product

HIDDEN, SIZE = 72, 40
# Tiles so small that every size leaves a rest.
SMALL = Config(16, Product(16, 32, 4, 2), Product(32, 16, 4, 2))


@dataclasses.dataclass
class Weights:
    """Experts' weights, rounded to their dtype, and as the oracle takes them."""

    up: jnp.ndarray
    down: jnp.ndarray


def make(rng, experts, dtype=jnp.float32, activation="swiglu", hidden=HIDDEN, size=SIZE):
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, dtype)
    return Weights(draw(experts, size * (1 + (activation == "swiglu")), hidden), draw(experts, hidden, size))


def draw_tokens(rng, tokens, dtype=jnp.float32, hidden=HIDDEN):
    return jnp.asarray(rng.normal(size=(tokens, hidden)), dtype)


def assert_is_mixture(x, weights, chosen, factors, out, activation="swiglu"):
    real = np.asarray(chosen).max(axis=1) >= 0
    wide = [np.asarray(v.astype(jnp.float32), np.float64) for v in (x, weights.up, weights.down)]
    wanted = oracle.mixture_of_experts(*wide, np.where(chosen < len(wide[1]), chosen, -1), factors, activation)
    assert out.dtype == x.dtype
    out = np.asarray(out.astype(jnp.float32))
    # A token's result has as many roundings to the dtype as experts, before the last one.
    terms = 16 * (wide[1].shape[2] + wide[2].shape[2])
    assert_close(out[real], wanted[real], x.dtype, terms if x.dtype == jnp.float32 else 1e7, "tokens")
    assert not out[~real].any()
