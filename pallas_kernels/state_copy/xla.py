"""state_copy in plain jax.numpy."""

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import NULL_BLOCK, WindowLayout


def state_copy(
    pool: jax.Array,
    source: jax.Array,
    destination: jax.Array,
    window_row: jax.Array | None,
    *,
    layout: WindowLayout,
) -> jax.Array:
    """Copy the states. See api.py.

    It loops over the rows that copy a state. So a call without copies takes almost no time, and no call needs a temporary
    array of the pool's size.
    """
    copies = (destination != NULL_BLOCK) & ((source != destination) | (False if window_row is None else window_row > 0))
    axis = 2 if layout == "SD" else 3
    copying_first = jnp.argsort(~copies, stable=True).astype(jnp.int32)

    def copy_row(i: jax.Array, pool: jax.Array) -> jax.Array:
        row = copying_first[i]
        block = jax.lax.dynamic_index_in_dim(pool, source[row], axis=1, keepdims=True)
        block = jnp.where(source[row] == NULL_BLOCK, jnp.zeros_like(block), block)
        if window_row is not None:
            window = jax.lax.broadcasted_iota(jnp.int32, block.shape, axis)
            kept = jax.lax.dynamic_index_in_dim(pool, destination[row], axis=1, keepdims=True)
            shifted = jnp.roll(block, -window_row[row], axis=axis)
            block = jnp.where(window + window_row[row] < pool.shape[axis], shifted, kept)
        return jax.lax.dynamic_update_slice_in_dim(pool, block, destination[row], axis=1)

    return jax.lax.fori_loop(0, jnp.sum(copies, dtype=jnp.int32), copy_row, pool)
