"""The launches of the prefill kernels of Hopper GPUs."""

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.blocks import StateLayout
from pallas_kernels.gated_delta_rule._arguments import Options, Tokens
from pallas_kernels.gated_delta_rule.config import default_prefill_config
from pallas_kernels.gated_delta_rule.prefill.chunk_intra_per_channel_sm90 import products_per_channel
from pallas_kernels.gated_delta_rule.prefill.chunk_states_64_sm90 import WARPGROUPS
from pallas_kernels.gated_delta_rule.prefill.per_head_sm90 import prefill
from pallas_kernels.gated_delta_rule.prefill.variants_sm90 import is_selected, runs_first, split_by_variant, variants
from pallas_kernels.hopper.prefill_rows import TILE, prefill_inputs
from pallas_kernels.rows import Rows


def unsupported(inputs: Tokens, pool: jax.Array, rows: Rows, *, options: Options) -> str | None:
    """Return the reason why the kernels cannot run these arguments, or None if they can."""
    q, k, v, *_ = inputs
    key_dim, value_dim, chunk_size = k.shape[2], v.shape[2], rows.chunks.chunk_size
    if any(x.dtype != jnp.bfloat16 for x in (q, k, v)):
        return f"q, k and v must be bfloat16, got {q.dtype}, {k.dtype} and {v.dtype}"
    if chunk_size != TILE:
        return f"chunk_size must be {TILE}, got {chunk_size}"
    if key_dim not in (TILE, 2 * TILE) or value_dim % TILE:
        return f"key_dim must be 64 or 128 and value_dim a multiple of 64, got {key_dim} and {value_dim}"
    return None


def gated_delta_rule_prefill(
    tokens: Tokens, pool: jax.Array, rows: Rows, *, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Run the op that `gated_delta_rule_prefill` in api.py describes. Decays per head have a launch of their own."""
    q, k, v, g, beta = tokens
    per_channel, values = g.ndim == 3, v.shape[1] * v.shape[2] * rows.num_rows
    config = default_prefill_config(values, k.shape[2], k.dtype.itemsize, per_channel)
    inputs: dict[str, Any] = dict(q=q, k=k, v=v) | prefill_inputs(rows)
    if not per_channel:
        return prefill(inputs | dict(g=g, beta=beta), pool, options=options, terms=config.pieces)
    inputs |= products_per_channel(tokens, rows.chunks, options=options)
    return _states(inputs, pool, options.layout)


def _states(inputs: dict[str, Any], pool: jax.Array, layout: StateLayout) -> tuple[jax.Array, jax.Array]:
    """Launch the recurrence with a decay per key channel, on the inputs of `states` in chunk_states.py, by name."""
    v, key_dim, terms = inputs["v"], inputs["k"].shape[2], inputs["solve"].shape[0]
    chosen = variants(inputs["read_block"].shape[0], *v.shape[1:])
    # All are views of the same bytes.
    described = [each.module.memory(key_dim, terms, v.dtype, pool.dtype, per_channel=True) for each in chosen]

    def body(refs):
        cta, taken = hp.axis_index("cta"), hp.semaphores(1).at[0]
        is_first = runs_first(chosen, refs.query_start_loc)
        of_variants = zip(chosen, split_by_variant(refs.memory, described), refs.barriers, strict=True)
        for variant, memory_of, barriers in of_variants:
            named = SimpleNamespace(**vars(refs), **barriers)
            run = functools.partial(variant.chunk_states, named, memory_of, cta, taken, layout=layout)
            hp.when((cta < variant.ctas) & is_selected(variant, chosen, is_first))(run)

    results = hp.launch(
        body,
        name="gated_delta_rule_prefill_states",
        grid=dict(cta=max(variant.ctas for variant in chosen)),
        inputs=inputs,
        outputs=dict(out=jax.ShapeDtypeStruct(v.shape, v.dtype)),
        updates=dict(pool=pool),
        scratch=dict(
            memory=hp.RefUnion(*itertools.chain(*described)),
            barriers=[variant.module.barriers(key_dim, terms, per_channel=True) for variant in chosen],
        ),
        warpgroups=WARPGROUPS,
    )
    return results["out"], results["pool"]
