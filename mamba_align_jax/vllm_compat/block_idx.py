"""The columns that a row reads and writes in mode "all", in which every block boundary of a chunk is kept."""

from typing import Any, NamedTuple

from mamba_align_jax.align.columns import choose, column_of


class BlockIdx(NamedTuple):
    """Columns of a row. vLLM's names have the prefix `block_idx_`. Ints or integer arrays.

    Attributes:
        last_computed_token: The column with the state from which the row continues. 0 for a fresh row.
        first_scheduled_token: The column of the row's first token.
        last_scheduled_token: The column to which the row's final state goes.
    """

    last_computed_token: Any
    first_scheduled_token: Any
    last_scheduled_token: Any


def block_idx(num_computed_tokens: Any, num_tokens: Any, block_size: int) -> BlockIdx:
    """Returns the columns of a row of `num_tokens` tokens that starts at position `num_computed_tokens`.

    It is meant for Mamba layers that are ported from vLLM. It takes ints, NumPy arrays or JAX arrays.
    """
    at_least_0 = lambda column: choose(column < 0, 0, column)
    return BlockIdx(
        at_least_0(column_of(num_computed_tokens, block_size)),
        column_of(num_computed_tokens + 1, block_size),
        at_least_0(column_of(num_computed_tokens + num_tokens, block_size)),
    )
