"""From a packed token to its position in the sequence, and back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mamba_align_jax.align.columns import choose
from pallas_kernels.rows import token_rows


class TokenPositions(NamedTuple):
    """Where each packed token stands. Tokens behind the last row have `valid` False, a clipped `row` and position 0."""

    row: jax.Array
    position: jax.Array
    valid: jax.Array


def token_positions(query_start_loc: jax.Array, num_computed_tokens: jax.Array, num_tokens: int) -> TokenPositions:
    """Row and absolute position of each of `num_tokens` packed tokens: what rotary embeddings and KV pages go by."""
    rows = token_rows(query_start_loc, num_tokens)
    return TokenPositions(rows.row, jnp.where(rows.valid, num_computed_tokens[rows.row] + rows.offset, 0), rows.valid)


def packed_tokens(query_start_loc: Any, num_computed_tokens: Any, row: Any, position: Any, num_tokens: int) -> Any:
    """Where the packed batch has the token at `position` of `row`; `num_tokens` where the step doesn't run it.

    For whoever wants outputs at certain positions: the log-probabilities of a prompt's tokens, the hidden state at a block
    boundary. NumPy arrays or JAX arrays; `row` and `position` of one shape.
    """
    token = query_start_loc[row] + position - num_computed_tokens[row]
    inside = (position >= num_computed_tokens[row]) & (token < query_start_loc[row + 1])
    return choose(inside, token, num_tokens)
