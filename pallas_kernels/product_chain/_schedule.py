"""Which program of product_chain's launch multiplies what, and when what it needs is fetched.

Weights are cut into blocks of `ROWS` outputs. A warp multiplies one row, `WIDTH` inputs at a time. A program takes blocks
that follow each other. If a product has many inputs, and what reads it can add up shares, programs share the inputs of each
block, because a warp keeps the inputs in registers.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import device
from pallas_kernels.product_chain._steps import Norm, Product, Step

# In a step, a launch by Mosaic GPU begins about 4 us later than one by Triton. A step that needs no launch saves about 3 us.
FEWEST_STEPS = 4
WIDTH = 256  # inputs that a warp multiplies at a time, eight per lane
ROWS = 4  # outputs of a block, one for each warp of a warpgroup
_MAX_PIECES = 16  # of `WIDTH` inputs, which a warp keeps in registers
_FEW_PIECES = 12  # more are divided into shares, if they can be
_MAX_SLOTS = 10  # blocks in shared memory
_THREADS = 128  # of a warpgroup


class Phase(NamedTuple):
    """A product, between two waits of all programs for each other.

    Attributes:
        inputs: The number of its inputs.
        outputs: The number of its outputs; with a gate, of each half.
        halves: 2 if the first half of the weights is a gate, else 1.
        norm: The index of the norm that makes its inputs, in the order of the norms; None if there is none.
        shares: The number of programs that divide the inputs of a block among them.
    """

    inputs: int
    outputs: int
    halves: int
    norm: int | None
    shares: int

    @property
    def pieces(self) -> int:
        """Pieces of `WIDTH` inputs in a share."""
        return self.inputs // WIDTH // self.shares

    @property
    def blocks(self) -> int:
        """Blocks of outputs in each share and half."""
        return -(-self.outputs // ROWS)

    def work(self, program: Any, programs: int) -> tuple[Any, Any, Any]:
        """Returns the share of a program, its first block, and the block after its last one."""
        each = programs // self.shares
        share, number = jax.lax.rem(program, jnp.int32(self.shares)), jax.lax.div(program, jnp.int32(self.shares))
        cut = lambda n: jax.lax.div(jnp.minimum(n, each) * self.blocks, jnp.int32(each))
        return share, cut(number), cut(number + 1)


class Schedule(NamedTuple):
    """A chain as the launch runs it.

    Attributes:
        phases: The products.
        ends_with_norm: Whether a norm follows the last product.
        slots: Blocks that shared memory holds.
        depth: Blocks that are on their way at a time.
    """

    phases: tuple[Phase, ...]
    ends_with_norm: bool
    slots: int
    depth: int

    def is_sent(self, number: int) -> bool:
        """Whether programs send each other what a phase computes. Otherwise it is what the chain computes."""
        return number + 1 < len(self.phases) or self.ends_with_norm

    @property
    def starts(self) -> list[int]:
        """The first number of each phase among all that is sent, and the number after the last one."""
        sizes = [phase.shares * phase.outputs for n, phase in enumerate(self.phases) if self.is_sent(n)]
        return [0, *itertools.accumulate(sizes)]


def _shares(inputs: int) -> int:
    """Returns the least number of equal shares that are small enough for registers."""
    pieces = inputs // WIDTH
    return next(s for s in range(1, pieces + 1) if pieces % s == 0 and pieces // s <= _FEW_PIECES)


def schedule(steps: Sequence[Step], parts: tuple[int, ...] | None, itemsize: int) -> Schedule:
    """Returns the schedule of a chain.

    40 KB on their way to each core keep the memory of an H100 busy. With more, what programs tell each other would queue up
    behind them.
    """
    phases, norms = [], 0
    for number, step in enumerate(steps):
        if isinstance(step, Norm):
            norms += 1
            continue
        is_normed = number > 0 and isinstance(steps[number - 1], Norm)
        is_last = number + 1 == len(steps)
        can_share = parts is None if is_last else isinstance(steps[number + 1], Norm)
        inputs = step.weight.shape[1]
        shares = _shares(inputs) if can_share and not step.is_gated else 1
        phases.append(Phase(inputs, step.outputs, 1 + step.is_gated, norms - 1 if is_normed else None, shares))
    slot_bytes = slot_elements(phases) * itemsize
    vector_bytes = 4 * max(phase.pieces for phase in phases) * WIDTH
    slots = min(_MAX_SLOTS, (device.HOPPER_SHARED_BYTES - vector_bytes - 2048) // slot_bytes)
    depth = min(slots, max(2, 40_960 // slot_bytes))
    return Schedule(tuple(phases), isinstance(steps[-1], Norm), slots, depth)


def slot_elements(phases: Sequence[Phase]) -> int:
    """Returns the elements of the largest block."""
    return ROWS * WIDTH * max(phase.pieces for phase in phases)


def unsupported(x: jax.Array, steps: Sequence[Step], parts: tuple[int, ...] | None, programs: int) -> str | None:
    """Returns why one launch cannot run a chain, or None if it can."""
    products = [step for step in steps if isinstance(step, Product)]
    if x.shape[-2] != 1:
        return f"there must be one token, got {x.shape[-2]}"
    if len(steps) < 2 or not products:
        return f"there must be a product and another step, got {len(steps)} steps"
    dtypes = {jnp.dtype(step.weight.dtype) for step in products}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        return f"all weights must be bfloat16 or all float16, got {sorted(map(str, dtypes))}"
    channels = x.shape[-1]
    for number, step in enumerate(steps):
        if isinstance(step, Norm):
            if channels % _THREADS:
                return f"a norm must have a multiple of {_THREADS} channels, got {channels}"
            continue
        if channels % WIDTH:
            return f"a product must have a multiple of {WIDTH} inputs, got {channels}"
        if step.outputs % ROWS:
            return f"a product must have a multiple of {ROWS} outputs, got {step.outputs}"
        if step.is_gated and number + 1 == len(steps):
            return "the last product must not be gated"
        channels = step.outputs
    if parts is not None and any(part % ROWS for part in parts):
        return f"parts must be multiples of {ROWS}, got {list(parts)}"
    for phase in schedule(steps, parts, 2).phases:
        if phase.pieces > _MAX_PIECES or phase.shares > programs:
            return f"a product has too many inputs, {phase.inputs}"
    return None
