"""least_kept in plain jax.numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.least_kept._bits import PROBABILITY_BITS, float_of, probability_of, search

_BITS_PER_PASS = 3  # A pass with one more bit takes twice as long.


def least_kept(weights: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """See api.py."""
    return search(_last_to_reach, weights, top_k, top_p)


def _last_to_reach(weights: jax.Array, enough: jax.Array, *, counts: bool) -> jax.Array:
    """Return the largest p for which the tokens with probabilities >= p add up to at least `enough`; 0 if there is none.

    `weights` are the probabilities, from 0 to 1, float32 [rows, tokens]. `enough` and the results are float32 [rows]. If
    `counts` is set, each token adds 1 to the sum, instead of its probability.
    """
    bits = jnp.zeros(weights.shape[:1], jnp.int32)
    amounts, zero = 1.0 if counts else weights, np.zeros((), np.float32)
    for shift in range(PROBABILITY_BITS - _BITS_PER_PASS, -1, -_BITS_PER_PASS):
        candidates = [float_of(bits + (value << shift)) for value in range(1, 1 << _BITS_PER_PASS)]
        reaching = [jnp.where(weights >= candidate[:, None], amounts, zero) for candidate in candidates]
        # One operation, so that XLA computes all sums in one loop.
        sums = jax.lax.reduce(reaching, [zero] * len(candidates), _add, (1,))
        bits = bits + (sum((sum_ >= enough).astype(jnp.int32) for sum_ in sums) << shift)
    return probability_of(bits)


def _add(mine: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(mine, others, strict=True)]
