"""Blocks of a layer in and out of a stacked pool, as plain XLA: NULL reads are zeros, NULL writes are dropped."""

from typing import Literal

import jax
import jax.numpy as jnp

NULL_BLOCK = 0
# Of a convolution's window: "SD" is [window, channels], "DS" [channels, window].
WindowLayout = Literal["SD", "DS"]


def per_row(condition: jax.Array, like: jax.Array) -> jax.Array:
    """`condition[rows]` with trailing axes of size one, to select among whole rows of `like`."""
    return condition.reshape(condition.shape + (1,) * (like.ndim - condition.ndim))


def read_blocks(pool: jax.Array, layer: jax.Array, block: jax.Array) -> jax.Array:
    """`pool[layer, block]` in float32, zeros for NULL_BLOCK: its bytes may be anything."""
    states = pool.at[layer, block].get(mode="clip").astype(jnp.float32)
    return jnp.where(per_row(block != NULL_BLOCK, states), states, 0.0)


def write_blocks(pool: jax.Array, layer: jax.Array, block: jax.Array, states: jax.Array) -> jax.Array:
    """Sets `pool[layer, block] = states` where `block` is not NULL_BLOCK."""
    target = jnp.where(block != NULL_BLOCK, block, pool.shape[1])
    return pool.at[layer, target].set(states.astype(pool.dtype), mode="drop")


def places_to_keep(
    query_start_loc: jax.Array,
    write_block: jax.Array,
    checkpoint_offset: jax.Array | None,
    checkpoint_block: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """After how many tokens of each row its state is kept, and in which block, [rows, checkpoints + 1].

    The final state is the checkpoint at the row's end. A row without tokens keeps nothing.
    """
    length = jnp.diff(query_start_loc)[:, None]
    offset, block = length, write_block[:, None]
    if checkpoint_offset is not None and checkpoint_block is not None:
        offset = jnp.concatenate([checkpoint_offset, offset], axis=1)
        block = jnp.concatenate([checkpoint_block, block], axis=1)
    return offset, jnp.where(length > 0, block, NULL_BLOCK)


def write_kept(pool: jax.Array, layer: jax.Array, block: jax.Array, kept: jax.Array) -> jax.Array:
    """Writes states [rows, places, ...] to the blocks [rows, places] of `places_to_keep`, one place after the other."""
    for n in range(block.shape[1]):
        pool = write_blocks(pool, layer, block[:, n], kept[:, n])
    return pool
