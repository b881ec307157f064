"""Runs a plan: packs rows into a bucket, dispatches one jitted step with donated pools, reads the sampled tokens."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.checked import StepChecker
from mamba_align_jax.align.state import Additions, AlignState, add_requests
from mamba_align_jax.align.step import CopyPlan, begin_step, copy_states, migrate, plan_finish
from mamba_align_jax.align.tables import BlockTables, TableUpdates, update_block_tables
from mamba_align_jax.engine.sampling import count_sampled, sample
from mamba_align_jax.engine.scheduler import Plan, Row
from mamba_align_jax.kv import KVPages
from mamba_align_jax.metadata.attention import step_inputs
from mamba_align_jax.pool import StatePool
from mamba_align_jax.spec import AlignConfig, ConvState


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the host sends per step. Row arrays are [rows], `tokens` [tokens], `page_tables` [slots, pages]."""

    tokens: jax.Array
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

    `copies` counts blocks that moved, [2, groups]: recurrent states, conv windows. `null_reads` counts rows whose state was
    lost.
    """

    tokens: jax.Array
    counts: jax.Array
    copies: jax.Array
    null_reads: jax.Array


def _count(spec: AlignConfig, plan: CopyPlan | None) -> jax.Array:
    if plan is None:
        return jnp.zeros((2, len(spec.groups)), jnp.int32)
    return jnp.stack(plan.num_copies())


@functools.partial(
    jax.jit,
    static_argnames=("graph", "spec", "page_size", "num_decode_rows"),
    donate_argnames=("pool", "kv", "state", "tables"),
)
def _step(
    params: nnx.State,
    inputs: Inputs,
    pool: StatePool,
    kv: KVPages,
    state: AlignState,
    tables: BlockTables,
    *,
    graph: nnx.GraphDef,
    spec: AlignConfig,
    page_size: int,
    num_decode_rows: int,
) -> tuple[StepResult, StatePool, KVPages, AlignState, BlockTables]:
    model = nnx.merge(graph, params)
    batch = inputs.batch
    tables = update_block_tables(tables, inputs.updates)
    state = add_requests(state, inputs.additions)
    state, indices = begin_step(spec, state, batch, tables)
    pool = migrate(spec, pool, indices)
    step = step_inputs(
        batch,
        indices,
        num_decode_rows=num_decode_rows,
        num_decode_tokens=num_decode_rows * spec.window,
        page_tables=inputs.page_tables,
        num_tokens=inputs.tokens.shape[0],
        page_size=page_size,
        num_pages=kv.keys.shape[1],
    )
    hidden, pool, kv = model(inputs.tokens, step, pool, kv)
    # A token is sampled behind every token of a decode or verify row, and behind the last one of a prefill row.
    num_rows, window = batch.idx_mapping.shape[0], jnp.arange(spec.window, dtype=jnp.int32)
    last = jnp.maximum(batch.query_start_loc[1:] - 1, 0)
    verify, rest = jnp.split(last, [num_decode_rows])
    verify = jnp.minimum(batch.query_start_loc[:num_decode_rows, None] + window, verify[:, None])
    place = jnp.concatenate([verify.reshape(-1), rest])
    row = jnp.concatenate([jnp.repeat(jnp.arange(num_decode_rows), spec.window), jnp.arange(num_decode_rows, num_rows)])
    options = (option[row] for option in (inputs.temperature, inputs.top_k, inputs.top_p, inputs.seed))
    sampled = sample(model.logits(hidden[place]), *options, step.positions[place] + 1)
    verified, rest = jnp.split(sampled, [verify.size])
    verified = verified.reshape(verify.shape)
    counts = count_sampled(verified, inputs.tokens[verify[:, 1:]], batch.num_drafts[:num_decode_rows])
    counts = jnp.concatenate([counts, inputs.samples[num_decode_rows:].astype(jnp.int32)])
    state, plan = plan_finish(spec, state, batch, indices, counts, tables)
    pool = copy_states(spec, pool, plan)
    result = StepResult(
        tokens=jnp.concatenate([verified, jnp.broadcast_to(rest[:, None], (rest.shape[0], spec.window))]),
        counts=counts,
        copies=_count(spec, indices.migration) + _count(spec, plan),
        null_reads=indices.num_null_reads(),
    )
    return result, pool, kv, state, tables


class Bucket(NamedTuple):
    """Sizes of one compiled program: rows of each kind, and tokens of the prefill rows."""

    decode_rows: int
    prefill_rows: int
    prefill_tokens: int


def _sizes(most: int, least: int) -> list[int]:
    """Falling sizes, each a quarter of the one before: few programs to compile, and little padding."""
    sizes = [most]
    while sizes[-1] // 4 >= least:
        sizes.append(sizes[-1] // 4)
    return sizes


class StepRunner:
    """Owns the device's side: parameters, pools, bookkeeping. Its programs are compiled once per bucket."""

    def __init__(
        self,
        model: nnx.Module,
        spec: AlignConfig,
        kv: KVPages,
        num_state_blocks: int,
        max_prefill_rows: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.spec = spec
        self.pool = StatePool.create(spec, num_state_blocks)
        self.kv = kv
        self.page_size = kv.keys.shape[2]
        self.max_prefill_rows = max_prefill_rows
        self.max_num_batched_tokens = max_num_batched_tokens
        self.state = AlignState.create(spec)
        self.tables = BlockTables.create(spec)
        self.state_bytes_copied = self.null_reads = 0
        self._checker = StepChecker(spec, num_state_blocks)
        self._graph, self._params = nnx.split(model)
        self._page_tables = np.zeros((spec.max_num_reqs, -(-spec.max_model_len // self.page_size)), np.int32)

    @property
    def buckets(self) -> list[Bucket]:
        """Every program that a plan can need."""
        # A mixed step always has room for every request: one program instead of one per count of decode rows.
        prefill = [
            Bucket(rows, self.max_prefill_rows, tokens)
            for tokens in _sizes(self.max_num_batched_tokens, 128)
            for rows in (0, self.spec.max_num_reqs)
        ]
        return prefill + [Bucket(rows, 0, 0) for rows in _sizes(self.spec.max_num_reqs, 4)]

    def warm(self, bucket: Bucket) -> None:
        """Compiles one program by running it on padding rows, which change nothing."""
        jax.block_until_ready(self._run(bucket, [None] * (bucket.decode_rows + bucket.prefill_rows)))

    def dispatch(self, plan: Plan) -> StepResult:
        """Starts the plan's step; `read` waits for it. Nothing here synchronises with the device."""
        tokens = sum(row.num_tokens for row in plan.prefill)
        bucket = min(
            bucket
            for bucket in self.buckets
            if len(plan.decode) <= bucket.decode_rows
            and len(plan.prefill) <= bucket.prefill_rows
            and tokens <= bucket.prefill_tokens
        )
        pad = lambda rows, size: [*rows, *[None] * (size - len(rows))]
        return self._run(bucket, pad(plan.decode, bucket.decode_rows) + pad(plan.prefill, bucket.prefill_rows))

    def _run(self, bucket: Bucket, places: list[Row | None]) -> StepResult:
        inputs = self._inputs(places, bucket.decode_rows * self.spec.window + bucket.prefill_tokens)
        result, self.pool, self.kv, self.state, self.tables = _step(
            self._params,
            inputs,
            self.pool,
            self.kv,
            self.state,
            self.tables,
            graph=self._graph,
            spec=self.spec,
            page_size=self.page_size,
            num_decode_rows=bucket.decode_rows,
        )
        self._checker.check(inputs.updates, inputs.additions, inputs.batch, result.counts, self.state)
        self._places = places
        return result

    def read(self, result: StepResult) -> dict[int, list[int]]:
        """The sampled tokens of each request that samples, accepted drafts first, by id: the step's only wait."""
        tokens, counts, copies, null_reads = jax.device_get(result)
        self.null_reads += int(null_reads)
        for g, group in enumerate(self.spec.groups):
            for kind in group.states:
                size = self.spec.state_bytes_per_block(g, kind)
                self.state_bytes_copied += int(copies[int(isinstance(kind, ConvState)), g]) * size
        return {
            row.request.id: sampled[:count].tolist()
            for row, sampled, count in zip(self._places, tokens, counts, strict=True)
            if row is not None and row.samples
        }

    def _inputs(self, places: list[Row | None], num_tokens: int) -> Inputs:
        rows = [row for row in places if row is not None]
        tokens = np.zeros(num_tokens, np.int32)
        packed = []
        for row in rows:
            packed += row.request.tokens[row.start : row.start + row.num_tokens]
            packed += row.drafts
        tokens[: len(packed)] = packed
        for row in rows:
            for number, page in row.allocation.pages:
                self._page_tables[row.request.slot, number] = page
        entering = [row for row in rows if row.enters]
        column_entries = [
            (group, row.request.slot, column, block)
            for group in range(len(self.spec.groups))
            for row in rows
            for column, block in row.allocation.columns
        ]
        each = lambda value, padding, dtype: jax.device_put(
            np.array([padding if row is None else value(row) for row in places], dtype)
        )
        lengths = [0 if row is None else row.num_tokens for row in places]
        return Inputs(
            tokens=jax.device_put(tokens),
            batch=StepBatch.from_host(
                self.spec,
                len(places),
                [-1 if row is None else row.request.slot for row in places],
                np.cumsum([0, *lengths]).tolist(),
                [-1 if row is None or row.is_prefilling else len(row.drafts) for row in places],
                [row is not None and row.is_prefilling for row in places],
            ),
            # A row never gets more in one step than it may hold.
            updates=TableUpdates.from_host(
                self.spec, len(places) * len(self.spec.groups) * self.spec.blocks_per_request(), column_entries
            ),
            additions=Additions.from_host(
                self.spec,
                len(places),
                [row.request.slot for row in entering],
                [row.start for row in entering],
            ),
            page_tables=jax.device_put(self._page_tables.copy()),
            samples=each(lambda row: row.samples, False, np.bool_),
            temperature=each(lambda row: row.request.params.temperature, 0.0, np.float32),
            top_k=each(lambda row: row.request.params.top_k, 0, np.int32),
            top_p=each(lambda row: row.request.params.top_p, 1.0, np.float32),
            seed=each(lambda row: row.request.params.seed, 0, np.int32),
        )
