"""Reads and writes of blocks of one layer of a stacked pool, as plain XLA.

A pool is an array [layers, blocks, ...]. Reading NULL_BLOCK gives zeros, and writing it does nothing.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

NULL_BLOCK = 0
# The layout of a convolution's window in its pool: "SD" is [window, channels], "DS" is [channels, window].
WindowLayout = Literal["SD", "DS"]
# The layout of a delta rule's state in its pool: "VK" is [value_heads, value_dim, key_dim], "KV" is [value_heads, key_dim,
# value_dim].
StateLayout = Literal["VK", "KV"]


def state_dims(pool: Any, layout: StateLayout) -> tuple[int, int, int]:
    """Return the value heads, value dims and key dims of the states of `pool` [layers, blocks, *state]."""
    heads, rows, columns = pool.shape[2:]
    return (heads, rows, columns) if layout == "VK" else (heads, columns, rows)


def per_row(condition: jax.Array, like: jax.Array) -> jax.Array:
    """Add trailing axes of size one to `condition` [rows], so that it selects whole rows of `like` [rows, ...]."""
    return condition.reshape(condition.shape + (1,) * (like.ndim - condition.ndim))


def read_blocks(pool: jax.Array, layer: int | jax.Array, block: jax.Array) -> jax.Array:
    """Read blocks of one layer of a pool, in float32.

    Args:
        pool: Pool of states [layers, blocks, ...].
        layer: The layer that is read. int32 scalar.
        block: The blocks that are read, int32 of any shape. NULL_BLOCK reads as zeros, whatever its memory holds.

    Returns:
        The states, float32 [*block.shape, ...].
    """
    states = pool.at[layer, block].get(mode="clip").astype(jnp.float32)
    return jnp.where(per_row(block != NULL_BLOCK, states), states, 0.0)


def write_blocks(pool: jax.Array, layer: int | jax.Array, block: jax.Array, states: jax.Array) -> jax.Array:
    """Write states to blocks of one layer of a pool and return the new pool.

    Args:
        pool: Pool of states [layers, blocks, ...]. It is updated in place if the enclosing jit donates it.
        layer: The layer that is written. int32 scalar.
        block: The blocks that are written, int32 of any shape. NULL_BLOCK skips the write.
        states: The new states [*block.shape, ...], rounded to the pool's dtype.
    """
    target = jnp.where(block != NULL_BLOCK, block, pool.shape[1])
    return pool.at[layer, target].set(states.astype(pool.dtype), mode="drop")


def write_kept(pool: jax.Array, layer: int | jax.Array, block: jax.Array, kept: jax.Array) -> jax.Array:
    """Write the states [rows, checkpoints, ...] to the blocks [rows, checkpoints]: see `rows.kept_states`."""
    for n in range(block.shape[1]):
        pool = write_blocks(pool, layer, block[:, n], kept[:, n])
    return pool
