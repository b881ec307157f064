"""Packed rows: which row a token belongs to, and how rows fall into chunks on the grid of absolute positions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenRows(NamedTuple):
    """Where each packed token stands. Tokens behind the last row have `valid` False and a clipped `row`."""

    row: jax.Array
    offset: jax.Array
    valid: jax.Array


def token_rows(query_start_loc: jax.Array, num_tokens: int) -> TokenRows:
    """Finds the row of each of `num_tokens` packed tokens and the token's offset in it."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(query_start_loc[1:], token, side="right").astype(jnp.int32)
    row = jnp.minimum(row, query_start_loc.shape[0] - 2)
    valid = (token >= query_start_loc[0]) & (token < query_start_loc[-1])
    return TokenRows(row, token - query_start_loc[row], valid)


class Chunks(NamedTuple):
    """Rows cut at multiples of the chunk size in the sequence's absolute position, in packed order.

    All int32, one entry per chunk of a fixed-size list; entries behind the last chunk have length 0.
    """

    row: jax.Array
    start: jax.Array  # first packed token
    length: jax.Array
    offset: jax.Array  # of `start`, from the row's first new token


def max_chunks(num_tokens: int, num_rows: int, chunk_size: int) -> int:
    """A bound on the chunks that `num_tokens` in `num_rows` rows fall into, whatever position the rows start at."""
    # A row of n >= 1 tokens makes at most (n + 2 * (chunk_size - 1)) // chunk_size chunks, and never more than n.
    # XLA would inline a loop over one chunk, and its bits could differ from those of a loop over many: hence 2.
    return max(2, min(num_tokens, (num_tokens + 2 * (chunk_size - 1) * num_rows) // chunk_size))


def _last_chunk(query_start_loc: jax.Array, lead: jax.Array, chunk_size: int) -> jax.Array:
    """Number of chunks in all rows up to and including each."""
    length = jnp.diff(query_start_loc)
    return jnp.cumsum(jnp.where(length > 0, (lead + length + chunk_size - 1) // chunk_size, 0), dtype=jnp.int32)


def chunk_rows(query_start_loc: jax.Array, num_computed_tokens: jax.Array, chunk_size: int, num_tokens: int) -> Chunks:
    """Cuts packed rows, the first new token of each at position `num_computed_tokens[row]`, into chunks."""
    num_rows = num_computed_tokens.shape[0]
    lead = num_computed_tokens % chunk_size
    stop = _last_chunk(query_start_loc, lead, chunk_size)
    chunk = jnp.arange(max_chunks(num_tokens, num_rows, chunk_size), dtype=jnp.int32)
    row = jnp.searchsorted(stop, chunk, side="right").astype(jnp.int32)
    real = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    nth = chunk - jnp.where(row > 0, stop[row - 1], 0)
    # Only the row's first chunk can start inside a cell of the grid.
    offset = jnp.maximum(nth * chunk_size - lead[row], 0)
    end = jnp.minimum((nth + 1) * chunk_size - lead[row], jnp.diff(query_start_loc)[row])
    return Chunks(
        row=row,
        start=jnp.where(real, query_start_loc[row] + offset, query_start_loc[-1]),
        length=jnp.where(real, end - offset, 0),
        offset=offset,
    )


def chunk_of_token(
    rows: TokenRows, query_start_loc: jax.Array, num_computed_tokens: jax.Array, chunk_size: int
) -> tuple[jax.Array, jax.Array]:
    """For each token, its entry in `chunk_rows`' list and its place in that chunk."""
    lead = num_computed_tokens % chunk_size
    stop = _last_chunk(query_start_loc, lead, chunk_size)
    first = jnp.where(rows.row > 0, stop[rows.row - 1], 0)
    nth = (lead[rows.row] + rows.offset) // chunk_size
    return first + nth, rows.offset - jnp.maximum(nth * chunk_size - lead[rows.row], 0)
