"""Indices, loads, stores and conversions of tiles that are operands of products."""

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import Operand, as_terms

BLOCK = 16  # the shortest axis that a product on tensor cores may have


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Return a tile whose elements are their own index along `axis`, in int32."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def key_lanes(key_dim: int) -> int:
    """Return the extent of a tile's axis that holds all key dims of a head: a power of two, and at least `BLOCK`."""
    return max(pt.power_of_two(key_dim), BLOCK)


def as_operand(x: jax.Array) -> jax.Array:
    """Return the tile as an operand of `dot`: bfloat16 unchanged, other dtypes in float32."""
    return x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)


def store_terms(ref, values: jax.Array, *at, mask: jax.Array | None = None) -> None:
    """Store `values` to ref[:, *at], split into `ref.shape[0]` terms."""
    terms = as_terms(values, ref.shape[0]) if ref.dtype == jnp.bfloat16 else (values,)
    for n, term in enumerate(terms):
        pt.store(ref.at[(jnp.int32(n), *at)], term, mask=mask)


def load_terms(ref, *at, mask: jax.Array | None = None) -> Operand:
    """Load the terms of `store_terms` from ref[:, *at]. Elements outside of `mask` are 0."""
    other = None if mask is None else 0.0
    terms = tuple(pt.load(ref.at[(jnp.int32(n), *at)], mask=mask, other=other) for n in range(ref.shape[0]))
    return terms if len(terms) > 1 else terms[0]
