"""Times the bookkeeping of a step alone: `python -m benchmarks.bookkeeping --json benchmarks/results/pipeline.jsonl`.

`begin_step` and `finish_step`, without copies, run for 256 slots and 4 groups, by policy, number of drafts and number of
layers, on which the time should not depend.
"""

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.pipeline import DRAFTS, STEPS, kernels_per_step
from benchmarks.rows import Row, append, environment
from benchmarks.timing import kernel_times, span_per_turn
from mamba_align_jax import (
    AlignConfig,
    AlignState,
    BlockTables,
    ConvState,
    DeltaRuleRing,
    GroupSpec,
    RecurrentState,
    StepBatch,
    begin_step,
)
from mamba_align_jax.align.columns import column_of
from mamba_align_jax.align.policy import POLICIES
from mamba_align_jax.align.step import plan_finish

LAYERS = (1, 30, 60)


@dataclass(frozen=True)
class Bookkeeping:
    """The bookkeeping alone: `begin_step`, and `finish_step` without its copies, as two programs. All slots have a row."""

    policy: str
    drafts: int
    layers: int
    slots: int = 256
    groups: int = 4

    @property
    def name(self) -> str:
        """The "case" of its row of results."""
        return f"bookkeeping {self.policy} K{self.drafts} {self.layers} layers"

    @property
    def align(self) -> AlignConfig:
        """The configuration. The time should not depend on its number of layers."""
        states, ring = (ConvState(4, 8192), RecurrentState((32, 128, 128))), DeltaRuleRing(16, 128, 32, 128)
        groups = tuple(GroupSpec(f"group {number}", self.layers, states, ring) for number in range(self.groups))
        return AlignConfig(groups, 512, self.drafts, self.slots, 32768, policy=self.policy)

    def programs(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Returns the two jitted programs, whose state is donated.

        They are (state, batch, tables) -> (state, indices) and (state, batch, indices, num_sampled, tables) ->
        (state, plan).
        """
        align = self.align
        begin = jax.jit(lambda *arguments: begin_step(align, *arguments), donate_argnums=0)
        return begin, jax.jit(lambda *arguments: plan_finish(align, *arguments), donate_argnums=0)

    def arguments(self) -> tuple[AlignState, StepBatch, BlockTables]:
        """Makes the first program's arguments, with rows at random places in their slots and blocks."""
        rng, n, window = np.random.default_rng(0), self.slots, 1 + self.drafts
        computed = jnp.asarray(rng.integers(1, 16384, n), jnp.int32)
        state = AlignState(
            num_computed_tokens=computed,
            num_accepted_tokens=jnp.ones(n, jnp.int32),
            running_column=column_of(computed, self.align.state_block_size),
            state_pos=jnp.maximum(computed - 1, 0) // 16 * 16 if self.align.is_deferred else None,
        )
        slots, locations = rng.permutation(n).tolist(), (np.arange(n + 1) * window).tolist()
        batch = StepBatch.from_host(self.align, n, slots, locations, [self.drafts] * n)
        blocks = rng.integers(1, 2**20, (self.groups, n, self.align.num_columns))
        return state, batch, BlockTables(blocks=jnp.asarray(blocks, jnp.int32))

    def measure(self) -> Row:
        """Returns a row of results: the time of both programs' kernels, and the span from one pair to the next."""
        (begin, finish), (state, batch, tables) = self.programs(), self.arguments()
        sampled = jnp.ones(self.slots, jnp.int32)

        def run(steps):
            nonlocal state
            for _ in range(steps):
                state, indices = begin(state, batch, tables)
                state, _ = finish(state, batch, indices, sampled, tables)
            jax.block_until_ready(state)

        run(1)
        launches = kernel_times(lambda: run(STEPS))
        each = kernels_per_step(self.name, launches, STEPS)
        times = [statistics.median(us for _, us in launches[kernel + each :: each]) for kernel in range(each)]
        row = {"case": self.name} | dataclasses.asdict(self) | {"us": sum(times), "kernels": each}
        row["each"] = list(zip((name for name, _ in launches), times, strict=False))
        return row | {"span_us": span_per_turn(run, rounds=500, turns=1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    parser.add_argument("--drafts", type=int, action="append", help=f"default: {DRAFTS}")
    parser.add_argument("--json", help="append one JSON row for each case to this file")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    header = environment(options.commit)
    print(header)
    for policy, K, layers in itertools.product(options.policy or POLICIES, options.drafts or DRAFTS, LAYERS):
        row = Bookkeeping(policy, K, layers).measure()
        print(row, flush=True)
        append(options.json, row | header)


if __name__ == "__main__":
    main()
