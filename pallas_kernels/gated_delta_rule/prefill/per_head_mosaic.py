"""All of the prefill with a decay per head in one launch, on Hopper GPUs.

The first programs make products, chunk by chunk, and the others carry states. A state needs the products of its own chunk
only, so it is carried on while those of later chunks are made, by cores that few rows would leave idle. A counter per
chunk and key head tells when its products are there. Programs that make products never wait for others, and the GPU starts
programs in order, so all of them end, whatever else runs on it.

Programs that carry the states of few rows have nothing to carry at first. Those of a key head in the first row then make
the products of its first chunks, one chunk each. They wait for each other too, so the GPU must have a core for each of the
programs of one key head, which are four in most models.
"""

from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels._mosaic_rows import TILE
from pallas_kernels.blocks import StateLayout
from pallas_kernels.chunks import Chunks
from pallas_kernels.gated_delta_rule.prefill import heads_mosaic, products_mosaic, states_mosaic
from pallas_kernels.gated_delta_rule.prefill.states_mosaic import WARPGROUPS

_CORES = 132  # of a Hopper GPU. With another number the launch is slower, and its results are the same.


class Plan(NamedTuple):
    """How programs share the work. No result depends on it.

    Attributes:
        carrying: The module of the programs that carry states.
        parts: How many of them each head of each row has.
        carriers: The number of these programs.
        makers: The number of programs that make products, which come before.
        helpers: How many of the carriers make products of the first chunks first, as many per key head.
    """

    carrying: ModuleType
    parts: int
    carriers: int
    makers: int
    helpers: int


def plan(rows: int, value_heads: int, value_dim: int) -> Plan:
    """Returns the plan for so many rows and heads of so many value dims."""
    parts = value_dim // TILE
    carriers = rows * value_heads * parts
    if carriers > _CORES and parts % heads_mosaic.PARTS == 0:
        carriers, parts = carriers // heads_mosaic.PARTS, parts // heads_mosaic.PARTS
        return Plan(heads_mosaic, parts, carriers, makers=_CORES, helpers=0)
    makers = max(_CORES - carriers, _CORES // 2 + 2)  # those of few rows fill the GPU together with the carriers
    return Plan(states_mosaic, parts, carriers, makers, helpers=value_heads * parts)


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
    number = chunks.seq_idx.shape[0]
    carrying, parts, carriers, makers, helpers = plan(rows, value_heads, value_dim)
    given = inputs | dict(g=g, beta=beta)
    outputs = dict(out=jax.ShapeDtypeStruct(v.shape, v.dtype)) | products_mosaic.outputs(value_heads, number, pieces)
    names, products_memory = [*given, "pool", *outputs], products_mosaic.memory(WARPGROUPS, k.dtype)

    def body(*arrays):
        *arrays, memory, products_barriers, states_barriers, made = arrays
        of_products, of_states = memory[: len(products_memory)], memory[len(products_memory) :]
        refs = SimpleNamespace(**dict(zip(names, arrays, strict=True)))
        counters = pm.counters(number * key_heads)
        program, warpgroup = pm.axis_index("program"), pm.axis_index(pm.WARPGROUP)
        is_maker, index, div, rem = program < makers, program - makers, jax.lax.div, jax.lax.rem
        # An item is a chunk and key head. A helper has one, and of every `step` others, in order, each warpgroup of a maker
        # has one.
        items, step = number * key_heads, jnp.int32(WARPGROUPS * makers)
        each = jnp.int32(helpers // key_heads)
        if helpers:
            of_helper = rem(index, each) * key_heads + div(index, each)
            first = jnp.where(is_maker, helpers + warpgroup * makers + program, of_helper)
            has_one = (index < helpers) & (first < items) & (warpgroup == WARPGROUPS - 1)
            count = jnp.where(is_maker, div(items - first + step - 1, step), has_one.astype(jnp.int32))
        else:
            first = warpgroup * makers + program
            count = jnp.where(is_maker, div(items - first + step - 1, step), 0)

        def one(n, here):
            # The compiler would keep every address in registers over the loop if it knew that none changes.
            here = pm.computed(here)
            place = products_mosaic.place_of(here, of_products, products_barriers)
            item = first + n * step
            chunk, key_head = div(item, jnp.int32(key_heads)), rem(item, jnp.int32(key_heads))
            options = dict(scale=scale, use_qk_l2norm=use_qk_l2norm)
            products_mosaic.make_products(refs, place, chunk, key_head, **options)
            pm.wait_for_copies_out(0)
            pm.signal(counters.at[item])
            return here

        jax.lax.fori_loop(0, count, one, warpgroup)

        @pm.when(program >= makers)
        def _():
            part, rest = rem(index, jnp.int32(parts)), div(index, jnp.int32(parts))
            head, row = rem(rest, jnp.int32(value_heads)), div(rest, jnp.int32(value_heads))
            wait = lambda chunk, key_head: pm.wait_for_signal(counters.at[chunk * key_heads + key_head])
            named = SimpleNamespace(**vars(refs), **states_barriers)

            def begin():
                """Waits until no warpgroup makes products, which are in the same shared memory."""
                if helpers:
                    pm.commit()
                    pm.arrive(made)
                    pm.wait(made)

            place = row, head, part
            carrying.carry_states(named, of_states, place, layout=layout, wait_for_products=wait, begin=begin)

    updated = jax.new_ref(pool)
    out, *_ = pm.kernel(
        body,
        out_type=tuple(outputs.values()),
        grid=(makers + carriers,),
        grid_names=("program",),
        num_threads=WARPGROUPS,
        thread_name=pm.WARPGROUP,
        scratch_types=[
            pm.union(*products_memory, *carrying.memory(key_dim, pieces, v.dtype, per_channel=False)),
            products_mosaic.barriers(WARPGROUPS, key_dim),
            carrying.barriers(key_dim, pieces, per_channel=False),
            pm.Barrier(num_arrivals=WARPGROUPS),
        ],
        compiler_params=pm.fast_math(),
        kernel_name="gated_delta_rule_prefill_per_head",
    )(*given.values(), updated)
    return out, jax.freeze(updated)
