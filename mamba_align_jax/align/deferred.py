"""Deferred states on the device: what a step does with them, and the two ways to write one without a token.

Under policy "deferred" a slot's state is the state at its base, plus the entries of its ring since. Decode and verify rows
fold in the kernel that runs their tokens. A chunk after a verify row, and a request that ends on a boundary, need the state
itself: `settle` and `fold_slots` write it. Whatever folds a group that ends on a boundary also writes the boundary's window.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from mamba_align_jax import _values as values
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.columns import fold_end
from mamba_align_jax.align.config import AlignConfig, ConvState
from mamba_align_jax.align.policy import FoldPlaces, boundary_window, fold_places
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.ring_folds import fold
from mamba_align_jax.align.slots import has_integers, set_slots
from mamba_align_jax.align.state import AlignState
from mamba_align_jax.align.tables import BlockTables
from pallas_kernels import NULL_BLOCK, BoundaryWindow, Implementation, Rows, Run, causal_conv1d_update


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BoundaryWindows:
    """The convolution windows of the boundaries that rows fold.

    Attributes:
        read: The block with the window of each row's last step. int32 [groups, rows].
        first_row: The first row of the boundary's window there. int32 [rows].
        block: The boundary's block, which receives the window from row 0 on. NULL_BLOCK for a row that passes no boundary,
            and for one whose boundary's window is in place. int32 [groups, rows].
        moves: True if `block` is `read`, so that the row's own window moves to row 0 of it. bool [rows].
    """

    read: jax.Array
    first_row: jax.Array
    block: jax.Array
    moves: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Folds:
    """The deferred states of a step's rows. Idle and padding rows have NULL_BLOCK everywhere.

    Attributes:
        slot: The slot whose ring each row uses, 0 for padding rows. int32 [rows].
        base: The position of the row's state. int32 [rows].
        position: The position of the row's first token. int32 [rows].
        read: The block with the state at `base`; NULL_BLOCK if that is 0. int32 [groups, rows].
        block: The block that receives the state at the end of base's fold group, NULL_BLOCK for a row that does not
            fold. int32 [groups, rows].
        rest: The block that receives the state at `position`, for a chunk after a verify row; NULL_BLOCK for other rows.
            int32 [groups, rows].
        unsettled: True for the chunks whose state is not written before `migrate`. bool [rows].
        windows: The windows of the boundaries that are folded; None if they are in place without drafts.
    """

    slot: jax.Array
    base: jax.Array
    position: jax.Array
    read: jax.Array
    block: jax.Array
    rest: jax.Array
    unsettled: jax.Array
    windows: BoundaryWindows | None = None

    def num_unsettled(self) -> jax.Array:
        """Counts the rows whose states only `migrate` writes. int32 scalar."""
        return jnp.sum(self.unsettled, dtype=jnp.int32)

    def lost(self, recurrent_read: jax.Array) -> jax.Array:
        """Finds the rows that have a state but read NULL_BLOCK for it. bool [groups, rows]."""
        empty = (recurrent_read == NULL_BLOCK) & ((self.base > 0) | self.unsettled)[None]
        return empty | ((self.unsettled & (self.base > 0))[None] & (self.read == NULL_BLOCK))


def plan_folds(
    align: AlignConfig,
    state: AlignState,
    batch: StepBatch,
    tables: BlockTables,
    live: jax.Array,
    computed: jax.Array,
    current: jax.Array,
    conv_read: jax.Array,
) -> tuple[jax.Array, Folds, jax.Array]:
    """Finds where the rows of a step read and write their deferred states.

    Rows take part where `live`, bool [rows], is true. A row's first token is at position `computed`, and its running
    column is `current`, int32 [rows]. `conv_read` is the block with the window of its last step, int32 [groups, rows].

    Returns:
        The block in which each row finds its state, int32 [groups, rows]; the folds; and the base of each row after the
        step, int32 [rows].
    """
    assert state.state_pos is not None
    slot, is_chunk = jnp.maximum(batch.idx_mapping, 0), batch.num_drafts < 0
    # Idle rows are at position 0, so that they never fold.
    base = jnp.where(live, state.state_pos[slot], 0)
    unsettled = live & is_chunk & (base < computed)
    folds, places = _make_folds(align, state, tables, slot, live, base, computed, current, conv_read, unsettled)
    # A chunk writes its last state, which is then the base.
    next_base = jnp.where(is_chunk, computed + batch.num_tokens, places.next_base)
    return jnp.where(unsettled, folds.rest, folds.read), folds, next_base


def _make_folds(
    align: AlignConfig,
    state: AlignState,
    tables: BlockTables,
    slot: jax.Array,
    live: jax.Array,
    base: jax.Array,
    position: jax.Array,
    column: jax.Array,
    conv_read: jax.Array,
    unsettled: jax.Array,
) -> tuple[Folds, FoldPlaces]:
    """Finds the deferred states of the rows that are `live`. Those that are `unsettled` continue in `column`."""
    sizes = align.state_block_size, align.fold_length
    places = fold_places(base, position, *sizes)
    lookup = lambda column, where: jnp.where(where, tables.lookup(slot, column), NULL_BLOCK)
    block, windows = lookup(places.fold_column, live & places.folds), None
    if align.passes_boundaries:  # Otherwise the windows are always in place.
        old, accepted = state.running_column[slot], state.num_accepted_tokens[slot]
        window = boundary_window(old, accepted, base, position, *sizes)
        windows = BoundaryWindows(
            read=conv_read,
            first_row=jnp.where(window.needed, window.first_row, 0),
            # A row that does not fold has no block, and keeps no boundary.
            block=jnp.where(window.needed, block, NULL_BLOCK),
            moves=window.moves,
        )
    folds = Folds(
        slot=slot,
        base=base,
        position=position,
        read=lookup(places.recurrent_column, live),
        block=block,
        rest=lookup(column, unsettled),
        unsettled=unsettled,
        windows=windows,
    )
    return folds, places


def settle(
    align: AlignConfig, pool: StatePool, folds: Folds, *, implementation: Implementation | None = None
) -> StatePool:
    """Writes the states of the rows that are `unsettled`: at the end of a complete fold group, then at their position.

    If the group ends on a boundary, it writes the boundary's window, too. A jitted caller may donate `pool`.
    """
    pool = _keep_windows(align, pool, folds.windows, folds.unsettled, implementation)
    block = jnp.where(folds.unsettled, folds.block, NULL_BLOCK)
    pool = fold(align, pool, folds.slot, folds.base, folds.position, folds.read, block, implementation)
    # Of the group that the position is in, only the entries before it count. The others are cleared.
    places = fold_places(folds.base, folds.position, align.state_block_size, align.fold_length)
    read = jnp.where(places.folds, folds.block, folds.read)
    end = fold_end(places.next_base, align.fold_length)
    pool = _clear(align, pool, jnp.where(folds.unsettled, folds.slot, align.max_num_seqs), folds.position, end)
    return fold(align, pool, folds.slot, places.next_base, end, read, folds.rest, implementation)


def fold_slots(
    align: AlignConfig,
    state: AlignState,
    pool: StatePool,
    tables: BlockTables,
    slots: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> tuple[AlignState, StatePool]:
    """Folds the complete fold group of slots without running a token, so that the boundary at its end can be published.

    If the group ends on a boundary, its window is written, too.
    Call it between steps, while the slots hold their blocks. Slots whose group is not complete do not change.

    Args:
        align: The configuration, with policy "deferred". Static.
        state: The counts of the slots. A jitted caller may donate it.
        pool: The pool. A jitted caller may donate it.
        tables: The block tables.
        slots: The slots, all distinct, or -1 for padding. int32 [n].
        implementation: The implementation of the ops.

    Returns:
        The state with the new bases, and with the accepted count 1 where a window has moved to row 0 of its block; and the
        pool.

    Raises:
        ValueError: An argument is something else, the policy is not "deferred", or `state`, `pool` or `tables` were made for
            another configuration.
    """
    values.instances("fold_slots", state=(state, AlignState), pool=(pool, StatePool), tables=(tables, BlockTables))
    values.require(has_integers(slots) and slots.ndim == 1, "fold_slots: slots", "int32 [n]", slots)
    pool.check(align)
    state, folds = plan_slots(align, state, tables, slots)
    pool = _keep_windows(align, pool, folds.windows, slots >= 0, implementation)
    where = folds.slot, folds.base, folds.position, folds.read, folds.block
    return state, fold(align, pool, *where, implementation)


def plan_slots(
    align: AlignConfig, state: AlignState, tables: BlockTables, slots: jax.Array
) -> tuple[AlignState, Folds]:
    """Does what `fold_slots` does, but returns the folds instead of making them."""
    if not align.is_deferred:
        raise ValueError(f"fold_slots: policy must be 'deferred', got {align.policy!r}")
    state.check(align)
    tables.check(align)
    assert state.state_pos is not None
    slot, live = jnp.maximum(slots, 0), slots >= 0
    base, computed, column = state.state_pos[slot], state.num_computed_tokens[slot], state.running_column[slot]
    conv_read = jnp.where(live, tables.lookup(slot, column), NULL_BLOCK)
    settled = jnp.zeros(slots.shape, jnp.bool_)
    folds, places = _make_folds(align, state, tables, slot, live, base, computed, column, conv_read, settled)
    accepted = state.num_accepted_tokens[slot]
    state, _ = jax.lax.optimization_barrier((state, (folds, accepted, places.next_base)))
    assert state.state_pos is not None
    state = replace(state, state_pos=set_slots(state.state_pos, slots, places.next_base))
    if folds.windows is not None:
        # A window that has moved to row 0 is as after a step that accepted one token.
        accepted = jnp.where(folds.windows.moves, 1, accepted)
        state = replace(state, num_accepted_tokens=set_slots(state.num_accepted_tokens, slots, accepted))
    return state, folds


def _clear(align: AlignConfig, pool: StatePool, slot: jax.Array, first: jax.Array, end: jax.Array) -> StatePool:
    """Clears entries, so that they add nothing: those of the positions `first` to `end` - 1. It skips slots out of range."""
    places = 2 * align.fold_length
    position = first[:, None] + jnp.arange(align.fold_length, dtype=jnp.int32)[None]
    place = jnp.where(position < end[:, None], position % places, places)
    # The indexed axes come first in what is set: [rows, entries, layers, heads, ...].
    where = slice(None), slot[:, None], slice(None), place
    rings = tuple(tuple(entries.at[where].set(0.0, mode="drop") for entries in ring) for ring in pool.rings or ())
    return replace(pool, rings=rings)


def _keep_windows(
    align: AlignConfig,
    pool: StatePool,
    windows: BoundaryWindows | None,
    live: jax.Array,
    implementation: Implementation | None,
) -> StatePool:
    """Writes the windows of the boundaries of the rows that are `live`, in every layer."""
    if windows is None:
        return pool
    for number, group in enumerate(align.groups):
        where = windows.read[number], windows.first_row, jnp.where(live, windows.block[number], NULL_BLOCK)
        arrays = list(pool.states[number])
        for index, kind in enumerate(group.states):
            if isinstance(kind, ConvState):
                one = functools.partial(_keep_layer, kind, where, implementation)
                arrays[index] = jax.lax.fori_loop(0, group.num_layers, one, arrays[index])
        pool = pool.with_group(number, arrays)
    return pool


def _keep_layer(
    kind: ConvState,
    where: tuple[jax.Array, jax.Array, jax.Array],
    implementation: Implementation | None,
    layer: jax.Array,
    pool: jax.Array,
) -> jax.Array:
    """Runs the op of the convolution without tokens in one layer: the rows that have a block write a window."""
    read, first_row, block = where
    # A device of several has a part of the channels.
    channels = pool.shape[3 if kind.layout == "SD" else 2]
    no_tokens, nothing = jnp.zeros((0, channels), pool.dtype), jnp.zeros_like(read)
    rows = Rows(
        query_start_loc=jnp.zeros(read.shape[0] + 1, jnp.int32),
        layer=jnp.int32(layer),
        window_read=read,
        window_row=nothing,
        write=nothing[:, None],
        boundary=BoundaryWindow(row=first_row, block=block),
    )
    taps, run = jnp.zeros((kind.width, channels), pool.dtype), Run(implementation=implementation)
    _, pool = causal_conv1d_update(no_tokens, pool, taps, None, rows, layout=kind.layout, run=run)
    return pool
