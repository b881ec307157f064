"""A product with weights, and its gate.

Of a single token, each warp multiplies a row of a block by all inputs, without the other warps. Of several tokens, the eight
warps of two warpgroups multiply a block of eight outputs together, by `mma.m16n8k16`: see fragments.py. Their partial sums
are added in SMEM.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._check import require
from pallas_kernels._lazy_hopper import hp, messages
from pallas_kernels.linear import linear, linear_sums
from pallas_kernels.linear.config import default_config as linear_config
from pallas_kernels.product_chain import fragments
from pallas_kernels.product_chain.fragments import OUTPUTS, PAIRS, WARPGROUPS, WARPS
from pallas_kernels.product_chain.one_token import weights_in_registers
from pallas_kernels.product_chain.schedule import FEW_K_TILES, MOST_TOKENS, WIDTH, Launch, Phase
from pallas_kernels.product_chain.step import Place, Separate, Step, Taken
from pallas_kernels.quantized import QuantizedWeight

_SUMS = 4  # independent accumulators of the same outputs, to hide the latency of `mma`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Product(Step):
    """Multiply by weights: x weight^T, or silu(gate) * up of its halves.

    Attributes:
        weight: The weights.
        is_gated: Whether the first half of the outputs is a gate of the second half.
    """

    weight: Float[Array | QuantizedWeight, "outputs inputs"]
    is_gated: bool = field(default=False, metadata=dict(static=True))

    roles: ClassVar[dict[str, tuple[str, ...]]] = dict(weights=("weight",))

    @property
    def outputs(self) -> int:
        """The number of results."""
        return self.weight.shape[0] // (1 + self.is_gated)

    @property
    def gives(self) -> tuple[Taken, ...]:
        """See `Step`."""
        return ("results",) if self.is_gated else ("results", "sums", "parts")

    def outputs_of(self, channels: int) -> int:
        """See `Step`."""
        return self.outputs

    def check(self, name: str, place: Place, x: jax.Array, residual: jax.Array | None) -> None:
        """See `Step`."""
        shape = self.weight.shape
        is_right = shape[1] == place.channels
        require(is_right, f"{name}: weight must be [outputs, {place.channels}], got {list(shape)}")
        require(not self.is_gated or shape[0] % 2 == 0, f"{name}: gated weights must have an even number of rows")

    def run_alone(self, value: jax.Array, place: Place, chain: Separate) -> Any:
        """Run `linear` or `linear_sums`."""
        value = value.astype(self.weight.dtype)
        if self.is_gated:
            return linear(value, self.weight, is_gated=True, run=chain.run)[0]
        if place.taken == "parts":
            return linear(value, self.weight, parts=place.parts, run=chain.run)
        if place.taken == "sums":
            return linear_sums(value, self.weight, run=chain.run)
        return linear(value, self.weight, run=chain.run)[0]

    def unsupported(self, place: Place, launch: Launch, x: jax.Array, capacity: int | None) -> str | None:
        """See `Step`."""
        if place.after is None and self.is_gated:
            return "the last product must not be gated"
        divisor = WIDTH * (self._splits_of_results() if place.after is None and place.taken == "sums" else 1)
        if place.channels % divisor:
            return f"the last product must have a multiple of {divisor} inputs, got {place.channels}"
        return None

    def phases(self, place: Place, launch: Launch, first: int) -> list[Phase]:
        """See `Step`."""
        inputs, splits = self.weight.shape[1], 1
        if place.taken == "sums":
            splits = self._splits_of_results() if place.after is None else _splits(inputs)
        sends = None if place.after is None or place.taken == "parts" else place.taken
        shape = inputs, self.outputs, 1 + self.is_gated, launch.rows
        return [ProductPhase(first, place.index, launch, *shape, place.source, place.is_normed, splits, sends)]

    def _splits_of_results(self) -> int:
        """Return the number of splits of a chain's last product, whose partial sums are the same as `linear_sums` has."""
        shapes = (MOST_TOKENS, self.weight.shape[1]), self.weight.shape
        x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
        return linear_config(x, weight, is_summed=True).shares

    def prepared(self) -> Self:
        """See `Step`."""
        return replace(self, weight=in_k_tiles(self.weight))


def in_k_tiles(weight: Any) -> jax.Array:
    """Return weights with an axis of K tiles: copies have at most 256 elements along an axis."""
    return weight.reshape(*weight.shape[:-1], -1, WIDTH)


def _splits(inputs: int) -> int:
    """Return the smallest number of equal splits whose inputs fit into registers."""
    k_tiles = inputs // WIDTH
    return next(s for s in range(1, k_tiles + 1) if k_tiles % s == 0 and k_tiles // s <= FEW_K_TILES)


class ProductPhase(Phase):
    """A product of inputs that the step before computes, or of the results of the phase before."""

    def load_one_token(self, cta: Any) -> list[jax.Array]:
        """Return the inputs of this CTA's split, in every warp's registers."""
        if self.source is not None:
            return cta.steps[self.source].load_one_token(cta, self)
        (value,) = cta.results_before(self.index, cta.work[self.index].split * self.vector, self.vector)
        return cta.for_each_warp([value.astype(cta.dtype)])

    def multiply_one_token(self, cta: Any, own_block: Any, x: list[jax.Array]) -> list[jax.Array]:
        """Multiply by a block of rows, one for each warp, or by a block of the gate and a block of up."""
        row, sink = cta.block_of(self, own_block) * self.rows, cta.sink_of(self)
        held = None if sink is None else sink.load_one_token(cta, row)
        sums = []
        for term in range(self.terms):
            with cta.block(self, own_block, term) as block:
                weights = weights_in_registers(block)
                sums.append(jnp.sum(weights * hp.along_columns(x[0], self.rows), axis=1))
        value = sums[0] / (1.0 + jnp.exp(-sums[0])) * sums[1] if self.terms == 2 else sums[0]
        cta.store(self, cta.work[self.index].split, row, value, held)
        return x

    def load_few_tokens(self, cta: Any) -> jax.Array:
        """Return this thread's inputs, in registers."""
        first = cta.work[self.index].split * self.k_tiles * WIDTH
        if self.source is not None:
            return cta.steps[self.source].load_few_tokens(cta, self, first)
        if self.index == 0:
            return fragments.load(fragments.Vectors(cta.refs.x, 0, self.inputs, first), self.k_tiles, cta.tokens)
        cta.wait_for(self.index - 1)
        sent = fragments.Vectors(cta.refs.sent, cta.where[self.index - 1].results, self.inputs, first)
        return fragments.receive(sent, self.k_tiles, cta.tokens)

    def multiply_few_tokens(self, cta: Any, x: jax.Array, own_block: Any) -> None:
        """Multiply by a block of weights, or by a block of the gate and a block of up."""
        each = self.k_tiles // self.group
        row, sink = cta.block_of(self, own_block) * self.rows, cta.sink_of(self)
        held = [] if sink is None else sink.load_few_tokens(cta, row)
        sums: list[jax.Array] = []
        for copy in range(self.copies):
            with cta.block(self, own_block, copy) as block:
                found = self._sums_of_warp(cta, block, x, copy % each * self.group)
            sums = [*sums, found] if copy % each == 0 else [*sums[:-1], sums[-1] + found]
        emit = functools.partial(self._emit if sink is None else sink.emit, cta)
        targets = [cta.refs.sent] if self.sends else cta.refs.results
        operands = [*((ref, ()) for ref in targets), cta.work[self.index].split, row, *held]
        self._add_up(cta, sums, cta.ordinals[self.index] + own_block, operands, emit)

    def _sums_of_warp(self, cta: Any, block: Any, x: jax.Array, first_k_tile: int) -> jax.Array:
        """Multiply a group of K tiles of this warp's inputs, from the first one on, by its weights in SMEM.

        Each thread has four partial sums in the result, float32 [512]: of the tokens `lane // 4` and `lane // 4 + 8`, and of
        the outputs `lane % 4 * 2` and `lane % 4 * 2 + 1`.
        """
        halves = fragments.halves(cta.tokens)

        def body(block: Any, x: Any) -> Any:
            here = fragments.thread()
            held, kind = list(x)[first_k_tile * halves :], block.dtype
            columns = [hp.index(here.column + k_tile * WIDTH) for k_tile in range(self.group)]
            weights = [_weights_of_thread(block, here.row, column) for column in columns]
            zeros, sums = [hp.i32(0)] * 4, [[hp.f32(0.0)] * 4 for _ in range(_SUMS)]
            for k_tile, right in enumerate(weights):
                first, *second = (hp.unpack(each) for each in held[k_tile * halves : (k_tile + 1) * halves])
                second = second[0] if second else zeros
                for half in range(2):
                    left = [words[2 * half + n] for n in range(2) for words in (first, second)]
                    own = (2 * k_tile + half) % _SUMS
                    sums[own] = hp.mma(sums[own], left, right[2 * half : 2 * half + 2], kind)
            return (hp.strided([hp.add(*each) for each in zip(*sums, strict=True)]),)

        return hp.inline(body, (block, ()), x, results=[(512, jnp.float32)])[0]

    def _add_up(
        self, cta: Any, sums: Sequence[jax.Array], ordinal: Any, operands: Sequence[Any], emit: Callable[..., None]
    ) -> None:
        """Add up the warps' partial sums of a block through SMEM, times the norm's factors, and apply the gate.

        Some threads then store the outputs 2 * pair and 2 * pair + 1 each, by emit(token, pair, values, *operands). The
        lowest bit of the block's `ordinal` selects one of two stages in SMEM, so a block needs one barrier: no warp stores
        partial sums where another may still load the last block's sums.
        """
        each, terms = MOST_TOKENS * OUTPUTS, self.terms
        factors = None if self.source is None else cta.steps[self.source].factors(cta)

        def body(partials: Any, ordinal: Any, *given: Any) -> None:
            here, rest = fragments.thread(), given[terms:]
            start = (ordinal & 1) * (partials.shape[0] // 2)
            for term, own in enumerate(given[:terms]):
                elements = hp.elements(own)
                offset = hp.add(start, here.warp * each, here.lane * 2, term * WARPS * each)
                for half in range(fragments.halves(cta.tokens)):
                    pair = hp.pack(elements[2 * half : 2 * half + 2])
                    hp.store_vector(pair, partials, offset + half * each // 2)
            hp.barrier_of_warpgroups(WARPGROUPS)
            index = hp.thread_of_cta()
            with hp.predicated(index < cta.tokens * PAIRS):
                offset = start + index * 2
                totals = []
                for term in range(terms):
                    at = [offset + (term * WARPS + n) * each for n in range(WARPS)]
                    found = [hp.load_vector(partials, one, count=2) for one in at]
                    totals.append(hp.add(*found))
                token, pair = index >> 2, index & 3
                if factors is not None:
                    of_norm, *rest = rest
                    factor = of_norm[token]
                    both = hp.pack([factor, factor])
                    totals = [total * both for total in totals]
                values = hp.unpack(totals[-1])
                if terms == 2:
                    gates = hp.unpack(totals[0])
                    values = [hp.silu(gate) * value for gate, value in zip(gates, values, strict=True)]
                emit(token, pair, values, *rest)

        given = [] if factors is None else [(factors, ())]
        hp.inline(body, (cta.refs.partials, ()), ordinal, *sums, *given, *operands)

    def _emit(self, cta: Any, token: Any, pair: Any, values: Sequence[Any], *operands: Any) -> None:
        """Send two results to the next phase, or store them as results of the chain."""
        *targets, split, row = operands
        if self.sends is None and cta.parts is not None:
            emit_parts(cta.parts, cta.dtype, token, pair, values, targets, row)
            return
        offset, size = fragments.offset_of_pair(token, pair, row, self.outputs), cta.tokens * self.outputs
        if self.sends == "results":
            address = hp.word_address(targets[0], cta.where[self.index].results, offset)
            messages.store(address, [hp.word(hp.rounded_pair(values, cta.dtype))])
        elif self.sends == "sums":
            offset = hp.add(offset, split * size, cta.where[self.index].results)
            messages.store(hp.address(targets[0], offset), values)
        else:
            hp.store_vector(hp.pack(values), targets[0], offset + split * size)


def _weights_of_thread(block: Any, row: Any, column: Any) -> list[Any]:
    """Load a thread's weights of a K tile, as operand of `mma`: four words of two weights.

    A format of weights is decoded here.
    """
    return hp.unpack(hp.words(hp.load_vector(block, row, column, count=8)))


def emit_parts(
    parts: Sequence[int], dtype: Any, token: Any, pair: Any, values: Sequence[Any], refs: Sequence[Any], row: Any
) -> None:
    """Store two results of the chain to the output array to which their block belongs."""
    rounded, first = hp.rounded_pair(values, dtype), 0
    for part, ref in zip(parts, refs, strict=True):
        inside = row - first
        with hp.predicated(hp.unsigned_less(inside, part)):
            hp.store_vector(rounded, ref, fragments.offset_of_pair(token, pair, inside, part))
        first += part
