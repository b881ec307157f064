"""Block tables on the device: the block id of each column of each slot."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax import _values as values
from mamba_align_jax.align.batch import Put
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.errors import FieldError
from pallas_kernels import NULL_BLOCK


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockTables:
    """The block ids of all columns.

    Attributes:
        blocks: int32 [groups, slots, columns]. Entries of released or skipped columns are stale and are never used.
    """

    blocks: jax.Array

    @classmethod
    def create(cls, align: AlignConfig) -> "BlockTables":
        """Creates tables in which every entry is NULL_BLOCK."""
        values.instance("BlockTables: align", align, AlignConfig)
        shape = (len(align.groups), align.max_num_seqs, align.num_columns)
        return cls(blocks=jnp.full(shape, NULL_BLOCK, jnp.int32))

    def check(self, align: AlignConfig) -> None:
        """Raises ValueError unless the tables have the groups and slots of `align`, and at least its columns."""
        wanted = (len(align.groups), align.max_num_seqs, align.num_columns)
        if self.blocks.ndim != 3 or self.blocks.shape[:2] != wanted[:2] or self.blocks.shape[2] < wanted[2]:
            shape = f"[groups, slots, columns] = {list(wanted)}, or more columns"
            raise FieldError("BlockTables: blocks", shape, str(list(self.blocks.shape)))

    def lookup(self, slot: jax.Array, column: jax.Array) -> jax.Array:
        """Returns the blocks of columns, int32 [groups, *column.shape].

        Args:
            slot: int32, in a shape that broadcasts with that of `column`.
            column: int32. NULL_BLOCK is returned for a column that is negative or beyond the last one.
        """
        inside = (column >= 0) & (column < self.blocks.shape[2])
        # A gather clamps its indices, so a column that is out of range would silently read another column's block.
        blocks = self.blocks[:, jnp.maximum(slot, 0), jnp.clip(column, 0, self.blocks.shape[2] - 1)]
        return jnp.where(inside, blocks, NULL_BLOCK)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TableUpdates:
    """Entries of the block tables to set. int32 [updates] each. An update with slot -1 is padding."""

    group: jax.Array
    slot: jax.Array
    column: jax.Array
    block: jax.Array

    @classmethod
    def from_host(
        cls,
        align: AlignConfig,
        bucket: int,
        entries: Sequence[tuple[int, ...]],
        put: Put = jax.device_put,
    ) -> "TableUpdates":
        """Checks (group, slot, column, block) entries and pads them to `bucket`.

        Args:
            align: The configuration.
            bucket: Entries of the result.
            entries: May repeat an entry, but not give two blocks to one place.
            put: See `StepBatch.from_host`.

        Raises:
            ValueError: There are more than `bucket` entries, an entry is out of range, or two entries give different
                blocks to one place.
        """
        values.instance("TableUpdates: align", align, AlignConfig)
        bucket = values.integer("TableUpdates: bucket", bucket, 0)
        entries = values.rows("TableUpdates: entries", entries, 4)
        values.require(len(entries) <= bucket, "TableUpdates: entries", f"at most bucket = {bucket}", len(entries))
        limits = (len(align.groups), align.max_num_seqs, align.num_columns)
        blocks: dict[tuple[int, ...], int] = {}
        for number, (*place, block) in enumerate(entries):
            if any(not 0 <= x < limit for x, limit in zip(place, limits, strict=True)) or block < 0:
                wanted = f"(group, slot, column) inside {limits} and a block >= 0"
                raise FieldError(f"TableUpdates: entry {number}", wanted, str((*place, block)))
            first = blocks.setdefault(tuple(place), block)
            if first != block:
                name = f"TableUpdates: (group, slot, column) {tuple(place)}"
                raise FieldError(name, "have one block", f"{first} and {block}", "must")
        padded = np.full((4, bucket), -1, np.int32)
        padded[:, : len(entries)] = np.asarray(entries, np.int32).reshape(-1, 4).T
        group, slot, column, block = map(put, padded)
        return cls(group=group, slot=slot, column=column, block=block)


def update_block_tables(tables: BlockTables, updates: TableUpdates) -> BlockTables:
    """Returns the tables with the entries of `updates` set. A jitted caller may donate `tables`.

    Raises:
        ValueError: An argument is something else.
    """
    values.instances("update_block_tables", tables=(tables, BlockTables), updates=(updates, TableUpdates))
    slot = jnp.where(updates.slot >= 0, updates.slot, tables.blocks.shape[1])
    blocks = tables.blocks.at[updates.group, slot, updates.column].set(updates.block, mode="drop")
    return BlockTables(blocks=blocks)
