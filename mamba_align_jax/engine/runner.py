"""Runs plans: packs rows into a bucket, dispatches one jitted step with donated pools, reads the sampled tokens later."""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.checked import StepChecker
from mamba_align_jax.align.columns import certain_tokens
from mamba_align_jax.align.config import AlignConfig, ConvState
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.state import Additions, AlignState, add_requests
from mamba_align_jax.align.step import CopyPlan, begin_step, copy_states, migrate, plan_finish
from mamba_align_jax.align.tables import BlockTables, TableUpdates, update_block_tables
from mamba_align_jax.engine.drafting.mtp import MTPDrafter
from mamba_align_jax.engine.drafting.prompt_lookup_device import DeviceDrafter, SampledStep
from mamba_align_jax.engine.pending import Pending, Sampled, advance, decode_places, enter, propose, resolve
from mamba_align_jax.engine.sampling import count_sampled, most_likely, sample
from mamba_align_jax.engine.scheduler import Plan, Row
from mamba_align_jax.engine.sizing import PoolSizes
from mamba_align_jax.kv import KVPages
from mamba_align_jax.metadata.attention import step_inputs
from mamba_align_jax.sharding import Layout


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the host sends per step. Row arrays are [rows], `tokens` [tokens], `page_tables` [slots, pages].

    `entering` [additions, length] are the tokens of requests that enter, as `Pending.history` keeps them.
    """

    tokens: jax.Array
    entering: jax.Array
    batch: StepBatch
    updates: TableUpdates
    additions: Additions
    page_tables: jax.Array
    samples: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array


class StepResult(NamedTuple):
    """What the host reads of a step: row i sampled `tokens[i, :counts[i]]`, int32 [rows, 1 + K] and [rows].

    `drafts` says how many drafts it verified, [rows]. `copies` counts blocks that moved, [2, groups]: recurrent states, conv
    windows. `null_reads` counts rows whose state was lost.
    """

    tokens: jax.Array
    counts: jax.Array
    drafts: jax.Array
    copies: jax.Array
    null_reads: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """All that one step hands to the next. Donate it."""

    pool: StatePool
    kv: KVPages
    state: AlignState
    tables: BlockTables
    pending: Pending


@dataclass(frozen=True)
class Graph:
    """A model without its parameters, which travel as a list: quicker to pass than a tree with hundreds of names."""

    definition: nnx.GraphDef
    structure: jax.tree_util.PyTreeDef

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Every call of a jitted function hashes its static arguments: 5 ms for 32 layers.
        return hash((self.definition, self.structure))

    @classmethod
    def split(cls, model: nnx.Module) -> "tuple[Graph, list[jax.Array]]":
        """The graph and the parameters."""
        definition, state = nnx.split(model)
        leaves, structure = jax.tree.flatten(state)
        return cls(definition, structure), leaves

    def model(self, params: list[jax.Array]) -> Any:
        """The inverse of `split`."""
        return nnx.merge(self.definition, jax.tree.unflatten(self.structure, params))


class Dispatched(NamedTuple):
    """A step on its way: the row in each place, and what will be read."""

    places: list[Row | None]
    result: StepResult


class RowResult(NamedTuple):
    """What one row sampled, accepted drafts first, and how many drafts it had."""

    tokens: list[int]
    num_drafts: int


def _count(spec: AlignConfig, plan: CopyPlan | None) -> jax.Array:
    if plan is None:
        return jnp.zeros((2, len(spec.groups)), jnp.int32)
    return jnp.stack(plan.num_copies())


def _device_specs(layout: Layout) -> DeviceState:
    every: Any = PartitionSpec()
    return DeviceState(pool=layout.pool, kv=layout.kv, state=every, tables=every, pending=every)


@functools.partial(
    jax.jit,
    static_argnames=("graph", "spec", "drafter", "num_decode_rows", "draws", "layout"),
    donate_argnames=("device_state",),
)
def _step(
    params: list[jax.Array],
    inputs: Inputs,
    device_state: DeviceState,
    *,
    layout: Layout | None = None,
    **static: Any,
) -> tuple[StepResult, DeviceState]:
    run = functools.partial(_run_step, **static)
    if layout is not None:
        every, specs = PartitionSpec(), _device_specs(layout)
        run = layout.run(run, (list(layout.params), every, specs), (every, specs))
    return run(params, inputs, device_state)


def _run_step(
    params: list[jax.Array],
    inputs: Inputs,
    device_state: DeviceState,
    *,
    graph: Graph,
    spec: AlignConfig,
    drafter: DeviceDrafter | None,
    num_decode_rows: int,
    draws: bool,
) -> tuple[StepResult, DeviceState]:
    model = graph.model(params)
    batch, pool, kv = inputs.batch, device_state.pool, device_state.kv
    tables = update_block_tables(device_state.tables, inputs.updates)
    state = add_requests(device_state.state, inputs.additions)
    pending = enter(device_state.pending, inputs.additions.slot[: inputs.entering.shape[0]], inputs.entering)
    verify = decode_places(batch, num_decode_rows, spec.window)
    tokens, drafts, num_drafts = resolve(pending, batch, inputs.tokens, verify)
    state, indices = begin_step(spec, state, batch, tables)
    pool = migrate(spec, pool, indices)
    step = step_inputs(
        batch,
        indices,
        num_decode_rows=num_decode_rows,
        num_decode_tokens=num_decode_rows * spec.window,
        page_tables=inputs.page_tables,
        num_tokens=tokens.shape[0],
        page_size=kv.keys.shape[2],
        num_pages=kv.keys.shape[1],
    )
    hidden, pool, kv = model(tokens, step, pool, kv)
    # A token is sampled behind every token of a decode or verify row, and behind the last one of a prefill row.
    num_rows = batch.idx_mapping.shape[0]
    last = jnp.maximum(batch.query_start_loc[1 + num_decode_rows :] - 1, 0)
    place = jnp.concatenate([verify.reshape(-1), last])
    row = jnp.concatenate([jnp.repeat(jnp.arange(num_decode_rows), spec.window), jnp.arange(num_decode_rows, num_rows)])
    logits = model.logits(hidden[place])
    if draws:
        options = (option[row] for option in (inputs.temperature, inputs.top_k, inputs.top_p, inputs.seed))
        chosen = sample(logits, *options, step.positions[place] + 1)
    else:
        chosen = most_likely(logits)
    verified, rest = jnp.split(chosen, [verify.size])
    verified = verified.reshape(verify.shape)
    counts = count_sampled(verified, drafts, num_drafts)
    counts = jnp.concatenate([counts, inputs.samples[num_decode_rows:].astype(jnp.int32)])
    state, plan = plan_finish(spec, state, batch, indices, counts, tables)
    pool = copy_states(spec, pool, plan)
    sampled = Sampled(
        slot=jnp.where(inputs.samples, batch.idx_mapping, spec.max_num_seqs),
        tokens=jnp.concatenate([verified, jnp.broadcast_to(rest[:, None], (rest.shape[0], spec.window))]),
        counts=counts,
        known=certain_tokens(indices.num_computed_tokens, batch.num_tokens, jnp.maximum(batch.num_drafts, 0)),
    )
    pending = advance(pending, sampled)
    if drafter is not None:
        finished = SampledStep(model, hidden, step, kv, batch, pending.history, sampled)
        guesses, num_guesses, kv = drafter.draft(finished, spec.num_speculative_tokens)
        pending = propose(pending, sampled.slot, guesses, num_guesses)
    result = StepResult(
        tokens=sampled.tokens,
        counts=counts,
        drafts=jnp.pad(num_drafts, (0, num_rows - num_decode_rows)),
        copies=_count(spec, indices.migration) + _count(spec, plan),
        null_reads=indices.num_null_reads(),
    )
    return result, DeviceState(pool=pool, kv=kv, state=state, tables=tables, pending=pending)


class Bucket(NamedTuple):
    """Sizes of one compiled program: rows of each kind, and tokens of the prefill rows; and whether rows may draw tokens.

    Where no row draws there is nothing to decide on the device: the host would wait for such a decision, and could not be a
    step ahead.
    """

    decode_rows: int
    prefill_rows: int
    prefill_tokens: int
    draws: bool = True


def _sizes(most: int, least: int) -> list[int]:
    """Falling sizes, each a quarter of the one before: few programs to compile, and little padding."""
    sizes = [most]
    while sizes[-1] // 4 >= least:
        sizes.append(sizes[-1] // 4)
    return sizes


def _stay(array: np.ndarray) -> Any:
    """Leaves an array on the host: the jitted step takes it along, which is far quicker than one put after another."""
    return array


class StepRunner:
    """Owns the device's side: parameters, pools, bookkeeping. Its programs are compiled once per bucket."""

    def __init__(
        self,
        model: Any,
        spec: AlignConfig,
        sizes: PoolSizes,
        kv_page_size: int,
        max_prefill_rows: int,
        max_num_batched_tokens: int,
        *,
        drafter: DeviceDrafter | None = None,
        layout: Layout | None = None,
    ) -> None:
        """A runner with fresh pools.

        Args:
            model: The model.
            spec: How states are kept.
            sizes: Of the pools.
            kv_page_size: Tokens of a KV page.
            max_prefill_rows: Prefill rows of a step.
            max_num_batched_tokens: Their tokens.
            drafter: Who drafts on the device, if anybody does.
            layout: Of a model that is split over devices; `spec` and `sizes` are then one device's.
        """
        self.spec = spec
        self.max_prefill_rows = max_prefill_rows
        self.max_num_batched_tokens = max_num_batched_tokens
        self.state_bytes_copied = self.null_reads = 0
        self._graph, self._params = Graph.split(model)
        self._kv_spec = model.kv_spec(draft=True) if isinstance(drafter, MTPDrafter) else model.kv_spec()
        self._sizes, self._page_size = sizes, kv_page_size
        self._drafter, self._layout = drafter, layout
        self._start()

    def reset(self) -> None:
        """Fresh pools and bookkeeping, for every slot: what a step that raised has left is gone."""
        # The old arrays go before the new ones come: there is no room for both.
        del self.device_state
        self._start()

    def _start(self) -> None:
        spec, sizes = self.spec, self._sizes
        history = spec.max_model_len if self._drafter else 0
        create = lambda: DeviceState(
            pool=StatePool.create(spec, sizes.state_blocks),
            kv=KVPages.create(self._kv_spec, sizes.kv_pages, self._page_size),
            state=AlignState.create(spec),
            tables=BlockTables.create(spec),
            pending=Pending.create(spec.max_num_seqs, spec.window, history),
        )
        if self._layout is not None:
            create = jax.jit(self._layout.run(create, (), _device_specs(self._layout)))
        self.device_state = create()
        self._checker = StepChecker(spec, sizes.state_blocks)
        self._page_tables = np.zeros((spec.max_num_seqs, -(-spec.max_model_len // self._page_size)), np.int32)

    @property
    def buckets(self) -> list[Bucket]:
        """Every program that a plan can need."""
        # A mixed step always has room for every request: one program instead of one per count of decode rows.
        prefill = [
            Bucket(rows, self.max_prefill_rows, tokens)
            for tokens in _sizes(self.max_num_batched_tokens, 128)
            for rows in (0, self.spec.max_num_seqs)
        ]
        decode = _sizes(self.spec.max_num_seqs, 4)
        return prefill + [Bucket(rows, 0, 0, draws) for rows in decode for draws in (False, True)]

    def trace(self, bucket: Bucket) -> jax.stages.Traced:
        """One program, to be looked at, or lowered and compiled: the first step that needs it then finds it compiled."""
        inputs = self._inputs(bucket, [None] * (bucket.decode_rows + bucket.prefill_rows))
        return _step.trace(self._params, inputs, self.device_state, **self._static(bucket))

    def compile(self) -> Iterator[None]:
        """Compiles every program; yields once for each that is done.

        For a GPU several at a time: tracing is Python's, compiling isn't. XLA's compiler for CPUs has crashed in threads.
        """
        if jax.default_backend() == "cpu":
            for bucket in self.buckets:
                self.trace(bucket).lower().compile()
                yield
            return
        with ThreadPoolExecutor() as pool:
            for program in as_completed([pool.submit(self.trace(bucket).lower().compile) for bucket in self.buckets]):
                program.result()
                yield

    def warm(self, bucket: Bucket) -> None:
        """Runs one program on padding rows, which change nothing."""
        jax.block_until_ready(self._run(bucket, [None] * (bucket.decode_rows + bucket.prefill_rows)))

    def dispatch(self, plan: Plan) -> Dispatched:
        """Starts the plan's step; `read` waits for it. Nothing here synchronises with the device."""
        tokens = sum(row.num_tokens for row in plan.prefill)
        bucket = min(
            bucket
            for bucket in self.buckets
            if len(plan.decode) <= bucket.decode_rows
            and len(plan.prefill) <= bucket.prefill_rows
            and tokens <= bucket.prefill_tokens
            and (bucket.draws or all(row.request.params.temperature == 0 for row in plan.rows))
        )
        pad = lambda rows, size: [*rows, *[None] * (size - len(rows))]
        places = pad(plan.decode, bucket.decode_rows) + pad(plan.prefill, bucket.prefill_rows)
        result = self._run(bucket, places)
        for array in result:
            array.copy_to_host_async()
        return Dispatched(places, result)

    def _run(self, bucket: Bucket, places: list[Row | None]) -> StepResult:
        inputs = self._inputs(bucket, places)
        result, self.device_state = _step(self._params, inputs, self.device_state, **self._static(bucket))
        self._checker.check(inputs.updates, inputs.additions, inputs.batch, result.counts, self.device_state.state)
        return result

    def read(self, dispatched: Dispatched) -> list[tuple[Row, RowResult]]:
        """What each row of a step came to: the step's only wait. Rows that don't sample have no tokens."""
        tokens, counts, drafts, copies, null_reads = jax.device_get(dispatched.result)
        self.null_reads += int(null_reads)
        for g, group in enumerate(self.spec.groups):
            for kind in group.states:
                size = self.spec.state_bytes_per_block(g, kind)
                self.state_bytes_copied += int(copies[int(isinstance(kind, ConvState)), g]) * size
        return [
            (row, RowResult(sampled[: count if row.samples else 0].tolist(), int(num_drafts)))
            for row, sampled, count, num_drafts in zip(dispatched.places, tokens, counts, drafts, strict=True)
            if row is not None
        ]

    def _static(self, bucket: Bucket) -> dict[str, Any]:
        return dict(
            graph=self._graph,
            spec=self.spec,
            drafter=self._drafter,
            num_decode_rows=bucket.decode_rows,
            draws=bucket.draws,
            layout=self._layout,
        )

    def _inputs(self, bucket: Bucket, places: list[Row | None]) -> Inputs:
        rows = [row for row in places if row is not None]
        tokens = np.zeros(bucket.decode_rows * self.spec.window + bucket.prefill_tokens, np.int32)
        packed = [token for row in rows for token in row.tokens]
        tokens[: len(packed)] = packed
        entering = [row for row in rows if row.enters]
        for row in entering:
            self._page_tables[row.request.slot] = 0  # a drafter may look behind what the request has
        for row in rows:
            for number, page in row.allocation.pages:
                self._page_tables[row.request.slot, number] = page
        history = np.zeros((bucket.prefill_rows, self.device_state.pending.history.shape[1]), np.int32)
        for place, row in enumerate(entering if self._drafter else ()):
            history[place, : len(row.request.tokens)] = row.request.tokens
        column_entries = [
            (group, row.request.slot, column, block)
            for group in range(len(self.spec.groups))
            for row in rows
            for column, block in row.allocation.columns
        ]
        each = lambda value, padding, dtype: _stay(
            np.array([padding if row is None else value(row) for row in places], dtype)
        )
        lengths = [0 if row is None else row.num_tokens for row in places]
        return Inputs(
            tokens=_stay(tokens),
            entering=_stay(history),
            batch=StepBatch.from_host(
                self.spec,
                len(places),
                [-1 if row is None else row.request.slot for row in places],
                np.cumsum([0, *lengths]).tolist(),
                [-1 if row is None or row.is_prefilling else len(row.drafts) for row in places],
                [row is not None and row.is_prefilling for row in places],
                _stay,
            ),
            # A row never gets more in one step than it may hold, and a step is in flight at most.
            updates=TableUpdates.from_host(
                self.spec,
                len(places) * len(self.spec.groups) * self.spec.blocks_per_request(1),
                column_entries,
                _stay,
            ),
            additions=Additions.from_host(
                self.spec,
                len(places),
                [row.request.slot for row in entering],
                [row.start for row in entering],
                _stay,
            ),
            page_tables=_stay(self._page_tables.copy()),
            samples=each(lambda row: row.samples, False, np.bool_),
            temperature=each(lambda row: row.request.params.temperature, 0.0, np.float32),
            top_k=each(lambda row: row.request.params.top_k, 0, np.int32),
            top_p=each(lambda row: row.request.params.top_p, 1.0, np.float32),
            seed=each(lambda row: row.request.params.seed, 0, np.int32),
        )
