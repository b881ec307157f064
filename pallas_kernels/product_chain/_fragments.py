"""The thread-level code of a chain of few tokens: register fragments of `mma.m16n8k16` (SM90).

The eight warps of two warpgroups multiply a block of eight outputs together. Of every 256 inputs (a K tile), each warp takes
32, and the lanes of a row take eight consecutive inputs each. A lane holds its inputs of the tokens `lane // 4` and
`lane // 4 + 8`, and multiplies by its weights of the output `lane // 4`. The instruction allows any order of inputs that is
also the order of weights, so eight weights are read by one load and used without shuffles.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.hopper import messages
from pallas_kernels.product_chain._schedule import MOST_TOKENS, WIDTH
from pallas_kernels.product_chain._schedule import TOKENS_ROWS as OUTPUTS
from pallas_kernels.product_chain._steps import GatedNorm

WARPGROUPS = 2  # that multiply
_WARPS = 8
_SUMS = 4  # independent accumulators of the same outputs, to hide the latency of `mma`
PAIRS = OUTPUTS // 2  # of a token's outputs in a block


class Thread(NamedTuple):
    """The indices of a thread.

    Attributes:
        lane: The index in the warp.
        warp: The warp's index in the CTA.
        row: lane // 4: the index of its first token, and of the output by whose weights it multiplies.
        column: The first of its eight inputs in each K tile.
    """

    lane: Any
    warp: Any
    row: Any
    column: Any


class Vectors(NamedTuple):
    """Vectors in GMEM, one for each token, of which a CTA may take a slice.

    Attributes:
        ref: The array, with one axis. Its elements are elements of the vectors, or words of 32 bits with two of them.
        start: The offset of the first vector, in elements of `ref`.
        length: The number of elements of a whole vector.
        first: The first element of the slice.
    """

    ref: Any
    start: Any
    length: int
    first: Any


def halves(tokens: int) -> int:
    """Return the number of tokens, 1 or 2, whose inputs a thread holds."""
    return 1 if tokens <= MOST_TOKENS // 2 else 2


def registers(k_tiles: int, tokens: int) -> int:
    """Return the length of the int32 array with the inputs of all threads in registers, two inputs in each element."""
    return 128 * PAIRS * k_tiles * halves(tokens)


def partial_elements(terms: int) -> int:
    """Return the size of the SMEM buffer of `finish`, in float32 elements."""
    return 2 * terms * _WARPS * MOST_TOKENS * OUTPUTS


def head_elements(k_tiles: int) -> int:
    """Return the size of the SMEM buffer of `load_gated`, in float32 elements."""
    return k_tiles * MOST_TOKENS * _WARPS


def load(x: Vectors, k_tiles: int, tokens: int) -> jax.Array:
    """Load the inputs of all threads from GMEM to registers. See `registers`."""

    def body(ref: Any, first: Any) -> Any:
        loaded = [hp.words(hp.load_vector(ref, at, count=8)) for at in offsets_of(x, first, k_tiles, tokens)]
        return (loaded,)

    return hp.inline(body, (x.ref, ()), x.first, results=[(registers(k_tiles, tokens), jnp.int32)])[0]


def load_gated(x: Vectors, gate: Any, weight: Any, heads: Any, step: GatedNorm, k_tiles: int, tokens: int) -> jax.Array:
    """Load inputs like `load`, normalise each head, and multiply it by its activated gates.

    Args:
        x: The vectors.
        gate: The gates, like x.ref.
        weight: Weights of the norm, for all heads. float32 [channels of a head]
        heads: A buffer in SMEM: see `head_elements`.
        step: The gated norm.
        k_tiles: The number of K tiles, of `WIDTH` inputs each.
        tokens: The number of tokens.
    """
    dim = weight.shape[0]
    warps = max(1, dim // 32)  # that hold a head together

    def body(ref: Any, gate: Any, weight: Any, heads: Any, first: Any) -> Any:
        at = offsets_of(x, first, k_tiles, tokens)
        kind = ref.dtype
        values, gates = ([hp.load_vector(each, offset, count=8) for offset in at] for each in (ref, gate))
        here = thread()
        weights = hp.load_vector(weight, here.column & (dim - 1), count=8)
        stored = lambda n, warp: hp.index(
            hp.add(here.row * _WARPS, warp, (n // halves(tokens)) * 128 + n % halves(tokens) * 64)
        )
        for index, value in enumerate(values):
            wide = value.astype(jnp.float32)
            total = hp.reduce_add(wide * wide)
            total = hp.sum_over_lanes(total, (1, 2))
            heads[stored(index, here.warp)] = total
        hp.barrier_of_warpgroups(WARPGROUPS)
        first_warp = here.warp & (_WARPS - warps)
        found = []
        for index, (value, closed) in enumerate(zip(values, gates, strict=True)):
            sums = [heads[stored(index, first_warp + n)] for n in range(warps)]
            factor = hp.approximate("rsqrt", hp.add(*sums) * (1.0 / dim) + step.epsilon)
            activation = hp.silu if step.activation == "silu" else hp.sigmoid
            opened = hp.pack([activation(one) for one in hp.unpack(closed.astype(jnp.float32))])
            scaled = value.astype(jnp.float32) * hp.broadcast(factor, 8) * weights
            found.append(hp.words((scaled * opened).astype(kind)))
        hp.barrier_of_warpgroups(WARPGROUPS)  # `heads` may be used again
        return (found,)

    operands = (x.ref, ()), (gate, ()), (weight, ()), (heads, ()), x.first
    return hp.inline(body, *operands, results=[(registers(k_tiles, tokens), jnp.int32)])[0]


def receive(x: Vectors, k_tiles: int, tokens: int) -> jax.Array:
    """Poll GMEM for inputs that other CTAs send, two in each word of 32 bits. See `registers`."""

    def body(ref: Any, first: Any) -> Any:
        addresses = [hp.word_address(ref, x.start, at) for at in offsets_of(x, first, k_tiles, tokens)]
        kind = jnp.int32
        found = messages.poll(messages.load(addresses, PAIRS, kind), addresses, kind)
        held = [hp.pack(words) for words in found]
        return (held,)

    return hp.inline(body, (x.ref, ()), x.first, results=[(registers(k_tiles, tokens), jnp.int32)])[0]


def multiply(block: Any, x: jax.Array, first_k_tile: int, k_tiles: int, tokens: int) -> jax.Array:
    """Multiply some K tiles of this warp's inputs by its weights, by `mma.m16n8k16`.

    Each thread has four partial sums in the result, float32 [512]: of the tokens `lane // 4` and `lane // 4 + 8`, and of
    the outputs `lane % 4 * 2` and `lane % 4 * 2 + 1`.

    Args:
        block: The weights, in SMEM. [OUTPUTS, k_tiles * WIDTH]
        x: All of the warp's inputs: see `registers`.
        first_k_tile: The first K tile of `x` that is multiplied.
        k_tiles: The number of K tiles, of `WIDTH` inputs each.
        tokens: The number of tokens.
    """

    def body(block: Any, x: Any) -> Any:
        here = thread()
        held, kind = list(x)[first_k_tile * halves(tokens) :], block.dtype
        columns = [hp.index(here.column + k_tile * WIDTH) for k_tile in range(k_tiles)]
        load = lambda at: hp.load_vector(block, here.row, at, count=8)
        weights = [hp.unpack(hp.words(load(at))) for at in columns]
        zeros, sums = [hp.i32(0)] * 4, [[hp.f32(0.0)] * 4 for _ in range(_SUMS)]
        for k_tile, right in enumerate(weights):
            first, *second = (hp.unpack(each) for each in held[k_tile * halves(tokens) : (k_tile + 1) * halves(tokens)])
            second = second[0] if second else zeros
            for half in range(2):
                left = [words[2 * half + n] for n in range(2) for words in (first, second)]
                own = (2 * k_tile + half) % _SUMS
                sums[own] = hp.mma(sums[own], left, right[2 * half : 2 * half + 2], kind)
        return (hp.strided([hp.add(*each) for each in zip(*sums, strict=True)]),)

    return hp.inline(body, (block, ()), x, results=[(512, jnp.float32)])[0]


def finish(
    sums: Sequence[jax.Array],
    partials: Any,
    block: Any,
    tokens: int,
    factors: Any,
    operands: Sequence[Any],
    emit: Callable[..., None],
) -> None:
    """Add up the warps' partial sums of a block through SMEM, and apply the gate. Some threads then emit two outputs each.

    Args:
        sums: The results of `multiply`: of the outputs, or of their gates and of the gated outputs.
        partials: A buffer in SMEM: see `partial_elements`. Its halves are the two stages of all blocks, so a block needs one
            barrier: no warp stores partial sums where another may still load the last block's sums.
        block: The index of the block, whose lowest bit selects the stage.
        tokens: The number of tokens.
        factors: Factors of each token's sums, float32 [MOST_TOKENS] in SMEM; None for 1.
        operands: Operands of `inline`.
        emit: emit(token, pair, values, *operands) stores the outputs 2 * pair and 2 * pair + 1.
    """
    each = MOST_TOKENS * OUTPUTS
    terms = len(sums)

    def body(partials: Any, block: Any, *given: Any) -> None:
        here, rest = thread(), given[terms:]
        start = (block & 1) * (partials.shape[0] // 2)
        for term, own in enumerate(given[:terms]):
            elements = hp.elements(own)
            offset = hp.add(start, here.warp * each, here.lane * 2, term * _WARPS * each)
            for half in range(halves(tokens)):
                pair = hp.pack(elements[2 * half : 2 * half + 2])
                hp.store_vector(pair, partials, offset + half * each // 2)
        hp.barrier_of_warpgroups(WARPGROUPS)
        index = hp.thread_of_cta()
        with hp.predicated(index < tokens * PAIRS):
            offset = start + index * 2
            totals = []
            for term in range(terms):
                at = [offset + (term * _WARPS + n) * each for n in range(_WARPS)]
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
    hp.inline(body, (partials, ()), block, *sums, *given, *operands)


def emit_sums(
    start: int, outputs: int, size: int, token: Any, pair: Any, values: Sequence[Any], sent: Any, split: Any, row: Any
) -> None:
    """Send two float32 partial sums of a split of `size` elements, in `finish`."""
    offset = hp.add(offset_of_pair(token, pair, row, outputs), split * size, start)
    messages.store(hp.address(sent, offset), values)


def emit_rounded(
    start: int, outputs: int, dtype: Any, token: Any, pair: Any, values: Sequence[Any], sent: Any, row: Any
) -> None:
    """Send two rounded results in a word of 32 bits, in `finish`."""
    offset = offset_of_pair(token, pair, row, outputs)
    messages.store(hp.word_address(sent, start, offset), [hp.word(hp.rounded_pair(values, dtype))])


def emit_result_sums(
    outputs: int, size: int, token: Any, pair: Any, values: Sequence[Any], out: Any, split: Any, row: Any
) -> None:
    """Store two partial sums of the chain's results, in `finish`."""
    offset = offset_of_pair(token, pair, row, outputs) + split * size
    hp.store_vector(hp.pack(values), out, offset)


def emit_parts(parts: Sequence[int], dtype: Any, token: Any, pair: Any, values: Sequence[Any], *operands: Any) -> None:
    """Store two results of the chain to the output array to which their block belongs, in `finish`."""
    *refs, row = operands
    rounded, first = hp.rounded_pair(values, dtype), 0
    for part, ref in zip(parts, refs, strict=True):
        inside = row - first
        with hp.predicated(hp.unsigned_less(inside, part)):
            hp.store_vector(rounded, ref, offset_of_pair(token, pair, inside, part))
        first += part


def offset_of_pair(token: Any, pair: Any, row: Any, length: int) -> Any:
    """Return the offset in [tokens, length] of a token's pair of outputs in the block that begins at output `row`."""
    return hp.add(token * length, row, pair * 2)


def thread() -> Thread:
    """Return this thread's indices."""
    index = hp.thread_of_cta()
    lane, warp = hp.lane_and_warp(index)
    column = warp * 32 + (lane & 3) * 8
    return Thread(lane, warp, lane >> 2, column)


def offsets_of(x: Vectors, first: Any, k_tiles: int, tokens: int) -> list[Any]:
    """Return the offsets of a thread's inputs: for each K tile and each of its tokens, the first of eight inputs.

    Offsets are relative to the first vector. A token that does not exist takes the inputs of the last token.
    """
    here = thread()
    rows = [here.row + 8 * half for half in range(halves(tokens))]
    starts = [hp.minimum(r, tokens - 1) * x.length + first + here.column for r in rows]
    return [start + k_tile * WIDTH for k_tile in range(k_tiles) for start in starts]
