"""Tiles of neighbouring tokens of packed rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.rows import Rows, TokenRows


class Tiles(NamedTuple):
    """Tiles of packed tokens, each from one row. A tile without tokens has length 0.

    Attributes:
        table: The row of the page table that has the pages of the tile's row.
        start: The tile's first packed token.
        length: The number of the tile's tokens.
        position: Position of the tile's first token in its sequence.
        row_end: The number of keys of the tile's row.
    """

    table: Int32[Array, " tiles"]
    start: Int32[Array, " tiles"]
    length: Int32[Array, " tiles"]
    position: Int32[Array, " tiles"]
    row_end: Int32[Array, " tiles"]


def tiles(rows: Rows, num_tokens: int, tile_tokens: int, slots: jax.Array | None) -> Tiles:
    """Cut each row into tiles of `tile_tokens` tokens, from its first token on; a row's last tile may be shorter.

    `num_tokens` is the number of packed tokens, padding included. For `slots` see api.py.
    """
    query_start_loc, num_computed_tokens = rows.query_start_loc, rows.num_computed_tokens
    num_rows, row_length = rows.num_rows, jnp.diff(query_start_loc)
    if rows.max_query_tokens is not None:
        tiles_per_row = -(-rows.max_query_tokens // tile_tokens)
        tile = jnp.arange(num_rows * tiles_per_row, dtype=jnp.int32)
        row, offset = tile // tiles_per_row, tile % tiles_per_row * tile_tokens
    else:
        tile = jnp.arange(num_tokens // tile_tokens + num_rows, dtype=jnp.int32)
        count = -(-row_length // tile_tokens)
        end = jnp.cumsum(count, dtype=jnp.int32)
        row = jnp.searchsorted(end, tile, side="right", method="compare_all").astype(jnp.int32)
        # A tile after the last row's last tile gets an offset after that row's end.
        row = jnp.minimum(row, num_rows - 1)
        offset = (tile - (end - count)[row]) * tile_tokens
    length = jnp.clip(row_length[row] - offset, 0, tile_tokens)
    table = row if slots is None else slots[row]
    row_end = num_computed_tokens[row] + row_length[row]
    return Tiles(table, query_start_loc[row] + offset, length, num_computed_tokens[row] + offset, row_end)


def padded_indices(rows: Rows, of_token: TokenRows, tile_tokens: int) -> jax.Array:
    """Return the index of each packed token in a layout of all `tiles` that pads each of them to `tile_tokens` tokens.

    int32 [tokens].
    """
    if rows.max_query_tokens is not None:
        first_tile = of_token.row * -(-rows.max_query_tokens // tile_tokens)
    else:
        count = -(-jnp.diff(rows.query_start_loc) // tile_tokens)
        first_tile = (jnp.cumsum(count, dtype=jnp.int32) - count)[of_token.row]
    return first_tile * tile_tokens + of_token.offset
