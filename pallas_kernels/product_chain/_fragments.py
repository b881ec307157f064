"""What single threads do in a chain of few tokens, on Hopper GPUs.

The eight warps of two warpgroups multiply a block of eight outputs together. Of every 256 inputs, each warp takes 32, and
the lanes of a row take eight each, which follow each other. A lane holds its inputs of the tokens `lane // 4` and
`lane // 4 + 8`, and multiplies by its weights of the output `lane // 4`. The tensor core's instruction wants inputs and
weights in the same order, whichever it is, so eight weights are read at once and used as they are.
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
_SUMS = 4  # of the same outputs, so that products need not wait for each other
PAIRS = OUTPUTS // 2  # of a token's outputs in a block


class Thread(NamedTuple):
    """The indices of a thread.

    Attributes:
        lane: Its index in its warp.
        warp: The warp's index in the CTA.
        row: A quarter of the lane: the first of its tokens, and the output by whose weights it multiplies.
        column: The first of the eight inputs that it has of each piece.
    """

    lane: Any
    warp: Any
    row: Any
    column: Any


class Vectors(NamedTuple):
    """Vectors in GMEM, one for each token, of which a CTA may take a slice.

    Attributes:
        ref: The memory, with one axis. Its elements are those of the vectors, or 32 bits for two of them.
        start: The memory's element at which the first vector begins.
        length: Elements of a whole vector.
        first: The first element of the slice.
    """

    ref: Any
    start: Any
    length: int
    first: Any


def halves(tokens: int) -> int:
    """Returns how many tokens a thread has inputs of."""
    return 1 if tokens <= MOST_TOKENS // 2 else 2


def registers(pieces: int, tokens: int) -> int:
    """Returns the length of the array of int32 that holds the inputs of all threads, two in each element."""
    return 128 * PAIRS * pieces * halves(tokens)


def partial_elements(terms: int) -> int:
    """Returns the float32 numbers of SMEM that `finish` needs."""
    return 2 * terms * _WARPS * MOST_TOKENS * OUTPUTS


def head_elements(pieces: int) -> int:
    """Returns the float32 numbers of SMEM that `load_gated` needs."""
    return pieces * MOST_TOKENS * _WARPS


def load(x: Vectors, pieces: int, tokens: int) -> jax.Array:
    """Loads the inputs of all threads. See `registers`."""

    def body(ref: Any, first: Any) -> Any:
        loaded = [hp.words(hp.load_vector(ref, at, count=8)) for at in places_of(x, first, pieces, tokens)]
        return (loaded,)

    return hp.inline(body, (x.ref, ()), x.first, results=[(registers(pieces, tokens), jnp.int32)])[0]


def load_gated(x: Vectors, gate: Any, weight: Any, heads: Any, step: GatedNorm, pieces: int, tokens: int) -> jax.Array:
    """Loads inputs like `load`, normalises each head by itself, and gates it.

    Args:
        x: The vectors.
        gate: The gates, like x.ref.
        weight: Weights of a head. float32 [channels of a head]
        heads: Memory that all warps share: see `head_elements`.
        step: The gated norm.
        pieces: Pieces of `WIDTH` inputs.
        tokens: The number of tokens.
    """
    dim = weight.shape[0]
    warps = max(1, dim // 32)  # that share a head

    def body(ref: Any, gate: Any, weight: Any, heads: Any, first: Any) -> Any:
        at = places_of(x, first, pieces, tokens)
        kind = ref.dtype
        values, gates = ([hp.load_vector(each, place, count=8) for place in at] for each in (ref, gate))
        here = thread()
        weights = hp.load_vector(weight, here.column & (dim - 1), count=8)
        stored = lambda n, warp: hp.index(
            hp.add(here.row * _WARPS, warp, (n // halves(tokens)) * 128 + n % halves(tokens) * 64)
        )
        for number, value in enumerate(values):
            wide = value.astype(jnp.float32)
            total = hp.reduce_add(wide * wide)
            total = hp.sum_over_lanes(total, (1, 2))
            heads[stored(number, here.warp)] = total
        hp.barrier_of_warpgroups(WARPGROUPS)
        first_warp = here.warp & (_WARPS - warps)
        found = []
        for number, (value, closed) in enumerate(zip(values, gates, strict=True)):
            sums = [heads[stored(number, first_warp + n)] for n in range(warps)]
            factor = hp.approximate("rsqrt", hp.add(*sums) * (1.0 / dim) + step.epsilon)
            activation = hp.silu if step.activation == "silu" else hp.sigmoid
            opened = hp.pack([activation(one) for one in hp.unpack(closed.astype(jnp.float32))])
            scaled = value.astype(jnp.float32) * hp.broadcast(factor, 8) * weights
            found.append(hp.words((scaled * opened).astype(kind)))
        hp.barrier_of_warpgroups(WARPGROUPS)  # `heads` may be used again
        return (found,)

    operands = (x.ref, ()), (gate, ()), (weight, ()), (heads, ()), x.first
    return hp.inline(body, *operands, results=[(registers(pieces, tokens), jnp.int32)])[0]


def receive(x: Vectors, pieces: int, tokens: int) -> jax.Array:
    """Waits for inputs that other CTAs send, two in each word of 32 bits. See `registers`."""

    def body(ref: Any, first: Any) -> Any:
        places = [hp.word_address(ref, x.start, at) for at in places_of(x, first, pieces, tokens)]
        kind = jnp.int32
        found = messages.poll(messages.load(places, PAIRS, kind), places, kind)
        held = [hp.pack(words) for words in found]
        return (held,)

    return hp.inline(body, (x.ref, ()), x.first, results=[(registers(pieces, tokens), jnp.int32)])[0]


def multiply(block: Any, x: jax.Array, first_piece: int, pieces: int, tokens: int) -> jax.Array:
    """Multiplies some of this warp's inputs by its weights.

    Each thread has four sums in the result, float32 [512]: those of the tokens `lane // 4` and `lane // 4 + 8`, and of the
    outputs `lane % 4 * 2` and the one after it.

    Args:
        block: The weights, in SMEM. [OUTPUTS, pieces * WIDTH]
        x: All of its inputs: see `registers`.
        first_piece: The first piece of inputs that is multiplied.
        pieces: The number of pieces, of `WIDTH` inputs each.
        tokens: The number of tokens.
    """

    def body(block: Any, x: Any) -> Any:
        here = thread()
        held, kind = list(x)[first_piece * halves(tokens) :], block.dtype
        columns = [hp.index(here.column + piece * WIDTH) for piece in range(pieces)]
        load = lambda at: hp.load_vector(block, here.row, at, count=8)
        weights = [hp.unpack(hp.words(load(at))) for at in columns]
        zeros, sums = [hp.i32(0)] * 4, [[hp.f32(0.0)] * 4 for _ in range(_SUMS)]
        for piece, right in enumerate(weights):
            first, *second = (hp.unpack(each) for each in held[piece * halves(tokens) : (piece + 1) * halves(tokens)])
            second = second[0] if second else zeros
            for turn in range(2):
                left = [words[2 * turn + n] for n in range(2) for words in (first, second)]
                own = (2 * piece + turn) % _SUMS
                sums[own] = hp.mma(sums[own], left, right[2 * turn : 2 * turn + 2], kind)
        return (hp.strided([hp.add(*each) for each in zip(*sums, strict=True)]),)

    return hp.inline(body, (block, ()), x, results=[(512, jnp.float32)])[0]


def finish(
    sums: Sequence[jax.Array],
    partials: Any,
    turn: Any,
    tokens: int,
    factors: Any,
    operands: Sequence[Any],
    emit: Callable[..., None],
) -> None:
    """Adds up the warps' sums of a block, and gates them if there are two. Some threads emit two outputs of a token each.

    Args:
        sums: What `multiply` has returned: for the outputs, or for their gates and what they multiply.
        partials: Memory that all warps share: see `partial_elements`. Two blocks take turns to use it.
        turn: The number of the block.
        tokens: The number of tokens.
        factors: By what the sums of each token are multiplied, float32 [MOST_TOKENS] in SMEM; None for 1.
        operands: Operands of `inline`.
        emit: emit(token, pair, values, *operands) stores the outputs 2 * pair and the one after it.
    """
    each = MOST_TOKENS * OUTPUTS
    terms = len(sums)

    def body(partials: Any, turn: Any, *given: Any) -> None:
        here, rest = thread(), given[terms:]
        start = (turn & 1) * (terms * _WARPS * each)
        for term, own in enumerate(given[:terms]):
            parts = hp.elements(own)
            place = hp.add(start, here.warp * each, here.lane * 2, term * _WARPS * each)
            for half in range(halves(tokens)):
                pair = hp.pack(parts[2 * half : 2 * half + 2])
                hp.store_vector(pair, partials, place + half * each // 2)
        hp.barrier_of_warpgroups(WARPGROUPS)
        number = hp.thread_of_cta()
        with hp.predicated(number < tokens * PAIRS):
            place = start + number * 2
            totals = []
            for term in range(terms):
                at = [place + (term * _WARPS + n) * each for n in range(_WARPS)]
                found = [hp.load_vector(partials, one, count=2) for one in at]
                totals.append(hp.add(*found))
            token, pair = number >> 2, number & 3
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
    hp.inline(body, (partials, ()), turn, *sums, *given, *operands)


def emit_sums(
    start: int, outputs: int, size: int, token: Any, pair: Any, values: Sequence[Any], sent: Any, share: Any, row: Any
) -> None:
    """Sends two float32 numbers of a share, in `finish`. Each share has `size` of them."""
    place = hp.add(place_of_pair(token, pair, row, outputs), share * size, start)
    messages.store(hp.address(sent, place), values)


def emit_rounded(
    start: int, outputs: int, dtype: Any, token: Any, pair: Any, values: Sequence[Any], sent: Any, row: Any
) -> None:
    """Sends two numbers in a word, in `finish`."""
    place = place_of_pair(token, pair, row, outputs)
    messages.store(hp.word_address(sent, start, place), [hp.word(hp.rounded_pair(values, dtype))])


def emit_result_sums(
    outputs: int, size: int, token: Any, pair: Any, values: Sequence[Any], out: Any, share: Any, row: Any
) -> None:
    """Stores two sums that the chain computes, in `finish`."""
    place = place_of_pair(token, pair, row, outputs) + share * size
    hp.store_vector(hp.pack(values), out, place)


def emit_parts(parts: Sequence[int], dtype: Any, token: Any, pair: Any, values: Sequence[Any], *operands: Any) -> None:
    """Stores two results of the chain in the output array to which their block belongs, in `finish`."""
    *refs, row = operands
    rounded, first = hp.rounded_pair(values, dtype), 0
    for part, ref in zip(parts, refs, strict=True):
        inside = row - first
        with hp.predicated(hp.unsigned_less(inside, part)):
            hp.store_vector(rounded, ref, place_of_pair(token, pair, inside, part))
        first += part


def place_of_pair(token: Any, pair: Any, row: Any, length: int) -> Any:
    """Returns the offset of a token's pair of a block that begins at `row`, in [tokens, length]."""
    return hp.add(token * length, row, pair * 2)


def thread() -> Thread:
    """Returns this thread's indices."""
    number = hp.thread_of_cta()
    lane, warp = hp.lane_and_warp(number)
    column = warp * 32 + (lane & 3) * 8
    return Thread(lane, warp, lane >> 2, column)


def places_of(x: Vectors, first: Any, pieces: int, tokens: int) -> list[Any]:
    """Returns the offsets of a thread's inputs: for each piece, and for each of its tokens, the first of eight.

    Offsets are counted from the first vector on. A token that does not exist has the inputs of the last one.
    """
    here = thread()
    rows = [here.row + 8 * half for half in range(halves(tokens))]
    starts = [hp.minimum(r, tokens - 1) * x.length + first + here.column for r in rows]
    return [start + piece * WIDTH for piece in range(pieces) for start in starts]
