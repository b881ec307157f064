"""The second prefill kernel: inverts each chunk's triangular system I + L and scales the inverse's columns by beta."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import Operand, as_terms, dot
from pallas_kernels._pallas_triton import Refs
from pallas_kernels._tiles import BLOCK, iota, store_terms
from pallas_kernels.gated_delta_rule.prefill.chunk_intra import HeadChunk


def inverse(refs: Refs, own: HeadChunk, *, interpret: bool) -> None:
    """Handle one chunk and value head, by forward substitution, whose error is only rounding, whatever L holds.

    The blocks of 16 on the diagonal are inverted row by row, all of them at once. The blocks below the diagonal then
    follow by products of blocks. Reads `system` and `beta`. Writes `solve`.
    """
    head, chunk, start, end, size = own
    blocks = range(size // BLOCK)
    lane, row, column = iota((BLOCK,), 0), iota((BLOCK, BLOCK), 0), iota((BLOCK, BLOCK), 1)
    product = functools.partial(dot, interpret=interpret)

    def split(x: jax.Array) -> Operand:
        return as_terms(x, 2) if refs.solve.dtype == jnp.bfloat16 else x

    def load(row: jax.Array, column: jax.Array) -> jax.Array:
        return pt.load(refs.system.at[head, chunk, row, column])

    def substitute(i, tiles):
        after = []
        for b, tile in enumerate(tiles):
            known = jnp.sum(load(b * BLOCK + i, b * BLOCK + lane)[:, None] * tile, axis=0)
            after.append(jnp.where(row == i, tile - known[None, :], tile))
        return after

    identity = jnp.where(row == column, 1.0, 0.0)
    tiles = jax.lax.fori_loop(1, BLOCK, substitute, [identity for _ in blocks])

    solution = {(b, b): tile for b, tile in enumerate(tiles)}
    operand = {at: split(tile) for at, tile in solution.items()}
    for i in blocks:
        left = [split(load((i * BLOCK + lane)[:, None], (m * BLOCK + lane)[None, :])) for m in range(i)]
        for j in reversed(range(i)):
            known: Any = sum(product(left[m], operand[m, j]) for m in range(j, i))
            solution[i, j] = -product(operand[i, i], split(known))
            operand[i, j] = split(solution[i, j])

    for j in blocks:
        token = start + j * BLOCK + lane
        beta = pt.load(refs.beta.at[token, head], mask=token < end, other=0.0)
        for i in blocks:
            values = solution[i, j] * beta[None, :] if i >= j else jnp.zeros((BLOCK, BLOCK), jnp.float32)
            at = (i * BLOCK + lane)[:, None], (j * BLOCK + lane)[None, :]
            store_terms(refs.solve, values, head, chunk, *at)
