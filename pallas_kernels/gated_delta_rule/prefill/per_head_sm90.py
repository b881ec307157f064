"""All of the prefill with a decay per head in one launch, on Hopper GPUs.

The first CTAs compute the stages within chunks, and the others the recurrence from chunk to chunk. A state needs the
products of its own chunk only, so the recurrence goes on while later chunks are computed, by SMs that few rows would leave
idle. A semaphore per chunk and key head signals that its products are in GMEM. CTAs that compute products never wait for
others, and the GPU starts CTAs in order, so all of them end, whatever else runs on it.

CTAs that carry the states of few rows have no products to read at first. The CTAs of a key head in the first row then
compute the products of its first chunks, one chunk each. They wait for each other too, so the GPU must have an SM for each
of the CTAs of one key head, which are four in most models.
"""

import functools
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.gated_delta_rule._arguments import Options
from pallas_kernels.gated_delta_rule.prefill import chunk_intra_sm90, chunk_states_128_sm90
from pallas_kernels.gated_delta_rule.prefill.chunk_states_64_sm90 import WARPGROUPS
from pallas_kernels.gated_delta_rule.prefill.variants_sm90 import (
    SMS,
    Variant,
    is_selected,
    runs_first,
    split_by_variant,
    variants,
)


class Plan(NamedTuple):
    """The division of work among CTAs if one variant runs the recurrence. No result depends on it.

    An item is a chunk and key head. One warpgroup computes its products.

    Attributes:
        carrying: The variant. Its CTAs are carriers.
        makers: The number of CTAs that compute products. They have the first indices.
        helpers: The number of carriers that compute products of the first chunks first, as many per key head.
        is_packed: Whether a maker's warpgroups have items that follow each other. Then few makers compute the last items,
            and the SMs of the others are free for carriers.
    """

    carrying: Variant
    makers: int
    helpers: int
    is_packed: bool

    @classmethod
    def of(cls, variant: Variant) -> "Plan":
        """Return the plan of a variant."""
        work = variant.work
        if variant.module is chunk_states_128_sm90:
            # If no CTA has more than one entry, the CTAs that start last end last.
            return cls(variant, SMS, helpers=0, is_packed=work.total > SMS)
        # With few rows, makers and carriers together fill the GPU.
        return cls(variant, makers=max(SMS - work.total, SMS // 2 + 2), helpers=work.of_row, is_packed=False)


class _Cta:
    """The work of a CTA. Makers and helpers compute products of chunks, and carriers, helpers among them, carry states."""

    def __init__(self, refs: Any, memory: Sequence[Any], plans: Sequence[Plan], options: Options) -> None:
        self.refs, self.plans, self.options = refs, plans, options
        self.of_products, *self.of_variants = memory
        self.num_chunks, self.key_heads = refs.cu_chunk_seqlens.shape[0] - 1, refs.k.shape[1]
        self.items = self.num_chunks * self.key_heads
        self.counters = hp.semaphores(self.items + 1)  # one per item, and the work queue's
        self.cta, self.warpgroup = hp.axis_index("cta"), hp.axis_index(hp.WARPGROUP)
        self.chosen = [plan.carrying for plan in plans]
        self.is_first = runs_first(self.chosen, refs.query_start_loc)
        self.makers = self.of_plan(*(jnp.int32(plan.makers) for plan in plans))
        self.is_maker, self.index = self.cta < self.makers, self.cta - self.makers

    def of_plan(self, *of_plans: Any) -> Any:
        """Return the value of the plan that the launch follows, given the value of each plan."""
        return of_plans[0] if len(of_plans) == 1 else jnp.where(self.is_first, *of_plans)

    def run(self) -> None:
        """Compute the products of the CTA's items, if it has any, and run the recurrence if it is a carrier."""
        self.make_products()
        for plan, memory, barriers in zip(self.plans, self.of_variants, self.refs.carrying_barriers, strict=True):
            is_own = is_selected(plan.carrying, self.chosen, self.is_first)
            carry = functools.partial(self.carry, plan, memory, barriers)
            hp.when((self.cta >= self.makers) & (self.index < plan.carrying.ctas) & is_own)(carry)

    def own_items(self) -> tuple[Any, Any, Any]:
        """Return the warpgroup's first item, the distance between its items, and their number.

        A helper has one item. Of each `step` other items, in order, each warpgroup of a maker has one.
        """
        plans, cta, warpgroup, makers = self.plans, self.cta, self.warpgroup, self.makers
        div, rem = jax.lax.div, jax.lax.rem
        step = WARPGROUPS * makers
        helpers = self.of_plan(*(jnp.int32(plan.helpers) for plan in plans))
        packed = cta * WARPGROUPS + warpgroup
        maker_index = self.of_plan(*(packed if plan.is_packed else warpgroup * makers + cta for plan in plans))
        first, of_helpers = helpers + maker_index, jnp.int32(0)
        if plans[0].helpers:
            each = jnp.int32(plans[0].helpers // self.key_heads)
            of_helper = rem(self.index, each) * self.key_heads + div(self.index, each)
            first = jnp.where(self.is_maker, first, of_helper)
            has_one = (self.index < helpers) & (first < self.items) & (warpgroup == WARPGROUPS - 1)
            of_helpers = has_one.astype(jnp.int32)
        return first, step, jnp.where(self.is_maker, div(self.items - first + step - 1, step), of_helpers)

    def chunk_and_head(self, item: Any) -> tuple[Any, Any]:
        """Return an item's chunk, which does not exist if there is no such item, and its key head."""
        return jax.lax.div(item, jnp.int32(self.key_heads)), jax.lax.rem(item, jnp.int32(self.key_heads))

    def bounds_of(self, item: Any) -> tuple[Any, Any]:
        """Return the bounds of an item's chunk, or of the last chunk if there is no such item."""
        chunk = jnp.minimum(self.chunk_and_head(item)[0], self.num_chunks - 1)
        return self.refs.cu_chunk_seqlens[chunk], self.refs.cu_chunk_seqlens[chunk + 1]

    def gates_of(self, item: Any, bounds: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
        """Return the gates of an item's first two value heads, or of others if there is no such item."""
        return chunk_intra_sm90.load_pair(self.refs, self.chunk_and_head(item)[1], 0, bounds)

    def make_products(self) -> None:
        """Compute the products of the warpgroup's items."""
        refs, (first, step, count) = self.refs, self.own_items()

        def is_live(carry):
            """Return whether there is an item. If a chunk has no tokens, none after it has any."""
            n, _, (start, end), _ = carry
            return (n < count) & (start < end)

        def make(carry):
            # The compiler would keep every address in registers over the loop if it knew that none changes.
            n, here, bounds, gates = carry[0], hp.optimization_barrier(carry[1]), *carry[2:]
            own = chunk_intra_sm90.of_warpgroup(here, self.of_products, refs.products_barriers)
            item = first + n * step
            chunk, key_head = self.chunk_and_head(item)
            following = self.bounds_of(item + step)
            chunk_intra_sm90.make_products(refs, own, chunk, key_head, bounds, gates, self.options)
            gates = self.gates_of(item + step, following)  # they arrive while this one waits
            hp.wait_smem_to_gmem(0)
            hp.semaphore_signal(self.counters.at[item])
            return n + 1, here, following, gates

        begin = self.bounds_of(first)
        jax.lax.while_loop(is_live, make, (jnp.int32(0), self.warpgroup, begin, self.gates_of(first, begin)))

    def carry(self, plan: Plan, memory: Any, barriers: dict[str, Any]) -> None:
        """Run the recurrence."""
        wait = lambda chunk, key_head: hp.semaphore_wait(self.counters.at[chunk * self.key_heads + key_head])
        named = SimpleNamespace(**vars(self.refs), **barriers)

        def begin():
            """Wait until no warpgroup computes products, which use the same SMEM."""
            if plan.helpers:
                hp.commit_smem()
                hp.barrier_arrive(self.refs.made)
                hp.barrier_wait(self.refs.made)

        others = dict(layout=self.options.layout, wait_for_products=wait, begin=begin)
        plan.carrying.chunk_states(named, memory, self.index, self.counters.at[self.items], **others)


def prefill(inputs: dict[str, Any], pool: jax.Array, *, options: Options, terms: int) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel. See `gated_delta_rule_prefill` in sm90.py, which makes `inputs`."""
    k, v, num_chunks = inputs["k"], inputs["v"], inputs["cu_chunk_seqlens"].shape[0] - 1
    key_dim, value_heads = k.shape[2], v.shape[1]
    chosen = variants(inputs["read_block"].shape[0], *v.shape[1:])
    plans = [Plan.of(variant) for variant in chosen]
    outputs = dict(out=jax.ShapeDtypeStruct(v.shape, v.dtype))
    outputs |= chunk_intra_sm90.outputs(value_heads, num_chunks, terms)
    # All are views of the same bytes.
    of_variants = [each.module.memory(key_dim, terms, v.dtype, pool.dtype, per_channel=False) for each in chosen]
    described = [chunk_intra_sm90.memory(WARPGROUPS, k.dtype), *of_variants]
    results = hp.launch(
        lambda refs: _Cta(refs, split_by_variant(refs.memory, described), plans, options).run(),
        name="gated_delta_rule_prefill_per_head",
        grid=dict(cta=max(plan.makers + plan.carrying.ctas for plan in plans)),
        inputs=inputs,
        outputs=outputs,
        updates=dict(pool=pool),
        scratch=dict(
            memory=hp.RefUnion(*itertools.chain(*described)),
            products_barriers=chunk_intra_sm90.barriers(WARPGROUPS, key_dim),
            carrying_barriers=[variant.module.barriers(key_dim, terms, per_channel=False) for variant in chosen],
            made=hp.Barrier(num_arrivals=WARPGROUPS),
        ),
        warpgroups=WARPGROUPS,
        is_fast=True,
    )
    return results["out"], results["pool"]
