"""Runs a plan: packs rows into a bucket, dispatches one jitted step with donated pools, reads the sampled tokens."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.state import Additions, AlignState, add_requests
from mamba_align_jax.align.step import CopyPlan, begin_step, copy_states, migrate, plan_finish
from mamba_align_jax.align.tables import BlockTables, TableUpdates, update_block_tables
from mamba_align_jax.engine.sampling import sample
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
    position: jax.Array


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
) -> tuple[jax.Array, jax.Array, StatePool, KVPages, AlignState, BlockTables]:
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
    logits = model.logits(hidden[jnp.maximum(batch.query_start_loc[1:] - 1, 0)])
    sampled = sample(logits, inputs.temperature, inputs.top_k, inputs.top_p, inputs.seed, inputs.position)
    state, plan = plan_finish(spec, state, batch, indices, inputs.samples.astype(jnp.int32), tables)
    pool = copy_states(spec, pool, plan)
    copies = _count(spec, indices.migration) + _count(spec, plan)
    return sampled, copies, pool, kv, state, tables


def _bucket(count: int, most: int, least: int = 1) -> int:
    """The smallest of least, 4 * least, 16 * least, ... and `most` that holds `count`: few programs to compile."""
    size = least
    while size < count:
        size *= 4
    return min(size, most)


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
        self.state_bytes_copied = 0
        self._graph, self._params = nnx.split(model)
        self._page_tables = np.zeros((spec.max_num_reqs, -(-spec.max_model_len // self.page_size)), np.int32)

    def dispatch(self, plan: Plan) -> jax.Array:
        """Starts the plan's step; `read` waits for it. Nothing here synchronises with the device."""
        most = self.spec.max_num_reqs
        # A mixed step always has room for every request: one program instead of one per count of decode rows.
        decode_rows = (most if plan.prefill else _bucket(len(plan.decode), most)) if plan.decode else 0
        prefill_rows = self.max_prefill_rows if plan.prefill else 0
        needed = sum(row.num_tokens for row in plan.prefill)
        prefill_tokens = _bucket(needed, max(self.max_num_batched_tokens, needed), 64) if plan.prefill else 0
        places: list[Row | None] = [
            *plan.decode, *[None] * (decode_rows - len(plan.decode)),
            *plan.prefill, *[None] * (prefill_rows - len(plan.prefill)),
        ]  # fmt: skip
        inputs = self._inputs(places, decode_rows * self.spec.window + prefill_tokens)
        sampled, copies, self.pool, self.kv, self.state, self.tables = _step(
            self._params,
            inputs,
            self.pool,
            self.kv,
            self.state,
            self.tables,
            graph=self._graph,
            spec=self.spec,
            page_size=self.page_size,
            num_decode_rows=decode_rows,
        )
        self._places, self._copies = places, copies
        return sampled

    def read(self, sampled: jax.Array) -> dict[int, int]:
        """The sampled tokens by request id: the step's only wait."""
        tokens, copies = jax.device_get((sampled, self._copies))
        for g, group in enumerate(self.spec.groups):
            for kind in group.states:
                size = self.spec.state_bytes_per_block(g, kind)
                self.state_bytes_copied += int(copies[int(isinstance(kind, ConvState)), g]) * size
        return {
            row.request.id: int(token)
            for row, token in zip(self._places, tokens, strict=True)
            if row is not None and row.samples
        }

    def _inputs(self, places: list[Row | None], num_tokens: int) -> Inputs:
        rows = [row for row in places if row is not None]
        tokens = np.zeros(num_tokens, np.int32)
        packed = [t for row in rows for t in row.request.tokens[row.start : row.start + row.num_tokens]]
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
        each = lambda value, padding, dtype: jnp.asarray(
            [padding if row is None else value(row) for row in places], dtype=dtype
        )
        lengths = [0 if row is None else row.num_tokens for row in places]
        return Inputs(
            tokens=jnp.asarray(tokens),
            batch=StepBatch.from_host(
                self.spec,
                len(places),
                [-1 if row is None else row.request.slot for row in places],
                np.cumsum([0, *lengths]).tolist(),
                [-1 if row is None or row.is_prefilling else 0 for row in places],
                [row is not None and row.is_prefilling for row in places],
            ),
            # A row gets at most its running column's block, its drafts', and an entering one the hit's.
            updates=TableUpdates.from_host(
                self.spec, len(places) * len(self.spec.groups) * (self.spec.window + 2), column_entries
            ),
            additions=Additions.from_host(
                self.spec,
                len(places),
                [row.request.slot for row in entering],
                [row.start for row in entering],
            ),
            page_tables=jnp.array(self._page_tables),
            samples=each(lambda row: row.samples, False, jnp.bool_),
            temperature=each(lambda row: row.request.params.temperature, 0.0, jnp.float32),
            top_k=each(lambda row: row.request.params.top_k, 0, jnp.int32),
            top_p=each(lambda row: row.request.params.top_p, 1.0, jnp.float32),
            seed=each(lambda row: row.request.params.seed, 0, jnp.int32),
            position=each(lambda row: row.start + row.num_tokens, 0, jnp.int32),
        )
