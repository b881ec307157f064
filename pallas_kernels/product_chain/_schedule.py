"""The schedule of product_chain's launch: the blocks of weights of each CTA, and the number of copies in flight.

Weights are cut into blocks of outputs. For a single token, a block is `ROWS` rows, and a warp multiplies one of them,
`WIDTH` inputs (a K tile) at a time. For several tokens, it is `TOKENS_ROWS` rows, and all warps multiply it together. A CTA
takes consecutive blocks. If a product has many inputs, and the step that reads it can add up partial sums, several CTAs
divide the inputs of each block (split-K), because warps keep the inputs in registers.

A mixture of experts is three products: the router's, and the first and the second product of the chosen experts.
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

# In a step, a launch by Mosaic GPU begins about 4 us later than one by Triton, and a launch less saves about 3 us.
FEWEST_STEPS = 4
WIDTH = 256  # inputs that a warp multiplies at a time, eight per lane
ROWS = 4  # outputs that the warps of a warpgroup multiply at a time, one each
MOST_TOKENS = 16
TOKENS_ROWS = 8  # outputs of a block, if there are several tokens
OWNERS = 128  # CTAs that each own some channels of the residual stream, if there are several tokens
_MAX_K_TILES = 16  # of `WIDTH` inputs, which a warp keeps in registers
_FEW_K_TILES = 12  # more are divided by split-K, if possible
_MAX_SLOTS = 10  # blocks in SMEM
_MAX_ROWS = 16  # of a block
_MAX_GROUP = 5  # K tiles of one copy, if there are several tokens
_SUMS_BYTES = 20_480  # SMEM for partial sums of warps, if there are several tokens


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


class Phase(NamedTuple):
    """A product, after which all CTAs wait for each other.

    Attributes:
        inputs: The number of inputs; in the experts' second products, of one expert.
        outputs: The number of outputs; with a gate, of each half; in the experts' first products, of all chosen experts.
        terms: The number of blocks of weights per block of outputs: one, or two for gate and up, or one for each of several
            experts, whose products are added.
        norm: The index, among the norms, of the norm that computes the inputs; None for other inputs.
        splits: The number of CTAs that divide the inputs, or the experts, of a block among them (split-K).
        kind: A `Product`, or the router's, first or second product of `Experts`. The first products take the same inputs as
            the router's.
        rows: The number of outputs of a block.
        experts: The mixture; None for a `Product`.
    """

    inputs: int
    outputs: int
    terms: int
    norm: int | None
    splits: int
    kind: Literal["product", "router", "up", "down"] = "product"
    rows: int = ROWS
    experts: Experts | None = None

    @property
    def mixture(self) -> Experts:
        """The mixture of experts of a phase that belongs to one."""
        assert self.experts is not None
        return self.experts

    @property
    def k_tiles(self) -> int:
        """The number of K tiles, of `WIDTH` inputs each, of a block."""
        return self.inputs // WIDTH // (1 if self.kind == "down" else self.splits)

    @property
    def group(self) -> int:
        """The number of K tiles of one copy, if there are several tokens: few, so that few bytes are in flight."""
        return next((n for n in range(_MAX_GROUP, 2, -1) if self.k_tiles % n == 0), self.k_tiles)

    @property
    def vector(self) -> int:
        """The number of inputs that a CTA multiplies."""
        return self.k_tiles * WIDTH * (self.terms if self.kind == "down" else 1)

    @property
    def blocks(self) -> int:
        """The number of blocks of outputs of each split."""
        return -(-self.outputs // self.rows)

    def work(self, cta: Any, ctas: int) -> Work:
        """Return the work of a CTA.

        In the experts' first products, CTAs take blocks round-robin. So the blocks of shared experts, which come first, are
        spread over all CTAs, which fetch them before the other experts are chosen.
        """
        if self.kind == "up":
            return Work(jnp.int32(0), cta, ctas, _count_round_robin(self.blocks, cta, ctas))
        each = ctas // self.splits
        split, index = jax.lax.rem(cta, jnp.int32(self.splits)), jax.lax.div(cta, jnp.int32(self.splits))
        cut = lambda n: jax.lax.div(jnp.minimum(n, each) * self.blocks, jnp.int32(each))
        return Work(split, cut(index), 1, cut(index + 1) - cut(index))

    def count_of_shared(self, cta: Any, ctas: int) -> Any:
        """Return the number of a CTA's blocks of shared experts, in the experts' first products."""
        return _count_round_robin(self.mixture.shared * self.blocks // self.mixture.chosen, cta, ctas)

    def weights_of_block(self, split: Any, block: Any, term: Any) -> WeightBlock:
        """Return the indices of the weights of a term of a block, whose results begin at `block * rows` of its split."""
        if self.kind == "up":
            each = jnp.int32(self.blocks // self.mixture.chosen)
            row = term * each * self.rows + jax.lax.rem(block, each) * self.rows
            return WeightBlock(jax.lax.div(block, each), row, 0)
        if self.kind == "down":
            return WeightBlock(split * self.terms + term, block * self.rows, 0)
        return WeightBlock(None, term * self.outputs + block * self.rows, split * self.k_tiles)


class Schedule(NamedTuple):
    """The schedule of a chain in one launch.

    Attributes:
        phases: The products.
        ends_with_norm: Whether a norm follows the last product.
        slots: The number of blocks that SMEM holds.
        depth: The number of blocks whose copies are in flight.
    """

    phases: tuple[Phase, ...]
    ends_with_norm: bool
    slots: int
    depth: int

    def is_sent(self, index: int) -> bool:
        """Whether CTAs send each other the results of phase `index`. Else they are the chain's results."""
        return index + 1 < len(self.phases) or self.ends_with_norm

    @property
    def starts(self) -> list[int]:
        """The offset of each sent phase in the buffer `sent`, and the buffer's size, in float32 elements."""
        sizes = [phase.splits * phase.outputs for n, phase in enumerate(self.phases) if self.is_sent(n)]
        return [0, *itertools.accumulate(sizes)]

    @property
    def vector(self) -> int:
        """The size of the SMEM buffer from which warps read their inputs, in float32 elements."""
        return vector_elements(self.phases)

    @property
    def has_experts(self) -> bool:
        """Whether the chain has experts."""
        return any(phase.experts is not None for phase in self.phases)


def _count_round_robin(blocks: int, cta: Any, ctas: int) -> Any:
    """Return the number of blocks that a CTA takes if CTAs take them round-robin."""
    return jax.lax.div(blocks + ctas - 1 - cta, jnp.int32(ctas))


def _splits(inputs: int) -> int:
    """Return the smallest number of equal splits whose inputs fit into registers."""
    k_tiles = inputs // WIDTH
    return next(s for s in range(1, k_tiles + 1) if k_tiles % s == 0 and k_tiles // s <= _FEW_K_TILES)


def _splits_of_results(weight: jax.Array) -> int:
    """Return the number of splits of a chain's last product if it returns partial sums: the same as of `linear_sums`."""
    x, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((MOST_TOKENS, weight.shape[1]), weight.shape))
    return linear_config(x, weights, is_summed=True).shares


def _of_experts(experts: Experts, norm: int | None) -> list[Phase]:
    """Return the three products of a mixture of experts.

    The router's outputs are padded to a multiple of `THREADS` by outputs with weights 0. A block of the second product has
    the most rows with which it is no larger than a block of the first product.
    """
    inputs, size = experts.up.shape[2], experts.down.shape[2]
    outputs = -(-experts.router.shape[0] // THREADS) * THREADS
    first = Phase(inputs, outputs, 1, norm, 1, "router", experts=experts)
    second = Phase(inputs, experts.chosen * size, 2, None, 1, "up", experts=experts)
    counts = range(1, experts.chosen + 1)
    splits = next(s for s in counts if experts.chosen % s == 0 and experts.chosen // s * size // WIDTH <= _FEW_K_TILES)
    rows = ROWS
    while 2 * rows <= _MAX_ROWS and 2 * rows * size <= ROWS * inputs and experts.outputs % (2 * rows) == 0:
        rows *= 2
    terms = experts.chosen // splits
    return [first, second, Phase(size, experts.outputs, terms, None, splits, "down", rows, experts)]


def schedule(steps: Sequence[Step], parts: tuple[int, ...] | None, itemsize: int) -> Schedule:
    """Return the schedule of a chain of one token.

    48 KB in flight per SM keep the memory of an H200 busy. With more, the messages between CTAs would queue up behind them.
    """
    phases = _phases(steps, parts, ROWS)
    return _with_slots(phases, steps, slot_elements(phases) * itemsize, 4 * vector_elements(phases))


def schedule_of_tokens(steps: Sequence[Step], parts: tuple[int, ...] | None, itemsize: int) -> Schedule:
    """Return the schedule of a chain of several tokens. A block is copied in groups of K tiles: see `Phase.group`."""
    phases = _phases(steps, parts, TOKENS_ROWS)
    return _with_slots(phases, steps, group_elements(phases) * itemsize, _SUMS_BYTES)


def _with_slots(phases: tuple[Phase, ...], steps: Sequence[Step], slot_bytes: int, other_bytes: int) -> Schedule:
    """Return a schedule. `other_bytes` is the SMEM of all buffers but the weights'."""
    slots = min(_MAX_SLOTS, (device.HOPPER_SHARED_BYTES - other_bytes - 4096) // slot_bytes)
    depth = min(slots, max(2, 49_152 // slot_bytes))
    return Schedule(phases, isinstance(steps[-1], Norm), slots, depth)


def _phases(steps: Sequence[Step], parts: tuple[int, ...] | None, rows: int) -> tuple[Phase, ...]:
    """Return the products of a chain, in blocks of `rows` outputs."""
    phases: list[Phase] = []
    norms = 0
    for index, step in enumerate(steps):
        if isinstance(step, Norm):
            norms += 1
        if isinstance(step, Norm | GatedNorm):
            continue
        is_normed = index > 0 and isinstance(steps[index - 1], Norm)
        norm = norms - 1 if is_normed else None
        if isinstance(step, Experts):
            phases += _of_experts(step, norm)
            continue
        is_last = index + 1 == len(steps)
        can_split = not step.is_gated and (parts is None if is_last else isinstance(steps[index + 1], Norm))
        inputs, splits = step.weight.shape[1], 1
        if can_split:
            splits = _splits_of_results(step.weight) if is_last else _splits(inputs)
        phases.append(Phase(inputs, step.outputs, 1 + step.is_gated, norm, splits, rows=rows))
    return tuple(phases)


def slot_elements(phases: Sequence[Phase]) -> int:
    """Return the number of elements of the largest block."""
    return WIDTH * max(phase.rows * phase.k_tiles for phase in phases)


def vector_elements(phases: Sequence[Phase]) -> int:
    """Return the most inputs that a CTA stores to SMEM for its warps: all channels after a norm, else its split's."""
    return max(phase.vector if phase.norm is None else phase.inputs for phase in phases)


def group_elements(phases: Sequence[Phase]) -> int:
    """Return the number of elements of the largest group of K tiles of a block."""
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
    ctas: int,
    capacity: int | None = None,
) -> str | None:
    """Return why one launch cannot run a chain, or None if it can.

    Args:
        x: See api.py, as for the next three.
        steps: The steps.
        residual: The residual stream.
        parts: The sizes of the results.
        ctas: The number of CTAs, one per SM.
        capacity: The number of values that a side of a mailbox holds; None on a single device.
    """
    others = _without_gated_norm(steps)
    multiplied = [step for step in others if not isinstance(step, Norm)]
    is_one = is_of_one_token(x, capacity)
    reason = None if is_one else _unsupported_tokens(x, others, residual, ctas)
    if reason is not None:
        return reason
    if len(others) < 2 or not multiplied:
        return f"there must be a product and another step, got {len(others)} steps"
    dtypes = {jnp.dtype(weight.dtype) for weight in weights_of(multiplied)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        return f"all weights must be bfloat16 or all float16, got {sorted(map(str, dtypes))}"
    rows, normed, most_k_tiles = (ROWS, THREADS, _MAX_K_TILES) if is_one else (TOKENS_ROWS, WIDTH, _FEW_K_TILES)
    channels = x.shape[-1]
    for index, step in enumerate(steps):
        if isinstance(step, GatedNorm):
            continue
        if isinstance(step, Norm):
            if channels % normed:
                return f"a norm must have a multiple of {normed} channels, got {channels}"
            words = x.shape[-2] * channels
            if step.over_devices and capacity is not None and words > capacity:
                return f"a mailbox must hold {words} elements, got {capacity}"
            continue
        if channels % WIDTH:
            return f"a product must have a multiple of {WIDTH} inputs, got {channels}"
        if step.outputs % rows:
            return f"a product must have a multiple of {rows} outputs, got {step.outputs}"
        if isinstance(step, Experts):
            around = steps[max(index - 1, 0)], steps[min(index + 1, len(steps) - 1)]
            if not all(isinstance(each, Norm) for each in around):
                return "experts must be between two norms"
            if step.chosen > LANES or step.down.shape[2] % WIDTH or step.down.shape[2] > _FEW_K_TILES * WIDTH:
                return f"there must be at most {LANES} experts of multiples of {WIDTH} channels, up to 3072"
        elif index + 1 == len(steps):
            if step.is_gated:
                return "the last product must not be gated"
            divisor = WIDTH * (_splits_of_results(step.weight) if parts is None else 1)
            if channels % divisor:
                return f"the last product must have a multiple of {divisor} inputs, got {channels}"
        channels = step.outputs
    if parts is not None and any(part % rows for part in parts):
        return f"parts must be multiples of {rows}, got {list(parts)}"
    plan = (schedule if is_one else schedule_of_tokens)(steps, parts, 2)
    phases = plan.phases
    for phase in phases:
        if phase.k_tiles > most_k_tiles or phase.splits > ctas or (plan.slots < 2 and phase.norm is not None):
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
    x: jax.Array, others: Sequence[Product | Norm | Experts], residual: jax.Array | None, ctas: int
) -> str | None:
    """Return why the launch for several tokens cannot run a chain, or None. `others` are the steps but the gated norm."""
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
    if norms and ctas < OWNERS:
        return f"norms of several tokens need {OWNERS} SMs, got {ctas}"
    return None


def _unsupported_heads(dim: int, first: Phase) -> str | None:
    """Return why a CTA cannot normalise heads of `dim` channels, or None. Each head must be in one warp's registers."""
    pack = pack_of_spread(first.vector)
    if dim in [pack * lanes for lanes in (1, 2, 4, 8, 16, LANES)]:
        return None
    return f"heads of a gated norm must have a power of two channels from {pack} to {pack * LANES}, got {dim}"
