"""The bookkeeping of one step: where each row reads and writes, what is copied, and the new counts of the slots."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from mamba_align_jax import _values as values
from mamba_align_jax.align import columns
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.config import AlignConfig, ConvState
from mamba_align_jax.align.deferred import Folds, plan_folds, settle
from mamba_align_jax.align.policy import POLICIES
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.slots import has_integers, set_slots
from mamba_align_jax.align.state import AlignState
from mamba_align_jax.align.tables import BlockTables
from pallas_kernels import NULL_BLOCK, Implementation, Run, state_copy


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CopyPlan:
    """Copies of states between blocks, one per group and row.

    Attributes:
        recurrent_source: The block from which the recurrent states are copied. int32 [groups, rows].
        conv_source: The block from which the conv windows are copied. int32 [groups, rows].
        window_row: The first row of the window to copy. int32 [rows].
        destination: The block to which both are copied, or NULL_BLOCK for no copy. int32 [groups, rows].
    """

    recurrent_source: jax.Array
    conv_source: jax.Array
    window_row: jax.Array
    destination: jax.Array

    def num_copies(self) -> tuple[jax.Array, jax.Array]:
        """Counts the recurrent states and the conv windows that are copied, int32 [groups] each.

        A copy of a block onto itself moves nothing and is not counted.
        """
        real = self.destination != NULL_BLOCK
        recurrent = real & (self.recurrent_source != self.destination)
        conv = real & ((self.conv_source != self.destination) | (self.window_row > 0)[None])
        return jnp.sum(recurrent, axis=1, dtype=jnp.int32), jnp.sum(conv, axis=1, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepIndices:
    """Where each row reads and writes, as `begin_step` found it. Idle and padding rows have NULL_BLOCK everywhere.

    Attributes:
        recurrent_read: The block with the recurrent state before the row's first token, or NULL_BLOCK for a fresh row.
            int32 [groups, rows].
        conv_read: The block with the conv window before the row's first token, or NULL_BLOCK for a fresh row.
            int32 [groups, rows].
        window_row: The first row to read in that window. int32 [rows].
        write: The blocks of the columns that the row writes. The recurrent state after token t of a verify row goes to
            `write[..., t]`. The recurrent state after the last token of any other row, and the conv window of every
            row, go to `write[..., 0]`. int32 [groups, rows, 1 + K].
        num_computed_tokens: The position of the row's first token. int32 [rows].
        has_initial_state: True if the row has a state to continue. bool [rows].
        running_column: The running column of the step. int32 [rows].
        migration: The copies that `migrate` makes before the model runs, or None if the policy has none.
        folds: The deferred states of the rows, or None unless the policy is "deferred". Then `write[..., 0]` alone has
            blocks, for the window, and for the state of a row that is no verify row.
    """

    recurrent_read: jax.Array
    conv_read: jax.Array
    window_row: jax.Array
    write: jax.Array
    num_computed_tokens: jax.Array
    has_initial_state: jax.Array
    running_column: jax.Array
    migration: CopyPlan | None
    folds: Folds | None = None

    def num_null_reads(self) -> jax.Array:
        """Counts the rows that have computed tokens but read NULL_BLOCK, so that their state is lost. int32 scalar."""
        missing = (self.recurrent_read == NULL_BLOCK) | (self.conv_read == NULL_BLOCK)
        if self.folds is not None:
            missing = self.folds.lost(self.recurrent_read) | (self.conv_read == NULL_BLOCK)
        if self.migration is not None:
            plan = self.migration
            no_source = (plan.recurrent_source == NULL_BLOCK) | (plan.conv_source == NULL_BLOCK)
            missing |= no_source & (plan.destination != NULL_BLOCK)
        return jnp.sum(jnp.any(missing, axis=0) & (self.num_computed_tokens > 0), dtype=jnp.int32)


def _live(batch: StepBatch) -> jax.Array:
    """Finds the rows that take part in the step: those that are not padding and have tokens. bool [rows]."""
    return (batch.idx_mapping >= 0) & (batch.num_tokens > 0)


def _set_live(array: jax.Array, batch: StepBatch, live: jax.Array, values: jax.Array) -> jax.Array:
    """Sets the slots of the rows that take part."""
    return set_slots(array, jnp.where(live, batch.idx_mapping, -1), values)


def begin_step(
    align: AlignConfig, state: AlignState, batch: StepBatch, tables: BlockTables
) -> tuple[AlignState, StepIndices]:
    """Finds where each row reads and writes, and advances the running columns.

    It computes only on int32 vectors, in a few launches, whatever the number of layers.

    Args:
        align: The configuration. Static.
        state: The counts of the slots. A jitted caller may donate it.
        batch: The rows.
        tables: Must have a block in each column that the step may read or write.

    Returns:
        The state with the new running columns, and where each row reads and writes.

    Raises:
        ValueError: An argument is something else, the tables do not have the groups and slots of `align`, or have too few
            columns, or `state` was made for another policy or number of slots.
    """
    values.instances("begin_step", state=(state, AlignState), batch=(batch, StepBatch), tables=(tables, BlockTables))
    tables.check(align)
    state.check(align)
    size = align.state_block_size
    live, slot = _live(batch), jnp.maximum(batch.idx_mapping, 0)
    computed = jnp.where(live, state.num_computed_tokens[slot], 0)
    accepted = state.num_accepted_tokens[slot]
    old = jnp.where(live, state.running_column[slot], -1)
    current = columns.running_column(computed, batch.num_tokens, size)

    places = POLICIES[align.policy](old, accepted, current)
    started = live & (old >= 0)
    lookup = lambda column, where: jnp.where(where, tables.lookup(slot, column), NULL_BLOCK)
    window = current[:, None] + jnp.arange(align.window, dtype=jnp.int32)[None]
    migration = None
    if places.migration is not None:
        moves = places.migration
        needed = started & moves.needed
        migration = CopyPlan(
            recurrent_source=lookup(moves.recurrent_source, needed),
            conv_source=lookup(moves.conv_source, needed),
            window_row=jnp.where(needed, moves.window_row, 0),
            destination=lookup(moves.destination, needed),
        )
    indices = StepIndices(
        recurrent_read=lookup(places.recurrent_column, started),
        conv_read=lookup(places.conv_column, started),
        window_row=jnp.where(started, places.window_row, 0),
        write=jnp.where(live[:, None], tables.lookup(slot[:, None], window), NULL_BLOCK),
        num_computed_tokens=computed,
        has_initial_state=started,
        running_column=current,
        migration=migration,
    )
    if align.is_deferred:
        return _begin_deferred(align, state, batch, tables, indices)
    # The barrier lets the state be overwritten only after everything was read from it. Otherwise XLA may copy it first.
    read = computed, current, indices.recurrent_read, indices.conv_read, indices.window_row
    state, _ = jax.lax.optimization_barrier((state, read))
    return replace(state, running_column=_set_live(state.running_column, batch, live, current)), indices


def _begin_deferred(
    align: AlignConfig, state: AlignState, batch: StepBatch, tables: BlockTables, indices: StepIndices
) -> tuple[AlignState, StepIndices]:
    """Completes `begin_step` for policy "deferred". `indices` already says where the convolution windows are."""
    live, current, write, window_row = _live(batch), indices.running_column, indices.write, indices.window_row
    computed, conv_read = indices.num_computed_tokens, indices.conv_read
    read, folds, base = plan_folds(align, state, batch, tables, live, computed, current, conv_read)
    write = jnp.where(jnp.arange(write.shape[-1], dtype=jnp.int32) == 0, write, NULL_BLOCK)
    if folds.windows is not None:
        # `migrate` writes the boundaries before chunks, which find their own window where it is then.
        window_row = jnp.where(folds.windows.moves & folds.unsettled, 0, window_row)
    indices = replace(indices, recurrent_read=read, write=write, window_row=window_row, folds=folds)
    state, _ = jax.lax.optimization_barrier((state, (indices, base)))
    put = lambda array, values: _set_live(array, batch, live, values)
    return replace(
        state, running_column=put(state.running_column, current), state_pos=put(state.state_pos, base)
    ), indices


def copy_states(
    align: AlignConfig, pool: StatePool, plan: CopyPlan | None, *, implementation: Implementation | None = None
) -> StatePool:
    """Makes the copies of `plan`, if there are any, in every array of the pool. A jitted caller may donate `pool`."""
    if plan is None:
        return pool
    run = Run(implementation=implementation)
    for g, group in enumerate(align.groups):
        arrays = [
            state_copy(*(array, plan.conv_source[g], plan.destination[g], plan.window_row), layout=kind.layout, run=run)
            if isinstance(kind, ConvState)
            else state_copy(array, plan.recurrent_source[g], plan.destination[g], run=run)
            for kind, array in zip(group.states, pool.states[g], strict=True)
        ]
        pool = pool.with_group(g, arrays)
    return pool


def migrate(
    align: AlignConfig, pool: StatePool, indices: StepIndices, *, implementation: Implementation | None = None
) -> StatePool:
    """Copies states to the new running column before any layer reads. Does nothing under policy "copy_free".

    Under policy "deferred" it writes the states from which chunks after verify rows continue. A caller whose chunks
    never follow verify rows may leave it out.

    Raises:
        ValueError: An argument is something else, or `pool` was made for another AlignConfig.
    """
    values.instances("migrate", pool=(pool, StatePool), indices=(indices, StepIndices))
    pool.check(align)
    if indices.folds is not None:
        return settle(align, pool, indices.folds, implementation=implementation)
    return copy_states(align, pool, indices.migration, implementation=implementation)


def plan_saves(
    align: AlignConfig,
    tables: BlockTables,
    slot: jax.Array,
    live: jax.Array,
    column: jax.Array,
    certain: jax.Array,
    accepted: jax.Array,
) -> tuple[CopyPlan, jax.Array]:
    """Plans the copies that save the boundaries which rows passed.

    Rows take part where `live`, bool [rows], is true. Their running columns, their `certain` tokens, which stay
    computed if all drafts are rejected, and the numbers of tokens that they accepted, at least 1, are int32 [rows].

    Returns:
        The copies, and the accepted counts after them, int32 [rows].
    """
    save = columns.boundary_save(certain, columns.tokens_after(certain, accepted), align.state_block_size)
    passed = live & save.passed
    lookup = lambda column: jnp.where(passed, tables.lookup(slot, column), NULL_BLOCK)
    plan = CopyPlan(
        recurrent_source=lookup(column + save.offset),
        conv_source=lookup(column),
        window_row=jnp.where(passed, save.offset, 0),
        destination=lookup(save.target),
    )
    return plan, columns.accepted_after_save(accepted, passed, save.target, column)


def _of_rows(num_sampled: jax.Array | int | None, shape: tuple[int, ...]) -> jax.Array:
    """Returns `num_sampled` as int32 [rows]; None counts as 1."""
    dtype, own = getattr(num_sampled, "dtype", None), getattr(num_sampled, "shape", ())
    is_array = has_integers(num_sampled) and own in ((), shape)
    known = num_sampled is None or values.is_integer(num_sampled) or is_array
    if not known:
        wanted, got = f"None, a whole number, or int32 {list(shape)}", f"{dtype} {list(own)}" if dtype else num_sampled
        raise ValueError(f"finish_step: num_sampled must be {wanted}, got {got}")
    return jnp.broadcast_to(jnp.int32(1 if num_sampled is None else num_sampled), shape)


def plan_finish(
    align: AlignConfig,
    state: AlignState,
    batch: StepBatch,
    indices: StepIndices,
    num_sampled: jax.Array | int | None,
    tables: BlockTables,
) -> tuple[AlignState, CopyPlan | None]:
    """Does what `finish_step` does, but returns the copies instead of making them, or None if there can be none."""
    live, slot = _live(batch), jnp.maximum(batch.idx_mapping, 0)
    drafts = jnp.maximum(batch.num_drafts, 0)
    # A chunk inside a prompt samples nothing, but still leaves one state to continue from.
    accepted = jnp.maximum(_of_rows(num_sampled, slot.shape), 1)
    certain = columns.certain_tokens(indices.num_computed_tokens, batch.num_tokens, drafts)
    plan, computed = None, columns.tokens_after(certain, accepted)
    # Under policy "deferred" the step after the boundary keeps it.
    if align.passes_boundaries and not align.is_deferred and num_sampled is not None:
        plan, accepted = plan_saves(align, tables, slot, live, indices.running_column, certain, accepted)
    return replace(
        state,
        num_computed_tokens=_set_live(state.num_computed_tokens, batch, live, computed),
        num_accepted_tokens=_set_live(state.num_accepted_tokens, batch, live, accepted),
    ), plan


def finish_step(
    align: AlignConfig,
    state: AlignState,
    pool: StatePool,
    batch: StepBatch,
    indices: StepIndices,
    num_sampled: jax.Array | int | None,
    tables: BlockTables,
    *,
    implementation: Implementation | None = None,
) -> tuple[AlignState, StatePool]:
    """Records what each row accepted, and saves the state of the block boundary that it passed.

    Under policy "deferred" it saves nothing: the next step of the row folds the boundary and writes its window.

    Args:
        align: The configuration. Static.
        state: What `begin_step` returned. A jitted caller may donate it.
        pool: What the model returned. A jitted caller may donate it.
        batch: The step's rows.
        indices: What `begin_step` returned.
        num_sampled: How many tokens each row sampled: its accepted drafts and the bonus token, or 0 for a chunk inside
            a prompt. int32 [rows]. An int stands for that number in every row, so boundaries are saved as with an
            array. None is for a pipeline stage that samples nothing: every row counts as having sampled one token, and
            no boundary is saved.
        tables: The step's tables.
        implementation: The implementation of `state_copy`.

    Returns:
        The state and the pool for the next step. Padding rows and rows without tokens change nothing.

    Raises:
        ValueError: An argument is something else, `pool` was made for another AlignConfig, or its arrays changed places.
    """
    given = dict(state=(state, AlignState), pool=(pool, StatePool), batch=(batch, StepBatch))
    values.instances("finish_step", **given, indices=(indices, StepIndices), tables=(tables, BlockTables))
    pool.check(align)
    state, plan = plan_finish(align, state, batch, indices, num_sampled, tables)
    return state, copy_states(align, pool, plan, implementation=implementation)
