"""product_chain of one token in one launch, on Hopper GPUs, with a CTA for each SM.

One of a CTA's two warpgroups fetches blocks of weights, those of the products to come too, while the other one waits for
what other CTAs compute. That one multiplies by its blocks: each of its warps has a row of a block and sums it without
the others. Where a token's experts are to be chosen, the one that fetches chooses them, each CTA for itself. If a chain
begins with a gated norm, each CTA computes it for itself while its first weights are on their way. At the end the warps
that have results may convolve them: see `_convolution`. All CTAs must run at the same time, because they wait for each
other.
"""

import functools
import operator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import device
from pallas_kernels import hopper as hp
from pallas_kernels.hopper import messages
from pallas_kernels.product_chain import _convolution as convolutions
from pallas_kernels.product_chain._choice import choose
from pallas_kernels.product_chain._schedule import LANES, ROWS, WIDTH, Phase, Schedule, schedule, slot_elements
from pallas_kernels.product_chain._steps import (
    Convolution,
    GatedNorm,
    Norm,
    Step,
    gated_norm_of,
    norms_of,
    weights_of,
)

_WARPGROUPS = 2
# The memory of a token's experts, and the barrier that completes when they have been selected.
_CHOICE = ("logits", "chosen", "factors", "decided")


def product_chain(
    x: jax.Array,
    steps: Sequence[Step],
    residual: jax.Array | None,
    mailboxes: None,
    epoch: None,
    convolution: Convolution | None,
    *,
    parts: tuple[int, ...] | None,
) -> tuple[Any, jax.Array | None, None]:
    """See api.py. There is one token, and one device. A convolution is none of `steps`."""
    weights, norms, gated = weights_of(steps), norms_of(steps), gated_norm_of(steps)
    dtype, programs = weights[0].dtype, device.sm_count()
    plan = schedule(steps, parts, dtype.itemsize)
    cut = lambda weight: weight.reshape(*weight.shape[:-1], -1, WIDTH)  # copies have at most 256 elements along an axis
    given = dict(x=x.reshape(-1, x.shape[-1]), weights=[cut(weight) for weight in weights])
    given |= dict(norms=[step.weight for step in norms], residual=[] if residual is None else [residual[0]])
    given |= dict(gated=[] if gated is None else [gated.gate[0], gated.weight.astype(jnp.float32)])
    # Booleans in memory are read differently by different versions of the lowering. A step converts the array once.
    valid = (phase.mixture.valid if phase.kind == "down" else None for phase in plan.phases)
    given |= dict(valid=[None if each is None else each.astype(jnp.int32) for each in valid])
    # What CTAs send each other begins as +0: see hopper/messages.py. An array must not be empty.
    given |= dict(sent=jax.new_ref(jnp.zeros((max(plan.starts[-1], 1),), jnp.float32)))
    given |= dict(counters=jax.new_ref(jnp.zeros((len(plan.phases),), jnp.int32)))
    convolved = convolutions.arrays_of(convolution)
    given |= dict(convolution=convolved)
    arrays, tree = jax.tree.flatten(given)
    out = _outputs(plan, parts, norms, residual, dtype)

    def body(*refs):
        count = len(arrays) + len(out)
        names = "blocks", "vector", "full", "free", "done", *(_CHOICE if plan.has_experts else ())
        memory = dict(zip(names, refs[count:], strict=True))
        refs = SimpleNamespace(**jax.tree.unflatten(tree, refs[: len(arrays)]), out=refs[len(arrays) : count], **memory)
        refs.convolution = convolutions.seen_by_programs(convolution, refs.convolution)
        _run(refs, plan, gated, norms, parts, dtype, programs)

    results = hp.kernel(
        body,
        out_type=tuple(out),
        grid=(programs,),
        grid_names=("program",),
        num_threads=_WARPGROUPS,
        thread_name=hp.WARPGROUP,
        scratch_types=[
            hp.SMEM((plan.slots, slot_elements(plan.phases)), dtype),
            hp.SMEM((plan.vector,), jnp.float32),
            hp.Barrier(num_barriers=plan.slots),
            hp.Barrier(num_barriers=plan.slots),
            hp.Barrier(num_arrivals=_WARPGROUPS),
            *(_memory_of_choice(plan) if plan.has_experts else ()),
        ],
        compiler_params=hp.fast_math(),
        kernel_name="product_chain",
    )(*arrays)
    total = residual if residual is None or not norms else results[0][None]
    results = results[len(norms) > 0 :]
    if plan.ends_with_norm:
        return results[0][None], total, epoch
    if parts is None:
        return results[0].reshape(-1, 1, plan.phases[-1].outputs), total, epoch
    results = tuple(part[None] for part in results)
    return results if convolved is None else (*results, jax.freeze(convolved["pool"])), total, epoch


def _memory_of_choice(plan: Schedule) -> tuple[Any, ...]:
    """Describes the SMEM of `_CHOICE`. One barrier follows another choice, so it serves all."""
    logits = max(phase.outputs for phase in plan.phases if phase.kind == "router")
    return (
        hp.SMEM((logits,), jnp.float32),
        hp.SMEM((LANES,), jnp.int32),
        hp.SMEM((LANES,), jnp.float32),
        hp.Barrier(),
    )


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


def _run(
    refs: Any,
    plan: Schedule,
    gated: GatedNorm | None,
    norms: Sequence[Norm],
    parts: Any,
    dtype: Any,
    programs: int,
) -> None:
    """Runs one CTA."""
    program = hp.axis_index("program")
    phases, slots = plan.phases, jnp.int32(plan.slots)
    enough = 3 * messages.WARPS * programs // 4  # warps that have signalled
    work = [phase.work(program, programs) for phase in phases]
    # The blocks of a phase are numbered from `begin` on, in the order in which they are fetched.
    begin = [jnp.int32(0)]
    for phase, own in zip(phases, work, strict=True):
        begin.append(begin[-1] + own.count * phase.terms)

    def block_of(phase: Phase, slot: Any, *shape: int) -> Any:
        return refs.blocks.at[slot, hp.ds(0, phase.rows * phase.pieces * WIDTH)].reshape(shape)

    def source_of(number: int, place: Any, term: Any, is_shared: bool) -> Any:
        """Returns the weights of a term of a phase's block, given the block's index among the CTA's own."""
        phase, (share, first, step, _), weights = phases[number], work[number], refs.weights[number]
        expert, row, piece = phase.place(share, first + place * step, term)
        if expert is not None:
            weights = weights.at[phase.mixture.routed + expert if is_shared else refs.chosen[expert]]
        return weights.at[hp.ds(row, phase.rows), hp.ds(piece, phase.pieces)]

    def fetch() -> None:
        """Fetches the blocks of all phases, a few at a time."""
        for number, phase in enumerate(phases):

            def one(n, _, number=number, phase=phase, is_shared=False):
                block = begin[number] + n
                slot, earlier = jax.lax.rem(block, slots), jax.lax.rem(block - plan.depth, slots)
                hp.when(block >= slots)(lambda: hp.barrier_wait(refs.free.at[slot]))
                hp.when(block >= plan.depth)(lambda: hp.barrier_wait(refs.full.at[earlier]))
                term, place = jax.lax.rem(n, jnp.int32(phase.terms)), jax.lax.div(n, jnp.int32(phase.terms))
                target = block_of(phase, slot, phase.rows, phase.pieces, WIDTH)
                hp.copy_gmem_to_smem(source_of(number, place, term, is_shared), target, refs.full.at[slot])

            before, count = jnp.int32(0), begin[number + 1] - begin[number]
            if phase.kind == "up":
                # The blocks of shared experts can be fetched at once.
                before = phase.terms * phase.count_of_shared(program, programs)
                jax.lax.fori_loop(jnp.int32(0), before, functools.partial(one, is_shared=True), None)
                decide(number - 1)
            jax.lax.fori_loop(before, count, one, None)

    def decide(number: int) -> None:
        """Chooses the token's experts by what the router's phase has computed, for both warpgroups."""
        logits = refs.logits.at[hp.ds(0, phases[number].outputs)]
        messages.wait(refs.counters.at[hp.ds(number, 1)], enough)
        (found,) = messages.receive([sent(number, 0, 0, phases[number].outputs)])
        logits[...] = found.astype(dtype).astype(jnp.float32)
        hp.inline(hp.warpgroup_barrier)
        choose(logits, refs.chosen, refs.factors, phases[number].mixture)
        hp.inline(hp.warpgroup_barrier)
        hp.barrier_arrive(refs.decided)

    def sent(number: int, share: Any, row: Any, count: int) -> Any:
        """Where numbers of a phase are sent."""
        return refs.sent.at[hp.ds(plan.starts[number] + share * phases[number].outputs + row, count)]

    def shares_before(number: int, first: Any, count: int) -> list[jax.Array]:
        """Waits for the shares of what the phase before has computed."""
        if number == 0:
            return [hp.load_spread(refs.x.at[n, hp.ds(first, count)]) for n in range(refs.x.shape[0])]
        messages.wait(refs.counters.at[hp.ds(number - 1, 1)], enough)
        return messages.receive([sent(number - 1, n, first, count) for n in range(phases[number - 1].shares)])

    def normed_heads(step: GatedNorm, first: Any, count: int) -> jax.Array:
        """Normalises and gates the inputs of the chain that this CTA's share of the first product takes."""
        gate, weight = refs.gated
        (value,) = shares_before(0, first, count)
        gate, dim = hp.load_spread(gate.at[hp.ds(first, count)]), weight.shape[0]
        weight = hp.load_for_each_head(weight, count)
        factor = jax.lax.rsqrt(hp.sums_of_heads(value * value, dim) / dim + step.epsilon)
        scaled = value * factor * weight
        activated = (gate if step.activation == "silu" else 1.0) / (1.0 + jnp.exp(-gate))
        return (scaled * activated).astype(refs.x.dtype)

    def normed(number: int, norm: int, total: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Adds what the phase before has computed to the residual stream. Returns the normed sum and the stream."""
        (residual,), step = refs.residual, norms[norm]
        channels = residual.shape[0]
        added = functools.reduce(operator.add, shares_before(number, 0, channels))
        before = hp.load_spread(residual) if total is None else total
        rounded = (before + step.scale * added).astype(residual.dtype)
        if norm + 1 == len(norms):

            @hp.when(program == 0)
            def _():
                refs.out[0][...] = rounded

        total = rounded.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.sum(total * total) / channels + step.epsilon)
        value = total * factor * (step.offset + hp.load_spread(refs.norms[norm]))
        return value.astype(step.out_dtype or residual.dtype), total

    def for_each_warp(values: Sequence[jax.Array], cut: Any = None) -> list[jax.Array]:
        """Gives every warp all numbers of vectors that the warpgroup's threads share, or those that `cut` selects."""
        places, start = [], 0
        for value in values:
            places.append(refs.vector.at[hp.ds(start, value.shape[0])])
            start += value.shape[0]
        hp.inline(hp.warpgroup_barrier)  # no warp reads what is there any more
        for place, value in zip(places, values, strict=True):
            place[...] = value.astype(jnp.float32)
        hp.inline(hp.warpgroup_barrier)
        return [hp.load_for_each_warp(place if cut is None else place.at[cut]) for place in places]

    def inputs_of(number: int, total: jax.Array | None) -> tuple[list[jax.Array], jax.Array | None]:
        """Returns the inputs of this CTA's share of a phase, which every warp gets, and the residual stream."""
        phase = phases[number]
        if phase.kind == "down":
            return for_each_warp(weighted(number)), total
        count, cut = phase.pieces * WIDTH, None
        if number == 0 and gated is not None:
            value = normed_heads(gated, work[0].share * count, count)
        elif phase.norm is None:
            (value,) = shares_before(number, work[number].share * count, count)
        else:
            # A norm needs all channels, whatever share of them the CTA multiplies.
            value, total = normed(number, phase.norm, total)
            cut = None if phase.shares == 1 else hp.ds(work[number].share * count, count)
        return for_each_warp([value.astype(dtype)], cut), total

    def weighted(number: int) -> list[jax.Array]:
        """Returns what the experts of this CTA's share have computed between their products, times their weights."""
        phase = phases[number]
        first = work[number].share * phase.terms
        messages.wait(refs.counters.at[hp.ds(number - 1, 1)], enough)
        hp.barrier_wait(refs.decided)
        terms = [first + n for n in range(phase.terms)]
        values = messages.receive([sent(number - 1, 0, term * phase.inputs, phase.inputs) for term in terms])
        rounded = [value.astype(dtype).astype(jnp.float32) for value in values]
        return [value * refs.factors[term] for term, value in zip(terms, rounded, strict=True)]

    def multiply() -> None:
        """Runs all phases."""
        total, x = None, []
        rows = None if refs.convolution is None else convolutions.rows_of_one(refs.convolution)
        for number, phase in enumerate(phases):
            if phase.kind != "up":
                x, total = inputs_of(number, total)
            body = functools.partial(multiply_rows, number, rows if number + 1 == len(phases) else None)
            body = functools.partial(add_up, number) if phase.kind == "down" else body
            jax.lax.fori_loop(jnp.int32(0), work[number].count, body, x)
            if plan.is_sent(number):
                messages.signal_by_warp(refs.counters.at[hp.ds(number, 1)])
        if plan.ends_with_norm:

            @hp.when(program == 0)
            def _():
                refs.out[-1][...] = normed(len(phases), len(norms) - 1, total)[0]

    def multiply_rows(number: int, rows: Any, place: Any, x: list[jax.Array]) -> list[jax.Array]:
        """Multiplies by a block of rows, one for each warp, or by two of which one is the gate of the other.

        `rows` are those of the windows of a convolution, or None if the results are not convolved.
        """
        phase, (share, first, step, _) = phases[number], work[number]
        row, held = (first + place * step) * phase.rows, None
        if rows is not None:
            held = convolutions.load_by_warp(refs.convolution, rows[0], row), rows[1]
        sums = []
        for term in range(phase.terms):
            slot = jax.lax.rem(begin[number] + place * phase.terms + term, slots)
            hp.barrier_wait(refs.full.at[slot])
            block = hp.load_rows_by_warp(block_of(phase, slot, ROWS, phase.pieces * WIDTH))
            sums.append(jnp.sum(block * hp.along_columns(x[0], ROWS), axis=1))
            hp.barrier_arrive(refs.free.at[slot])
        value = sums[0] / (1.0 + jnp.exp(-sums[0])) * sums[1] if phase.terms == 2 else sums[0]
        store(number, share, row, value, held)
        return x

    def add_up(number: int, place: Any, x: list[jax.Array]) -> list[jax.Array]:
        """Adds up the outputs of several experts, for a block of rows, of which each warp has every fourth."""
        phase, (share, first, _, _) = phases[number], work[number]
        parts = range(phase.rows // ROWS)
        sums: list[Any] = [0.0 for _ in parts]
        for term in range(phase.terms):
            slot = jax.lax.rem(begin[number] + place * phase.terms + term, slots)
            hp.barrier_wait(refs.full.at[slot])
            block = block_of(phase, slot, phase.rows, phase.pieces * WIDTH)
            for part in parts:
                rows = hp.load_rows_by_warp(block.at[hp.ds(part * ROWS, ROWS)])
                sums[part] = sums[part] + rows * hp.along_columns(x[term], ROWS)
            hp.barrier_arrive(refs.free.at[slot])
        valid = refs.valid[number]
        values = [jnp.sum(each, axis=1) for each in sums]
        for part, value in enumerate(values):
            value = value if valid is None else hp.keep_if(valid[0] > 0, value)
            store(number, share, (first + place) * phase.rows + part * ROWS, value)
        return x

    def store(
        number: int, share: Any, row: Any, value: jax.Array, held: tuple[jax.Array, jax.Array] | None = None
    ) -> None:
        """Stores results of a block: for the next phase, or as results of the chain.

        `held` is what a convolution needs: what warps have loaded, and the window row that is written.
        """
        phase = phases[number]
        if plan.is_sent(number):
            messages.send(sent(number, share, row, ROWS), value)
            return
        if parts is None:
            hp.store_gmem(refs.out[-1].at[hp.ds(share * phase.outputs + row, ROWS)], value)
            return
        start = 0
        for part, ref in zip(parts, refs.out[len(norms) > 0 :], strict=True):

            def put(ref=ref, start=start):
                if start == 0 and held is not None:
                    convolutions.store_by_warp(refs.convolution, ref, value, *held, row)
                    return
                hp.store_gmem(ref.at[hp.ds(row - start, ROWS)], value.astype(dtype))

            hp.when((row >= start) & (row < start + part))(put)
            start += part

    hp.run_by_warpgroup([multiply, fetch], refs.done)
