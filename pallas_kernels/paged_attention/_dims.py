"""The dims of a head in Triton kernels, whose tiles have powers of two of them, and their gates."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt


class Dims(NamedTuple):
    """Some dims of a head: their indices [size], and which of them exist; None if all do."""

    index: jax.Array
    exists: jax.Array | None


def dims_of(begin: int, end: int) -> Iterator[Dims]:
    """Cuts dims begin .. end - 1 into parts of a power of two and at least 16, the largest first."""
    while begin < end:
        size = max(16, 1 << ((end - begin).bit_length() - 1))
        index, _ = pt.lanes(0, size, size)
        index = begin + index
        yield Dims(index, None if begin + size <= end else index < end)
        begin += size


def mask_of(rows: jax.Array, dims: Dims) -> jax.Array:
    """Returns the mask of a tile [rows, dims]."""
    exists = jnp.ones(dims.index.shape, bool) if dims.exists is None else dims.exists
    return rows[:, None] & exists[None, :]


def gated(
    gates: Any, x: jax.Array, token: jax.Array, head: jax.Array, dims: Dims, mask: jax.Array, value_dim: int
) -> jax.Array:
    """Multiplies results by the sigmoids of their gates, if there are any.

    Args:
        gates: The gates [tokens, heads, gate_dim], of which a head's last ones are read; None if there are none.
        x: Results of pairs of a token and a head [pairs, dims].
        token: The tokens [pairs].
        head: The heads [pairs].
        dims: The dims.
        mask: Which results exist [pairs, dims].
        value_dim: The dims of a head.
    """
    if gates is None:
        return x
    index = gates.shape[2] - value_dim + dims.index
    factors = pt.load(gates.at[token[:, None], head[:, None], index[None, :]], mask=mask, other=0.0)
    return x * jax.nn.sigmoid(factors.astype(jnp.float32))
