"""Blocks of a layer in and out of a stacked pool, as plain XLA: NULL reads are zeros, NULL writes are dropped."""

import jax
import jax.numpy as jnp

NULL_BLOCK = 0


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
