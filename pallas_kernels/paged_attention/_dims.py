"""Tiles of a head's dims in Triton kernels, whose extents are powers of two, and the gates of attended values."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt


class Dims(NamedTuple):
    """A tile of a head's dims: their indices [size], and the mask of those that exist; None if all do."""

    index: jax.Array
    exists: jax.Array | None


def dims_of(begin: int, end: int) -> Iterator[Dims]:
    """Cut dims begin .. end - 1 into tiles of a power of two and at least 16 dims, the largest first."""
    while begin < end:
        size = max(16, 1 << ((end - begin).bit_length() - 1))
        index, _ = pt.lanes(0, size, size)
        index = begin + index
        yield Dims(index, None if begin + size <= end else index < end)
        begin += size


def mask_of(rows: jax.Array, dims: Dims) -> jax.Array:
    """Return the mask of a tile [rows, dims]."""
    exists = jnp.ones(dims.index.shape, bool) if dims.exists is None else dims.exists
    return rows[:, None] & exists[None, :]


def gated(
    gates: Any, x: jax.Array, token: jax.Array, head: jax.Array, dims: Dims, mask: jax.Array, value_dim: int
) -> jax.Array:
    """Multiply attended values x [pairs, dims] by the sigmoids of their gates, if there are any.

    A pair is a token and a head. Of the gates [tokens, heads, gate_dim], a head's last `value_dim` are read. `mask` is False
    for elements of `x` that do not exist [pairs, dims].
    """
    if gates is None:
        return x
    index = gates.shape[2] - value_dim + dims.index
    factors = pt.load(gates.at[token[:, None], head[:, None], index[None, :]], mask=mask, other=0.0)
    return x * jax.nn.sigmoid(factors.astype(jnp.float32))
