"""What both implementations share: weights as the bits of their floats, which have the same order."""

import jax
import jax.numpy as jnp

# The weights that are compared are at most 1, whose bits are below 2^30.
WEIGHT_BITS = 30
# The bits of the smallest normal float, 2^-126.
_SMALLEST_BITS = 1 << 23


def float_of(bits: jax.Array) -> jax.Array:
    """Returns the floats that have these bits, int32."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def weight_of(bits: jax.Array) -> jax.Array:
    """Returns the floats that have these bits, and 0 for those that some devices take for 0."""
    return jnp.where(bits < _SMALLEST_BITS, 0.0, float_of(bits))
