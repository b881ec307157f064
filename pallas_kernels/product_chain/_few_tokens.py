"""product_chain of 2 to 16 tokens in one launch (SM90), with a CTA for each SM.

One of a CTA's three warpgroups copies blocks of weights to SMEM, also of later products, while the other two wait for the
results of other CTAs. These two multiply by the blocks together, on tensor cores. Each warp has a range of the inputs of
all tokens in registers, and the warps' partial sums are added in SMEM: see `_fragments`. If a norm follows a product, each
of 128 CTAs adds up its channels of the residual stream, and sends them to all CTAs: see `_residual_stream`. At the end
the threads that have results may convolve them: see `_convolution`. All CTAs must be resident at the same time, because
they wait for each other.
"""

import functools
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import device
from pallas_kernels import hopper as hp
from pallas_kernels.all_reduce import Mailboxes
from pallas_kernels.hopper import messages
from pallas_kernels.product_chain import _convolution as convolutions
from pallas_kernels.product_chain import _fragments as fragments
from pallas_kernels.product_chain import _residual_stream as residual_stream
from pallas_kernels.product_chain._over_devices import Devices, next_epoch
from pallas_kernels.product_chain._schedule import (
    MOST_TOKENS,
    OWNERS,
    TOKENS_ROWS,
    WIDTH,
    Phase,
    Schedule,
    group_elements,
    schedule_of_tokens,
)
from pallas_kernels.product_chain._steps import (
    Convolution,
    GatedNorm,
    Norm,
    Step,
    gated_norm_of,
    norms_of,
    weights_of,
)

_FETCHING = fragments.WARPGROUPS  # the warpgroup that fetches


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
    for phase, after in itertools.pairwise(plan.phases):
        start, outputs = found[-1].end if found else 0, tokens * phase.outputs
        if after.norm is None:
            found.append(Offsets(start, start, start, start + outputs // 2))
            continue
        stream = start + phase.splits * outputs
        squares = stream + outputs // 2
        found.append(Offsets(start, stream, squares, squares + tokens * OWNERS))
    return found


def product_chain(
    x: jax.Array,
    steps: Sequence[Step],
    residual: jax.Array | None,
    mailboxes: Mailboxes | None,
    epoch: jax.Array | None,
    convolution: Convolution | None,
    *,
    parts: tuple[int, ...] | None,
) -> tuple[Any, jax.Array | None, jax.Array | None]:
    """See api.py. There are up to 16 tokens. The first step is a product or a gated norm, and the last one is a product.

    `steps` do not contain the convolution. Returns the results, the residual stream, and the next epoch.
    """
    weights, norms, gated = weights_of(steps), norms_of(steps), gated_norm_of(steps)
    dtype, ctas, tokens = weights[0].dtype, device.sm_count(), x.shape[0]
    plan = schedule_of_tokens(steps, parts, dtype.itemsize)
    cut = lambda weight: weight.reshape(weight.shape[0], -1, WIDTH)  # copies have at most 256 elements along an axis
    given = dict(x=x.reshape(-1), weights=[cut(weight) for weight in weights], norms=[step.weight for step in norms])
    given |= dict(residual=[] if residual is None else [residual.reshape(-1)])
    given |= dict(gated=[] if gated is None else [gated.gate.reshape(-1), gated.weight.astype(jnp.float32)])
    # The buffer through which CTAs exchange results begins as +0: see hopper/messages.py.
    given |= dict(sent=jax.new_ref(jnp.zeros((offsets(plan, tokens)[-1].end,), jnp.float32)))
    given |= dict(counters=jax.new_ref(jnp.zeros((2 * len(plan.phases),), jnp.int32)))
    over_devices = None
    if mailboxes is not None:
        assert epoch is not None
        over_devices = mailboxes.addresses.reshape(-1), epoch.reshape(1), mailboxes.memory
    given |= dict(over_devices=over_devices)
    convolved = convolutions.arrays_of(convolution)
    given |= dict(convolution=convolved)
    arrays, tree = jax.tree.flatten(given)
    last, array = plan.phases[-1], jax.ShapeDtypeStruct
    whole = array((last.splits * tokens * last.outputs,), jnp.float32)
    out = dict(results=[array((tokens * part,), dtype) for part in parts] if parts else [whole])
    out |= dict(stream=array((residual.size,), residual.dtype) if norms and residual is not None else None)
    out |= dict(epoch=None if mailboxes is None else array((1,), jnp.int32))
    outputs, out_tree = jax.tree.flatten(out)
    staged = max([1, *(tokens * step.weight.shape[0] // 2 // OWNERS for step in norms)])

    def body(*refs):
        count = len(arrays) + len(outputs)
        names = "blocks", "partials", "staging", "factors", "full", "free", "done"
        memory = dict(zip(names, refs[count:], strict=True))
        out = SimpleNamespace(**jax.tree.unflatten(out_tree, refs[len(arrays) : count]))
        refs = SimpleNamespace(**jax.tree.unflatten(tree, refs[: len(arrays)]), out=out, **memory)
        refs.convolution = convolutions.with_references(convolution, refs.convolution)
        _run(refs, plan, gated, norms, parts, dtype, ctas, tokens, None if mailboxes is None else mailboxes.capacity)

    terms = max(phase.terms for phase in plan.phases)
    heads = 0 if gated is None else fragments.head_elements(plan.phases[0].k_tiles)
    results = hp.kernel(
        body,
        out_type=tuple(outputs),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=fragments.WARPGROUPS + 1,
        thread_name=hp.WARPGROUP,
        scratch_types=[
            hp.SMEM((plan.slots, group_elements(plan.phases)), dtype),
            hp.SMEM((max(fragments.partial_elements(terms), heads),), jnp.float32),
            hp.SMEM((staged,), jnp.float32),
            hp.SMEM((max(len(norms), 1), MOST_TOKENS), jnp.float32),
            hp.Barrier(num_barriers=plan.slots),
            hp.Barrier(num_barriers=plan.slots, num_arrivals=fragments.WARPGROUPS),
            hp.Barrier(num_arrivals=fragments.WARPGROUPS + 1),
        ],
        compiler_params=hp.fast_math(),
        kernel_name="product_chain_of_few_tokens",
    )(*arrays)
    found = jax.tree.unflatten(out_tree, results)
    total = residual if found["stream"] is None else found["stream"].reshape(tokens, -1)
    epoch = None if found["epoch"] is None else found["epoch"].reshape(())
    if parts is None:
        return found["results"][0].reshape(last.splits, tokens, last.outputs), total, epoch
    results = tuple(part.reshape(tokens, -1) for part in found["results"])
    return results if convolved is None else (*results, jax.freeze(convolved["pool"])), total, epoch


def _run(
    refs: Any,
    plan: Schedule,
    gated: GatedNorm | None,
    norms: Sequence[Norm],
    parts: tuple[int, ...] | None,
    dtype: Any,
    ctas: int,
    tokens: int,
    capacity: int | None,
) -> None:
    """Run one CTA. `capacity` is the capacity of a side of a mailbox, or None on a single device."""
    cta = hp.axis_index("cta")
    owner = jnp.minimum(cta, OWNERS - 1)  # CTAs that own no channels load the channels of the last owner.
    phases, slots = plan.phases, jnp.int32(plan.slots)
    enough = 3 * ctas // 4  # CTAs that have signalled
    work = [phase.work(cta, ctas) for phase in phases]
    where = offsets(plan, tokens)
    groups = [phase.terms * (phase.k_tiles // phase.group) for phase in phases]  # of a block of outputs
    # The indices of each phase's first group of weights, and first block of outputs, over all phases.
    begin, ordinals = [jnp.int32(0)], [jnp.int32(0)]
    for count, own in zip(groups, work, strict=True):
        begin.append(begin[-1] + own.count * count)
        ordinals.append(ordinals[-1] + own.count)

    def group_of(phase: Phase, slot: Any, *shape: int) -> Any:
        """Return a group of weights in SMEM."""
        return refs.blocks.at[slot, hp.ds(0, TOKENS_ROWS * phase.group * WIDTH)].reshape(shape)

    def counter(index: int, *, of_owners: bool = False) -> Any:
        """Return the counter of CTAs that have sent a phase's results, or of owners that have sent the stream after it."""
        return refs.counters.at[hp.ds(2 * index + of_owners, 1)]

    def fetch() -> None:
        """Copy the blocks of all phases from GMEM to SMEM, `plan.depth` of them in flight. One warpgroup runs it."""
        hp.set_max_registers(40, action="decrease")
        for index, phase in enumerate(phases):

            def copy(n, _, index=index, phase=phase):
                block = begin[index] + n
                slot, earlier = jax.lax.rem(block, slots), jax.lax.rem(block - plan.depth, slots)
                hp.when(block >= slots)(lambda: hp.barrier_wait(refs.free.at[slot]))
                hp.when(block >= plan.depth)(lambda: hp.barrier_wait(refs.full.at[earlier]))
                split, first, step, _ = work[index]
                own_block, group = jax.lax.div(n, jnp.int32(groups[index])), jax.lax.rem(n, jnp.int32(groups[index]))
                each = jnp.int32(phase.k_tiles // phase.group)
                _, row, k_tile = phase.weights_of_block(split, first + own_block * step, jax.lax.div(group, each))
                k_tiles = hp.ds(k_tile + jax.lax.rem(group, each) * phase.group, phase.group)
                source = refs.weights[index].at[hp.ds(row, TOKENS_ROWS), k_tiles]
                hp.copy_gmem_to_smem(source, group_of(phase, slot, TOKENS_ROWS, phase.group, WIDTH), refs.full.at[slot])

            jax.lax.fori_loop(jnp.int32(0), begin[index + 1] - begin[index], copy, None)

    def inputs_of(index: int, total: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Return this thread's inputs of a phase, and its channels of the residual stream, in registers."""
        phase = phases[index]
        first = work[index].split * phase.k_tiles * WIDTH
        if index == 0:
            x = fragments.Vectors(refs.x, 0, phase.inputs, first)
            if gated is None:
                return fragments.load(x, phase.k_tiles, tokens), total
            gate, weight = refs.gated
            return fragments.load_gated(x, gate, weight, refs.partials, gated, phase.k_tiles, tokens), total
        at = where[index - 1]
        if phase.norm is None:
            messages.wait(counter(index - 1), enough)
            sent = fragments.Vectors(refs.sent, at.results, phase.inputs, first)
            return fragments.receive(sent, phase.k_tiles, tokens), total
        # The loads that need no other CTA are issued before the first wait.
        weights = residual_stream.load_own_weights(refs.norms[phase.norm], owner, phase.inputs, tokens)
        if total is None:
            total = residual_stream.load_own(refs.residual[0], owner, phase.inputs, tokens)
        messages.wait(counter(index - 1), enough)
        total = owned(index - 1, phase.norm, total, weights)
        messages.wait(counter(index - 1, of_owners=True), OWNERS)
        stream, step = fragments.Vectors(refs.sent, at.stream, phase.inputs, first), norms[phase.norm]
        factors = refs.factors.at[phase.norm]
        return residual_stream.receive_weighted(stream, at.squares, factors, step, phase.k_tiles, tokens, dtype), total

    def devices_of(norm: int) -> Devices:
        """Return the devices, with the count of sums before norm `norm`; for `len(norms)`, the count of all sums."""
        assert capacity is not None
        addresses, epoch, _ = refs.over_devices
        sums = sum(step.over_devices for step in norms[:norm])
        return Devices(addresses, epoch, addresses.shape[0] // 2 - 1, capacity, sums)

    def owned(index: int, norm: int, total: jax.Array, weights: jax.Array) -> jax.Array:
        """Add the results of a phase to this CTA's channels of the residual stream, if it is an owner."""
        phase, at = phases[index], where[index]
        size = tokens * phase.outputs

        def own() -> jax.Array:
            result = residual_stream.own(
                refs.sent,
                [at.results + split * size for split in range(phase.splits)],
                at.stream,
                at.squares,
                total,
                weights,
                refs.out.stream if norm + 1 == len(norms) else None,
                refs.staging,
                cta,
                norms[norm],
                phase.outputs,
                tokens,
                dtype,
                devices_of(norm) if norms[norm].over_devices else None,
            )
            messages.signal(counter(index, of_owners=True))
            return result

        return jax.lax.cond(cta < OWNERS, own, lambda: total)

    def multiply() -> None:
        """Run all phases. Two warpgroups run it together."""
        hp.set_max_registers(232, action="increase")
        total = None
        rows = None if refs.convolution is None else convolutions.load_rows(refs.convolution, tokens)
        for index in range(len(phases)):
            x, total = inputs_of(index, total)
            body = functools.partial(multiply_block, index, x, rows if index + 1 == len(phases) else None)
            jax.lax.fori_loop(jnp.int32(0), work[index].count, body, None)
            if index + 1 < len(phases):
                messages.signal(counter(index))
        if capacity is not None:
            hp.when(cta == 0)(lambda: next_epoch(devices_of(len(norms)), refs.out.epoch))

    def multiply_block(index: int, x: jax.Array, rows: jax.Array | None, own_block: Any, _: None) -> None:
        """Multiply by a block of weights, or by a block of the gate and a block of up.

        `rows` are the window rows of `load_rows`, or None if the results are not convolved.
        """
        phase, (split, first, step, _) = phases[index], work[index]
        each = phase.k_tiles // phase.group
        row = (first + own_block * step) * TOKENS_ROWS
        held = () if rows is None else (rows, convolutions.load_by_thread(refs.convolution, rows, row, tokens))
        sums: list[jax.Array] = []
        for group in range(groups[index]):
            slot = jax.lax.rem(begin[index] + own_block * groups[index] + group, slots)
            hp.barrier_wait(refs.full.at[slot])
            weights = group_of(phase, slot, TOKENS_ROWS, phase.group * WIDTH)
            found = fragments.multiply(weights, x, group % each * phase.group, phase.group, tokens)
            hp.barrier_arrive(refs.free.at[slot])
            sums = [*sums, found] if group % each == 0 else [*sums[:-1], sums[-1] + found]
        factors = None if phase.norm is None else refs.factors.at[phase.norm]
        fragments.finish(
            sums,
            refs.partials,
            ordinals[index] + own_block,
            tokens,
            factors,
            *emitting(index, split, row, phase.outputs, held),
        )

    def emitting(index: int, split: Any, row: Any, outputs: int, held: tuple[jax.Array, ...]) -> tuple[list[Any], Any]:
        """Return the `operands` and `emit` of `fragments.finish` for the results of a phase.

        `held` is the window rows, windows and taps in registers if the results are convolved, else ().
        """
        size = tokens * outputs
        if held:
            assert parts is not None
            step = refs.convolution
            emit = functools.partial(convolutions.emit_convolved, step, parts, dtype)
            return [*((ref, ()) for ref in refs.out.results), row, *held, (step.pool, ())], emit
        if index + 1 == len(phases):
            if parts is None:
                return [(refs.out.results[0], ()), split, row], functools.partial(
                    fragments.emit_result_sums, outputs, size
                )
            return [*((ref, ()) for ref in refs.out.results), row], functools.partial(
                fragments.emit_parts, parts, dtype
            )
        at = where[index].results
        if phases[index + 1].norm is None:
            return [(refs.sent, ()), row], functools.partial(fragments.emit_rounded, at, outputs, dtype)
        return [(refs.sent, ()), split, row], functools.partial(fragments.emit_sums, at, outputs, size)

    is_multiplying = hp.axis_index(hp.WARPGROUP) < _FETCHING
    hp.when(is_multiplying)(multiply)
    hp.when(jnp.logical_not(is_multiplying))(fetch)
    hp.finish_together(refs.done)
