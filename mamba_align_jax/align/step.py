"""One step's bookkeeping: where every row reads and writes, what is copied, and what the slots become."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mamba_align_jax._deprecated import renamed_fields
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.columns import (
    accepted_after_save,
    boundary_save,
    certain_tokens,
    running_column,
    tokens_after,
)
from mamba_align_jax.align.config import AlignConfig, ConvState
from mamba_align_jax.align.policy import POLICIES
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.state import AlignState
from mamba_align_jax.align.tables import BlockTables
from pallas_kernels import NULL_BLOCK, Implementation, state_copy


@renamed_fields(conv_row="window_row")
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CopyPlan:
    """Copies between blocks: int32 [groups, rows], but `window_row` [rows]. Destination NULL_BLOCK: no copy."""

    recurrent_source: jax.Array
    conv_source: jax.Array
    window_row: jax.Array
    destination: jax.Array

    def num_copies(self) -> tuple[jax.Array, jax.Array]:
        """Blocks that move, int32 [groups] each: recurrent states, conv windows. A copy onto itself moves nothing."""
        real = self.destination != NULL_BLOCK
        recurrent = real & (self.recurrent_source != self.destination)
        conv = real & ((self.conv_source != self.destination) | (self.window_row > 0))
        return jnp.sum(recurrent, axis=1, dtype=jnp.int32), jnp.sum(conv, axis=1, dtype=jnp.int32)


@renamed_fields(conv_row="window_row", column="running_column")
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepIndices:
    """What `begin_step` found. Rows of padding, or without tokens, have NULL_BLOCK everywhere.

    Attributes:
        recurrent_read: Block of the state before the row's first token; NULL_BLOCK if fresh. int32 [groups, rows].
        conv_read: Block of the conv window before it, likewise.
        window_row: First window row to read. int32 [rows].
        write: Block of the window's columns: after token t of a verify row the state goes to `write[..., t]`, after the
            last token of any other row to `write[..., 0]`; the conv window to `write[..., 0]`. int32 [groups, rows, 1+K].
        num_computed_tokens: Position of the row's first token. int32 [rows].
        has_initial_state: Whether the row has any. bool [rows].
        running_column: Running column of the step. int32 [rows].
        migration: Copies that `migrate` makes before the model runs; None where the policy has none.
    """

    recurrent_read: jax.Array
    conv_read: jax.Array
    window_row: jax.Array
    write: jax.Array
    num_computed_tokens: jax.Array
    has_initial_state: jax.Array
    running_column: jax.Array
    migration: CopyPlan | None

    def num_null_reads(self) -> jax.Array:
        """Rows that have computed tokens and yet read NULL_BLOCK, that is zeros: their state was lost. int32 scalar."""
        missing = (self.recurrent_read == NULL_BLOCK) | (self.conv_read == NULL_BLOCK)
        if self.migration is not None:
            plan = self.migration
            no_source = (plan.recurrent_source == NULL_BLOCK) | (plan.conv_source == NULL_BLOCK)
            missing |= no_source & (plan.destination != NULL_BLOCK)
        return jnp.sum(jnp.any(missing, axis=0) & (self.num_computed_tokens > 0), dtype=jnp.int32)


def _live(batch: StepBatch) -> jax.Array:
    """Rows that take part: neither padding nor without tokens."""
    return (batch.idx_mapping >= 0) & (batch.num_tokens > 0)


def _scatter(array: jax.Array, batch: StepBatch, live: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[jnp.where(live, batch.idx_mapping, array.shape[0])].set(values, mode="drop")


def begin_step(
    spec: AlignConfig, state: AlignState, batch: StepBatch, tables: BlockTables
) -> tuple[AlignState, StepIndices]:
    """Finds where each row reads and writes, and advances the running columns. int32 vectors only.

    Args:
        spec: Static.
        state: Donate it.
        batch: The rows.
        tables: Must hold a block in every column that the step may read or write.

    Returns:
        The state with `running_column` advanced, and the indices, which carry what the step read.

    Raises:
        ValueError: the tables are not those of `spec`, or too narrow for its windows.
    """
    tables.check(spec)
    size = spec.state_block_size
    live, slot = _live(batch), jnp.maximum(batch.idx_mapping, 0)
    computed = jnp.where(live, state.num_computed_tokens[slot], 0)
    accepted = state.num_accepted_tokens[slot]
    old = jnp.where(live, state.running_column[slot], -1)
    current = running_column(computed, batch.num_tokens, size)

    places = POLICIES[spec.policy](old, accepted, current)
    started = live & (old >= 0)
    lookup = lambda column, where: jnp.where(where, tables.lookup(slot, column), NULL_BLOCK)
    window = current[:, None] + jnp.arange(spec.window, dtype=jnp.int32)
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
    # What overwrites the state, here or in `finish_step`, waits for all that is read of it: else XLA may copy it first.
    read = computed, current, indices.recurrent_read, indices.conv_read, indices.window_row
    state, _ = jax.lax.optimization_barrier((state, read))
    return AlignState(
        num_computed_tokens=state.num_computed_tokens,
        num_accepted_tokens=state.num_accepted_tokens,
        running_column=_scatter(state.running_column, batch, live, current),
    ), indices


def copy_states(
    spec: AlignConfig, pool: StatePool, plan: CopyPlan | None, *, implementation: Implementation | None = None
) -> StatePool:
    """Runs a plan over every array of the pool. Donate `pool`."""
    if plan is None:
        return pool
    for g, group in enumerate(spec.groups):
        arrays = [
            state_copy(
                *(array, plan.conv_source[g], plan.destination[g], plan.window_row),
                layout=kind.layout,
                implementation=implementation,
            )
            if isinstance(kind, ConvState)
            else state_copy(array, plan.recurrent_source[g], plan.destination[g], implementation=implementation)
            for kind, array in zip(group.states, pool.states[g], strict=True)
        ]
        pool = pool.with_group(g, arrays)
    return pool


def migrate(
    spec: AlignConfig, pool: StatePool, indices: StepIndices, *, implementation: Implementation | None = None
) -> StatePool:
    """Copies states to the new running column, before any layer reads. Nothing at all under "copy_free"."""
    return copy_states(spec, pool, indices.migration, implementation=implementation)


def plan_saves(
    spec: AlignConfig,
    tables: BlockTables,
    slot: jax.Array,
    live: jax.Array,
    column: jax.Array,
    certain: jax.Array,
    accepted: jax.Array,
) -> tuple[CopyPlan, jax.Array]:
    """Copies of the boundaries that live rows passed, and what counts as accepted after them. int32 [rows] throughout."""
    save = boundary_save(certain, tokens_after(certain, accepted), spec.state_block_size)
    passed = live & save.passed
    lookup = lambda column: jnp.where(passed, tables.lookup(slot, column), NULL_BLOCK)
    plan = CopyPlan(
        recurrent_source=lookup(column + save.offset),
        conv_source=lookup(column),
        window_row=jnp.where(passed, save.offset, 0),
        destination=lookup(save.target),
    )
    return plan, accepted_after_save(accepted, passed, save.target, column)


def plan_finish(
    spec: AlignConfig,
    state: AlignState,
    batch: StepBatch,
    indices: StepIndices,
    num_sampled: jax.Array | int | None,
    tables: BlockTables,
) -> tuple[AlignState, CopyPlan | None]:
    """`finish_step` without running the copies of its boundary saves: None if there can be none."""
    live, slot = _live(batch), jnp.maximum(batch.idx_mapping, 0)
    drafts = jnp.maximum(batch.num_drafts, 0)
    # A chunk that samples nothing still has one state to go on from.
    accepted = jnp.maximum(jnp.broadcast_to(jnp.int32(1 if num_sampled is None else num_sampled), slot.shape), 1)
    certain = certain_tokens(indices.num_computed_tokens, batch.num_tokens, drafts)
    plan, computed = None, tokens_after(certain, accepted)
    # Without drafts every step ends in its running column: a boundary is where it belongs already.
    if spec.mode != "none" and spec.num_speculative_tokens > 0 and num_sampled is not None:
        plan, accepted = plan_saves(spec, tables, slot, live, indices.running_column, certain, accepted)
    return AlignState(
        num_computed_tokens=_scatter(state.num_computed_tokens, batch, live, computed),
        num_accepted_tokens=_scatter(state.num_accepted_tokens, batch, live, accepted),
        running_column=state.running_column,
    ), plan


def finish_step(
    spec: AlignConfig,
    state: AlignState,
    pool: StatePool,
    batch: StepBatch,
    indices: StepIndices,
    num_sampled: jax.Array | int | None,
    tables: BlockTables,
    *,
    implementation: Implementation | None = None,
) -> tuple[AlignState, StatePool]:
    """Takes in what was accepted, and keeps the state of a block boundary that acceptance passed.

    Args:
        spec: Static.
        state: What `begin_step` returned. Donate it.
        pool: What the model returned. Donate it.
        batch: The step's rows.
        indices: The step's indices.
        num_sampled: Tokens each row sampled, accepted drafts and the bonus token; 0 for a chunk inside a prompt.
            int32 [rows] or one number for all. None for a pipeline stage that samples nothing: no save.
        tables: The step's tables.
        implementation: Of the copies.

    Returns:
        The state and the pool for the next step. Rows without tokens and padding rows change nothing.
    """
    state, plan = plan_finish(spec, state, batch, indices, num_sampled, tables)
    return state, copy_states(spec, pool, plan, implementation=implementation)
