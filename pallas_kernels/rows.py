"""Packed rows: which row a token belongs to."""

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
    # Rows are few: to compare with all is one launch, to search is a loop of them.
    row = jnp.searchsorted(query_start_loc[1:], token, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, query_start_loc.shape[0] - 2)
    valid = (token >= query_start_loc[0]) & (token < query_start_loc[-1])
    return TokenRows(row, token - query_start_loc[row], valid)
