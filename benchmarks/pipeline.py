"""Times whole steps: `python -m benchmarks.pipeline --json benchmarks/results/FILE.jsonl`.

A step is one program over donated buffers. It updates the tables and slots, then runs `begin_step`, `migrate`, the
convolutions and recurrences of Qwen3.5-35B-A3B's 30 gated delta net layers, and `finish_step`. It multiplies no matrices.

A row crosses a block boundary if its tokens pass one. Its running column then changes, and "pre_copy" moves its states. All
drafts are accepted, so with drafts either policy saves the boundary. Mode "none" has no boundaries. Each step admits its
rows anew (`add_requests`), either half a block before a boundary or right at one, so that one program serves every share of
crossing rows. Each step uses other slots than the one before, until states of five times the size of the L2 were used.

Under "deferred" the rows are spread evenly over the phases of their fold groups, as if every step advanced each of them by
all of its tokens: in a step with T tokens per row, T rows of 16 fold. A crossing row is one whose last step has
crossed: it folds the boundary and, with drafts, writes the boundary's window.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_benchmark import ROTATION_BYTES, random_pool
from benchmarks.rows import Row, append, environment
from benchmarks.timing import kernel_times, span_per_turn
from mamba_align_jax import (
    Additions,
    AlignConfig,
    AlignState,
    BlockTables,
    ConvState,
    CopyPlan,
    DeltaRuleRing,
    GroupSpec,
    RecurrentState,
    StatePool,
    StepBatch,
    StepIndices,
    TableUpdates,
    add_requests,
    begin_step,
    finish_step,
    migrate,
    split_rows,
    update_block_tables,
)
from mamba_align_jax.align.columns import column_of
from mamba_align_jax.align.step import plan_finish
from pallas_kernels import DeltaRuleEntries, Implementation, Run, causal_conv1d_update, gated_delta_rule_update
from pallas_kernels.gated_delta_rule.deferred import gated_delta_rule_deferred

ROWS, DRAFTS, POLICIES = (1, 8, 64, 256), (0, 3), ("none", "copy_free", "pre_copy", "deferred")
REPETITIONS = 5
STEPS = 12  # the least number of steps whose kernels are timed together
SPAN_US = 50_000  # the least time over which a span is measured


@dataclass(frozen=True)
class Case:
    """A step of `rows` rows, each with one token and `drafts` more tokens. Names are those of its row of results."""

    policy: str  # a policy, or "none" for mode "none"
    rows: int
    drafts: int
    block_size: int = 512
    layers: int = 30
    key_heads: int = 16
    value_heads: int = 32
    dim: int = 128
    width: int = 4
    dtype: str = "bfloat16"
    state_dtype: str = "float32"

    @property
    def name(self) -> str:
        """The beginning of "case" in its rows of results."""
        return f"pipeline {self.policy} K{self.drafts} {self.rows}"

    @property
    def channels(self) -> int:
        """The channels of the convolution: those of queries, keys and values."""
        return (2 * self.key_heads + self.value_heads) * self.dim

    @property
    def align(self) -> AlignConfig:
        """The configuration, with enough slots for the steps to use states of five times the size of the L2."""
        state = RecurrentState((self.value_heads, self.dim, self.dim), self.state_dtype)
        ring = DeltaRuleRing(self.key_heads, self.dim, self.value_heads, self.dim, self.dtype)
        group = GroupSpec("gdn", self.layers, (ConvState(self.width, self.channels, self.dtype), state), ring)
        # A sequence has two blocks of tokens, one on each side of the boundary.
        align = AlignConfig((group,), self.block_size, self.drafts, self.rows, 2 * self.block_size)
        sets = math.ceil(ROTATION_BYTES / (self.rows * align.bytes_per_block))
        how: dict[str, Any] = dict(mode="none") if self.policy == "none" else dict(policy=self.policy)
        return dataclasses.replace(align, max_num_seqs=sets * self.rows, **how)

    @property
    def pool_bytes(self) -> int:
        """The bytes of all slots' blocks."""
        return self.align.max_num_seqs * self.align.num_columns * self.align.bytes_per_block

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The shares of crossing rows that are measured: none, one in every `block_size` rows, and all."""
        return (Fraction(0),) if self.policy == "none" else (Fraction(0), Fraction(1, self.block_size), Fraction(1))


class Inputs(NamedTuple):
    """What the host sends for each step; `num_sampled` is int32 [rows].

    `base` has the positions of the rows' states under policy "deferred", and `accepted` the tokens that their last steps
    accepted, int32 [rows] each. Both are None under the others.
    """

    updates: TableUpdates
    additions: Additions
    batch: StepBatch
    num_sampled: jax.Array
    base: jax.Array | None = None
    accepted: jax.Array | None = None


class Buffers(NamedTuple):
    """The arguments of a step that are donated, and that it returns."""

    pool: StatePool
    state: AlignState
    tables: BlockTables


def make_buffers(case: Case) -> Buffers:
    """Makes the buffers. Every column of every slot has a block, and no block is all zeros."""
    align = case.align
    blocks = 1 + jnp.arange(align.max_num_seqs * align.num_columns, dtype=jnp.int32)
    shapes = jax.eval_shape(lambda: StatePool.create(align, 1 + blocks.size))
    pool = jax.jit(lambda: jax.tree.map(lambda array: random_pool(array.shape, array.dtype), shapes))()
    tables = BlockTables(blocks=blocks.reshape(1, align.max_num_seqs, align.num_columns))
    return Buffers(pool, AlignState.create(align), tables)


def make_tokens(case: Case) -> dict[str, jax.Array]:
    """Draws what every layer reads. One set serves all layers, so it is in the L2 as in a model."""
    keys = iter(jax.random.split(jax.random.key(0), 6))
    draw = lambda shape, dtype=case.dtype: jax.random.normal(next(keys), shape).astype(dtype)
    tokens = case.rows * (1 + case.drafts)
    gates = {name: draw((tokens, case.value_heads)) for name in ("a", "b")}
    gates |= {name: draw((case.value_heads,), "float32") for name in ("A_log", "dt_bias")}
    return dict(x=draw((tokens, case.channels)), weight=draw((case.width, case.channels))) | gates


def make_inputs(case: Case, step: int, crosses: np.ndarray) -> Inputs:
    """Makes the host's inputs of step number `step`. `crosses`, bool [rows], says which rows cross a boundary."""
    align, window = case.align, 1 + case.drafts
    slots = step * case.rows % align.max_num_seqs + np.arange(case.rows)
    # The running column of a crossing row changes, and the last column of its window gets a block. The first half of a
    # verify row's tokens lie before the boundary.
    computed = np.where(crosses, case.block_size - window // 2, case.block_size // 2).astype(np.int32)
    base = accepted = None
    if align.is_deferred:
        # A base is 1 to `fold_length` tokens before the row's position, but that of a crossing row is in the group before
        # the boundary, which the last step has crossed with all of its tokens.
        L, size = align.fold_length, case.block_size
        passed = size - max(window // 2, 1) + window
        computed = np.where(crosses, passed, computed + window * (1 + slots) % L).astype(np.int32)
        base = jnp.asarray(np.where(crosses, size - L, (computed - 1) // L * L), jnp.int32)
        accepted = jnp.asarray(np.where(crosses, window, 1), jnp.int32)
    entered = [] if align.mode == "none" else slots[crosses].tolist()
    last = align.num_columns - 1
    entry = lambda slot: (0, slot, last, 1 + slot * align.num_columns + last)
    lengths = np.arange(case.rows + 1) * window
    return Inputs(
        updates=TableUpdates.from_host(align, case.rows, list(map(entry, entered))),
        additions=Additions(
            slot=jnp.asarray(slots, jnp.int32),
            num_computed_tokens=jnp.asarray(computed),
            running_column=jnp.asarray(column_of(computed, align.state_block_size)),
        ),
        batch=StepBatch.from_host(align, case.rows, slots.tolist(), lengths.tolist(), [case.drafts] * case.rows),
        num_sampled=jnp.full(case.rows, window, jnp.int32),
        base=base,
        accepted=accepted,
    )


def make_cycle(case: Case, share: Fraction) -> list[Inputs]:
    """Makes the shortest cycle of steps that uses every slot and in which `share` of all rows cross, evenly spread."""
    steps = share.denominator // math.gcd(share.denominator, case.rows)
    steps *= math.ceil(case.align.max_num_seqs / (case.rows * steps))
    crossings = np.arange(steps * case.rows + 1) * share.numerator // share.denominator
    crosses = np.diff(crossings).astype(bool).reshape(steps, case.rows)
    sets = case.align.max_num_seqs // case.rows
    made: dict[tuple[int, bytes], Inputs] = {}
    for step, row in enumerate(crosses):
        key = step % sets, row.tobytes()
        if key not in made:
            made[key] = make_inputs(case, step, row)
    return [made[step % sets, row.tobytes()] for step, row in enumerate(crosses)]


def _begin(align: AlignConfig, buffers: Buffers, inputs: Inputs) -> tuple[AlignState, BlockTables, StepIndices]:
    tables = update_block_tables(buffers.tables, inputs.updates)
    state = add_requests(buffers.state, inputs.additions)
    if inputs.base is not None:
        put = lambda array, values: array.at[inputs.additions.slot].set(values)
        accepted = put(state.num_accepted_tokens, inputs.accepted)
        state = dataclasses.replace(state, state_pos=put(state.state_pos, inputs.base), num_accepted_tokens=accepted)
    state, indices = begin_step(align, state, inputs.batch, tables)
    return state, tables, indices


def make_step(case: Case, implementation: Implementation | None) -> Any:
    """Returns the jitted step: (buffers, inputs, tokens) -> (buffers, the last layer's outputs). `buffers` is donated."""
    align, how, run = case.align, dict(implementation=implementation), Run(implementation=implementation)

    def step(buffers, inputs, tokens):
        state, tables, indices = _begin(align, buffers, inputs)
        # There are no chunks, for which alone "deferred" migrates.
        pool = buffers.pool if align.is_deferred else migrate(align, buffers.pool, indices, **how)
        rows = split_rows(inputs.batch, indices, case.rows).decode
        (conv, recurrent), ring = pool.states[0], pool.ring(0)
        gates: dict[str, Any] = {name: tokens[name] for name in ("a", "b", "A_log", "dt_bias")}
        out = tokens["x"]
        for layer in range(case.layers):
            here = rows.of_group(0, layer)
            qkv, conv = causal_conv1d_update(tokens["x"], conv, tokens["weight"], None, here, run=run)
            if here.fold is None:
                out, recurrent = gated_delta_rule_update(qkv, **gates, pool=recurrent, rows=here, run=run)
            else:
                entries = DeltaRuleEntries(*ring)
                out, recurrent, entries = gated_delta_rule_deferred(
                    qkv, **gates, pool=recurrent, ring=entries, rows=here, run=run
                )
                ring = entries.arrays
            # In a model the next layer waits for these outputs.
            conv, recurrent, ring, out = jax.lax.optimization_barrier((conv, recurrent, ring, out))
        pool = pool.with_group(0, (conv, recurrent, *ring))
        state, pool = finish_step(align, state, pool, inputs.batch, indices, inputs.num_sampled, tables, **how)
        return Buffers(pool, state, tables), out

    return jax.jit(step, donate_argnums=0)


def trace(case: Case, implementation: Implementation | None) -> Any:
    """Traces the step, with shapes in place of large arrays."""
    buffers, tokens = jax.eval_shape(lambda: (make_buffers(case), make_tokens(case)))
    return make_step(case, implementation).trace(buffers, make_inputs(case, 0, np.full(case.rows, True)), tokens)


@dataclass
class Steps:
    """A compiled step with the buffers that the host passes from call to call."""

    compiled: Callable[..., tuple[Buffers, jax.Array]]
    buffers: Buffers
    tokens: dict[str, jax.Array]

    def run(self, cycle: Sequence[Inputs], times: int = 1) -> jax.Array:
        """Runs the cycle `times` times and waits. Returns the last layer's outputs in the last step."""
        out = None
        for inputs in itertools.chain.from_iterable(itertools.repeat(cycle, times)):
            self.buffers, out = self.compiled(self.buffers, inputs, self.tokens)
        return jax.block_until_ready(out)


def moved_bytes(case: Case, state: AlignState, tables: BlockTables, cycle: Sequence[Inputs]) -> dict[str, float]:
    """Returns the bytes of states that the ops of a step read and write, and those that its copies do, from the plans.

    Under "deferred" the entries of rings count as bytes of states, and so do the windows of boundaries.
    """
    align = case.align
    ((conv, recurrent),) = [group.states for group in align.groups]

    @jax.jit
    def counts(inputs):
        # The plans need neither pools nor layers.
        state_, tables_, indices = _begin(align, Buffers(StatePool(states=()), state, tables), inputs)
        _, plan = plan_finish(align, state_, inputs.batch, indices, inputs.num_sampled, tables_)
        copies = [plan.num_copies() for plan in (indices.migration, plan) if isinstance(plan, CopyPlan)]
        reads, writes, entries, windows = jnp.sum(indices.recurrent_read > 0), jnp.sum(indices.write > 0), 0, 0
        if indices.folds is not None:
            entries = jnp.sum(indices.folds.position - indices.folds.base) + inputs.batch.query_start_loc[-1]
            writes = jnp.sum(indices.folds.block > 0)
            windows = 0 if indices.folds.windows is None else jnp.sum(indices.folds.windows.block > 0)
        return reads, writes, entries, windows, jnp.asarray(copies, jnp.int32).reshape(-1, 2).sum(axis=0)

    found = zip(*jax.device_get([*map(counts, cycle)]), strict=True)
    reads, writes, entries, windows, copies = (np.sum(each, axis=0) for each in found)
    # A row reads a window of width - 1 and writes one window row fewer than that, and one more for each token.
    window_rows = reads * (2 * case.width - 2 + case.drafts) + windows * 2 * (case.width - 1)
    window_row_bytes = align.state_bytes_per_block(0, conv) / conv.block_shape(case.drafts)[0]
    state_bytes = align.state_bytes_per_block(0, recurrent)
    entry_bytes = align.ring_bytes_per_slot / (2 * align.fold_length)
    copied = copies @ (state_bytes, align.state_bytes_per_block(0, conv))
    moved = (reads + writes) * state_bytes + entries * entry_bytes + window_rows * window_row_bytes
    return {"state_bytes": float(moved) / len(cycle), "copied_bytes": 2.0 * float(copied) / len(cycle)}


def kernels_per_step(name: str, launches: Sequence[Any], steps: int) -> int:
    """Returns how many of the launches belong to one step.

    Raises:
        RuntimeError: The number of launches is not a multiple of `steps`.
    """
    each, rest = divmod(len(launches), steps)
    if each == 0 or rest:
        raise RuntimeError(f"{name}: the launches must divide into {steps} steps, got {len(launches)} launches")
    return each


def measure(case: Case, steps: Steps, share: Fraction) -> Row:
    """Returns a row of results, without the facts of the machine."""
    cycle = make_cycle(case, share)
    steps.run(cycle)
    times = math.ceil(STEPS / len(cycle))
    n = times * len(cycle)
    launches = [kernel_times(lambda: steps.run(cycle, times)) for _ in range(REPETITIONS)]
    us = statistics.median(sum(us for _, us in each) for each in launches) / n
    row = {"case": case.name, "policy": case.policy, "rows": case.rows, "drafts": case.drafts, "crossing": str(share)}
    row |= {"block_size": case.block_size, "layers": case.layers, "state_dtype": case.state_dtype, "us": us}
    row["kernels"] = kernels_per_step(case.name, launches[0], n)
    rounds = max(2, math.ceil(SPAN_US / (us * len(cycle))))
    row["span_us"] = span_per_turn(lambda n: steps.run(cycle, n), rounds, len(cycle))
    return row | moved_bytes(case, steps.buffers.state, steps.buffers.tables, cycle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=POLICIES, action="append", help="policy of the steps; default: all")
    parser.add_argument("--rows", type=int, action="append", help=f"default: {ROWS}")
    parser.add_argument("--drafts", type=int, action="append", help=f"default: {DRAFTS}")
    parser.add_argument("--json", help="append one JSON row for each case to this file")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    header, drafts = environment(options.commit), options.drafts or DRAFTS
    print(header)

    def keep(row: Row) -> None:
        print({name: value for name, value in row.items() if name not in header}, flush=True)
        append(options.json, row | header)

    grid = itertools.product(options.policy or POLICIES, options.rows or ROWS, drafts)
    # The case with the largest pool comes first: the memory that it frees has room for every later pool.
    for case in sorted(itertools.starmap(Case, grid), key=lambda case: case.pool_bytes, reverse=True):
        steps = Steps(trace(case, "triton").lower().compile(), make_buffers(case), make_tokens(case))
        for share in case.shares:
            keep(measure(case, steps, share))
        del steps  # frees the pool before the next one is made


if __name__ == "__main__":
    main()
