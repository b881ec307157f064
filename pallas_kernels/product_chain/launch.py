"""What product_chain's two launches share (SM90): their arrays, a CTA's work, and the warpgroup that fetches weights.

There is a CTA for each SM, and all must be resident at the same time, because they wait for each other. One of a CTA's
warpgroups copies blocks of weights to SMEM, also of later phases, while the others wait for the results of other CTAs. It
has a ring of slots, with barriers that complete when a slot is full, and when it is free again.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import device
from pallas_kernels._lazy_hopper import hp, messages
from pallas_kernels.all_reduce import Mailboxes
from pallas_kernels.product_chain import schedule as schedules
from pallas_kernels.product_chain.schedule import WIDTH, Launch, Phase, Schedule
from pallas_kernels.product_chain.step import Step, norms_of, weights_of


class Call(NamedTuple):
    """What is known of a launch when it is traced.

    Attributes:
        plan: The schedule.
        parts: The sizes of the results, or None.
        dtype: The dtype of the weights.
        ctas: The number of CTAs.
        tokens: The number of tokens.
        capacity: The capacity of a side of a mailbox, or None on a single device.
    """

    plan: Schedule
    parts: tuple[int, ...] | None
    dtype: Any
    ctas: int
    tokens: int
    capacity: int | None


class Cta:
    """A CTA of a launch. Each of the two launches extends it.

    Attributes:
        launch: How its schedule differs from the other launch's.
        name: The name of the launch in a profile.
        warpgroups: The number of a CTA's warpgroups.
        outputs: The kernel's output arrays, in their order.
        axes: The number of axes of the chain's inputs.
        counters: The number of counters of a phase.
        enough: How many warps or CTAs must have sent a phase's results before others poll for them.
    """

    launch: ClassVar[Launch]
    name: ClassVar[str]
    warpgroups: ClassVar[int]
    outputs: ClassVar[tuple[str, ...]]
    axes: ClassVar[int]
    counters: ClassVar[int]
    enough: int

    def __init__(self, refs: Any, steps: Sequence[Any], call: Call) -> None:
        """`refs` has the references of all arrays and of SMEM by name. `steps` have references for arrays."""
        self.refs, self.steps, self.call = refs, steps, call
        self.plan, self.parts, self.dtype, self.ctas, self.tokens, _ = call
        self.norms = norms_of(steps)
        self.sink = steps[-1] if steps[-1].takes == "parts" else None
        self.sink_rows: Any = None  # what it loads before the first phase
        self.cta = hp.axis_index("cta")
        self.total: Any = None  # the residual stream, or this CTA's channels of it, in registers

    def divide(self) -> None:
        """Compute this CTA's work, and the index of each phase's first copy among all copies."""
        self.work = [phase.work(self.cta, self.ctas) for phase in self.plan.phases]
        self.begin = [jnp.int32(0)]
        for phase, own in zip(self.plan.phases, self.work, strict=True):
            self.count(phase, own.count)

    def count(self, phase: Phase, blocks: Any) -> None:
        """Count the copies of a phase, given the number of its blocks."""
        self.begin.append(self.begin[-1] + blocks * phase.copies)

    def fetch(self) -> None:
        """Copy the blocks of all phases from GMEM to SMEM. One warpgroup runs it."""
        for phase in self.plan.phases:
            phase.fetch(self)

    def copies_of(self, phase: Phase) -> Any:
        """Return the number of this CTA's copies of a phase."""
        return self.begin[phase.index + 1] - self.begin[phase.index]

    def copy_blocks(self, phase: Phase, first: Any, stop: Any, matrix: Callable[[Any], Any] | None = None) -> None:
        """Run this CTA's copies of a phase from `first` up to `stop`, `plan.depth` of them in flight.

        matrix(expert) returns the weights in GMEM; None is `phase.matrix`.
        """
        matrix = matrix or functools.partial(phase.matrix, self)
        slots, depth = jnp.int32(self.plan.slots), self.plan.depth

        def copy(n: Any, _: None) -> None:
            index = self.begin[phase.index] + n
            slot, earlier = jax.lax.rem(index, slots), jax.lax.rem(index - depth, slots)
            hp.when(index >= slots)(lambda: hp.barrier_wait(self.refs.free.at[slot]))
            hp.when(index >= depth)(lambda: hp.barrier_wait(self.refs.full.at[earlier]))
            target = self.slot(phase, slot, phase.rows, phase.group, WIDTH)
            hp.copy_gmem_to_smem(self.source(phase, n, matrix), target, self.refs.full.at[slot])

        jax.lax.fori_loop(first, stop, copy, None)

    def source(self, phase: Phase, copy: Any, matrix: Callable[[Any], Any]) -> Any:
        """Return the weights of one of this CTA's copies of a phase, in GMEM."""
        raise NotImplementedError

    def block_of(self, phase: Phase, own_block: Any) -> Any:
        """Return the index of a block of a phase, given its index among this CTA's blocks."""
        _, first, step, _ = self.work[phase.index]
        return first + own_block * step

    def weights_at(self, phase: Phase, block: Any, term: Any, matrix: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
        """Return the weights in GMEM, and the first row and K tile, of a term of a block of this CTA's split."""
        expert, row, k_tile = phase.weights_of_block(self.work[phase.index].split, block, term)
        return matrix(expert), row, k_tile

    def slot(self, phase: Phase, slot: Any, *shape: int) -> Any:
        """Return a phase's block of weights in SMEM."""
        return self.refs.blocks.at[slot, hp.ds(0, phase.rows * phase.group * WIDTH)].reshape(shape)

    @contextlib.contextmanager
    def block(self, phase: Phase, own_block: Any, copy: int) -> Iterator[Any]:
        """Wait for a copy of a block, [rows, inputs] in SMEM, and free its slot afterwards."""
        index = self.begin[phase.index] + own_block * phase.copies + copy
        slot = jax.lax.rem(index, jnp.int32(self.plan.slots))
        hp.barrier_wait(self.refs.full.at[slot])
        yield self.slot(phase, slot, phase.rows, phase.group * WIDTH)
        hp.barrier_arrive(self.refs.free.at[slot])

    def sink_of(self, phase: Phase) -> Any:
        """Return the step that stores a phase's results, if there is one."""
        return None if phase.sends else self.sink

    def counter(self, index: int, *, of_owners: bool = False) -> Any:
        """Return the counter of those that have sent a phase's results, or of owners that have sent the stream after it."""
        return self.refs.counters.at[hp.ds(self.counters * index + of_owners, 1)]

    def wait_for(self, index: int) -> None:
        """Wait until most CTAs have sent a phase's results."""
        messages.wait(self.counter(index), self.enough)


def launch(
    kind: type[Any],
    x: jax.Array,
    steps: Sequence[Step],
    residual: jax.Array | None,
    mailboxes: Mailboxes | None,
    epoch: jax.Array | None,
    *,
    parts: tuple[int, ...] | None,
) -> tuple[Any, jax.Array | None, jax.Array | None]:
    """Run a chain in one launch of `kind`, a class that extends `Cta`. See api.py.

    Returns the results, the residual stream, and the next epoch.
    """
    dtype, tokens = weights_of(steps)[0].dtype, x.shape[-2]
    plan = schedules.schedule(steps, parts, dtype.itemsize, kind.launch)
    capacity = None if mailboxes is None else mailboxes.capacity
    call = Call(plan, parts, dtype, device.sm_count(), tokens, capacity)
    steps, own = [step.prepared() for step in steps], _inputs(kind, call, x, residual, mailboxes, epoch)
    operands = {(name, 0): array for name, array in own.items()}
    operands |= {(role, n): given for n, step in enumerate(steps) for role, given in step.operands().items()}
    arrays, tree = jax.tree.flatten(operands)
    out = _outputs(call, steps, residual)
    shapes, out_tree = jax.tree.flatten([out[name] for name in kind.outputs])
    scratch = kind.memory(call, steps)

    def body(*refs: Any) -> None:
        refs, results, memory = refs[: len(arrays)], refs[len(arrays) : -len(scratch)], refs[-len(scratch) :]
        given, results = jax.tree.unflatten(tree, refs), jax.tree.unflatten(out_tree, results)
        named = {name: given[name, 0] for name in own} | dict(zip(kind.outputs, results, strict=True))
        named |= dict(zip(scratch, memory, strict=True))
        of_step = lambda n: {role: given[role, n] for role in steps[n].roles}
        kind(SimpleNamespace(**named), [step.with_references(of_step(n)) for n, step in enumerate(steps)], call).run()

    found = hp.kernel(
        body,
        out_type=tuple(shapes),
        grid=(call.ctas,),
        grid_names=("cta",),
        num_threads=kind.warpgroups,
        thread_name=hp.WARPGROUP,
        scratch_types=list(scratch.values()),
        compiler_params=hp.fast_math(),
        kernel_name=kind.name,
    )(*arrays)
    out = dict(zip(kind.outputs, jax.tree.unflatten(out_tree, found), strict=True))
    total = residual if out["stream"] is None else out["stream"].reshape(tokens, -1)
    epoch = epoch if mailboxes is None else out["epoch"].reshape(())
    if parts is not None:
        results = [part.reshape(tokens, -1) for part in out["results"]]
        return (*results, *(array for step in steps for array in step.updated())), total, epoch
    (results,), shape = out["results"], (tokens, -1) if plan.ends_with_norm else (-1, tokens, plan.phases[-1].outputs)
    return results.reshape(shape), total, epoch


def _inputs(
    kind: type[Any], call: Call, x: jax.Array, residual: jax.Array | None, mailboxes: Any, epoch: jax.Array | None
) -> dict[str, Any]:
    """Return the arrays that a launch takes beside the arrays of the steps."""
    given = dict(
        x=x.reshape((-1, x.shape[-1])[: kind.axes]), residual=None if residual is None else residual.reshape(-1)
    )
    # The buffer through which CTAs exchange results begins as +0: see hopper/messages.py. An array must not be empty.
    given |= dict(sent=jax.new_ref(jnp.zeros((max(kind.words(call), 1),), jnp.float32)))
    given |= dict(counters=jax.new_ref(jnp.zeros((kind.counters * len(call.plan.phases),), jnp.int32)))
    if mailboxes is not None and epoch is not None:
        given |= dict(over_devices=(mailboxes.addresses.reshape(-1), epoch.reshape(1), mailboxes.memory))
    return given


def _outputs(call: Call, steps: Sequence[Any], residual: jax.Array | None) -> dict[str, Any]:
    """Return the shapes of the last step's results, of the residual stream after the last norm, and of the next epoch."""
    array, last = jax.ShapeDtypeStruct, call.plan.phases[-1]
    stream = array((residual.size,), residual.dtype) if residual is not None and norms_of(steps) else None
    if call.parts is not None:
        results = [array((call.tokens * part,), call.dtype) for part in call.parts]
    elif stream is not None and call.plan.ends_with_norm:
        results = [array(stream.shape, steps[-1].out_dtype or stream.dtype)]
    else:
        results = [array((last.splits * call.tokens * last.outputs,), jnp.float32)]
    return dict(results=results, stream=stream, epoch=None if call.capacity is None else array((1,), jnp.int32))
