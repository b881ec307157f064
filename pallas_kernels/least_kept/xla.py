"""least_kept in plain jax.numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.least_kept._bits import WEIGHT_BITS, float_of, weight_of

_BITS_PER_PASS = 3  # A pass for one bit more is twice as long.


def last_to_reach(weights: jax.Array, enough: jax.Array, *, counts: bool) -> jax.Array:
    """Returns the largest number for which tokens of at least that weight have `enough`; 0 if all together have not.

    Args:
        weights: From 0 to 1. float32 [rows, tokens].
        enough: float32 [rows].
        counts: Whether each token counts as 1, instead of its weight.

    Returns:
        float32 [rows].
    """
    bits = jnp.zeros(weights.shape[:1], jnp.int32)
    amounts, zero = 1.0 if counts else weights, np.zeros((), np.float32)
    for shift in range(WEIGHT_BITS - _BITS_PER_PASS, -1, -_BITS_PER_PASS):
        numbers = [float_of(bits + (value << shift)) for value in range(1, 1 << _BITS_PER_PASS)]
        reaching = [jnp.where(weights >= number[:, None], amounts, zero) for number in numbers]
        # One loop computes the sums of one operation.
        sums = jax.lax.reduce(reaching, [zero] * len(numbers), _add, (1,))
        bits = bits + (sum((sum_ >= enough).astype(jnp.int32) for sum_ in sums) << shift)
    return weight_of(bits)


def _add(mine: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(mine, others, strict=True)]
