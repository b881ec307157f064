"""product_chain in one launch, on Hopper GPUs, with a program for each core.

One of a program's two warpgroups fetches blocks of weights, those of the products to come too, while the other one waits for
what other programs compute. That one multiplies by its blocks: each of its warps has a row of a block and sums it without
the others. All programs must run at the same time, because they wait for each other.
"""

import functools
import operator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels import device
from pallas_kernels.product_chain import _messages as messages
from pallas_kernels.product_chain._schedule import ROWS, WIDTH, Phase, Schedule, schedule, slot_elements
from pallas_kernels.product_chain._steps import Norm, Product, Step

_WARPGROUPS = 2


def product_chain(
    x: jax.Array, steps: Sequence[Step], residual: jax.Array | None, *, parts: tuple[int, ...] | None
) -> tuple[Any, jax.Array | None]:
    """See api.py. There is one token."""
    products = [step for step in steps if isinstance(step, Product)]
    norms = [step for step in steps if isinstance(step, Norm)]
    dtype, programs = products[0].weight.dtype, device.cores()
    plan = schedule(steps, parts, dtype.itemsize)
    cut = lambda weight: weight.reshape(weight.shape[0], -1, WIDTH)  # copies have at most 256 elements along an axis
    given = dict(x=x.reshape(-1, x.shape[-1]), weights=[cut(step.weight) for step in products])
    given |= dict(norms=[step.weight for step in norms], residual=[] if residual is None else [residual[0]])
    # What programs send each other begins as +0: see _messages.py. An array must not be empty.
    given |= dict(sent=jax.new_ref(jnp.zeros((max(plan.starts[-1], 1),), jnp.float32)))
    given |= dict(counters=jax.new_ref(jnp.zeros((len(plan.phases),), jnp.int32)))
    arrays, tree = jax.tree.flatten(given)
    out = _outputs(plan, parts, norms, residual, dtype)

    def body(*refs):
        count = len(arrays) + len(out)
        memory = dict(zip(("blocks", "vector", "full", "free", "done"), refs[count:], strict=True))
        refs = SimpleNamespace(**jax.tree.unflatten(tree, refs[: len(arrays)]), out=refs[len(arrays) : count], **memory)
        _run(refs, plan, norms, parts, dtype, programs)

    results = pm.kernel(
        body,
        out_type=tuple(out),
        grid=(programs,),
        grid_names=("program",),
        num_threads=_WARPGROUPS,
        thread_name=pm.WARPGROUP,
        scratch_types=[
            pm.shared((plan.slots, slot_elements(plan.phases)), dtype),
            pm.shared((max(phase.pieces for phase in plan.phases) * WIDTH,), jnp.float32),
            pm.Barrier(num_barriers=plan.slots),
            pm.Barrier(num_barriers=plan.slots),
            pm.Barrier(num_arrivals=_WARPGROUPS),
        ],
        compiler_params=pm.fast_math(),
        kernel_name="product_chain",
    )(*arrays)
    total = residual if residual is None or not norms else results[0][None]
    results = results[len(norms) > 0 :]
    if plan.ends_with_norm:
        return results[0][None], total
    if parts is None:
        return results[0].reshape(-1, 1, products[-1].outputs), total
    return tuple(part[None] for part in results), total


def _outputs(
    plan: Schedule, parts: Any, norms: Sequence[Norm], residual: Any, dtype: Any
) -> list[jax.ShapeDtypeStruct]:
    """The results: the residual stream after the last norm, if there is one, and what the last step computes."""
    outputs, last = [], plan.phases[-1]
    if norms:
        outputs.append(jax.ShapeDtypeStruct(residual.shape[1:], residual.dtype))
    if plan.ends_with_norm:
        outputs.append(jax.ShapeDtypeStruct(residual.shape[1:], norms[-1].out_dtype or residual.dtype))
    elif parts is None:
        outputs.append(jax.ShapeDtypeStruct((last.shares * last.outputs,), jnp.float32))
    else:
        outputs += [jax.ShapeDtypeStruct((part,), dtype) for part in parts]
    return outputs


def _run(refs: Any, plan: Schedule, norms: Sequence[Norm], parts: Any, dtype: Any, programs: int) -> None:
    """Runs one program."""
    program = pm.axis_index("program")
    phases, slots = plan.phases, jnp.int32(plan.slots)
    work = [phase.work(program, programs) for phase in phases]
    # The blocks of a phase are numbered from `begin` on, in the order in which they are fetched.
    begin = [jnp.int32(0)]
    for phase, (_, first, after) in zip(phases, work, strict=True):
        begin.append(begin[-1] + (after - first) * phase.halves)

    def block_of(phase: Phase, slot: Any, *shape: int) -> Any:
        return refs.blocks.at[slot, pm.slice_of(0, ROWS * phase.pieces * WIDTH)].reshape((ROWS, *shape))

    def fetch() -> None:
        """Fetches the blocks of all phases, a few at a time."""
        for number, (phase, (share, first, _)) in enumerate(zip(phases, work, strict=True)):

            def one(n, _, number=number, phase=phase, share=share, first=first):
                block = begin[number] + n
                slot, earlier = jax.lax.rem(block, slots), jax.lax.rem(block - plan.depth, slots)
                pm.when(block >= slots)(lambda: pm.wait(refs.free.at[slot]))
                pm.when(block >= plan.depth)(lambda: pm.wait(refs.full.at[earlier]))
                half, place = jax.lax.rem(n, jnp.int32(phase.halves)), jax.lax.div(n, jnp.int32(phase.halves))
                rows = pm.slice_of(half * phase.outputs + (first + place) * ROWS, ROWS)
                source = refs.weights[number].at[rows, pm.slice_of(share * phase.pieces, phase.pieces)]
                pm.copy_in(source, block_of(phase, slot, phase.pieces, WIDTH), refs.full.at[slot])

            jax.lax.fori_loop(0, begin[number + 1] - begin[number], one, None)

    def sent(number: int, share: Any, row: Any, count: int) -> Any:
        """Where numbers of a phase are sent."""
        return refs.sent.at[pm.slice_of(plan.starts[number] + share * phases[number].outputs + row, count)]

    def shares_before(number: int, first: Any, count: int) -> list[jax.Array]:
        """Waits for the shares of what the phase before has computed."""
        if number == 0:
            return [pm.load_spread(refs.x.at[n, pm.slice_of(first, count)]) for n in range(refs.x.shape[0])]
        messages.listen(refs.counters.at[pm.slice_of(number - 1, 1)], programs)
        return [messages.receive(sent(number - 1, n, first, count)) for n in range(phases[number - 1].shares)]

    def normed(number: int, norm: int, total: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Adds what the phase before has computed to the residual stream. Returns the normed sum and the stream."""
        (residual,), step = refs.residual, norms[norm]
        channels = residual.shape[0]
        added = functools.reduce(operator.add, shares_before(number, 0, channels))
        before = pm.load_spread(residual) if total is None else total
        rounded = (before + step.scale * added).astype(residual.dtype)
        if norm + 1 == len(norms):

            @pm.when(program == 0)
            def _():
                refs.out[0][...] = rounded

        total = rounded.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.sum(total * total) / channels + step.epsilon)
        value = total * factor * (step.offset + pm.load_spread(refs.norms[norm]))
        return value.astype(step.out_dtype or residual.dtype), total

    def inputs_of(number: int, total: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Returns the inputs of this program's share of a phase, which every warp gets, and the residual stream."""
        phase = phases[number]
        count = phase.pieces * WIDTH
        if phase.norm is None:
            (value,) = shares_before(number, work[number][0] * count, count)
        else:
            value, total = normed(number, phase.norm, total)
        place = refs.vector.at[pm.slice_of(0, count)]
        pm.inline(lambda _: pm.warpgroup_barrier())  # no warp reads what is there any more
        place[...] = value.astype(dtype).astype(jnp.float32)
        pm.inline(lambda _: pm.warpgroup_barrier())
        return pm.load_for_each_warp(place), total

    def multiply() -> None:
        """Runs all phases."""
        total = None
        for number, phase in enumerate(phases):
            x, total = inputs_of(number, total)
            share, first, after = work[number]

            def one(place, x, number=number, phase=phase, share=share, first=first):
                sums = []
                for half in range(phase.halves):
                    slot = jax.lax.rem(begin[number] + (place - first) * phase.halves + half, slots)
                    pm.wait(refs.full.at[slot])
                    block = pm.load_rows_by_warp(block_of(phase, slot, phase.pieces * WIDTH))
                    sums.append(jnp.sum(block * pm.along_columns(x, ROWS), axis=1))
                    pm.arrive(refs.free.at[slot])
                value = sums[0] / (1.0 + jnp.exp(-sums[0])) * sums[1] if phase.halves == 2 else sums[0]
                store(number, share, place * ROWS, value)
                return x

            jax.lax.fori_loop(first, after, one, x)
            if plan.is_sent(number):
                messages.tell(refs.counters.at[pm.slice_of(number, 1)])
        if plan.ends_with_norm:

            @pm.when(program == 0)
            def _():
                refs.out[-1][...] = normed(len(phases), len(norms) - 1, total)[0]

    def store(number: int, share: Any, row: Any, value: jax.Array) -> None:
        """Stores results of a block: for the next phase, or as results of the chain."""
        phase = phases[number]
        if plan.is_sent(number):
            messages.send(sent(number, share, row, ROWS), value)
            return
        if parts is None:
            pm.store_directly(refs.out[-1].at[pm.slice_of(share * phase.outputs + row, ROWS)], value)
            return
        start = 0
        for part, ref in zip(parts, refs.out[len(norms) > 0 :], strict=True):

            def put(ref=ref, start=start):
                pm.store_directly(ref.at[pm.slice_of(row - start, ROWS)], value.astype(dtype))

            pm.when((row >= start) & (row < start + part))(put)
            start += part

    pm.run_by_warpgroup([multiply, fetch], refs.done)
