"""How product_chain's launch assigns blocks of parameters to CTAs, and how far ahead it copies them to SMEM.

Weights are cut into blocks of outputs. Of a single token, a block is `ROWS` rows, and a warp multiplies one of them,
`WIDTH` inputs at a time. Of several tokens, it is `TOKENS_ROWS` rows, and all warps multiply it together. A CTA takes
blocks that follow each other. If a product has many inputs, and what reads it can add up shares, CTAs share the inputs
of each block, because warps keep the inputs in registers.

A mixture of experts is three products: the router's, and the first and the second one of the chosen experts.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import device
from pallas_kernels._warpgroup import LANES, THREADS, pack_of_spread
from pallas_kernels.linear.config import default_config as linear_config
from pallas_kernels.product_chain._steps import (
    Experts,
    GatedNorm,
    Norm,
    Product,
    Step,
    gated_norm_of,
    norms_of,
    weights_of,
)

# In a step, a launch by Mosaic GPU begins about 4 us later than one by Triton. A step that needs no launch saves about 3 us.
FEWEST_STEPS = 4
WIDTH = 256  # inputs that a warp multiplies at a time, eight per lane
ROWS = 4  # outputs that the warps of a warpgroup multiply at a time, one each
MOST_TOKENS = 16
TOKENS_ROWS = 8  # outputs of a block, if there are several tokens
OWNERS = 128  # CTAs that have a part of the residual stream each, if there are several tokens
_MAX_PIECES = 16  # of `WIDTH` inputs, which a warp keeps in registers
_FEW_PIECES = 12  # more are divided into shares, if they can be
_MAX_SLOTS = 10  # blocks in SMEM
_MAX_ROWS = 16  # of a block
_MAX_GROUP = 5  # pieces that are fetched at once, if there are several tokens
_SUMS_BYTES = 20_480  # SMEM for sums of warps, if there are several tokens


class Work(NamedTuple):
    """What a CTA does of a product: its share, its first block, the distance between two, and their number."""

    share: Any
    first: Any
    step: int
    count: Any


class Place(NamedTuple):
    """Where the weights of a block are: in which of the token's experts, from which row and which piece of inputs on.

    A token's experts are in the order in which they are multiplied: shared ones first, then the best one. None is for a
    product without experts.
    """

    expert: Any
    row: Any
    piece: Any


class Phase(NamedTuple):
    """A product, between two waits of all CTAs for each other.

    Attributes:
        inputs: The number of its inputs; of an expert's second product, those of one expert.
        outputs: The number of its outputs; with a gate, of each half. Those of all chosen experts' first products.
        terms: The blocks of weights that a block of outputs takes: one, or a gate and what it multiplies, or those of
            several experts, whose products are added.
        norm: The index of the norm that makes its inputs, in the order of the norms; None if there is none.
        shares: The number of CTAs that divide the inputs, or the experts, of a block among them.
        kind: Whose product it is. The experts' first products take the inputs of the router's.
        rows: Outputs of a block.
        experts: The experts that are multiplied; None if there are none.
    """

    inputs: int
    outputs: int
    terms: int
    norm: int | None
    shares: int
    kind: Literal["product", "router", "up", "down"] = "product"
    rows: int = ROWS
    experts: Experts | None = None

    @property
    def mixture(self) -> Experts:
        """The mixture of experts that this phase belongs to. Only phases of a mixture have one."""
        assert self.experts is not None
        return self.experts

    @property
    def pieces(self) -> int:
        """Pieces of `WIDTH` inputs in a block."""
        return self.inputs // WIDTH // (1 if self.kind == "down" else self.shares)

    @property
    def group(self) -> int:
        """Pieces of a block that are fetched at once, if there are several tokens: few, so that little is on its way."""
        return next((n for n in range(_MAX_GROUP, 2, -1) if self.pieces % n == 0), self.pieces)

    @property
    def vector(self) -> int:
        """Inputs that a CTA multiplies."""
        return self.pieces * WIDTH * (self.terms if self.kind == "down" else 1)

    @property
    def blocks(self) -> int:
        """Blocks of outputs in each share."""
        return -(-self.outputs // self.rows)

    def work(self, program: Any, programs: int) -> Work:
        """Returns the work of a CTA.

        In the experts' first products, neighbouring blocks are different CTAs'. So the blocks of shared experts, which
        come first, are spread over all CTAs, which fetch them before the other experts are chosen.
        """
        if self.kind == "up":
            return Work(jnp.int32(0), program, programs, _count_in_turn(self.blocks, program, programs))
        each = programs // self.shares
        share, number = jax.lax.rem(program, jnp.int32(self.shares)), jax.lax.div(program, jnp.int32(self.shares))
        cut = lambda n: jax.lax.div(jnp.minimum(n, each) * self.blocks, jnp.int32(each))
        return Work(share, cut(number), 1, cut(number + 1) - cut(number))

    def count_of_shared(self, program: Any, programs: int) -> Any:
        """Returns how many of a CTA's blocks are shared experts', in the experts' first products."""
        return _count_in_turn(self.mixture.shared * self.blocks // self.mixture.chosen, program, programs)

    def place(self, share: Any, block: Any, term: Any) -> Place:
        """Returns where the weights of a term of a block are. The block's results begin at `block * rows` of its share."""
        if self.kind == "up":
            each = jnp.int32(self.blocks // self.mixture.chosen)
            row = term * each * self.rows + jax.lax.rem(block, each) * self.rows
            return Place(jax.lax.div(block, each), row, 0)
        if self.kind == "down":
            return Place(share * self.terms + term, block * self.rows, 0)
        return Place(None, term * self.outputs + block * self.rows, share * self.pieces)


class Schedule(NamedTuple):
    """A chain as the launch runs it.

    Attributes:
        phases: The products.
        ends_with_norm: Whether a norm follows the last product.
        slots: Blocks that SMEM holds.
        depth: Blocks that are on their way at a time.
    """

    phases: tuple[Phase, ...]
    ends_with_norm: bool
    slots: int
    depth: int

    def is_sent(self, number: int) -> bool:
        """Whether CTAs send each other the results of a phase. The results of the others are the chain's."""
        return number + 1 < len(self.phases) or self.ends_with_norm

    @property
    def starts(self) -> list[int]:
        """The first number of each phase among all that is sent, and the number after the last one."""
        sizes = [phase.shares * phase.outputs for n, phase in enumerate(self.phases) if self.is_sent(n)]
        return [0, *itertools.accumulate(sizes)]

    @property
    def vector(self) -> int:
        """The most numbers that a CTA hands to its warps."""
        return vector_elements(self.phases)

    @property
    def has_experts(self) -> bool:
        """Whether experts are chosen."""
        return any(phase.experts is not None for phase in self.phases)


def _count_in_turn(blocks: int, program: Any, programs: int) -> Any:
    """Returns how many blocks a CTA gets if they are dealt out in turn."""
    return jax.lax.div(blocks + programs - 1 - program, jnp.int32(programs))


def _shares(inputs: int) -> int:
    """Returns the least number of equal shares that are small enough for registers."""
    pieces = inputs // WIDTH
    return next(s for s in range(1, pieces + 1) if pieces % s == 0 and pieces // s <= _FEW_PIECES)


def _shares_of_results(weight: jax.Array) -> int:
    """Returns the number of shares of a chain's results, sums of the last product. It is that of separate launches."""
    x, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((MOST_TOKENS, weight.shape[1]), weight.shape))
    return linear_config(x, weights, is_summed=True).shares


def _of_experts(experts: Experts, norm: int | None) -> list[Phase]:
    """Returns the three products of a mixture of experts.

    Routers have outputs for whole vectors of threads; those that don't exist have weights 0. A block of the second product
    has as many rows as make it no larger than one of the first.
    """
    inputs, size = experts.up.shape[2], experts.down.shape[2]
    outputs = -(-experts.router.shape[0] // THREADS) * THREADS
    first = Phase(inputs, outputs, 1, norm, 1, "router", experts=experts)
    second = Phase(inputs, experts.chosen * size, 2, None, 1, "up", experts=experts)
    counts = range(1, experts.chosen + 1)
    shares = next(s for s in counts if experts.chosen % s == 0 and experts.chosen // s * size // WIDTH <= _FEW_PIECES)
    rows = ROWS
    while 2 * rows <= _MAX_ROWS and 2 * rows * size <= ROWS * inputs and experts.outputs % (2 * rows) == 0:
        rows *= 2
    terms = experts.chosen // shares
    return [first, second, Phase(size, experts.outputs, terms, None, shares, "down", rows, experts)]


def schedule(steps: Sequence[Step], parts: tuple[int, ...] | None, itemsize: int) -> Schedule:
    """Returns the schedule of a chain of one token.

    48 KB on their way to each SM keep the memory of an H200 busy. With more, what CTAs tell each other would queue up
    behind them.
    """
    phases = _phases(steps, parts, ROWS)
    return _with_slots(phases, steps, slot_elements(phases) * itemsize, 4 * vector_elements(phases))


def schedule_of_tokens(steps: Sequence[Step], parts: tuple[int, ...] | None, itemsize: int) -> Schedule:
    """Returns the schedule of a chain of several tokens. A block is fetched in groups of pieces: see `Phase.group`."""
    phases = _phases(steps, parts, TOKENS_ROWS)
    return _with_slots(phases, steps, group_elements(phases) * itemsize, _SUMS_BYTES)


def _with_slots(phases: tuple[Phase, ...], steps: Sequence[Step], slot_bytes: int, other_bytes: int) -> Schedule:
    """Makes a schedule. `other_bytes` of SMEM are used for other things than weights."""
    slots = min(_MAX_SLOTS, (device.HOPPER_SHARED_BYTES - other_bytes - 4096) // slot_bytes)
    depth = min(slots, max(2, 49_152 // slot_bytes))
    return Schedule(phases, isinstance(steps[-1], Norm), slots, depth)


def _phases(steps: Sequence[Step], parts: tuple[int, ...] | None, rows: int) -> tuple[Phase, ...]:
    """Returns the products of a chain, in blocks of `rows` outputs."""
    phases: list[Phase] = []
    norms = 0
    for number, step in enumerate(steps):
        if isinstance(step, Norm):
            norms += 1
        if isinstance(step, Norm | GatedNorm):
            continue
        is_normed = number > 0 and isinstance(steps[number - 1], Norm)
        norm = norms - 1 if is_normed else None
        if isinstance(step, Experts):
            phases += _of_experts(step, norm)
            continue
        is_last = number + 1 == len(steps)
        can_share = not step.is_gated and (parts is None if is_last else isinstance(steps[number + 1], Norm))
        inputs, shares = step.weight.shape[1], 1
        if can_share:
            shares = _shares_of_results(step.weight) if is_last else _shares(inputs)
        phases.append(Phase(inputs, step.outputs, 1 + step.is_gated, norm, shares, rows=rows))
    return tuple(phases)


def slot_elements(phases: Sequence[Phase]) -> int:
    """Returns the elements of the largest block."""
    return WIDTH * max(phase.rows * phase.pieces for phase in phases)


def vector_elements(phases: Sequence[Phase]) -> int:
    """Returns the most inputs that a CTA hands to its warps. What is normed it has as a whole, also for a share."""
    return max(phase.vector if phase.norm is None else phase.inputs for phase in phases)


def group_elements(phases: Sequence[Phase]) -> int:
    """Returns the elements of the largest group of a block's pieces."""
    return WIDTH * max(phase.rows * phase.group for phase in phases)


def is_short(steps: Sequence[Step]) -> bool:
    """Whether a chain has too few steps for one launch to save time. A gated norm, which saves little, does not count."""
    return len(_without_gated_norm(steps)) < FEWEST_STEPS


def _without_gated_norm(steps: Sequence[Step]) -> list[Product | Norm | Experts]:
    return [step for step in steps if not isinstance(step, GatedNorm)]


def is_of_one_token(x: jax.Array, capacity: int | None) -> bool:
    """Whether a chain takes the launch for a single token, which cannot add up over devices."""
    return x.shape[-2] == 1 and capacity is None


def unsupported(
    x: jax.Array,
    steps: Sequence[Step],
    residual: jax.Array | None,
    parts: tuple[int, ...] | None,
    programs: int,
    capacity: int | None = None,
) -> str | None:
    """Returns why one launch cannot run a chain, or None if it can.

    Args:
        x: See api.py, as for the next three.
        steps: The steps.
        residual: The residual stream.
        parts: The sizes of the results.
        programs: The number of SMs.
        capacity: The numbers that a side of a mailbox holds; None if there are no other devices.
    """
    others = _without_gated_norm(steps)
    multiplied = [step for step in others if not isinstance(step, Norm)]
    is_one = is_of_one_token(x, capacity)
    reason = None if is_one else _unsupported_tokens(x, others, residual, programs)
    if reason is not None:
        return reason
    if len(others) < 2 or not multiplied:
        return f"there must be a product and another step, got {len(others)} steps"
    dtypes = {jnp.dtype(weight.dtype) for weight in weights_of(multiplied)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        return f"all weights must be bfloat16 or all float16, got {sorted(map(str, dtypes))}"
    rows, normed, most_pieces = (ROWS, THREADS, _MAX_PIECES) if is_one else (TOKENS_ROWS, WIDTH, _FEW_PIECES)
    channels = x.shape[-1]
    for number, step in enumerate(steps):
        if isinstance(step, GatedNorm):
            continue
        if isinstance(step, Norm):
            if channels % normed:
                return f"a norm must have a multiple of {normed} channels, got {channels}"
            words = x.shape[-2] * channels
            if step.over_devices and capacity is not None and words > capacity:
                return f"a mailbox must hold {words} numbers, got {capacity}"
            continue
        if channels % WIDTH:
            return f"a product must have a multiple of {WIDTH} inputs, got {channels}"
        if step.outputs % rows:
            return f"a product must have a multiple of {rows} outputs, got {step.outputs}"
        if isinstance(step, Experts):
            around = steps[max(number - 1, 0)], steps[min(number + 1, len(steps) - 1)]
            if not all(isinstance(each, Norm) for each in around):
                return "experts must be between two norms"
            if step.chosen > LANES or step.down.shape[2] % WIDTH or step.down.shape[2] > _FEW_PIECES * WIDTH:
                return f"there must be at most {LANES} experts of multiples of {WIDTH} channels, up to 3072"
        elif number + 1 == len(steps):
            if step.is_gated:
                return "the last product must not be gated"
            share = WIDTH * (_shares_of_results(step.weight) if parts is None else 1)
            if channels % share:
                return f"the last product must have a multiple of {share} inputs, got {channels}"
        channels = step.outputs
    if parts is not None and any(part % rows for part in parts):
        return f"parts must be multiples of {rows}, got {list(parts)}"
    plan = (schedule if is_one else schedule_of_tokens)(steps, parts, 2)
    phases = plan.phases
    for phase in phases:
        if phase.pieces > most_pieces or phase.shares > programs or (plan.slots < 2 and phase.norm is not None):
            return f"a product has too many inputs, {phase.inputs}"
    gated = gated_norm_of(steps)
    if gated is None:
        return None
    dim = gated.weight.shape[0]
    if is_one:
        return _unsupported_heads(dim, phases[0])
    is_right = dim in (32, 64, 128, 256)
    return None if is_right else f"heads of a gated norm must have 32, 64, 128 or 256 channels, got {dim}"


def _unsupported_tokens(
    x: jax.Array, others: Sequence[Product | Norm | Experts], residual: jax.Array | None, programs: int
) -> str | None:
    """Returns what only one launch of several tokens cannot run, or None. `others` are the steps without a gated norm."""
    if not 1 <= x.shape[-2] <= MOST_TOKENS:
        return f"there must be 1 to {MOST_TOKENS} tokens, got {x.shape[-2]}"
    if not others or not all(isinstance(others[end], Product) for end in (0, -1)):
        return "of several tokens, the first and the last step must be products"
    if any(isinstance(step, Experts) for step in others):
        return "experts must have one token"
    norms = norms_of(others)
    dtypes = {jnp.dtype(array.dtype) for array in (x, *weights_of(others), *([] if residual is None else [residual]))}
    dtypes |= {jnp.dtype(norm.out_dtype) for norm in norms if norm.out_dtype}
    if len(dtypes) > 1:
        return f"all arrays of several tokens must have one dtype, got {sorted(map(str, dtypes))}"
    if norms and programs < OWNERS:
        return f"norms of several tokens need {OWNERS} cores, got {programs}"
    return None


def _unsupported_heads(dim: int, first: Phase) -> str | None:
    """Returns why a CTA cannot norm heads of `dim` channels, or None. Each head must be in one warp's registers."""
    pack = pack_of_spread(first.vector)
    if dim in [pack * lanes for lanes in (1, 2, 4, 8, 16, LANES)]:
        return None
    return f"heads of a gated norm must have a power of two channels from {pack} to {pack * LANES}, got {dim}"
