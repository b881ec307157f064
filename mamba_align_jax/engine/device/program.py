"""The jitted step: one program over donated state, from the host's inputs to the sampled tokens and the next drafts."""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.columns import certain_tokens
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.deferred import fold_slots
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.state import Additions, AlignState, add_requests
from mamba_align_jax.align.step import CopyPlan, StepIndices, begin_step, copy_states, migrate, plan_finish
from mamba_align_jax.align.tables import BlockTables, TableUpdates, update_block_tables
from mamba_align_jax.engine.device.packed import Packed, pack
from mamba_align_jax.engine.device.page_tables import PageUpdates, set_pages
from mamba_align_jax.engine.device.pending import (
    Pending,
    decode_places,
    propose,
    record_prompts,
    record_sampled,
    resolve,
)
from mamba_align_jax.engine.drafting.protocols import DeviceDrafter, Sampled, SampledStep
from mamba_align_jax.engine.sampling.adjust import SamplerState
from mamba_align_jax.engine.sampling.choice import SamplingInputs, choose_tokens
from mamba_align_jax.engine.sampling.draw import count_sampled
from mamba_align_jax.engine.sampling.logprobs import Scores, score_prompt
from mamba_align_jax.kv import KVPages, KVSpec
from mamba_align_jax.layers.exchange import Exchange
from mamba_align_jax.metadata.interior import interior_boundaries
from mamba_align_jax.metadata.step_inputs import step_inputs
from mamba_align_jax.models.tensor_parallel import exchange_by
from mamba_align_jax.sharding import Layout, ring_partition
from pallas_kernels import Mailboxes
from pallas_kernels.rows import token_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the host sends for a step. The decode rows come first, then the prefill rows; both are padded.

    Attributes:
        tokens: Packed tokens, `UNKNOWN` where only the device knows them. int32 [tokens].
        following: The token after each prefill row, for drafters on the device: see `record_prompts`; of length 0 if
            there are none. int32 [prefill rows].
        batch: The rows.
        updates: New entries of the block tables.
        additions: The slots of the requests that enter.
        pages: Changes of the page tables.
        samples: True for rows that sample. bool [rows].
        sampling: How tokens are chosen.
    """

    tokens: jax.Array
    following: jax.Array
    batch: StepBatch
    updates: TableUpdates
    additions: Additions
    pages: PageUpdates
    samples: jax.Array
    sampling: SamplingInputs


class StepResult(NamedTuple):
    """What the host reads of a step. All arrays are int32, but for the log-probabilities.

    Attributes:
        tokens: Row r sampled `tokens[r, :counts[r]]`. [rows, 1 + K]
        counts: [rows]
        drafts: Number of drafts that each row verified. [rows]
        copies: Number of blocks that were copied: of recurrent states in row 0, of convolution windows in row 1. [2,
            groups]
        null_reads: Number of rows whose state was lost. []
        scores: How likely the tokens are; None in a program that doesn't say. [rows, 1 + K]
        prompt: How likely the token after each packed token is; None in a program that scores no prompt. [tokens]
    """

    tokens: jax.Array
    counts: jax.Array
    drafts: jax.Array
    copies: jax.Array
    null_reads: jax.Array
    scores: Scores | None = None
    prompt: Scores | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """What one step hands to the next: pools, slots, tables and pending tokens. Every step donates it.

    Attributes:
        pool: The recurrent states and windows.
        kv: The keys and values.
        state: Counts and running columns of the slots.
        tables: State blocks of each slot.
        page_tables: KV pages of each slot, in the order of their positions. int32 [slots, pages].
        pending: Tokens that the device knows before the host does.
        epoch: The next epoch of an exchange between the devices: see `pallas_kernels.all_reduce`. int32 []
    """

    pool: StatePool
    kv: KVPages
    state: AlignState
    tables: BlockTables
    page_tables: jax.Array
    pending: Pending
    epoch: jax.Array

    @classmethod
    def create(
        cls,
        align: AlignConfig,
        kv_spec: KVSpec,
        *,
        state_blocks: int,
        kv_pages: int,
        page_size: int,
        history: int,
        layout: Layout | None = None,
    ) -> "DeviceState":
        """Makes fresh pools, slots and tables.

        Args:
            align: How states are kept.
            kv_spec: What a KV page holds for each token.
            state_blocks: Number of state blocks, NULL_BLOCK included.
            kv_pages: Number of KV pages, the NULL page included.
            page_size: Number of tokens of a KV page.
            history: Number of tokens that are kept per slot for a drafter on the device; 0 without one.
            layout: How the arrays lie on several devices; `align` and the sizes are then those of one device.
        """

        def create() -> "DeviceState":
            return cls(
                pool=StatePool.create(align, state_blocks),
                kv=KVPages.create(kv_spec, kv_pages, page_size),
                state=AlignState.create(align),
                tables=BlockTables.create(align),
                page_tables=jnp.zeros((align.max_num_seqs, -(-align.max_model_len // page_size)), jnp.int32),
                pending=Pending.create(align.max_num_seqs, align.window, history),
                epoch=jnp.ones((), jnp.int32),
            )

        if layout is None:
            return create()
        return jax.jit(layout.run(create, (), device_specs(layout, align)))()


@dataclass(frozen=True)
class Graph:
    """A model without its parameters, which are passed as a list: that is faster than a tree with hundreds of names."""

    definition: nnx.GraphDef
    structure: jax.tree_util.PyTreeDef

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Every call of a jitted function hashes its static arguments, which takes 5 ms for 32 layers.
        return hash((self.definition, self.structure))

    @classmethod
    def split(cls, model: Any) -> "tuple[Graph, list[jax.Array]]":
        """Splits a model into its graph and its parameters."""
        definition, state = nnx.split(model)
        leaves, structure = jax.tree.flatten(state)
        return cls(definition, structure), leaves

    def model(self, params: list[jax.Array]) -> Any:
        """Puts graph and parameters together again: the inverse of `split`."""
        return nnx.merge(self.definition, jax.tree.unflatten(self.structure, params))


def device_specs(layout: Layout, align: AlignConfig) -> DeviceState:
    """Returns how the device state lies on a mesh: the pools are split, the bookkeeping is the same on all devices."""
    every: Any = PartitionSpec()
    rings: Any = ring_partition(align.groups) if align.is_deferred else None
    return DeviceState(
        pool=replace(layout.pool, rings=rings),
        kv=layout.kv,
        state=every,
        tables=every,
        page_tables=every,
        pending=every,
        epoch=every,
    )


# A kernel that updates a pool in place counts twice in XLA's estimate of memory, once as its input and once as its output.
# XLA would compute most products of a step twice, to bring an estimate down that is a multiple of what the step takes.
_COMPILER_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


@functools.partial(
    jax.jit,
    static_argnames=("graph", "align", "drafter", "num_decode_rows", "layout"),
    donate_argnames=("device_state", "sampler"),
    compiler_options=_COMPILER_OPTIONS,
)
def run_step(
    params: list[jax.Array],
    inputs: Packed,
    device_state: DeviceState,
    sampler: SamplerState | None = None,
    mailboxes: Mailboxes | None = None,
    *,
    graph: Graph,
    align: AlignConfig,
    drafter: DeviceDrafter | None,
    num_decode_rows: int,
    layout: Layout | None = None,
) -> tuple[Packed, DeviceState, SamplerState | None]:
    """Runs one step.

    Args:
        params: The model's parameters.
        inputs: What the host sends: `Inputs`, packed.
        device_state: What the last step left. `device_state` is donated.
        sampler: What is known of the requests whose logits are changed; None in a program that changes none. `sampler`
            is donated.
        mailboxes: What the devices of `layout` send each other sums through; None leaves sums to XLA.
        graph: The model without its parameters. Static, as are the arguments that follow.
        align: How states are kept.
        drafter: Proposes drafts for the next step; None if no drafter runs on the device.
        num_decode_rows: Number of rows that are decode or verify rows, padding included.
        layout: How the model lies on several devices; None for one device.

    Returns:
        What the host reads, a packed `StepResult`; the state for the next step; and `sampler` after the step.
    """
    run = functools.partial(_run_step, graph=graph, align=align, drafter=drafter, num_decode_rows=num_decode_rows)
    if layout is not None:
        every, specs = PartitionSpec(), device_specs(layout, align)
        boxes = every if mailboxes is None else mailboxes.partition()
        run = layout.run(run, (list(layout.params), every, specs, every, boxes), (every, specs, every))
    return run(params, inputs, device_state, sampler, mailboxes)


def _run_step(
    params: list[jax.Array],
    packed: Packed,
    device_state: DeviceState,
    sampler: SamplerState | None,
    mailboxes: Mailboxes | None,
    *,
    graph: Graph,
    align: AlignConfig,
    drafter: DeviceDrafter | None,
    num_decode_rows: int,
) -> tuple[Packed, DeviceState, SamplerState | None]:
    """The step on one device: see `run_step`."""
    model, inputs = graph.model(params), packed.unpack()
    exchange = None if mailboxes is None else Exchange(mailboxes, device_state.epoch)
    if exchange is not None:
        exchange_by(model, exchange)
    batch, pool, kv = inputs.batch, device_state.pool, device_state.kv
    tables = update_block_tables(device_state.tables, inputs.updates)
    page_tables = set_pages(device_state.page_tables, inputs.pages)
    state = add_requests(device_state.state, inputs.additions)
    pending = device_state.pending
    rows = token_rows(batch.query_start_loc, inputs.tokens.shape[0])
    verify = decode_places(batch, num_decode_rows, align.window)
    tokens, drafts, num_drafts = resolve(pending, batch, inputs.tokens, verify, rows)
    state, indices = begin_step(align, state, batch, tables)
    # The scheduler plans no chunk after a verify row of the same admission, so deferred states need no migration.
    pool = pool if align.is_deferred else migrate(align, pool, indices)
    step = step_inputs(
        batch,
        indices,
        num_decode_rows=num_decode_rows,
        page_tables=page_tables,
        num_tokens=tokens.shape[0],
        num_decode_tokens=num_decode_rows * align.window,
        page_size=kv.keys.shape[2],
        num_pages=kv.keys.shape[1],
        token_rows=rows,
        interior=interior_boundaries(align, batch, indices, tables, tokens.shape[0] - num_decode_rows * align.window),
    )
    if inputs.following.size:
        pending = record_prompts(pending, batch, rows, step.pages.positions, tokens, inputs.following)
    hidden, pool, kv = model(tokens, step, pool, kv)
    sampling = inputs.sampling
    verified, last, scores = choose_tokens(
        model, hidden, step.pages.positions, batch, sampling, verify, drafts, sampler
    )
    counts = count_sampled(verified, drafts, num_drafts)
    counts = jnp.concatenate([counts, inputs.samples[num_decode_rows:].astype(jnp.int32)])
    state, plan = plan_finish(align, state, batch, indices, counts, tables)
    pool = copy_states(align, pool, plan)
    sampled = Sampled(
        slot=jnp.where(inputs.samples, batch.idx_mapping, align.max_num_seqs),
        tokens=jnp.concatenate([verified, jnp.broadcast_to(last[:, None], (last.shape[0], align.window))]),
        counts=counts,
        known=certain_tokens(indices.num_computed_tokens, batch.num_tokens, jnp.maximum(batch.num_drafts, 0)),
    )
    pending = record_sampled(pending, sampled)
    if sampler is not None and sampling.adjust is not None:
        changed = jnp.where(inputs.samples, sampling.adjust.slot, align.max_num_seqs)
        sampler = sampler.counting(changed, sampled.tokens, counts)
    if drafter is not None:
        finished = SampledStep(model, hidden, step, kv, batch, rows, pending.history, sampled)
        next_drafts, num_next_drafts, kv = drafter.draft(finished, align.num_speculative_tokens)
        # Any drafter may be wrong: what is no token becomes one, which is then verified as all drafts are.
        next_drafts = jnp.clip(next_drafts, 0, model.config.vocab_size - 1)
        num_next_drafts = jnp.clip(num_next_drafts, 0, align.num_speculative_tokens)
        pending = propose(pending, sampled.slot, next_drafts, num_next_drafts)
    result = StepResult(
        tokens=sampled.tokens,
        counts=counts,
        drafts=jnp.pad(num_drafts, (0, counts.shape[0] - num_decode_rows)),
        copies=_num_copies(align, indices.migration) + _num_copies(align, plan),
        null_reads=_num_lost(indices),
        scores=scores,
        prompt=None if sampling.following is None else score_prompt(model, hidden, sampling.following),
    )
    after = DeviceState(
        pool=pool,
        kv=kv,
        state=state,
        tables=tables,
        page_tables=page_tables,
        pending=pending,
        epoch=device_state.epoch if exchange is None else exchange.epoch,
    )
    return pack(result), after, sampler


@functools.partial(jax.jit, static_argnames=("align", "layout"), donate_argnames="device_state")
def run_fold(
    slots: jax.Array, device_state: DeviceState, *, align: AlignConfig, layout: Layout | None = None
) -> DeviceState:
    """Folds slots between two steps: see `fold_slots`.

    Args:
        slots: The slots, or -1 for padding. int32 [n]
        device_state: What the last step left. `device_state` is donated.
        align: How states are kept. Static.
        layout: How the arrays lie on several devices; None for one. Static.

    Returns:
        The state for the next step.
    """

    def run(slots: jax.Array, device_state: DeviceState) -> DeviceState:
        state, pool = fold_slots(align, device_state.state, device_state.pool, device_state.tables, slots)
        return replace(device_state, state=state, pool=pool)

    if layout is not None:
        specs = device_specs(layout, align)
        return layout.run(run, (PartitionSpec(), specs), specs)(slots, device_state)
    return run(slots, device_state)


@functools.partial(jax.jit, static_argnames=("align", "layout"), donate_argnames="device_state")
def run_copies(
    sources: jax.Array,
    destinations: jax.Array,
    device_state: DeviceState,
    *,
    align: AlignConfig,
    layout: Layout | None = None,
) -> DeviceState:
    """Copies state blocks between two steps, all layers of them.

    Args:
        sources: The blocks that are read. int32 [n]
        destinations: The blocks that are written, none of which is read, or NULL_BLOCK for padding. int32 [n]
        device_state: What the last step left. `device_state` is donated.
        align: How states are kept. Static.
        layout: How the arrays lie on several devices; None for one. Static.

    Returns:
        The state for the next step.
    """

    def run(sources: jax.Array, destinations: jax.Array, device_state: DeviceState) -> DeviceState:
        source, destination = (jnp.tile(blocks, (len(align.groups), 1)) for blocks in (sources, destinations))
        plan = CopyPlan(
            recurrent_source=source,
            conv_source=source,
            window_row=jnp.zeros_like(sources),
            destination=destination,
        )
        return replace(device_state, pool=copy_states(align, device_state.pool, plan))

    if layout is not None:
        every, specs = PartitionSpec(), device_specs(layout, align)
        return layout.run(run, (every, every, specs), specs)(sources, destinations, device_state)
    return run(sources, destinations, device_state)


def _num_lost(indices: StepIndices) -> jax.Array:
    """Returns the number of rows whose state is lost, those that `migrate` would have found included. int32 scalar."""
    found = indices.num_null_reads()
    return found if indices.folds is None else found + indices.folds.num_unsettled()


def _num_copies(align: AlignConfig, plan: CopyPlan | None) -> jax.Array:
    """Returns the number of blocks that a plan copies, int32 [2, groups]: see `StepResult.copies`."""
    if plan is None:
        return jnp.zeros((2, len(align.groups)), jnp.int32)
    return jnp.stack(plan.num_copies())
