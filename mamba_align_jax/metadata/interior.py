"""The boundaries inside the prefill rows of a step, and the blocks that keep their states in mode "all"."""

import math
from dataclasses import dataclass, field

import jax

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.interior import interior_checkpoints
from mamba_align_jax.align.step import StepIndices
from mamba_align_jax.align.tables import BlockTables
from pallas_kernels import CHUNK_SIZE


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class InteriorBoundaries:
    """Where prefill ops keep the states of the boundaries inside each row.

    Attributes:
        offset: The number of the row's tokens before each boundary, in rising order. int32 [rows, boundaries]
        block: The block that takes its state; NULL_BLOCK where there is no further boundary. int32
            [groups, rows, boundaries]
        chunk_size: The `chunk_size` with which prefill ops must cut the rows, so that a chunk ends at every boundary.
            Static.
    """

    offset: jax.Array
    block: jax.Array
    chunk_size: int = field(metadata=dict(static=True))


def interior_boundaries(
    align: AlignConfig, batch: StepBatch, indices: StepIndices, tables: BlockTables, max_tokens: int
) -> InteriorBoundaries | None:
    """Finds the boundaries inside the rows of a step, for `step_inputs`, `LayerStep.create` and `split_rows`.

    It can be called inside a jitted step. Verify rows have entries as well, which are not used.

    Args:
        align: The configuration. Static.
        batch: The step's rows.
        indices: The result of `begin_step`.
        tables: The step's tables. They have a block in each column that a prefill row passes.
        max_tokens: The largest number of tokens in a prefill row, such as that of all prefill rows together. Static.

    Returns:
        The boundaries. None if the mode is not "all", or if there are no prefill tokens: then nothing is kept.
    """
    if align.mode != "all" or max_tokens <= 0:
        return None
    size = align.block_size
    offset, column = interior_checkpoints(
        indices.num_computed_tokens, batch.num_tokens, size, (max_tokens + size - 2) // size
    )
    block = tables.lookup(batch.idx_mapping[:, None], column)
    return InteriorBoundaries(offset=offset, block=block, chunk_size=math.gcd(size, CHUNK_SIZE))
