"""Token probabilities as the bits of their floats, which have the same order, for both implementations."""

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
