"""All of the prefill with a decay per head in one launch, on Hopper GPUs, but for decays.py.

The first programs make products, chunk by chunk, and the others carry states. A state needs the products of its own chunk
only, so it is carried on while those of later chunks are made, by cores that few rows would leave idle. A counter per
chunk and key head tells when its products are there. Programs that make products never wait for others, and the GPU starts
programs in order, so all of them end, whatever else runs on it.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels.blocks import StateLayout
from pallas_kernels.chunks import Chunks
from pallas_kernels.gated_delta_rule.prefill import products_mosaic, states_mosaic
from pallas_kernels.gated_delta_rule.prefill.decays import decays
from pallas_kernels.gated_delta_rule.prefill.states_mosaic import WARPGROUPS

_CORES = 132  # of a Hopper GPU. With another number the launch is slower, and its results are the same.


def _makers(carriers: int) -> int:
    """Returns how many programs make products, so that `carriers` programs beside them fill the GPU if they are few."""
    return max(_CORES - carriers, _CORES // 2 + 2)


def prefill(
    inputs: dict[str, jax.Array],
    g: jax.Array,
    beta: jax.Array,
    chunks: Chunks,
    pool: jax.Array,
    *,
    scale: float,
    use_qk_l2norm: bool,
    layout: StateLayout,
    pieces: int,
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel. See `gated_delta_rule_prefill` in launch_mosaic.py, whose other inputs are in `inputs`."""
    k, v, rows = inputs["k"], inputs["v"], inputs["read_block"].shape[0]
    (_, key_heads, key_dim), (_, value_heads, value_dim) = k.shape, v.shape
    number, parts = chunks.seq_idx.shape[0], value_dim // states_mosaic.TILE
    carriers = rows * value_heads * parts
    makers = _makers(carriers)
    factors, decay = decays(g, beta, chunks)
    given = inputs | dict(factors=factors, decay=decay)
    outputs = dict(out=jax.ShapeDtypeStruct(v.shape, v.dtype)) | products_mosaic.outputs(value_heads, number, pieces)
    names, products_memory = [*given, "pool", *outputs], products_mosaic.memory(WARPGROUPS, k.dtype)

    def body(*arrays):
        *arrays, memory, products_barriers, states_barriers = arrays
        of_products, of_states = memory[: len(products_memory)], memory[len(products_memory) :]
        refs = SimpleNamespace(**dict(zip(names, arrays, strict=True)))
        counters = pm.counters(number * key_heads)
        program = pm.axis_index("program")

        @pm.when(program < makers)
        def _():
            warpgroup = pm.axis_index(pm.WARPGROUP)
            # An item is a chunk and key head. Of every `step` items, in order, this warpgroup has one.
            first, step = warpgroup * makers + program, jnp.int32(WARPGROUPS * makers)

            def one(n, here):
                # The compiler would keep every address in registers over the loop if it knew that none changes.
                here = pm.computed(here)
                place = products_mosaic.place_of(here, of_products, products_barriers)
                item = first + n * step
                chunk, key_head = jax.lax.div(item, jnp.int32(key_heads)), jax.lax.rem(item, jnp.int32(key_heads))
                options = dict(scale=scale, use_qk_l2norm=use_qk_l2norm)
                products_mosaic.make_products(refs, place, chunk, key_head, **options)
                pm.wait_for_copies_out(0)
                pm.signal(counters.at[item])
                return here

            jax.lax.fori_loop(0, jax.lax.div(number * key_heads - first + step - 1, step), one, warpgroup)

        @pm.when(program >= makers)
        def _():
            index = program - makers
            part, index = jax.lax.rem(index, jnp.int32(parts)), jax.lax.div(index, jnp.int32(parts))
            head, row = jax.lax.rem(index, jnp.int32(value_heads)), jax.lax.div(index, jnp.int32(value_heads))
            wait = lambda chunk, key_head: pm.wait_for_signal(counters.at[chunk * key_heads + key_head])
            named = SimpleNamespace(**vars(refs), **states_barriers)
            states_mosaic.carry_states(named, of_states, (row, head, part), layout=layout, wait_for_products=wait)

    updated = jax.new_ref(pool)
    out, *_ = pm.kernel(
        body,
        out_type=tuple(outputs.values()),
        grid=(makers + carriers,),
        grid_names=("program",),
        num_threads=WARPGROUPS,
        thread_name=pm.WARPGROUP,
        scratch_types=[
            pm.union(*products_memory, *states_mosaic.memory(key_dim, pieces, v.dtype, per_channel=False)),
            products_mosaic.barriers(WARPGROUPS, key_dim, value_heads // key_heads),
            states_mosaic.barriers(key_dim, pieces, per_channel=False),
        ],
        compiler_params=pm.fast_math(),
        kernel_name="gated_delta_rule_prefill_per_head",
    )(*given.values(), updated)
    return out, jax.freeze(updated)
