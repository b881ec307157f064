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
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.chunks import Chunks
from pallas_kernels.gated_delta_rule._arguments import Options
from pallas_kernels.gated_delta_rule.prefill import chunk_intra_sm90, chunk_states_128_sm90
from pallas_kernels.gated_delta_rule.prefill.chunk_states_64_sm90 import WARPGROUPS
from pallas_kernels.gated_delta_rule.prefill.variants_sm90 import (
    SMS,
    chunk_states,
    ctas_of,
    is_selected,
    selects_first,
    split_by_variant,
    variants,
    views,
    work_of,
)
from pallas_kernels.gated_delta_rule.prefill.work_queue_sm90 import Work


class Plan(NamedTuple):
    """The division of work among CTAs if one variant runs the recurrence. No result depends on it.

    An item is a chunk and key head. One warpgroup computes its products.

    Attributes:
        carrying: The variant's module. Its CTAs are carriers.
        work: Their work queue.
        makers: The number of CTAs that compute products. They have the first indices.
        helpers: The number of carriers that compute products of the first chunks first, as many per key head.
        is_packed: Whether a maker's warpgroups have items that follow each other. Then few makers compute the last items,
            and the SMs of the others are free for carriers.
    """

    carrying: ModuleType
    work: Work
    makers: int
    helpers: int
    is_packed: bool

    @property
    def carriers(self) -> int:
        """The number of CTAs that run the recurrence."""
        return ctas_of(self.carrying, self.work)


def plan(variant: ModuleType, rows: int, value_heads: int, value_dim: int) -> Plan:
    """Return the plan of a variant for a number of rows, value heads and value dims."""
    work = work_of(variant, rows, value_heads, value_dim)
    if variant is chunk_states_128_sm90:
        # If no CTA has more than one entry, the CTAs that start last end last.
        return Plan(variant, work, SMS, helpers=0, is_packed=work.total > SMS)
    # With few rows, makers and carriers together fill the GPU.
    return Plan(variant, work, makers=max(SMS - work.total, SMS // 2 + 2), helpers=work.of_row, is_packed=False)


def prefill(
    inputs: dict[str, Any],
    g: jax.Array,
    beta: jax.Array,
    chunks: Chunks,
    pool: jax.Array,
    *,
    options: Options,
    terms: int,
) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel. See `gated_delta_rule_prefill` in sm90.py, whose other inputs are in `inputs`."""
    k, v, rows = inputs["k"], inputs["v"], inputs["read_block"].shape[0]
    (_, key_heads, key_dim), (_, value_heads, value_dim) = k.shape, v.shape
    num_chunks = chunks.seq_idx.shape[0]
    plans = [plan(variant, rows, value_heads, value_dim) for variant in variants(rows, value_heads, value_dim)]
    first_plan, last_plan = plans[0], plans[-1]
    outputs = dict(out=jax.ShapeDtypeStruct(v.shape, v.dtype)) | chunk_intra_sm90.outputs(
        value_heads, num_chunks, terms
    )
    chosen = tuple(each.carrying for each in plans)
    described = [
        chunk_intra_sm90.memory(WARPGROUPS, k.dtype),
        *views(chosen, key_dim, terms, v.dtype, pool.dtype, per_channel=False),
    ]

    def body(refs):
        of_products, *of_variants = split_by_variant(refs.memory, described)
        counters = hp.semaphores(num_chunks * key_heads + 1)  # one per item, and the work queue's
        cta, warpgroup = hp.axis_index("cta"), hp.axis_index(hp.WARPGROUP)
        is_first = len(plans) == 1 or selects_first(refs.query_start_loc, rows, first_plan.work.of_row)
        of_plan = lambda one, other: one if len(plans) == 1 else jnp.where(is_first, one, other)
        makers = of_plan(jnp.int32(first_plan.makers), jnp.int32(last_plan.makers))
        is_maker, index, div, rem = cta < makers, cta - makers, jax.lax.div, jax.lax.rem
        # A helper has one item. Of each `step` other items, in order, each warpgroup of a maker has one.
        items, step = num_chunks * key_heads, WARPGROUPS * makers
        helpers = of_plan(jnp.int32(first_plan.helpers), jnp.int32(last_plan.helpers))
        packed = cta * WARPGROUPS + warpgroup
        maker_index = of_plan(
            *(packed if each.is_packed else warpgroup * makers + cta for each in (first_plan, last_plan))
        )
        first, of_helpers = helpers + maker_index, jnp.int32(0)
        if first_plan.helpers:
            each = jnp.int32(first_plan.helpers // key_heads)
            of_helper = rem(index, each) * key_heads + div(index, each)
            first = jnp.where(is_maker, first, of_helper)
            has_one = (index < helpers) & (first < items) & (warpgroup == WARPGROUPS - 1)
            of_helpers = has_one.astype(jnp.int32)
        count = jnp.where(is_maker, div(items - first + step - 1, step), of_helpers)

        def chunk_and_head(item):
            """Return an item's chunk, which does not exist if there is no such item, and its key head."""
            return div(item, jnp.int32(key_heads)), rem(item, jnp.int32(key_heads))

        def bounds_of(item):
            """Return the bounds of an item's chunk, or of the last chunk if there is no such item."""
            chunk = jnp.minimum(chunk_and_head(item)[0], num_chunks - 1)
            return refs.cu_chunk_seqlens[chunk], refs.cu_chunk_seqlens[chunk + 1]

        def gates_of(item, bounds):
            """Return the gates of an item's first two value heads, or of others if there is no such item."""
            return chunk_intra_sm90.load_pair(refs, chunk_and_head(item)[1], 0, bounds)

        def is_live(carry):
            """Return whether there is an item. If a chunk has no tokens, none after it has any."""
            n, _, (start, end), _ = carry
            return (n < count) & (start < end)

        def one(carry):
            # The compiler would keep every address in registers over the loop if it knew that none changes.
            n, here, bounds, gates = carry[0], hp.optimization_barrier(carry[1]), *carry[2:]
            own = chunk_intra_sm90.of_warpgroup(here, of_products, refs.products_barriers)
            item = first + n * step
            chunk, key_head = chunk_and_head(item)
            following = bounds_of(item + step)
            chunk_intra_sm90.make_products(refs, own, chunk, key_head, bounds, gates, options)
            gates = gates_of(item + step, following)  # they arrive while this one waits
            hp.wait_smem_to_gmem(0)
            hp.semaphore_signal(counters.at[item])
            return n + 1, here, following, gates

        begin = bounds_of(first)
        jax.lax.while_loop(is_live, one, (jnp.int32(0), warpgroup, begin, gates_of(first, begin)))

        def carry(own, memory, barriers):
            wait = lambda chunk, key_head: hp.semaphore_wait(counters.at[chunk * key_heads + key_head])
            named = SimpleNamespace(**vars(refs), **barriers)

            def begin():
                """Wait until no warpgroup computes products, which use the same SMEM."""
                if own.helpers:
                    hp.commit_smem()
                    hp.barrier_arrive(refs.made)
                    hp.barrier_wait(refs.made)

            others = dict(layout=options.layout, wait_for_products=wait, begin=begin)
            chunk_states(own.carrying, named, memory, own.work, index, counters.at[items], **others)

        for own, memory, barriers in zip(plans, of_variants, refs.carrying_barriers, strict=True):
            is_own = is_selected(own.carrying, chosen, is_first)
            hp.when((cta >= makers) & (index < own.carriers) & is_own)(functools.partial(carry, own, memory, barriers))

    results = hp.launch(
        body,
        name="gated_delta_rule_prefill_per_head",
        grid=dict(cta=max(each.makers + each.carriers for each in plans)),
        inputs=inputs | dict(g=g, beta=beta),
        outputs=outputs,
        updates=dict(pool=pool),
        scratch=dict(
            memory=hp.RefUnion(*itertools.chain(*described)),
            products_barriers=chunk_intra_sm90.barriers(WARPGROUPS, key_dim),
            carrying_barriers=[variant.barriers(key_dim, terms, per_channel=False) for variant in chosen],
            made=hp.Barrier(num_arrivals=WARPGROUPS),
        ),
        warpgroups=WARPGROUPS,
        is_fast=True,
    )
    return results["out"], results["pool"]
