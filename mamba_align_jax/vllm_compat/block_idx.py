"""The blocks that a row's tokens lie in, where every block boundary of a chunk is kept (vLLM's mode "all")."""

from typing import Any, NamedTuple

from mamba_align_jax.align.columns import choose, column_of


class BlockIdx(NamedTuple):
    """Columns of a row, under vLLM's names less their prefix `block_idx_`.

    Attributes:
        last_computed_token: Has the state that the row goes on from; 0 for a fresh row.
        first_scheduled_token: Takes the row's first token.
        last_scheduled_token: Gets the row's final state.
    """

    last_computed_token: Any
    first_scheduled_token: Any
    last_scheduled_token: Any


def block_idx(num_computed_tokens: Any, num_tokens: Any, block_size: int) -> BlockIdx:
    """The columns that `num_tokens` from position `num_computed_tokens` on begin, lie and end in.

    For Mamba layers ported from vLLM. Works on ints, NumPy and JAX arrays alike.
    """
    least_0 = lambda column: choose(column < 0, 0, column)
    return BlockIdx(
        least_0(column_of(num_computed_tokens, block_size)),
        column_of(num_computed_tokens + 1, block_size),
        least_0(column_of(num_computed_tokens + num_tokens, block_size)),
    )
