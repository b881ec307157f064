"""Chunks of rows, which end at multiples of the chunk size in the sequence's absolute position.

The state at such a position is then the same bits, however the tokens before it were split over calls.
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

from pallas_kernels._check import checked, require
from pallas_kernels.blocks import per_row

CHUNK_SIZE = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The chunks of a batch's prefill rows, in packed order. Make it with `chunk_rows`.

    The number of chunks is fixed by the shapes of the batch; the list is padded with empty chunks after the last one.

    Attributes:
        cu_chunk_seqlens: Index of each chunk's first packed token; the last entry is the end of the last chunk.
        seq_idx: The row of each chunk, -1 for the padding after the last chunk.
        first_chunk_indices: The number of chunks in all earlier rows, for each row.
        last_chunk_indices: Index of each row's last chunk, -1 for a row without tokens, which has no chunk.
        chunk_size: The distance in tokens between two positions at which chunks are cut.
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
    """Cut packed rows into chunks for the prefill ops.

    A row's first chunk ends at the next multiple of `chunk_size` in the sequence, and its last chunk at the row's end.
    JAX arrays are cut on the device (the function can be jitted) and NumPy arrays on the host, with the same results. If
    only one of the two is a NumPy array, they are cut on the device.

    Source: vLLM's `_compute_chunk_metadata`, vectorised, except that a row without tokens has no chunk and -1 as its
    last one. If `num_computed_tokens` is `query_start_loc[:-1]`, rows are cut at multiples of the packed position, as
    vLLM's `compute_varlen_chunk_metadata` does.

    Args:
        query_start_loc: Index of each row's first token; the last entry is the end of the last row. Padding rows repeat
            it.
        num_computed_tokens: Absolute position of each row's first token in its sequence.
        num_tokens: Number of packed tokens, padding included. It and the number of rows determine the number of chunks.
        chunk_size: The distance in tokens between two positions at which chunks are cut.

    Raises:
        ValueError: if a shape or dtype breaks the contract, if there are no rows, or if `chunk_size` is not positive.
    """
    require(chunk_size >= 1, f"chunk_rows: chunk_size must be positive, got {chunk_size}")
    require(num_computed_tokens.shape[0] > 0, "chunk_rows: num_computed_tokens must have at least one row, got none")
    on_host = isinstance(query_start_loc, np.ndarray) and isinstance(num_computed_tokens, np.ndarray)
    cut: Any = functools.partial(_cut, np) if on_host else _cut_on_device
    return cut(query_start_loc, num_computed_tokens, chunk_size, num_tokens)


def max_chunks(num_tokens: int, num_rows: int, chunk_size: int) -> int:
    """Return the most chunks into which `num_tokens` tokens of `num_rows` rows can fall, wherever the rows start."""
    # A row of n >= 1 tokens makes at most (n + 2 * (chunk_size - 1)) // chunk_size chunks, and never more than n. The
    # result is at least 2, because XLA would inline a loop over one chunk, and its bits could then differ from the bits of
    # a loop over several.
    return max(2, min(num_tokens, (num_tokens + 2 * (chunk_size - 1) * num_rows) // chunk_size))


def _cut(xp: ModuleType, query_start_loc: Any, num_computed_tokens: Any, chunk_size: int, num_tokens: int) -> Chunks:
    num_rows = num_computed_tokens.shape[0]
    length, lead = xp.diff(query_start_loc), num_computed_tokens % chunk_size
    count = xp.where(length > 0, (lead + length + chunk_size - 1) // chunk_size, 0).astype(np.int32)
    stop = xp.cumsum(count, dtype=np.int32)
    first = stop - count
    chunk = xp.arange(max_chunks(num_tokens, num_rows, chunk_size) + 1, dtype=np.int32)
    # There are few rows, so counting is faster than a search, which would be a loop of launches on a GPU.
    row = xp.minimum(xp.sum(stop[:, None] <= chunk[None], axis=0), num_rows - 1).astype(np.int32)
    # Only a row's first chunk can start between two positions at which chunks are cut.
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


def check_chunks(name: str, chunks: Chunks, num_rows: int, num_tokens: int) -> None:
    """Raise ValueError, in the name of op `name`, unless `chunks` was made for `num_rows` rows in `num_tokens` tokens."""
    bound = max_chunks(num_tokens, num_rows, chunks.chunk_size)
    came = chunks.first_chunk_indices.shape[0], chunks.seq_idx.shape[0]
    require(
        came == (num_rows, bound),
        f"{name}: rows.chunks must be chunk_rows of {num_rows} rows in {num_tokens} tokens ({bound} chunks), "
        f"got {came[0]} rows and {came[1]} chunks",
    )


class Span(NamedTuple):
    """The extent of each chunk, as a scan over the chunks needs it: one entry per chunk, or scalars inside the scan.

    Attributes:
        row: The chunk's row, clipped to the existing rows for the padding after the last chunk.
        start: Index of the chunk's first packed token.
        length: The number of tokens in the chunk, 0 for padding.
        offset: The number of tokens of the row before the chunk.
    """

    row: Int32[Array, "*chunks"]
    start: Int32[Array, "*chunks"]
    length: Int32[Array, "*chunks"]
    offset: Int32[Array, "*chunks"]


def spans(chunks: Chunks, query_start_loc: jax.Array) -> Span:
    """Return the row, start, length and offset of each chunk, to scan over. `query_start_loc` is int32 [rows + 1]."""
    start, row = chunks.cu_chunk_seqlens[:-1], jnp.maximum(chunks.seq_idx, 0)
    return Span(row, start, jnp.diff(chunks.cu_chunk_seqlens), start - query_start_loc[row])


def chunk_of_token(chunks: Chunks, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Find the chunk of each packed token and the token's index in that chunk.

    Returns:
        Chunks and indices, each int32 [num_tokens]. For tokens after the last row the chunk is out of range.
    """
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
    """Advance the state of each row chunk by chunk, as plain XLA.

    Every chunk runs in the same loop body of one shape, so results have the same bits however a row is split between calls
    at the end of a chunk.

    Args:
        advance: Advances a state by one chunk: (state, take, live) -> (new state, outputs [chunk_size, ...]).
            `take(x)` returns the chunk's tokens of an array x [tokens, ...], padded with 0 to chunk_size. `live`, bool
            [chunk_size], is False for that padding.
        initial: The state before each row, float32 [rows, ...].
        chunks: The rows' chunks.
        query_start_loc: Index of each row's first token, int32 [rows + 1].
        offset: The numbers of tokens of each row after which its state is kept, int32 [rows, checkpoints].
        num_tokens: Number of packed tokens, padding included.

    Returns:
        The outputs [tokens, ...], which are 0 after the last row, and the kept states, float32 [rows, checkpoints, ...].
    """
    lane = jnp.arange(chunks.chunk_size, dtype=jnp.int32)

    def step(carry, chunk):
        state, kept = carry
        token = jnp.minimum(chunk.start + lane, num_tokens - 1)
        live = lane < chunk.length

        def take(x):
            return jnp.where(per_row(live, x[token]), x[token], 0)

        state, out = advance(jnp.where(chunk.offset == 0, initial[chunk.row], state), take, live)
        here = (offset[chunk.row] == chunk.offset + chunk.length) & (chunk.length > 0)
        kept = kept.at[chunk.row].set(jnp.where(per_row(here, kept[chunk.row]), state, kept[chunk.row]))
        return (state, kept), out

    kept = jnp.zeros((*offset.shape, *initial.shape[1:]), jnp.float32)
    (_, kept), out = jax.lax.scan(step, (jnp.zeros_like(initial[0]), kept), spans(chunks, query_start_loc))
    return out.at[chunk_of_token(chunks, num_tokens)].get(mode="fill", fill_value=0), kept
