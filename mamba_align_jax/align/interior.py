"""The block boundaries strictly inside a prefill row, which mode "all" keeps beside the row's last state."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mamba_align_jax.align.columns import NULL_BLOCK, choose, column_of, last_boundary


def prefill_checkpoints(
    num_computed_tokens: int, num_tokens: int, block_size: int, block_row: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The boundaries strictly inside a prefill row: what mode "all" gives the prefill ops beside the row's last state.

    Args:
        num_computed_tokens: Before the row.
        num_tokens: Of the row.
        block_size: Tokens between boundaries; for chunked ops a multiple of their `chunk_size`.
        block_row: Block of each column, of one group.

    Returns:
        `checkpoint_offset` and `checkpoint_block`: tokens of the row, rising, and blocks, NULL_BLOCK for a column without
        one. To pad them, repeat `num_tokens` and NULL_BLOCK.
    """
    first = last_boundary(num_computed_tokens, block_size) + block_size
    boundaries = range(first, num_computed_tokens + num_tokens, block_size)
    columns = [column_of(boundary, block_size) for boundary in boundaries]
    return (
        [boundary - num_computed_tokens for boundary in boundaries],
        [int(block_row[column]) if column < len(block_row) else NULL_BLOCK for column in columns],
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
    first = column_of(num_computed_tokens + 1, block_size)
    last = column_of(num_computed_tokens + num_tokens, block_size)
    column = first[:, None] + np.arange(checkpoints, dtype=np.int32)
    offset = (column + 1) * block_size - num_computed_tokens[:, None]
    return offset, choose(column < last[:, None], column, -1)
