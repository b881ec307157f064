"""product_chain of 2 to 16 tokens in one launch, on Hopper GPUs, with a CTA for each SM.

One of a CTA's three warpgroups fetches blocks of weights, those of the products to come too, while the others wait for
what other CTAs compute. These two multiply by its blocks together, on tensor cores. Each warp has a part of the inputs
of all tokens in registers, and the warps' sums are added in SMEM: see `_fragments`. If a norm follows a product,
each of 128 CTAs adds up its channels of the residual stream, and sends them to all others: see `_residual_stream`. At
the end the threads that have results may convolve them: see `_convolution`. All CTAs must run at the same time, because
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


class Places(NamedTuple):
    """The offsets in `sent` at which CTAs store the results of a phase for each other, in words of 32 bits.

    Attributes:
        shares: Split-K partial sums, float32 [shares, tokens, outputs]; or the rounded results, two in each word, if the
            next phase takes them as they are.
        stream: If a norm follows, the residual stream times the norm's weights, two channels in each word.
        squares: If a norm follows, sums of squares of each owner's channels. float32 [tokens, owners]
        end: The offset after them.
    """

    shares: int
    stream: int
    squares: int
    end: int


def places(plan: Schedule, tokens: int) -> list[Places]:
    """Returns the offsets of all phases but the last one."""
    found: list[Places] = []
    for phase, after in itertools.pairwise(plan.phases):
        start, outputs = found[-1].end if found else 0, tokens * phase.outputs
        if after.norm is None:
            found.append(Places(start, start, start, start + outputs // 2))
            continue
        stream = start + phase.shares * outputs
        squares = stream + outputs // 2
        found.append(Places(start, stream, squares, squares + tokens * OWNERS))
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

    A convolution is none of `steps`. It returns the results, the residual stream, and the next epoch.
    """
    weights, norms, gated = weights_of(steps), norms_of(steps), gated_norm_of(steps)
    dtype, programs, tokens = weights[0].dtype, device.sm_count(), x.shape[0]
    plan = schedule_of_tokens(steps, parts, dtype.itemsize)
    cut = lambda weight: weight.reshape(weight.shape[0], -1, WIDTH)  # copies have at most 256 elements along an axis
    given = dict(x=x.reshape(-1), weights=[cut(weight) for weight in weights], norms=[step.weight for step in norms])
    given |= dict(residual=[] if residual is None else [residual.reshape(-1)])
    given |= dict(gated=[] if gated is None else [gated.gate.reshape(-1), gated.weight.astype(jnp.float32)])
    # What CTAs send each other begins as +0: see hopper/messages.py.
    given |= dict(sent=jax.new_ref(jnp.zeros((places(plan, tokens)[-1].end,), jnp.float32)))
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
    whole = array((last.shares * tokens * last.outputs,), jnp.float32)
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
        refs.convolution = convolutions.seen_by_programs(convolution, refs.convolution)
        _run(
            refs, plan, gated, norms, parts, dtype, programs, tokens, None if mailboxes is None else mailboxes.capacity
        )

    terms = max(phase.terms for phase in plan.phases)
    heads = 0 if gated is None else fragments.head_elements(plan.phases[0].pieces)
    results = hp.kernel(
        body,
        out_type=tuple(outputs),
        grid=(programs,),
        grid_names=("program",),
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
        return found["results"][0].reshape(last.shares, tokens, last.outputs), total, epoch
    results = tuple(part.reshape(tokens, -1) for part in found["results"])
    return results if convolved is None else (*results, jax.freeze(convolved["pool"])), total, epoch


def _run(
    refs: Any,
    plan: Schedule,
    gated: GatedNorm | None,
    norms: Sequence[Norm],
    parts: tuple[int, ...] | None,
    dtype: Any,
    programs: int,
    tokens: int,
    capacity: int | None,
) -> None:
    """Runs one CTA. `capacity` is that of a side of a mailbox, or None if there are no other devices."""
    program = hp.axis_index("program")
    owner = jnp.minimum(program, OWNERS - 1)  # Programs that own nothing load what the last owner has.
    phases, slots = plan.phases, jnp.int32(plan.slots)
    enough = 3 * programs // 4  # CTAs that have signalled
    work = [phase.work(program, programs) for phase in phases]
    where = places(plan, tokens)
    groups = [phase.terms * (phase.pieces // phase.group) for phase in phases]  # that make a block of outputs
    # The groups of weights and the blocks of outputs are numbered over all phases.
    begin, ordinals = [jnp.int32(0)], [jnp.int32(0)]
    for count, own in zip(groups, work, strict=True):
        begin.append(begin[-1] + own.count * count)
        ordinals.append(ordinals[-1] + own.count)

    def group_of(phase: Phase, slot: Any, *shape: int) -> Any:
        """A group of weights in SMEM."""
        return refs.blocks.at[slot, hp.ds(0, TOKENS_ROWS * phase.group * WIDTH)].reshape(shape)

    def counter(number: int, *, of_owners: bool = False) -> Any:
        """Counts the CTAs that have sent what a phase computes, or the owners that have added it to the stream."""
        return refs.counters.at[hp.ds(2 * number + of_owners, 1)]

    def fetch() -> None:
        """Fetches the blocks of all phases, a few at a time."""
        hp.set_max_registers(40, action="decrease")
        for number, phase in enumerate(phases):

            def one(n, _, number=number, phase=phase):
                block = begin[number] + n
                slot, earlier = jax.lax.rem(block, slots), jax.lax.rem(block - plan.depth, slots)
                hp.when(block >= slots)(lambda: hp.barrier_wait(refs.free.at[slot]))
                hp.when(block >= plan.depth)(lambda: hp.barrier_wait(refs.full.at[earlier]))
                share, first, step, _ = work[number]
                place, group = jax.lax.div(n, jnp.int32(groups[number])), jax.lax.rem(n, jnp.int32(groups[number]))
                each = jnp.int32(phase.pieces // phase.group)
                _, row, piece = phase.place(share, first + place * step, jax.lax.div(group, each))
                pieces = hp.ds(piece + jax.lax.rem(group, each) * phase.group, phase.group)
                source = refs.weights[number].at[hp.ds(row, TOKENS_ROWS), pieces]
                hp.copy_gmem_to_smem(source, group_of(phase, slot, TOKENS_ROWS, phase.group, WIDTH), refs.full.at[slot])

            jax.lax.fori_loop(jnp.int32(0), begin[number + 1] - begin[number], one, None)

    def inputs_of(number: int, total: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Returns this thread's inputs of a phase, and its part of the residual stream."""
        phase = phases[number]
        first = work[number].share * phase.pieces * WIDTH
        if number == 0:
            x = fragments.Vectors(refs.x, 0, phase.inputs, first)
            if gated is None:
                return fragments.load(x, phase.pieces, tokens), total
            gate, weight = refs.gated
            return fragments.load_gated(x, gate, weight, refs.partials, gated, phase.pieces, tokens), total
        at = where[number - 1]
        if phase.norm is None:
            messages.wait(counter(number - 1), enough)
            sent = fragments.Vectors(refs.sent, at.shares, phase.inputs, first)
            return fragments.receive(sent, phase.pieces, tokens), total
        # What is there already is loaded before anything is waited for.
        weights = residual_stream.load_own_weights(refs.norms[phase.norm], owner, phase.inputs, tokens)
        if total is None:
            total = residual_stream.load_own(refs.residual[0], owner, phase.inputs, tokens)
        messages.wait(counter(number - 1), enough)
        total = owned(number - 1, phase.norm, total, weights)
        messages.wait(counter(number - 1, of_owners=True), OWNERS)
        stream, step = fragments.Vectors(refs.sent, at.stream, phase.inputs, first), norms[phase.norm]
        factors = refs.factors.at[phase.norm]
        return residual_stream.receive_weighted(stream, at.squares, factors, step, phase.pieces, tokens, dtype), total

    def devices_of(norm: int) -> Devices:
        """Returns the devices and the epoch of a norm's sum. For the number of norms, the epoch is the next launch's."""
        assert capacity is not None
        addresses, epoch, _ = refs.over_devices
        sums = sum(step.over_devices for step in norms[:norm])
        return Devices(addresses, epoch, addresses.shape[0] // 2 - 1, capacity, sums)

    def owned(number: int, norm: int, total: jax.Array, weights: jax.Array) -> jax.Array:
        """Adds what a phase has computed to this CTA's part of the residual stream, if it has one."""
        phase, at = phases[number], where[number]
        size = tokens * phase.outputs

        def own() -> jax.Array:
            result = residual_stream.own(
                refs.sent,
                [at.shares + share * size for share in range(phase.shares)],
                at.stream,
                at.squares,
                total,
                weights,
                refs.out.stream if norm + 1 == len(norms) else None,
                refs.staging,
                program,
                norms[norm],
                phase.outputs,
                tokens,
                dtype,
                devices_of(norm) if norms[norm].over_devices else None,
            )
            messages.signal(counter(number, of_owners=True))
            return result

        return jax.lax.cond(program < OWNERS, own, lambda: total)

    def multiply() -> None:
        """Runs all phases."""
        hp.set_max_registers(232, action="increase")
        total = None
        rows = None if refs.convolution is None else convolutions.load_rows(refs.convolution, tokens)
        for number in range(len(phases)):
            x, total = inputs_of(number, total)
            body = functools.partial(multiply_block, number, x, rows if number + 1 == len(phases) else None)
            jax.lax.fori_loop(jnp.int32(0), work[number].count, body, None)
            if number + 1 < len(phases):
                messages.signal(counter(number))
        if capacity is not None:
            hp.when(program == 0)(lambda: next_epoch(devices_of(len(norms)), refs.out.epoch))

    def multiply_block(number: int, x: jax.Array, rows: jax.Array | None, place: Any, _: None) -> None:
        """Multiplies by a block of weights, or by two of which one is the gate of the other.

        `rows` are those of the windows of a convolution, or None if the results are not convolved.
        """
        phase, (share, first, step, _) = phases[number], work[number]
        each = phase.pieces // phase.group
        row = (first + place * step) * TOKENS_ROWS
        held = () if rows is None else (rows, convolutions.load_by_thread(refs.convolution, rows, row, tokens))
        sums: list[jax.Array] = []
        for group in range(groups[number]):
            slot = jax.lax.rem(begin[number] + place * groups[number] + group, slots)
            hp.barrier_wait(refs.full.at[slot])
            weights = group_of(phase, slot, TOKENS_ROWS, phase.group * WIDTH)
            found = fragments.multiply(weights, x, group % each * phase.group, phase.group, tokens)
            hp.barrier_arrive(refs.free.at[slot])
            sums = [*sums, found] if group % each == 0 else [*sums[:-1], sums[-1] + found]
        factors = None if phase.norm is None else refs.factors.at[phase.norm]
        fragments.finish(
            sums,
            refs.partials,
            ordinals[number] + place,
            tokens,
            factors,
            *emitting(number, share, row, phase.outputs, held),
        )

    def emitting(number: int, share: Any, row: Any, outputs: int, held: tuple[jax.Array, ...]) -> tuple[list[Any], Any]:
        """Returns where results of a phase go, and how threads store them: see `fragments.finish`.

        `held` is what threads have loaded for the convolution, if there is one.
        """
        size = tokens * outputs
        if held:
            assert parts is not None
            step = refs.convolution
            emit = functools.partial(convolutions.emit_convolved, step, parts, dtype)
            return [*((ref, ()) for ref in refs.out.results), row, *held, (step.pool, ())], emit
        if number + 1 == len(phases):
            if parts is None:
                return [(refs.out.results[0], ()), share, row], functools.partial(
                    fragments.emit_result_sums, outputs, size
                )
            return [*((ref, ()) for ref in refs.out.results), row], functools.partial(
                fragments.emit_parts, parts, dtype
            )
        at = where[number].shares
        if phases[number + 1].norm is None:
            return [(refs.sent, ()), row], functools.partial(fragments.emit_rounded, at, outputs, dtype)
        return [(refs.sent, ()), share, row], functools.partial(fragments.emit_sums, at, outputs, size)

    is_multiplying = hp.axis_index(hp.WARPGROUP) < _FETCHING
    hp.when(is_multiplying)(multiply)
    hp.when(jnp.logical_not(is_multiplying))(fetch)
    hp.finish_together(refs.done)
