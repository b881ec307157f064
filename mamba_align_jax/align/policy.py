"""The policies "copy_free", "pre_copy" and "deferred": where a step reads the states that the last one left.

A policy is a function of three integers per row: `old`, the running column before the step, which is negative for a
fresh row; `accepted`, the tokens accepted in the last step; and `current`, the running column of this step. It returns
the columns that hold the row's states, and the copies that must be made first. Under "deferred" the column of the
recurrent state depends on other integers: see `fold_places`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mamba_align_jax.align.columns import choose, column_of, fold_end


class Migration(NamedTuple):
    """The copies to make before the step, per row.

    Attributes:
        recurrent_source: The column from which the recurrent state is copied.
        conv_source: The column from which the conv window is copied.
        window_row: The first row of the window to copy.
        destination: The column to which both are copied.
        needed: True for the rows that need the copy.
    """

    recurrent_source: Any
    conv_source: Any
    window_row: Any
    destination: Any
    needed: Any


class ReadPlaces(NamedTuple):
    """Where the model reads each row's states.

    Attributes:
        recurrent_column: The column of the recurrent state.
        conv_column: The column of the conv window.
        window_row: The first window row to read.
        migration: The copies to make first, or None if the policy has none.
    """

    recurrent_column: Any
    conv_column: Any
    window_row: Any
    migration: Migration | None


def copy_free(old: Any, accepted: Any, current: Any) -> ReadPlaces:
    """Kernels read where the last step wrote and write to the new running column. Nothing is copied (vLLM PR 42406)."""
    return ReadPlaces(old + accepted - 1, old, accepted - 1, None)


def pre_copy(old: Any, accepted: Any, current: Any) -> ReadPlaces:
    """States are copied to the running column when it changes, and read there as after one token (vLLM 0.33)."""
    crosses = (old >= 0) & (old != current)
    migration = Migration(old + accepted - 1, old, accepted - 1, current, crosses)
    accepted = choose(crosses, 1, accepted)
    return ReadPlaces(current + accepted - 1, current, accepted - 1, migration)


class FoldPlaces(NamedTuple):
    """Where the deferred state of each row is, and what a decode or verify row does with it.

    Attributes:
        recurrent_column: The column of the state at the row's base; -1 if the base is 0, where states are zero.
        folds: True if the row's fold group is complete and accepted, so that the row writes the state at its end.
        fold_column: The column that receives that state.
        next_base: The position of the state that the next step reads.
    """

    recurrent_column: Any
    folds: Any
    fold_column: Any
    next_base: Any


def fold_places(base: Any, computed: Any, block_size: int, fold_length: int) -> FoldPlaces:
    """Finds the places of deferred states.

    Args:
        base: The position of each row's state.
        computed: The position of each row's first token.
        block_size: Tokens per column.
        fold_length: Tokens per fold group.
    """
    end = fold_end(base, fold_length)
    folds = computed >= end
    return FoldPlaces(column_of(base, block_size), folds, column_of(end, block_size), choose(folds, end, base))


class BoundaryWindow(NamedTuple):
    """Where to find the convolution window of the boundary that a row has passed but not folded yet.

    Attributes:
        needed: True if the row must write the window to row 0 of the boundary's column, which is the fold's column.
        first_row: The first row of that window in the window of the last step.
        moves: True if the boundary's column is the one that the row reads. The row's own window, which ends on the
            boundary, is then at row 0 once the boundary's window is written.
    """

    needed: Any
    first_row: Any
    moves: Any


def boundary_window(
    old: Any, accepted: Any, base: Any, computed: Any, block_size: int, fold_length: int
) -> BoundaryWindow:
    """Finds the window of the boundary at the end of a row's fold group, if the group is complete and ends on one.

    The window of the last step has a row for each of its tokens, so the boundary's window begins as many rows before the
    row's own as there are tokens since the boundary.

    Args:
        old: The running column before the step.
        accepted: The tokens accepted in the last step.
        base: The position of each row's state.
        computed: The position of each row's first token.
        block_size: Tokens per column.
        fold_length: Tokens per fold group.
    """
    end = fold_end(base, fold_length)
    first_row, in_place = accepted - 1 + end - computed, column_of(end, block_size) == old
    needed = (computed >= end) & (end % block_size == 0) & ((first_row > 0) | (column_of(end, block_size) != old))
    return BoundaryWindow(needed, first_row, needed & in_place)


Policy = Callable[[Any, Any, Any], ReadPlaces]
# Under "deferred" the window is read as under "copy_free", and `fold_places` says where the recurrent state is.
POLICIES: Mapping[str, Policy] = MappingProxyType({"copy_free": copy_free, "pre_copy": pre_copy, "deferred": copy_free})
