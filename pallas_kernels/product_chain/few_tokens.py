"""product_chain of 2 to 16 tokens in one launch (SM90).

One of a CTA's three warpgroups fetches. The other two multiply by the blocks together, on tensor cores. Each warp has a
range of the inputs of all tokens in registers, and the warps' partial sums are added in SMEM. If a norm follows a product,
each of 128 CTAs adds up its channels of the residual stream, and sends them to all CTAs: see steps/norm.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._lazy_hopper import hp, messages
from pallas_kernels.product_chain import fragments
from pallas_kernels.product_chain.launch import Call, Cta
from pallas_kernels.product_chain.over_devices import Devices, next_epoch
from pallas_kernels.product_chain.schedule import FEW_TOKENS, MOST_TOKENS, OWNERS, Phase, Schedule, slot_elements
from pallas_kernels.product_chain.step import Step, norms_of


class Offsets(NamedTuple):
    """The offsets in the GMEM buffer `sent` of the results of a phase, in words of 32 bits.

    Attributes:
        results: Split-K partial sums, float32 [splits, tokens, outputs]; or the rounded results, two in each word, if no
            norm follows.
        stream: If a norm follows, the residual stream times the norm's weights, two channels in each word.
        squares: If a norm follows, the sum of squares of each owner's channels. float32 [tokens, owners]
        end: The offset after these arrays.
    """

    results: int
    stream: int
    squares: int
    end: int


def offsets(plan: Schedule, tokens: int) -> list[Offsets]:
    """Return the offsets of all phases but the last one."""
    found: list[Offsets] = []
    for phase in plan.phases[:-1]:
        start, outputs = found[-1].end if found else 0, tokens * phase.outputs
        if phase.sends == "results":
            found.append(Offsets(start, start, start, start + outputs // 2))
            continue
        stream = start + phase.splits * outputs
        squares = stream + outputs // 2
        found.append(Offsets(start, stream, squares, squares + tokens * OWNERS))
    return found


class FewTokens(Cta):
    """A CTA. Arrays in registers have all elements of all threads that multiply: see fragments.py."""

    launch, name, warpgroups = FEW_TOKENS, "product_chain_of_few_tokens", fragments.WARPGROUPS + 1
    outputs, axes, counters = ("epoch", "results", "stream"), 1, 2

    def __init__(self, refs: Any, steps: Sequence[Any], call: Call) -> None:
        super().__init__(refs, steps, call)
        self.owner = jnp.minimum(self.cta, OWNERS - 1)  # CTAs that own no channels load the last owner's
        self.ordinals = [jnp.int32(0)]  # the index of each phase's first block of outputs
        self.divide()
        self.where = offsets(self.plan, self.tokens)
        self.enough = 3 * self.ctas // 4  # CTAs that have signalled

    @staticmethod
    def words(call: Call) -> int:
        """Return the size of the buffer `sent`, in words of 32 bits."""
        return offsets(call.plan, call.tokens)[-1].end

    @staticmethod
    def memory(call: Call, steps: Sequence[Step]) -> dict[str, Any]:
        """Return the SMEM and the barriers."""
        plan, norms = call.plan, norms_of(steps)
        terms = max(phase.terms for phase in plan.phases)
        staged = max([1, *(call.tokens * step.weight.shape[0] // 2 // OWNERS for step in norms)])
        return dict(
            blocks=hp.SMEM((plan.slots, slot_elements(plan.phases)), call.dtype),
            partials=hp.SMEM((fragments.partial_elements(terms),), jnp.float32),
            staging=hp.SMEM((staged,), jnp.float32),
            factors=hp.SMEM((max(len(norms), 1), MOST_TOKENS), jnp.float32),
            full=hp.Barrier(num_barriers=plan.slots),
            free=hp.Barrier(num_barriers=plan.slots, num_arrivals=fragments.WARPGROUPS),
            done=hp.Barrier(num_arrivals=FewTokens.warpgroups),
        )

    def count(self, phase: Phase, blocks: Any) -> None:
        """See `Cta`."""
        super().count(phase, blocks)
        self.ordinals.append(self.ordinals[-1] + blocks)

    def run(self) -> None:
        """Run all phases."""
        is_multiplying = hp.axis_index(hp.WARPGROUP) < fragments.WARPGROUPS
        hp.when(is_multiplying)(self.multiply)
        hp.when(jnp.logical_not(is_multiplying))(self.fetch)
        hp.finish_together(self.refs.done)

    def fetch(self) -> None:
        """See `Cta`."""
        hp.set_max_registers(40, action="decrease")
        super().fetch()

    def source(self, phase: Phase, copy: Any, matrix: Callable[[Any], Any]) -> Any:
        """See `Cta`. A block is copied in groups of K tiles, the groups of a term one after the other."""
        own_block, group = jax.lax.div(copy, jnp.int32(phase.copies)), jax.lax.rem(copy, jnp.int32(phase.copies))
        each = jnp.int32(phase.k_tiles // phase.group)
        block = self.block_of(phase, own_block)
        weights, row, k_tile = self.weights_at(phase, block, jax.lax.div(group, each), matrix)
        k_tiles = hp.ds(k_tile + jax.lax.rem(group, each) * phase.group, phase.group)
        return weights.at[hp.ds(row, phase.rows), k_tiles]

    def multiply(self) -> None:
        """Run all phases but their copies. Two warpgroups run it together."""
        hp.set_max_registers(232, action="increase")
        if self.sink is not None:
            self.sink_rows = self.sink.rows_of_few_tokens(self)
        for phase in self.plan.phases:
            x = phase.load_few_tokens(self)
            body = lambda own_block, _, phase=phase, x=x: phase.multiply_few_tokens(self, x, own_block)
            jax.lax.fori_loop(jnp.int32(0), self.work[phase.index].count, body, None)
            if phase.sends:
                messages.signal(self.counter(phase.index))
        if self.call.capacity is not None:
            hp.when(self.cta == 0)(lambda: next_epoch(self.devices(self.norms), self.refs.epoch))

    def devices(self, norms: Sequence[Any]) -> Devices:
        """Return the devices, with the number of the sums over them of some norms."""
        addresses, epoch, _ = self.refs.over_devices
        assert self.call.capacity is not None
        sums = sum(step.over_devices for step in norms)
        return Devices(addresses, epoch, addresses.shape[0] // 2 - 1, self.call.capacity, sums)
