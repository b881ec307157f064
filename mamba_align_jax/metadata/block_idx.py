"""The blocks that a row's tokens lie in, where every block boundary of a chunk is kept (vLLM's mode "all")."""

from typing import Any, NamedTuple

import numpy as np

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

    For Mamba layers ported from vLLM, and `interior_checkpoints`. Works on ints, NumPy and JAX arrays alike.
    """
    least_0 = lambda column: choose(column < 0, 0, column)
    return BlockIdx(
        least_0(column_of(num_computed_tokens, block_size)),
        column_of(num_computed_tokens + 1, block_size),
        least_0(column_of(num_computed_tokens + num_tokens, block_size)),
    )


def interior_checkpoints(
    num_computed_tokens: Any, num_tokens: Any, block_size: int, checkpoints: int
) -> tuple[Any, Any]:
    """The block boundaries inside each row's chunk, as the prefill ops' `checkpoint_offset`, and their columns.

    The row's end is none of them: that is its final state. The columns go through `BlockTables.lookup` to become the ops'
    `checkpoint_block`; -1, for none, becomes NULL_BLOCK there.

    Args:
        num_computed_tokens: Position of each row's first token. [rows], NumPy or JAX
        num_tokens: Tokens of each row. [rows]
        block_size: Tokens between boundaries.
        checkpoints: Bound on the boundaries inside a row: (most tokens of a row + block_size - 2) // block_size do.

    Returns:
        Tokens of the row up to each boundary, and the boundary's column. [rows, checkpoints] each.
    """
    blocks = block_idx(num_computed_tokens, num_tokens, block_size)
    column = blocks.first_scheduled_token[:, None] + np.arange(checkpoints, dtype=np.int32)
    offset = (column + 1) * block_size - num_computed_tokens[:, None]
    return offset, choose(column < blocks.last_scheduled_token[:, None], column, -1)
