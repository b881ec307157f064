"""Rows cut into chunks at multiples of the chunk size in the sequence's absolute position.

A state at such a position is then the same however the tokens before it were split over calls.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from pallas_kernels._check import check_checkpoints, checked, require
from pallas_kernels.blocks import per_row

CHUNK_SIZE = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The chunks of a batch's prefill rows, in packed order: a list of fixed size, empty chunks behind the last.

    Attributes:
        cu_chunk_seqlens: First packed token of each chunk, and the end of the last. [chunks + 1]
        seq_idx: Row of each chunk, -1 behind the last. [chunks]
        first_chunk_indices: Chunks in the rows before each. [rows]
        last_chunk_indices: Last chunk of each row, -1 for a row of length zero, which has none. [rows]
        chunk_size: Tokens of a cell of the grid of positions.
    """

    cu_chunk_seqlens: Int32[Array, " chunks_plus_1"]
    seq_idx: Int32[Array, " chunks"]
    first_chunk_indices: Int32[Array, " rows"]
    last_chunk_indices: Int32[Array, " rows"]
    chunk_size: int = field(metadata=dict(static=True))


@checked
def chunk_rows(
    query_start_loc: Int32[Array, " rows_plus_1"] | Int32[np.ndarray, " rows_plus_1"],
    num_computed_tokens: Int32[Array, " rows"] | Int32[np.ndarray, " rows"],
    num_tokens: int,
    chunk_size: int = CHUNK_SIZE,
) -> Chunks:
    """Cuts packed rows, the first new token of each at position `num_computed_tokens[row]`, into chunks.

    A row's first chunk ends at the next multiple of `chunk_size`, its last at the row's end. On the device for JAX arrays
    (jittable), on the host for NumPy arrays: the same numbers. Source: vLLM's `_compute_chunk_metadata`, vectorised, except
    that a row of length zero has no chunk and -1 for its last. With `query_start_loc[:-1]` for positions the grid is that of
    packed positions, which vLLM's `compute_varlen_chunk_metadata` cuts at.

    Args:
        query_start_loc: First token of each row; the last entry ends the last row. Padding repeats it.
        num_computed_tokens: Absolute position of each row's first token.
        num_tokens: Packed tokens, padding included: with the rows, what bounds the number of chunks.
        chunk_size: Tokens of a cell of the grid of positions.

    Raises:
        ValueError: a shape or dtype breaks the contract, or there are no rows or chunk_size is not positive.
    """
    require(chunk_size >= 1, f"chunk_rows: chunk_size must be positive, got {chunk_size}")
    require(num_computed_tokens.shape[0] > 0, "chunk_rows: num_computed_tokens must have at least one row, got none")
    cut: Any = functools.partial(_cut, np) if isinstance(query_start_loc, np.ndarray) else _cut_on_device
    return cut(query_start_loc, num_computed_tokens, chunk_size, num_tokens)


def max_chunks(num_tokens: int, num_rows: int, chunk_size: int) -> int:
    """A bound on the chunks that `num_tokens` in `num_rows` rows fall into, whatever position the rows start at."""
    # A row of n >= 1 tokens makes at most (n + 2 * (chunk_size - 1)) // chunk_size chunks, and never more than n.
    # XLA would inline a loop over one chunk, and its bits could differ from those of a loop over many: hence 2.
    return max(2, min(num_tokens, (num_tokens + 2 * (chunk_size - 1) * num_rows) // chunk_size))


def _cut(xp: ModuleType, query_start_loc: Any, num_computed_tokens: Any, chunk_size: int, num_tokens: int) -> Chunks:
    num_rows = num_computed_tokens.shape[0]
    length, lead = xp.diff(query_start_loc), num_computed_tokens % chunk_size
    count = xp.where(length > 0, (lead + length + chunk_size - 1) // chunk_size, 0).astype(np.int32)
    stop = xp.cumsum(count, dtype=np.int32)
    first = stop - count
    chunk = xp.arange(max_chunks(num_tokens, num_rows, chunk_size) + 1, dtype=np.int32)
    row = xp.minimum(xp.searchsorted(stop, chunk, side="right"), num_rows - 1).astype(np.int32)
    # Only a row's first chunk can start inside a cell of the grid.
    offset = xp.maximum((chunk - first[row]) * chunk_size - lead[row], 0)
    real = chunk < stop[-1]
    return Chunks(
        cu_chunk_seqlens=xp.where(real, query_start_loc[row] + offset, query_start_loc[-1]).astype(np.int32),
        seq_idx=xp.where(real, row, -1)[:-1].astype(np.int32),
        first_chunk_indices=first,
        last_chunk_indices=xp.where(count > 0, stop - 1, -1).astype(np.int32),
        chunk_size=chunk_size,
    )


_cut_on_device = jax.jit(functools.partial(_cut, jnp), static_argnums=(2, 3))


def check_prefill(
    name: str,
    tokens: jax.Array,
    read_block: jax.Array,
    chunks: Chunks,
    checkpoint_offset: jax.Array | None,
    checkpoint_block: jax.Array | None,
) -> None:
    """Raises ValueError unless `chunks` fits these tokens and rows, and both checkpoint arguments are there or none."""
    rows, bound = read_block.shape[0], max_chunks(tokens.shape[0], read_block.shape[0], chunks.chunk_size)
    came = chunks.first_chunk_indices.shape[0], chunks.seq_idx.shape[0]
    require(
        came == (rows, bound),
        f"{name}: chunks must be chunk_rows of {rows} rows in {tokens.shape[0]} tokens ({bound} chunks), "
        f"got {came[0]} rows and {came[1]} chunks",
    )
    check_checkpoints(name, checkpoint_offset, checkpoint_block)


class Span(NamedTuple):
    """Chunks as a loop over them sees them: int32, empty ones behind the last with `length` 0 and a clipped `row`."""

    row: jax.Array
    start: jax.Array  # first packed token
    length: jax.Array
    offset: jax.Array  # of `start`, from the row's first new token


def spans(chunks: Chunks, query_start_loc: jax.Array) -> Span:
    """What to scan over."""
    start, row = chunks.cu_chunk_seqlens[:-1], jnp.maximum(chunks.seq_idx, 0)
    return Span(row, start, jnp.diff(chunks.cu_chunk_seqlens), start - query_start_loc[row])


def chunk_of_token(chunks: Chunks, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """For each packed token, its chunk and its place in it; out of range behind the last row."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    chunk = jnp.searchsorted(chunks.cu_chunk_seqlens[1:], token, side="right")
    return chunk, token - chunks.cu_chunk_seqlens[chunk]


def scan_chunks(
    advance: Callable[[jax.Array, Callable[[jax.Array], jax.Array], jax.Array], tuple[jax.Array, jax.Array]],
    initial: jax.Array,
    chunks: Chunks,
    query_start_loc: jax.Array,
    offset: jax.Array,
    num_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Runs rows chunk after chunk, each of the same shape: that is what makes a split bit-identical.

    Args:
        advance: Takes a state, a function that takes a chunk's tokens [chunk, ...] of an array (0 where there is none), and
            which there are [chunk]; returns the new state and the outputs [chunk, ...].
        initial: State before each row. [rows, ...]
        chunks: The rows' chunks.
        query_start_loc: First token of each row.
        offset: After how many tokens of a row its state is kept. [rows, places]
        num_tokens: Packed tokens, padding included.

    Returns:
        The outputs [tokens, ...], 0 behind the last row, and the states kept [rows, places, ...].
    """
    lane = jnp.arange(chunks.chunk_size, dtype=jnp.int32)

    def step(carry, chunk):
        state, kept = carry
        token = jnp.minimum(chunk.start + lane, num_tokens - 1)
        live = lane < chunk.length
        take = lambda x: jnp.where(per_row(live, x[token]), x[token], 0)
        state, out = advance(jnp.where(chunk.offset == 0, initial[chunk.row], state), take, live)
        here = (offset[chunk.row] == chunk.offset + chunk.length) & (chunk.length > 0)
        kept = kept.at[chunk.row].set(jnp.where(per_row(here, kept[chunk.row]), state, kept[chunk.row]))
        return (state, kept), out

    kept = jnp.zeros((*offset.shape, *initial.shape[1:]), jnp.float32)
    (_, kept), out = jax.lax.scan(step, (jnp.zeros_like(initial[0]), kept), spans(chunks, query_start_loc))
    return out.at[chunk_of_token(chunks, num_tokens)].get(mode="fill", fill_value=0), kept
