"""Block tables on the device: which physical block each column of each slot has."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax.align.batch import Put
from mamba_align_jax.align.config import AlignConfig
from pallas_kernels import NULL_BLOCK


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockTables:
    """`blocks` is int32 [groups, slots, columns]. Entries of released or skipped columns are stale and never used."""

    blocks: jax.Array

    @classmethod
    def create(cls, spec: AlignConfig) -> "BlockTables":
        """Tables without blocks."""
        shape = (len(spec.groups), spec.max_num_seqs, spec.num_columns)
        return cls(blocks=jnp.full(shape, NULL_BLOCK, jnp.int32))

    def check(self, spec: AlignConfig) -> None:
        """Raises ValueError unless the tables have the configuration's groups and slots, and columns for every window."""
        least = (len(spec.groups), spec.max_num_seqs, spec.num_columns)
        if self.blocks.ndim != 3 or self.blocks.shape[:2] != least[:2] or self.blocks.shape[2] < least[2]:
            raise ValueError(
                f"BlockTables: blocks must be [groups, slots, columns] = {list(least)}, or more columns, "
                f"got {list(self.blocks.shape)}"
            )

    def lookup(self, slot: jax.Array, column: jax.Array) -> jax.Array:
        """Blocks [groups, *slot.shape] of columns; NULL_BLOCK where the column is negative or behind the row's end."""
        inside = (column >= 0) & (column < self.blocks.shape[2])
        # Gathers clamp: an unchecked column would silently read its neighbour's block.
        blocks = self.blocks[:, jnp.maximum(slot, 0), jnp.clip(column, 0, self.blocks.shape[2] - 1)]
        return jnp.where(inside, blocks, NULL_BLOCK)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TableUpdates:
    """Entries to set, int32 [updates] each; slot -1 for padding."""

    group: jax.Array
    slot: jax.Array
    column: jax.Array
    block: jax.Array

    @classmethod
    def from_host(
        cls,
        spec: AlignConfig,
        bucket: int,
        entries: Sequence[tuple[int, int, int, int]],
        put: Put = jax.device_put,
    ) -> "TableUpdates":
        """Pads (group, slot, column, block) entries to `bucket`; for `put` see `StepBatch.from_host`.

        Raises:
            ValueError: too many entries, or one out of range, named.
        """
        if len(entries) > bucket:
            raise ValueError(f"TableUpdates: at most {bucket} entries, got {len(entries)}")
        limits = (len(spec.groups), spec.max_num_seqs, spec.num_columns)
        for number, (*place, block) in enumerate(entries):
            if any(not 0 <= x < limit for x, limit in zip(place, limits, strict=True)) or block < 0:
                raise ValueError(
                    f"TableUpdates: entry {number} must be (group, slot, column) inside {limits} and a block >= 0, "
                    f"got {(*place, block)}"
                )
        padded = np.full((4, bucket), -1, np.int32)
        padded[:, : len(entries)] = np.asarray(entries, np.int32).reshape(-1, 4).T
        group, slot, column, block = map(put, padded)
        return cls(group=group, slot=slot, column=column, block=block)


def update_block_tables(tables: BlockTables, updates: TableUpdates) -> BlockTables:
    """Sets entries. Donate `tables`."""
    slot = jnp.where(updates.slot >= 0, updates.slot, tables.blocks.shape[1])
    blocks = tables.blocks.at[updates.group, slot, updates.column].set(updates.block, mode="drop")
    return BlockTables(blocks=blocks)
