"""The launch of the recurrence with a decay per key channel, on Hopper GPUs. A launch before it computes its products."""

import functools
import itertools
from types import SimpleNamespace

import jax

from pallas_kernels import hopper as hp
from pallas_kernels.blocks import StateLayout
from pallas_kernels.gated_delta_rule.prefill.chunk_states_64_sm90 import WARPGROUPS
from pallas_kernels.gated_delta_rule.prefill.variants_sm90 import (
    chunk_states,
    ctas_of,
    is_selected,
    selects_first,
    split_by_variant,
    variants,
    views,
    work_of,
)


def states(inputs: dict[str, jax.Array], pool: jax.Array, *, layout: StateLayout) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel, on the inputs of `states` in chunk_states.py, by name."""
    v, key_dim, terms = inputs["v"], inputs["k"].shape[2], inputs["solve"].shape[0]
    rows, (_, value_heads, value_dim) = inputs["read_block"].shape[0], v.shape
    chosen = variants(rows, value_heads, value_dim)
    described = views(chosen, key_dim, terms, v.dtype, pool.dtype, per_channel=True)
    works = [work_of(variant, rows, value_heads, value_dim) for variant in chosen]
    ctas = [ctas_of(variant, work) for variant, work in zip(chosen, works, strict=True)]

    def body(refs):
        cta, taken = hp.axis_index("cta"), hp.semaphores(1).at[0]
        is_first = len(chosen) == 1 or selects_first(refs.query_start_loc, rows, works[0].of_row)
        of_variants = zip(chosen, works, ctas, split_by_variant(refs.memory, described), refs.barriers, strict=True)
        for variant, work, count, memory_of, barriers in of_variants:
            named = SimpleNamespace(**vars(refs), **barriers)
            run = functools.partial(chunk_states, variant, named, memory_of, work, cta, taken, layout=layout)
            hp.when((cta < count) & is_selected(variant, chosen, is_first))(run)

    results = hp.launch(
        body,
        name="gated_delta_rule_prefill_states",
        grid=dict(cta=max(ctas)),
        inputs=inputs,
        outputs=dict(out=jax.ShapeDtypeStruct(v.shape, v.dtype)),
        updates=dict(pool=pool),
        scratch=dict(
            memory=hp.RefUnion(*itertools.chain(*described)),
            barriers=[variant.barriers(key_dim, terms, per_channel=True) for variant in chosen],
        ),
        warpgroups=WARPGROUPS,
    )
    return results["out"], results["pool"]
