"""product_chain of one token in one launch (SM90).

One of a CTA's two warpgroups fetches. The other one multiplies by the blocks: each of its warps reduces a row of a block
without the other warps. The fetching warpgroup of each CTA also chooses the token's experts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._lazy_hopper import hp, messages
from pallas_kernels.product_chain.launch import Call, Cta
from pallas_kernels.product_chain.schedule import ONE_TOKEN, Phase, slot_elements, vector_elements
from pallas_kernels.product_chain.step import Step

ROWS = ONE_TOKEN.rows


class OneToken(Cta):
    """A CTA. Vectors are spread over the warpgroup that multiplies, or every warp has all of their elements."""

    launch, name, warpgroups = ONE_TOKEN, "product_chain", 2
    outputs, axes, counters = ("stream", "results"), 2, 1

    def __init__(self, refs: Any, steps: Sequence[Any], call: Call) -> None:
        super().__init__(refs, steps, call)
        self.divide()
        self.enough = 3 * messages.WARPS * self.ctas // 4  # warps that have signalled
        self.x: list[jax.Array] = []  # the inputs of the phase that runs

    @staticmethod
    def words(call: Call) -> int:
        """Return the size of the buffer `sent`, in words of 32 bits."""
        return call.plan.starts[-1]

    @staticmethod
    def memory(call: Call, steps: Sequence[Step]) -> dict[str, Any]:
        """Return the SMEM and the barriers."""
        plan = call.plan
        memory = dict(
            blocks=hp.SMEM((plan.slots, slot_elements(plan.phases)), call.dtype),
            vector=hp.SMEM((vector_elements(plan.phases),), jnp.float32),
            full=hp.Barrier(num_barriers=plan.slots),
            free=hp.Barrier(num_barriers=plan.slots),
            done=hp.Barrier(num_arrivals=OneToken.warpgroups),
        )
        for phase in plan.phases:
            memory |= phase.memory(plan.phases)
        return memory

    def run(self) -> None:
        """Run all phases."""
        hp.run_by_warpgroup([self.multiply, self.fetch], self.refs.done)

    def source(self, phase: Phase, copy: Any, matrix: Callable[[Any], Any]) -> Any:
        """See `Cta`. The terms of a block follow each other."""
        term, own_block = jax.lax.rem(copy, jnp.int32(phase.terms)), jax.lax.div(copy, jnp.int32(phase.terms))
        weights, row, k_tile = self.weights_at(phase, self.block_of(phase, own_block), term, matrix)
        return weights.at[hp.ds(row, phase.rows), hp.ds(k_tile, phase.k_tiles)]

    def multiply(self) -> None:
        """Run all phases but their copies."""
        if self.sink is not None:
            self.sink_rows = self.sink.rows_of_one_token()
        for phase in self.plan.phases:
            self.x = phase.load_one_token(self)
            body = lambda own_block, x, phase=phase: phase.multiply_one_token(self, own_block, x)
            jax.lax.fori_loop(jnp.int32(0), self.work[phase.index].count, body, self.x)
            if phase.sends:
                messages.signal_by_warp(self.counter(phase.index))
        if self.plan.ends_with_norm:

            @hp.when(self.cta == 0)
            def _() -> None:
                self.refs.results[0][...] = self.steps[-1].normed(self, len(self.plan.phases))

    def sent(self, index: int, split: Any, row: Any, count: int) -> Any:
        """Return the range of the GMEM buffer to which `count` results of a phase are sent."""
        return self.refs.sent.at[hp.ds(self.plan.starts[index] + split * self.plan.phases[index].outputs + row, count)]

    def results_before(self, index: int, first: Any, count: int) -> list[jax.Array]:
        """Wait for the partial sums of the results of the phase before, or load the partial sums of the chain's inputs."""
        if index == 0:
            return [hp.load_spread(self.refs.x.at[n, hp.ds(first, count)]) for n in range(self.refs.x.shape[0])]
        self.wait_for(index - 1)
        return messages.receive(
            [self.sent(index - 1, n, first, count) for n in range(self.plan.phases[index - 1].splits)]
        )

    def for_each_warp(self, values: Sequence[jax.Array], cut: Any = None) -> list[jax.Array]:
        """Distribute vectors that are spread over threads through SMEM: every warp gets all elements, or the slice `cut`."""
        targets, start = [], 0
        for value in values:
            targets.append(self.refs.vector.at[hp.ds(start, value.shape[0])])
            start += value.shape[0]
        hp.inline(hp.warpgroup_barrier)  # no warp reads the elements before any more
        for target, value in zip(targets, values, strict=True):
            target[...] = value.astype(jnp.float32)
        hp.inline(hp.warpgroup_barrier)
        return [hp.load_for_each_warp(target if cut is None else target.at[cut]) for target in targets]

    def store(self, phase: Phase, split: Any, row: Any, value: jax.Array, held: Any = None) -> None:
        """Send the results of a block, one of each warp, to the next phase, or store them as results of the chain.

        `held` is what the step that stores results has loaded before, if there is one. It stores the first of `parts`.
        """
        if phase.sends:
            messages.send(self.sent(phase.index, split, row, ROWS), value)
            return
        results = self.refs.results
        if self.parts is None:
            hp.store_gmem(results[0].at[hp.ds(split * phase.outputs + row, ROWS)], value)
            return
        start = 0
        for part, ref in zip(self.parts, results, strict=True):

            def put(ref: Any = ref, start: int = start) -> None:
                if start == 0 and self.sink is not None:
                    self.sink.store_one_token(self, ref, value, held, row)
                    return
                hp.store_gmem(ref.at[hp.ds(row - start, ROWS)], value.astype(self.dtype))

            hp.when((row >= start) & (row < start + part))(put)
            start += part


def weights_in_registers(block: Any) -> jax.Array:
    """Load a block of weights, [ROWS, inputs] in SMEM, in float32: each warp has a row.

    A format of weights is decoded here.
    """
    return hp.load_rows_by_warp(block)
