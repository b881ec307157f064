"""The schedule of product_chain's launch: the blocks of weights of each CTA, and the number of copies in flight.

A launch is a list of phases, its instructions. Each is a product: a step computes its inputs or they are the results of the
phase before, CTAs multiply its blocks of weights, and send each other the results or store them.

Weights are cut into blocks of outputs. For a single token, a block is a row for each warp of a warpgroup, and a warp
multiplies `WIDTH` inputs (a K tile) at a time. For several tokens, all warps multiply a block together. A CTA takes
consecutive blocks. If a product has many inputs, and the step that reads it can add up partial sums, several CTAs divide
the inputs of each block (split-K), because warps keep the inputs in registers.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import device
from pallas_kernels._warpgroup import THREADS
from pallas_kernels.product_chain.step import Step, norms_of, places, weights_of
from pallas_kernels.quantized import not_an_array

# In a step, a launch by Mosaic GPU begins about 4 us later than one by Triton, and a launch less saves about 3 us.
FEWEST_STEPS = 4
WIDTH = 256  # inputs that a warp multiplies at a time, eight per lane
MOST_TOKENS = 16
OWNERS = 128  # CTAs that each own some channels of the residual stream, if there are several tokens
FEW_K_TILES = 12  # of `WIDTH` inputs; more are divided by split-K, if possible
_MAX_SLOTS = 10  # blocks in SMEM


class Launch(NamedTuple):
    """What the schedules of the two launches differ in.

    Attributes:
        rows: The number of outputs of a block.
        normed: The channels of a norm are a multiple of this.
        most_k_tiles: The most K tiles that a warp keeps in registers.
        most_group: The most K tiles of one copy; None copies whole blocks.
        sums_bytes: SMEM for partial sums of warps. None for a vector of inputs.
    """

    rows: int
    normed: int
    most_k_tiles: int
    most_group: int | None
    sums_bytes: int | None


ONE_TOKEN = Launch(rows=4, normed=THREADS, most_k_tiles=16, most_group=None, sums_bytes=None)
FEW_TOKENS = Launch(rows=8, normed=WIDTH, most_k_tiles=FEW_K_TILES, most_group=5, sums_bytes=20_480)


def launch_of(tokens: int, capacity: int | None) -> Launch:
    """Return the launch of a chain. That for a single token cannot add up over devices."""
    return ONE_TOKEN if tokens == 1 and capacity is None else FEW_TOKENS


class Work(NamedTuple):
    """A CTA's range of a product: its split, its first block, the stride between its blocks, and their number."""

    split: Any
    first: Any
    step: int
    count: Any


class WeightBlock(NamedTuple):
    """The indices of a block's weights: the token's expert, the first row, and the first K tile.

    A token's experts are in the order in which they are multiplied: shared experts first, then the best expert, and so on.
    `expert` is None for a product without experts.
    """

    expert: Any
    row: Any
    k_tile: Any


@dataclass(frozen=True)
class Phase:
    """A product, after which all CTAs wait for each other. Each kind of product extends it in its step's file.

    Attributes:
        index: The index among the phases.
        step: The index of the step to which it belongs.
        launch: The launch.
        inputs: The number of inputs; in the experts' second products, of one expert.
        outputs: The number of outputs; with a gate, of each half; in the experts' first products, of all chosen experts.
        terms: The number of blocks of weights per block of outputs: one, or two for gate and up, or one for each of several
            experts, whose products are added.
        rows: The number of outputs of a block.
        source: The index of the step that computes the inputs; None if they are the results of the phase before.
        is_normed: Whether that step is a norm, which needs all channels.
        splits: The number of CTAs that divide the inputs, or the experts, of a block among them (split-K).
        sends: What CTAs send each other: rounded results or partial sums. None if the results are the chain's.
        field: The name of the weights in the step.
    """

    index: int
    step: int
    launch: Launch
    inputs: int
    outputs: int
    terms: int
    rows: int
    source: int | None = None
    is_normed: bool = False
    splits: int = 1
    sends: Literal["results", "sums"] | None = "results"
    field: str = "weight"

    @property
    def k_tiles(self) -> int:
        """The number of K tiles, of `WIDTH` inputs each, of a block."""
        return self.inputs // WIDTH // self.splits

    @property
    def group(self) -> int:
        """The number of K tiles of one copy. Of several tokens there are few, so that few bytes are in flight."""
        most = self.launch.most_group
        counts = range(most, 2, -1) if most else ()
        return next((n for n in counts if self.k_tiles % n == 0), self.k_tiles)

    @property
    def copies(self) -> int:
        """The number of copies of a block of outputs."""
        return self.terms * (self.k_tiles // self.group)

    @property
    def vector(self) -> int:
        """The number of inputs that a CTA multiplies."""
        return self.k_tiles * WIDTH

    @property
    def blocks(self) -> int:
        """The number of blocks of outputs of each split."""
        return -(-self.outputs // self.rows)

    def work(self, cta: Any, ctas: int) -> Work:
        """Return the work of a CTA."""
        each = ctas // self.splits
        split, index = jax.lax.rem(cta, jnp.int32(self.splits)), jax.lax.div(cta, jnp.int32(self.splits))
        cut = lambda n: jax.lax.div(jnp.minimum(n, each) * self.blocks, jnp.int32(each))
        return Work(split, cut(index), 1, cut(index + 1) - cut(index))

    def weights_of_block(self, split: Any, block: Any, term: Any) -> WeightBlock:
        """Return the indices of the weights of a term of a block, whose results begin at `block * rows` of its split."""
        return WeightBlock(None, term * self.outputs + block * self.rows, split * self.k_tiles)

    def matrix(self, cta: Any, expert: Any) -> Any:
        """Return the weights in GMEM, of one of the token's experts if there are experts."""
        weights = getattr(cta.steps[self.step], self.field)
        return weights if expert is None else weights.at[cta.refs.chosen[expert]]

    def fetch(self, cta: Any) -> None:
        """Copy a CTA's blocks from GMEM to SMEM. One warpgroup runs it."""
        cta.copy_blocks(self, jnp.int32(0), cta.copies_of(self))

    def memory(self, phases: "Sequence[Phase]") -> dict[str, Any]:
        """Return the SMEM and the barriers that phases of its kind share, and other phases don't use."""
        return {}


class Schedule(NamedTuple):
    """The schedule of a chain in one launch.

    Attributes:
        phases: The products.
        ends_with_norm: Whether a norm follows the last product.
        slots: The number of blocks, or groups of their K tiles, that SMEM holds.
        depth: The number of them whose copies are in flight.
    """

    phases: tuple[Any, ...]
    ends_with_norm: bool
    slots: int
    depth: int

    @property
    def starts(self) -> list[int]:
        """The offset of each sent phase in the buffer `sent`, and the buffer's size, in float32 elements (one token)."""
        sizes = [phase.splits * phase.outputs for phase in self.phases if phase.sends]
        return [0, *itertools.accumulate(sizes)]


def schedule(steps: Sequence[Step], parts: tuple[int, ...] | None, itemsize: int, launch: Launch) -> Schedule:
    """Return the schedule of a chain.

    48 KB in flight per SM keep the memory of an H200 busy. With more, the messages between CTAs would queue up behind them.
    """
    phases: list[Phase] = []
    for place in places(steps, 0, parts):
        phases += place.step.phases(place, launch, len(phases))
    slot_bytes, other_bytes = slot_elements(phases) * itemsize, launch.sums_bytes or 4 * vector_elements(phases)
    slots = min(_MAX_SLOTS, (device.HOPPER_SHARED_BYTES - other_bytes - 4096) // slot_bytes)
    depth = min(slots, max(2, 49_152 // slot_bytes))
    return Schedule(tuple(phases), steps[-1].takes == "sums", slots, depth)


def vector_elements(phases: Sequence[Phase]) -> int:
    """Return the most inputs that a CTA stores to SMEM for its warps: all channels after a norm, else its split's."""
    return max(phase.inputs if phase.is_normed else phase.vector for phase in phases)


def slot_elements(phases: Sequence[Phase]) -> int:
    """Return the number of elements of the largest copy."""
    return WIDTH * max(phase.rows * phase.group for phase in phases)


def is_short(steps: Sequence[Step]) -> bool:
    """Whether a chain has too few steps for one launch to save time. A gated norm, which saves little, does not count."""
    return sum(step.is_counted for step in steps) < FEWEST_STEPS


def unsupported(
    x: jax.Array,
    steps: Sequence[Step],
    residual: jax.Array | None,
    parts: tuple[int, ...] | None,
    ctas: int,
    capacity: int | None = None,
) -> str | None:
    """Return why one launch cannot run a chain, or None if it can.

    Args:
        x: See api.py, as for the next three.
        steps: The steps, without a convolution.
        residual: The residual stream.
        parts: The sizes of the results.
        ctas: The number of CTAs, one per SM.
        capacity: The number of values that a side of a mailbox holds; None on a single device.
    """
    narrow = not_an_array(*weights_of(steps))
    if narrow is not None:
        return narrow
    launch = launch_of(x.shape[-2], capacity)
    if not 1 <= x.shape[-2] <= MOST_TOKENS:
        return f"there must be 1 to {MOST_TOKENS} tokens, got {x.shape[-2]}"
    counted = sum(step.is_counted for step in steps)
    if counted < 2 or not weights_of(steps):
        return f"there must be a product and another step, got {counted} steps"
    reason = _unsupported_dtypes(x, steps, residual, launch)
    if launch is FEW_TOKENS and ctas < OWNERS and norms_of(steps):
        reason = reason or f"norms of several tokens need {OWNERS} SMs, got {ctas}"
    for place in places(steps, x.shape[-1], parts):
        outputs = place.step.outputs_of(place.channels)
        if place.step.weights and place.channels % WIDTH:
            reason = reason or f"a product must have a multiple of {WIDTH} inputs, got {place.channels}"
        if place.step.weights and outputs % launch.rows:
            reason = reason or f"a product must have a multiple of {launch.rows} outputs, got {outputs}"
        reason = reason or place.step.unsupported(place, launch, x, capacity)
    if reason is not None:
        return reason
    if parts is not None and any(part % launch.rows for part in parts):
        return f"parts must be multiples of {launch.rows}, got {list(parts)}"
    plan = schedule(steps, parts, 2, launch)
    for phase in plan.phases:
        if phase.k_tiles > launch.most_k_tiles or phase.splits > ctas or (plan.slots < 2 and phase.is_normed):
            return f"a product has too many inputs, {phase.inputs}"
        reason = None if phase.source is None else steps[phase.source].unsupported_inputs(phase, launch)
        if reason is not None:
            return reason
    return None


def _unsupported_dtypes(x: jax.Array, steps: Sequence[Step], residual: jax.Array | None, launch: Launch) -> str | None:
    """Return why a launch cannot run a chain of these dtypes, or None."""
    weights = {jnp.dtype(weight.dtype) for weight in weights_of(steps)}
    if len(weights) > 1 or not weights <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        return f"all weights must be bfloat16 or all float16, got {sorted(map(str, weights))}"
    every = {jnp.dtype(array.dtype) for array in (x, *([] if residual is None else [residual]))} | weights
    if launch is FEW_TOKENS and len(every) > 1:
        return f"all arrays of several tokens must have one dtype, got {sorted(map(str, every))}"
    return None
