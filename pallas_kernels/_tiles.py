"""Tiles of kernels that multiply: their indices, and how they are loaded, stored and prepared for products."""

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import Operand, pieces

BLOCK = 16  # the shortest axis that a product on tensor cores may have


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Returns a tile whose elements are their own index along `axis`, in int32."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def key_lanes(key_dim: int) -> int:
    """Returns the number of keys in a tile that holds all keys of a head and is multiplied."""
    return max(pt.power_of_two(key_dim), BLOCK)


def as_operand(x: jax.Array) -> jax.Array:
    """Returns the tile as it is multiplied: bfloat16 unchanged, and everything else in float32."""
    return x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)


def store_pieces(ref, values: jax.Array, *at, mask: jax.Array | None = None) -> None:
    """Stores `values` at ref[:, *at], split into as many pieces as the array has along its first axis."""
    parts = pieces(values, ref.shape[0]) if ref.dtype == jnp.bfloat16 else (values,)
    for n, part in enumerate(parts):
        pt.store(ref.at[(jnp.int32(n), *at)], part, mask=mask)


def load_pieces(ref, *at, mask: jax.Array | None = None) -> Operand:
    """Loads what `store_pieces` has stored at ref[:, *at]. Elements outside of `mask` are 0."""
    other = None if mask is None else 0.0
    parts = tuple(pt.load(ref.at[(jnp.int32(n), *at)], mask=mask, other=other) for n in range(ref.shape[0]))
    return parts if len(parts) > 1 else parts[0]
