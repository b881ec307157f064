"""Finds the block boundaries inside a prefill row. Mode "all" keeps their states as well as the row's last state."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mamba_align_jax import _values as values
from mamba_align_jax.align.columns import NULL_BLOCK, choose, column_of, last_boundary


def prefill_checkpoints(
    num_computed_tokens: int, num_tokens: int, block_size: int, block_row: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Finds the boundaries strictly inside one prefill row, on the host.

    Args:
        num_computed_tokens: Tokens computed before the row.
        num_tokens: Tokens in the row.
        block_size: Tokens between boundaries. For chunked ops, a multiple of their `chunk_size`.
        block_row: The block of each column, for one group.

    Returns:
        One row's `RowCheckpoints.offset` and `RowCheckpoints.block`: for each boundary the number of the row's tokens
        before it, in rising order, and its block, or NULL_BLOCK if the column has none. To pad them, repeat
        `num_tokens` and NULL_BLOCK.

    Raises:
        ValueError: An argument is no whole number, or negative.
    """
    num_computed_tokens = values.integer("prefill_checkpoints: num_computed_tokens", num_computed_tokens, 0)
    num_tokens = values.integer("prefill_checkpoints: num_tokens", num_tokens, 0)
    block_size = values.integer("prefill_checkpoints: block_size", block_size, 1)
    block_row = values.integers("prefill_checkpoints: block_row", block_row)
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
    """Finds the boundaries strictly inside each prefill row, for NumPy or JAX arrays, as inside a jitted step.

    Args:
        num_computed_tokens: Position of each row's first token. int32 [rows].
        num_tokens: Tokens in each row. int32 [rows].
        block_size: Tokens between boundaries.
        checkpoints: The boundaries to return per row. Rows of at most n tokens have (n + block_size - 2) // block_size.

    Returns:
        `RowCheckpoints.offset`, and the boundaries' columns for `BlockTables.lookup`, int32 [rows, checkpoints] each.
        The column is -1 where there is no further boundary.
    """
    first = column_of(num_computed_tokens + 1, block_size)
    last = column_of(num_computed_tokens + num_tokens, block_size)
    column = first[:, None] + np.arange(checkpoints, dtype=np.int32)[None]
    offset = (column + 1) * block_size - num_computed_tokens[:, None]
    return offset, choose(column < last[:, None], column, -1)
