"""Packed rows: finds the row that each token belongs to."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def cut_columns(x: jax.Array, sizes: Sequence[int]) -> tuple[jax.Array, ...]:
    """Cuts [rows, columns] into one array [rows, size] for each of `sizes`, whose sum is the number of columns."""
    return tuple(jnp.split(x, list(itertools.accumulate(sizes))[:-1], axis=1))


class TokenRows(NamedTuple):
    """The place of each packed token.

    Attributes:
        row: The token's row, clipped to the existing rows for padding tokens.
        offset: The token's index within its row.
        valid: False for padding tokens, which belong to no row.
    """

    row: Int32[Array, " tokens"]
    offset: Int32[Array, " tokens"]
    valid: Bool[Array, " tokens"]


def token_rows(query_start_loc: jax.Array, num_tokens: int) -> TokenRows:
    """Finds the row of each packed token and the token's offset in that row.

    Args:
        query_start_loc: Index of each row's first token; the last entry is the end of the last row. int32 [rows + 1].
        num_tokens: Number of packed tokens, padding included.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # There are few rows. Comparing with all of them is one launch; a binary search is a loop of launches.
    row = jnp.searchsorted(query_start_loc[1:], token, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, query_start_loc.shape[0] - 2)
    valid = (token >= query_start_loc[0]) & (token < query_start_loc[-1])
    return TokenRows(row, token - query_start_loc[row], valid)
