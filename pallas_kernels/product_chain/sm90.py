"""product_chain of one token in one launch (SM90), with a CTA for each SM.

One of a CTA's two warpgroups copies blocks of weights to SMEM, also of later products, while the other one waits for the
results of other CTAs. The other one multiplies by the blocks: each of its warps reduces a row of a block without the other
warps. The fetching warpgroup of each CTA also chooses the token's experts. If a chain begins with a gated norm, each CTA
computes it for its own inputs while its first weights are in flight. At the end the warps that have results may convolve
them: see `_convolution`. All CTAs must be resident at the same time, because they wait for each other.
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
# The SMEM of a token's experts, and the barrier that completes when they have been chosen.
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
    """See api.py. There is one token, and one device. `steps` do not contain the convolution."""
    weights, norms, gated = weights_of(steps), norms_of(steps), gated_norm_of(steps)
    dtype, ctas = weights[0].dtype, device.sm_count()
    plan = schedule(steps, parts, dtype.itemsize)
    cut = lambda weight: weight.reshape(*weight.shape[:-1], -1, WIDTH)  # copies have at most 256 elements along an axis
    given = dict(x=x.reshape(-1, x.shape[-1]), weights=[cut(weight) for weight in weights])
    given |= dict(norms=[step.weight for step in norms], residual=[] if residual is None else [residual[0]])
    given |= dict(gated=[] if gated is None else [gated.gate[0], gated.weight.astype(jnp.float32)])
    # Booleans in memory are read differently by different versions of the lowering. A step converts the array once.
    valid = (phase.mixture.valid if phase.kind == "down" else None for phase in plan.phases)
    given |= dict(valid=[None if each is None else each.astype(jnp.int32) for each in valid])
    # The buffer through which CTAs exchange results begins as +0: see hopper/messages.py. An array must not be empty.
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
        refs.convolution = convolutions.with_references(convolution, refs.convolution)
        _run(refs, plan, gated, norms, parts, dtype, ctas)

    results = hp.kernel(
        body,
        out_type=tuple(out),
        grid=(ctas,),
        grid_names=("cta",),
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
    """Return the SMEM and the barrier of `_CHOICE`. One barrier serves all choices, because they follow one another."""
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
    """Return the shapes of the residual stream after the last norm, if there is a norm, and of the last step's results."""
    outputs, last = [], plan.phases[-1]
    if norms:
        outputs.append(jax.ShapeDtypeStruct(residual.shape[1:], residual.dtype))
    if plan.ends_with_norm:
        outputs.append(jax.ShapeDtypeStruct(residual.shape[1:], norms[-1].out_dtype or residual.dtype))
    elif parts is None:
        outputs.append(jax.ShapeDtypeStruct((last.splits * last.outputs,), jnp.float32))
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
    ctas: int,
) -> None:
    """Run one CTA."""
    cta = hp.axis_index("cta")
    phases, slots = plan.phases, jnp.int32(plan.slots)
    enough = 3 * messages.WARPS * ctas // 4  # warps that have signalled
    work = [phase.work(cta, ctas) for phase in phases]
    # The index of the first block of each phase among all blocks that the CTA fetches.
    begin = [jnp.int32(0)]
    for phase, own in zip(phases, work, strict=True):
        begin.append(begin[-1] + own.count * phase.terms)

    def block_of(phase: Phase, slot: Any, *shape: int) -> Any:
        return refs.blocks.at[slot, hp.ds(0, phase.rows * phase.k_tiles * WIDTH)].reshape(shape)

    def source_of(index: int, own_block: Any, term: Any, is_shared: bool) -> Any:
        """Return the weights, in GMEM, of a term of a phase's block, given the block's index among the CTA's blocks."""
        phase, (split, first, step, _), weights = phases[index], work[index], refs.weights[index]
        expert, row, k_tile = phase.weights_of_block(split, first + own_block * step, term)
        if expert is not None:
            weights = weights.at[phase.mixture.routed + expert if is_shared else refs.chosen[expert]]
        return weights.at[hp.ds(row, phase.rows), hp.ds(k_tile, phase.k_tiles)]

    def fetch() -> None:
        """Copy the blocks of all phases from GMEM to SMEM, `plan.depth` of them in flight. One warpgroup runs it."""
        for index, phase in enumerate(phases):

            def copy(n, _, index=index, phase=phase, is_shared=False):
                block = begin[index] + n
                slot, earlier = jax.lax.rem(block, slots), jax.lax.rem(block - plan.depth, slots)
                hp.when(block >= slots)(lambda: hp.barrier_wait(refs.free.at[slot]))
                hp.when(block >= plan.depth)(lambda: hp.barrier_wait(refs.full.at[earlier]))
                term, own_block = jax.lax.rem(n, jnp.int32(phase.terms)), jax.lax.div(n, jnp.int32(phase.terms))
                target = block_of(phase, slot, phase.rows, phase.k_tiles, WIDTH)
                hp.copy_gmem_to_smem(source_of(index, own_block, term, is_shared), target, refs.full.at[slot])

            before, count = jnp.int32(0), begin[index + 1] - begin[index]
            if phase.kind == "up":
                # The blocks of shared experts can be fetched at once.
                before = phase.terms * phase.count_of_shared(cta, ctas)
                jax.lax.fori_loop(jnp.int32(0), before, functools.partial(copy, is_shared=True), None)
                decide(index - 1)
            jax.lax.fori_loop(before, count, copy, None)

    def decide(index: int) -> None:
        """Choose the token's experts by the results of the router's phase, for both warpgroups."""
        logits = refs.logits.at[hp.ds(0, phases[index].outputs)]
        messages.wait(refs.counters.at[hp.ds(index, 1)], enough)
        (found,) = messages.receive([sent(index, 0, 0, phases[index].outputs)])
        logits[...] = found.astype(dtype).astype(jnp.float32)
        hp.inline(hp.warpgroup_barrier)
        choose(logits, refs.chosen, refs.factors, phases[index].mixture)
        hp.inline(hp.warpgroup_barrier)
        hp.barrier_arrive(refs.decided)

    def sent(index: int, split: Any, row: Any, count: int) -> Any:
        """Return the range of the GMEM buffer to which `count` results of a phase are sent."""
        return refs.sent.at[hp.ds(plan.starts[index] + split * phases[index].outputs + row, count)]

    def partial_sums_before(index: int, first: Any, count: int) -> list[jax.Array]:
        """Wait for the partial sums of the results of the phase before."""
        if index == 0:
            return [hp.load_spread(refs.x.at[n, hp.ds(first, count)]) for n in range(refs.x.shape[0])]
        messages.wait(refs.counters.at[hp.ds(index - 1, 1)], enough)
        return messages.receive([sent(index - 1, n, first, count) for n in range(phases[index - 1].splits)])

    def normed_heads(step: GatedNorm, first: Any, count: int) -> jax.Array:
        """Normalise and gate the inputs of the chain that this CTA's split of the first product takes."""
        gate, weight = refs.gated
        (value,) = partial_sums_before(0, first, count)
        gate, dim = hp.load_spread(gate.at[hp.ds(first, count)]), weight.shape[0]
        weight = hp.load_for_each_head(weight, count)
        factor = jax.lax.rsqrt(hp.sums_of_heads(value * value, dim) / dim + step.epsilon)
        scaled = value * factor * weight
        activated = (gate if step.activation == "silu" else 1.0) / (1.0 + jnp.exp(-gate))
        return (scaled * activated).astype(refs.x.dtype)

    def normed(index: int, norm: int, total: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Add the results of the phase before to the residual stream. Returns the normed sum and the stream."""
        (residual,), step = refs.residual, norms[norm]
        channels = residual.shape[0]
        added = functools.reduce(operator.add, partial_sums_before(index, 0, channels))
        before = hp.load_spread(residual) if total is None else total
        rounded = (before + step.scale * added).astype(residual.dtype)
        if norm + 1 == len(norms):

            @hp.when(cta == 0)
            def _():
                refs.out[0][...] = rounded

        total = rounded.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.sum(total * total) / channels + step.epsilon)
        value = total * factor * (step.offset + hp.load_spread(refs.norms[norm]))
        return value.astype(step.out_dtype or residual.dtype), total

    def for_each_warp(values: Sequence[jax.Array], cut: Any = None) -> list[jax.Array]:
        """Distribute vectors that are spread over threads through SMEM: every warp gets all elements, or the slice `cut`."""
        targets, start = [], 0
        for value in values:
            targets.append(refs.vector.at[hp.ds(start, value.shape[0])])
            start += value.shape[0]
        hp.inline(hp.warpgroup_barrier)  # no warp reads the elements before any more
        for target, value in zip(targets, values, strict=True):
            target[...] = value.astype(jnp.float32)
        hp.inline(hp.warpgroup_barrier)
        return [hp.load_for_each_warp(target if cut is None else target.at[cut]) for target in targets]

    def inputs_of(index: int, total: jax.Array | None) -> tuple[list[jax.Array], jax.Array | None]:
        """Return the inputs of this CTA's split of a phase, in every warp's registers, and the residual stream."""
        phase = phases[index]
        if phase.kind == "down":
            return for_each_warp(weighted(index)), total
        count, cut = phase.k_tiles * WIDTH, None
        if index == 0 and gated is not None:
            value = normed_heads(gated, work[0].split * count, count)
        elif phase.norm is None:
            (value,) = partial_sums_before(index, work[index].split * count, count)
        else:
            # A norm needs all channels, also where the CTA multiplies one split of them.
            value, total = normed(index, phase.norm, total)
            cut = None if phase.splits == 1 else hp.ds(work[index].split * count, count)
        return for_each_warp([value.astype(dtype)], cut), total

    def weighted(index: int) -> list[jax.Array]:
        """Return the first products' results of the experts of this CTA's split, times their routing weights."""
        phase = phases[index]
        first = work[index].split * phase.terms
        messages.wait(refs.counters.at[hp.ds(index - 1, 1)], enough)
        hp.barrier_wait(refs.decided)
        terms = [first + n for n in range(phase.terms)]
        values = messages.receive([sent(index - 1, 0, term * phase.inputs, phase.inputs) for term in terms])
        rounded = [value.astype(dtype).astype(jnp.float32) for value in values]
        return [value * refs.factors[term] for term, value in zip(terms, rounded, strict=True)]

    def multiply() -> None:
        """Run all phases. One warpgroup runs it."""
        total, x = None, []
        rows = None if refs.convolution is None else convolutions.rows_of_one(refs.convolution)
        for index, phase in enumerate(phases):
            if phase.kind != "up":
                x, total = inputs_of(index, total)
            body = functools.partial(multiply_rows, index, rows if index + 1 == len(phases) else None)
            body = functools.partial(add_up, index) if phase.kind == "down" else body
            jax.lax.fori_loop(jnp.int32(0), work[index].count, body, x)
            if plan.is_sent(index):
                messages.signal_by_warp(refs.counters.at[hp.ds(index, 1)])
        if plan.ends_with_norm:

            @hp.when(cta == 0)
            def _():
                refs.out[-1][...] = normed(len(phases), len(norms) - 1, total)[0]

    def multiply_rows(index: int, rows: Any, own_block: Any, x: list[jax.Array]) -> list[jax.Array]:
        """Multiply by a block of rows, one for each warp, or by a block of the gate and a block of up.

        `rows` are the window rows of `rows_of_one`, or None if the results are not convolved.
        """
        phase, (split, first, step, _) = phases[index], work[index]
        row, held = (first + own_block * step) * phase.rows, None
        if rows is not None:
            held = convolutions.load_by_warp(refs.convolution, rows[0], row), rows[1]
        sums = []
        for term in range(phase.terms):
            slot = jax.lax.rem(begin[index] + own_block * phase.terms + term, slots)
            hp.barrier_wait(refs.full.at[slot])
            block = hp.load_rows_by_warp(block_of(phase, slot, ROWS, phase.k_tiles * WIDTH))
            sums.append(jnp.sum(block * hp.along_columns(x[0], ROWS), axis=1))
            hp.barrier_arrive(refs.free.at[slot])
        value = sums[0] / (1.0 + jnp.exp(-sums[0])) * sums[1] if phase.terms == 2 else sums[0]
        store(index, split, row, value, held)
        return x

    def add_up(index: int, own_block: Any, x: list[jax.Array]) -> list[jax.Array]:
        """Add up the outputs of several experts, for a block of rows, of which each warp has every fourth row."""
        phase, (split, first, _, _) = phases[index], work[index]
        groups = range(phase.rows // ROWS)
        sums: list[Any] = [0.0 for _ in groups]
        for term in range(phase.terms):
            slot = jax.lax.rem(begin[index] + own_block * phase.terms + term, slots)
            hp.barrier_wait(refs.full.at[slot])
            block = block_of(phase, slot, phase.rows, phase.k_tiles * WIDTH)
            for group in groups:
                rows = hp.load_rows_by_warp(block.at[hp.ds(group * ROWS, ROWS)])
                sums[group] = sums[group] + rows * hp.along_columns(x[term], ROWS)
            hp.barrier_arrive(refs.free.at[slot])
        valid = refs.valid[index]
        values = [jnp.sum(each, axis=1) for each in sums]
        for group, value in enumerate(values):
            value = value if valid is None else hp.keep_if(valid[0] > 0, value)
            store(index, split, (first + own_block) * phase.rows + group * ROWS, value)
        return x

    def store(
        index: int, split: Any, row: Any, value: jax.Array, held: tuple[jax.Array, jax.Array] | None = None
    ) -> None:
        """Send the results of a block to the next phase, or store them as results of the chain.

        `held` has the registers of `load_by_warp` and the window row to write, if the results are convolved.
        """
        phase = phases[index]
        if plan.is_sent(index):
            messages.send(sent(index, split, row, ROWS), value)
            return
        if parts is None:
            hp.store_gmem(refs.out[-1].at[hp.ds(split * phase.outputs + row, ROWS)], value)
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
