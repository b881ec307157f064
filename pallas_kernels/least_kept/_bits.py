"""What both implementations share: probabilities as the bits of their floats, which have the same order, and the search."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# The probabilities that are compared are at most 1, whose bits are below 2^30.
PROBABILITY_BITS = 30
# The bits of the smallest normal float, 2^-126.
_SMALLEST_BITS = 1 << 23


def float_of(bits: jax.Array) -> jax.Array:
    """Return the float32 values of the bits, int32."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def probability_of(bits: jax.Array) -> jax.Array:
    """Return the float32 values of the bits, int32, and 0 for subnormals, which some devices flush to 0."""
    return jnp.where(bits < _SMALLEST_BITS, 0.0, float_of(bits))


def search(
    last_to_reach: Callable[..., jax.Array], weights: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> jax.Array:
    """Find the least probability that `top_k` keeps, and then the least that `top_p` keeps of the tokens left."""
    by_rank = last_to_reach(weights, jnp.where(top_k > 0, top_k, weights.shape[1] + 1).astype(jnp.float32), counts=True)
    left = jnp.where(weights >= by_rank[:, None], weights, 0)
    by_mass = last_to_reach(left, jnp.where(top_p < 1, top_p * jnp.sum(left, axis=1), jnp.inf), counts=False)
    return jnp.maximum(by_rank, by_mass)
