"""Where packed tokens are in their sequences, and where positions of a sequence are among the packed tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mamba_align_jax.align.columns import choose
from pallas_kernels.rows import TokenRows, token_rows


class TokenPositions(NamedTuple):
    """The row and the position of each packed token.

    Attributes:
        row: Row of each token. Tokens after the last row have an arbitrary row that is in range. int32 [tokens]
        position: Absolute position of each token; 0 after the last row. int32 [tokens]
        valid: Whether a token belongs to a row. bool [tokens]
    """

    row: jax.Array
    position: jax.Array
    valid: jax.Array


def token_positions(
    query_start_loc: jax.Array, num_computed_tokens: jax.Array, num_tokens: int, rows: TokenRows | None = None
) -> TokenPositions:
    """Computes the row and the absolute position of each packed token. Rotations and KV pages depend on them.

    Args:
        query_start_loc: First token of each row, then the end of the last row. int32 [rows + 1]
        num_computed_tokens: Position of each row's first token. int32 [rows]
        num_tokens: Number of packed tokens, padding included. Static.
        rows: The result of `token_rows` for these arguments; None computes it.
    """
    rows = rows or token_rows(query_start_loc, num_tokens)
    return TokenPositions(rows.row, jnp.where(rows.valid, num_computed_tokens[rows.row] + rows.offset, 0), rows.valid)


def packed_tokens(query_start_loc: Any, num_computed_tokens: Any, row: Any, position: Any, num_tokens: int) -> Any:
    """Finds the packed token at a position of a row, for outputs at chosen positions such as prompt log-probabilities.

    All arguments are NumPy arrays or all are JAX arrays.

    Args:
        query_start_loc: First token of each row, then the end of the last row. int32 [rows + 1]
        num_computed_tokens: Position of each row's first token. int32 [rows]
        row: Rows, of any shape. int32
        position: Absolute positions, in the shape of `row`. int32
        num_tokens: The result for positions that the step does not run.

    Returns:
        Indices of packed tokens, int32 in the shape of `row`.
    """
    token = query_start_loc[row] + position - num_computed_tokens[row]
    inside = (position >= num_computed_tokens[row]) & (token < query_start_loc[row + 1])
    return choose(inside, token, num_tokens)
