"""Verifies each step on the host, for debugging: finds the slot that reads or writes a column that it must not."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mamba_align_jax import _values as values
from mamba_align_jax.align import columns
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.config import AlignConfig, ConvState, RecurrentState
from mamba_align_jax.align.corrections import Corrections
from mamba_align_jax.align.policy import POLICIES, ReadPlaces, boundary_window, fold_places
from mamba_align_jax.align.state import Additions, AlignState
from mamba_align_jax.align.tables import TableUpdates
from pallas_kernels import NULL_BLOCK

_KINDS = {RecurrentState: "recurrent state", ConvState: "conv window"}


class _CheckedRow(NamedTuple):
    """A row with tokens. `drafts` is -1 if it is no verify row. `places` is None if it is fresh.

    `base` is the position of its state, and the computed tokens unless the policy is "deferred".
    """

    slot: int
    num_tokens: int
    drafts: int
    computed: int
    current: int
    places: ReadPlaces | None
    accepted: int
    base: int


class StepChecker:
    """Repeats the device's bookkeeping on the host, and records which blocks were written since they were allocated.

    Call `check` once per step, in the order of the steps. It does nothing unless the configuration has `checked` set.
    If it has, `check` waits for the device. The engine calls it itself.
    """

    def __init__(self, align: AlignConfig, num_blocks: int | Sequence[int]) -> None:
        """Creates a checker for slots without tokens and an unwritten pool.

        Args:
            align: The configuration.
            num_blocks: The blocks of the pool, NULL_BLOCK included: one number for all groups, or one for each.

        Raises:
            ValueError: `num_blocks` does not have one number per group.
        """
        values.instance("StepChecker: align", align, AlignConfig)
        groups, slots = len(align.groups), align.max_num_seqs
        each = [num_blocks] * groups if values.is_integer(num_blocks) else num_blocks
        counts = values.integers("StepChecker: num_blocks", each, 1)
        if len(counts) != groups:
            raise ValueError(f"StepChecker: num_blocks must be one number or {groups}, got {len(counts)}")
        self.align = align
        self._num_blocks = counts
        self._tables = np.full((groups, slots, align.num_columns), NULL_BLOCK, np.int32)
        self._slots = {
            "num_computed_tokens": np.zeros(slots, np.int32),
            "num_accepted_tokens": np.ones(slots, np.int32),
            "running_column": np.full(slots, -1, np.int32),
        }
        if align.is_deferred:
            self._slots["state_pos"] = np.zeros(slots, np.int32)
        self._written = [
            {kind: np.zeros(count, np.bool_) for kind in _KINDS if any(isinstance(s, kind) for s in group.states)}
            for group, count in zip(align.groups, counts, strict=True)
        ]

    def check(
        self,
        updates: TableUpdates,
        additions: Additions,
        batch: StepBatch,
        num_sampled: Any,
        state: AlignState | None = None,
    ) -> None:
        """Verifies one step.

        Args:
            updates: The entries that the step set in the block tables: new blocks and those of a prefix hit.
            additions: The slots that requests entered in the step.
            batch: The step's rows.
            num_sampled: What `finish_step` was given: int32 [rows], an int or None.
            state: What the step returned, before it is donated to the next step. None to skip that comparison.

        Raises:
            ValueError: A column's block is out of range, a column that is read or written has no block, or a block is
                read that was not written since it was allocated. The text names the slot and the column. Also if a slot
                accepted more tokens than it ran, or has other counts on the device. After an error the checker cannot
                be used again.
        """
        if not self.align.checked:
            return
        entering = self._enter(additions)
        self._allocate(updates, entering)
        rows = list(self._rows(batch, num_sampled))
        # All rows copy, then all read, then all write, as on the device: no row may read what another row writes.
        for row in rows:
            if row.places is not None and row.places.migration is not None and row.places.migration.needed:
                moves = row.places.migration
                self._copy(row.slot, moves.recurrent_source, moves.conv_source, moves.destination)
        for row in rows:
            if row.places is not None:
                self._read(row.slot, row.places.recurrent_column, row.places.conv_column)
        for row in rows:
            if self.align.is_deferred:
                self._fold(row.slot)
            is_kept = row.drafts < 0 or not self.align.is_deferred
            self._write(row.slot, row.current, *_KINDS if is_kept else (ConvState,))
            for column in range(row.current + 1, row.current + 1 + max(row.drafts, 0) * (not self.align.is_deferred)):
                self._write(row.slot, column, RecurrentState)
            if self.align.mode == "all" and row.drafts < 0:
                self._keep(row)
        for row in rows:
            self._finish(row, saves=num_sampled is not None)
        if state is not None:
            self._compare(state)

    def wrote(self, group: int, block: int) -> None:
        """Records that `StatePool.write_block` filled a block. Call it before a request enters with that block.

        The request may enter inside the block, that is with any number of tokens whose state the block holds.
        """
        for written in self._written[group].values():
            written[block] = True

    def copied(self, source: int, destination: int) -> None:
        """Takes note that a block was copied in all groups, between the checks of the steps before and after it.

        Raises:
            ValueError: The block that was read is not written. After an error the checker cannot be used again.
        """
        for group, records in enumerate(self._written):
            for kind, written in records.items():
                if not written[source]:
                    what = f"block {source} of group {self.align.groups[group].name!r} is copied"
                    raise ValueError(f"{what}, but it has no {_KINDS[kind]}")
                written[destination] = True

    def corrected(self, corrections: Corrections) -> None:
        """Takes note of a call of `correct_counts`. Call it between the checks of the steps before and after that call.

        Raises:
            ValueError: A slot has no state for its new count. The text names the slot. After an error the checker cannot
                be used again.
        """
        if not self.align.checked:
            return
        for slot, wanted in _entries(corrections.slot, corrections.num_computed_tokens):
            if slot < 0:
                continue
            computed, accepted, column, *base = (int(array[slot]) for array in self._slots.values())
            # A deferred state can't go back before its base.
            first = max([computed - accepted + 1, *base])
            if not first <= wanted <= computed:
                raise ValueError(
                    f"slot {slot}: corrections: num_computed_tokens must be in [{first}, {computed}], of which the last "
                    f"step has left states, got {wanted}"
                )
            self._set(slot, wanted, accepted - (computed - wanted), column, *base)

    def folded(self, slot: int) -> None:
        """Takes note that `fold_slots` was called for a slot, between the checks of the steps before and after it."""
        if self.align.checked and slot >= 0:
            computed, accepted, column, _ = (int(array[slot]) for array in self._slots.values())
            base, moves = self._fold(slot)
            self._set(slot, computed, 1 if moves else accepted, column, base)

    def _enter(self, additions: Additions) -> dict[int, int]:
        """Initialises the slots that requests enter. Returns the column from which each continues."""
        entering = {}
        for slot, computed in _entries(additions.slot, additions.num_computed_tokens):
            if slot >= 0:
                entering[slot] = columns.column_of(computed, self.align.state_block_size)
                self._set(slot, computed, 1, entering[slot], computed)
        return entering

    def _set(self, slot: int, *counts: int) -> None:
        """Sets the counts of a slot, the last of which only policy "deferred" has."""
        for array, value in zip(self._slots.values(), counts, strict=False):
            array[slot] = value

    def _fold(self, slot: int) -> tuple[int, bool]:
        """Verifies the columns of a slot's deferred state, and of the fold and the window that a complete group writes.

        Returns the base after the fold, and whether the window of the last step has moved to row 0 of its column.
        """
        sizes = self.align.state_block_size, self.align.fold_length
        computed, accepted, old, base = (int(array[slot]) for array in self._slots.values())
        places, window = fold_places(base, computed, *sizes), boundary_window(old, accepted, base, computed, *sizes)
        if places.folds:
            if base:
                self._read(slot, places.recurrent_column)
            self._write(slot, places.fold_column, RecurrentState)
        if window.needed and self.align.passes_boundaries:
            self._read(slot, None, old)
            self._write(slot, places.fold_column, ConvState)
        return places.next_base, self.align.passes_boundaries and window.moves

    def _allocate(self, updates: TableUpdates, entering: dict[int, int]) -> None:
        for group, slot, column, block in _entries(updates.group, updates.slot, updates.column, updates.block):
            if slot < 0:
                continue
            if not 0 <= block < self._num_blocks[group]:
                wanted = f"must have a block in [0, {self._num_blocks[group]}), got {block}"
                raise ValueError(f"{self._name(group, slot, column)} {wanted}")
            # Other requests wrote the columns of a prefix hit, and an entry that is repeated is no allocation.
            is_prefix = column <= entering.get(slot, -1)
            is_same = slot not in entering and self._tables[group, slot, column] == block
            if not is_prefix and not is_same:
                for written in self._written[group].values():
                    written[block] = False
            self._tables[group, slot, column] = block

    def _rows(self, batch: StepBatch, num_sampled: Any) -> Iterator[_CheckedRow]:
        sampled = np.asarray(1 if num_sampled is None else num_sampled, np.int32)
        sampled = np.broadcast_to(sampled, batch.idx_mapping.shape)
        for slot, length, drafts, accepted in _entries(batch.idx_mapping, batch.num_tokens, batch.num_drafts, sampled):
            if slot < 0 or length == 0:
                continue
            max_sampled = 1 + max(drafts, 0)
            if not 0 <= accepted <= max_sampled:
                raise ValueError(f"slot {slot}: num_sampled must be in [0, {max_sampled}], got {accepted}")
            computed, before, old, *base = (int(array[slot]) for array in self._slots.values())
            current = columns.running_column(computed, length, self.align.state_block_size)
            places = POLICIES[self.align.policy](old, before, current) if old >= 0 else None
            if base and places is not None:
                column = columns.column_of(base[0], self.align.state_block_size)
                places = places._replace(recurrent_column=column if base[0] else None)
            position = base[0] if base else computed
            yield _CheckedRow(slot, length, drafts, computed, current, places, max(accepted, 1), position)

    def _finish(self, row: _CheckedRow, saves: bool) -> None:
        certain = columns.certain_tokens(row.computed, row.num_tokens, max(row.drafts, 0))
        computed, accepted = columns.tokens_after(certain, row.accepted), row.accepted
        if saves and self.align.passes_boundaries and not self.align.is_deferred:
            save = columns.boundary_save(certain, computed, self.align.state_block_size)
            if save.passed:
                self._copy(row.slot, row.current + save.offset, row.current, save.target)
            accepted = columns.accepted_after_save(accepted, save.passed, save.target, row.current)
        base = row.computed + row.num_tokens
        if row.drafts >= 0:
            end = columns.fold_end(row.base, self.align.fold_length)
            base = end if row.computed >= end else row.base
        self._set(row.slot, computed, accepted, row.current, base)

    def _name(self, group: int, slot: int, column: int) -> str:
        return f"slot {slot}: column {column} of group {self.align.groups[group].name!r}"

    def _blocks(self, slot: int, column: int, kind: type, verb: str) -> Iterator[tuple[str, np.ndarray, int]]:
        """Yields for each group with that kind of state: a text of what happens, the record, and the column's block."""
        for group, records in enumerate(self._written):
            if kind in records:
                what = f"{self._name(group, slot, column)} is {verb} a {_KINDS[kind]}"
                inside = 0 <= column < self._tables.shape[2]
                block = int(self._tables[group, slot, column]) if inside else NULL_BLOCK
                if block == NULL_BLOCK:
                    raise ValueError(f"{what}, but the column has no block")
                yield what, records[kind], block

    def _read(self, slot: int, recurrent_column: int | None, conv_column: int | None = None) -> None:
        """Verifies that states are read from written blocks. None for a state that is not read."""
        for kind, column in ((RecurrentState, recurrent_column), (ConvState, conv_column)):
            for what, written, block in () if column is None else self._blocks(slot, column, kind, "read for"):
                if not written[block]:
                    raise ValueError(f"{what}, but block {block} was not written since it was allocated")

    def _write(self, slot: int, column: int, *kinds: type) -> None:
        for kind in kinds:
            for _, written, block in self._blocks(slot, column, kind, "written with"):
                written[block] = True

    def _keep(self, row: _CheckedRow) -> None:
        """Records the boundaries inside a chunk. The record of NULL_BLOCK, which stands for no block, is never read."""
        for column in range(row.computed // self.align.state_block_size, row.current):
            for group, records in enumerate(self._written):
                for written in records.values():
                    written[self._tables[group, row.slot, column]] = True

    def _copy(self, slot: int, recurrent_source: int, conv_source: int, destination: int) -> None:
        self._read(slot, recurrent_source, conv_source)
        self._write(slot, destination, *_KINDS)

    def _compare(self, state: AlignState) -> None:
        for name, wanted in self._slots.items():
            found = jax.device_get(getattr(state, name))
            for slot in np.flatnonzero(found != wanted):
                raise ValueError(
                    f"slot {slot}: {name} is {found[slot]} on the device, {wanted[slot]} by the steps' inputs"
                )


def _entries(*arrays: Any) -> Iterator[tuple[int, ...]]:
    return zip(*(array.tolist() for array in jax.device_get(arrays)), strict=True)
