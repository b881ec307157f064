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

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels import _thread_code as code
from pallas_kernels._pallas_mosaic import arith, ir, memref, vector
from pallas_kernels.product_chain import _messages as messages
from pallas_kernels.product_chain._schedule import MOST_TOKENS, WIDTH
from pallas_kernels.product_chain._schedule import TOKENS_ROWS as OUTPUTS
from pallas_kernels.product_chain._steps import GatedNorm

WARPGROUPS = 2  # that multiply
_WARPS = 8
_SUMS = 4  # of the same outputs, so that products need not wait for each other
PAIRS = OUTPUTS // 2  # of a token's outputs in a block


class Thread(NamedTuple):
    """A thread's place.

    Attributes:
        lane: Its place in its warp.
        warp: The warp's place in the program.
        row: A quarter of the lane: the first of its tokens, and the output by whose weights it multiplies.
        column: The first of the eight inputs that it has of each piece.
    """

    lane: Any
    warp: Any
    row: Any
    column: Any


class Vectors(NamedTuple):
    """Vectors in the GPU's memory, one for each token, of which a program may take a part.

    Attributes:
        ref: The memory, with one axis. Its elements are those of the vectors, or 32 bits for two of them.
        start: The memory's element at which the first vector begins.
        length: Elements of a whole vector.
        first: The first element of the part.
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
    """Returns the float32 numbers of shared memory that `finish` needs."""
    return 2 * terms * _WARPS * MOST_TOKENS * OUTPUTS


def head_elements(pieces: int) -> int:
    """Returns the float32 numbers of shared memory that `load_gated` needs."""
    return pieces * MOST_TOKENS * _WARPS


def load(x: Vectors, pieces: int, tokens: int) -> jax.Array:
    """Loads the inputs of all threads. See `registers`."""

    def body(_: Any, ref: Any, first: Any) -> Any:
        loaded = [code.words(code.load(ref, at, 8)) for at in places_of(x, first, pieces, tokens)]
        return (pm.fragments_of_spread(loaded, registers(pieces, tokens)),)

    return pm.inline(body, (x.ref, ()), x.first, results=[(registers(pieces, tokens), jnp.int32)])[0]


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

    def body(_: Any, ref: Any, gate: Any, weight: Any, heads: Any, first: Any) -> Any:
        at = places_of(x, first, pieces, tokens)
        kind = ir.MemRefType(ref.type).element_type
        values, gates = ([code.load(each, place, 8) for place in at] for each in (ref, gate))
        here = thread()
        weights = code.load(weight, arith.andi(here.column, pm.constant(dim - 1)), 8)
        stored = lambda n, warp: code.index(
            code.total(
                code.scaled(here.row, _WARPS), warp, pm.constant((n // halves(tokens)) * 128 + n % halves(tokens) * 64)
            )
        )
        for number, value in enumerate(values):
            wide = code.wide(value)
            total = vector.reduction(ir.F32Type.get(), vector.CombiningKind.ADD, arith.mulf(wide, wide))
            total = pm.sum_over(total, (1, 2))
            memref.store(total, heads, [stored(number, here.warp)])
        pm.barrier_of_warpgroups(WARPGROUPS)
        first_warp = arith.andi(here.warp, pm.constant(_WARPS - warps))
        found = []
        for number, (value, closed) in enumerate(zip(values, gates, strict=True)):
            sums = [memref.load(heads, [stored(number, code.total(first_warp, pm.constant(n)))]) for n in range(warps)]
            factor = code.approximate("rsqrt", arith.addf(code.over(code.added(sums), dim), code.number(step.epsilon)))
            activation = code.silu if step.activation == "silu" else code.sigmoid
            opened = code.from_parts([activation(one) for one in code.parts(code.wide(closed))])
            scaled = arith.mulf(
                arith.mulf(code.wide(value), vector.broadcast(code.vector_type(8, ir.F32Type.get()), factor)), weights
            )
            found.append(code.words(arith.truncf(code.vector_type(8, kind), arith.mulf(scaled, opened))))
        pm.barrier_of_warpgroups(WARPGROUPS)  # `heads` may be used again
        return (pm.fragments_of_spread(found, registers(pieces, tokens)),)

    operands = (x.ref, ()), (gate, ()), (weight, ()), (heads, ()), x.first
    return pm.inline(body, *operands, results=[(registers(pieces, tokens), jnp.int32)])[0]


def receive(x: Vectors, pieces: int, tokens: int) -> jax.Array:
    """Waits for inputs that other programs send, two in each word of 32 bits. See `registers`."""

    def body(_: Any, ref: Any, first: Any) -> Any:
        places = [code.word_address(ref, x.start, at) for at in places_of(x, first, pieces, tokens)]
        kind = pm.integer()
        found = messages.arrived(messages.ask(places, PAIRS, kind), places, kind)
        held = [code.from_parts(words) for words in found]
        return (pm.fragments_of_spread(held, registers(pieces, tokens)),)

    return pm.inline(body, (x.ref, ()), x.first, results=[(registers(pieces, tokens), jnp.int32)])[0]


def multiply(block: Any, x: jax.Array, first_piece: int, pieces: int, tokens: int) -> jax.Array:
    """Multiplies some of this warp's inputs by its weights.

    Each thread has four sums in the result, float32 [512]: those of the tokens `lane // 4` and `lane // 4 + 8`, and of the
    outputs `lane % 4 * 2` and the one after it.

    Args:
        block: The weights, in shared memory. [OUTPUTS, pieces * WIDTH]
        x: All of its inputs: see `registers`.
        first_piece: The first piece of inputs that is multiplied.
        pieces: The number of pieces, of `WIDTH` inputs each.
        tokens: The number of tokens.
    """

    def body(_: Any, block: Any, x: Any) -> Any:
        here = thread()
        held, kind = list(x.registers.flat)[first_piece * halves(tokens) :], ir.MemRefType(block.type).element_type
        columns = [code.index(code.total(here.column, pm.constant(piece * WIDTH))) for piece in range(pieces)]
        load = lambda at: vector.load(code.vector_type(8, kind), block, [code.index(here.row), at], alignment=16)
        weights = [code.parts(code.words(load(at))) for at in columns]
        zeros, sums = [pm.constant(0)] * 4, [[code.number(0.0)] * 4 for _ in range(_SUMS)]
        for piece, right in enumerate(weights):
            first, *second = (code.parts(each) for each in held[piece * halves(tokens) : (piece + 1) * halves(tokens)])
            second = second[0] if second else zeros
            for turn in range(2):
                left = [words[2 * turn + n] for n in range(2) for words in (first, second)]
                own = (2 * piece + turn) % _SUMS
                sums[own] = code.multiply_tile(sums[own], left, right[2 * turn : 2 * turn + 2], kind)
        return (code.array([code.added(each) for each in zip(*sums, strict=True)]),)

    return pm.inline(body, (block, ()), x, results=[(512, jnp.float32)])[0]


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
        factors: By what the sums of each token are multiplied, float32 [MOST_TOKENS] in shared memory; None for 1.
        operands: Operands of `pm.inline`.
        emit: emit(token, pair, values, *operands) stores the outputs 2 * pair and the one after it.
    """
    each = MOST_TOKENS * OUTPUTS
    terms = len(sums)

    def body(_: Any, partials: Any, turn: Any, *given: Any) -> None:
        here, rest = thread(), given[terms:]
        start = code.scaled(arith.andi(turn, pm.constant(1)), terms * _WARPS * each)
        for term, own in enumerate(given[:terms]):
            parts = code.elements(own)
            place = code.total(
                start, code.scaled(here.warp, each), code.scaled(here.lane, 2), pm.constant(term * _WARPS * each)
            )
            for half in range(halves(tokens)):
                pair = code.from_parts(parts[2 * half : 2 * half + 2])
                vector.store(
                    pair, partials, [code.index(code.total(place, pm.constant(half * each // 2)))], alignment=8
                )
        pm.barrier_of_warpgroups(WARPGROUPS)
        number = pm.thread_of_program()
        with pm.only_if(code.is_less(number, tokens * PAIRS)):
            place = code.total(start, code.scaled(number, 2))
            totals = []
            for term in range(terms):
                at = [code.total(place, pm.constant((term * _WARPS + n) * each)) for n in range(_WARPS)]
                found = [code.load(partials, one, 2) for one in at]
                totals.append(code.added(found))
            token, pair = arith.shrui(number, pm.constant(2)), arith.andi(number, pm.constant(3))
            if factors is not None:
                of_norm, *rest = rest
                factor = memref.load(of_norm, [code.index(token)])
                both = code.from_parts([factor, factor])
                totals = [arith.mulf(total, both) for total in totals]
            values = code.parts(totals[-1])
            if terms == 2:
                gates = code.parts(totals[0])
                values = [arith.mulf(code.silu(gate), value) for gate, value in zip(gates, values, strict=True)]
            emit(token, pair, values, *rest)

    given = [] if factors is None else [(factors, ())]
    pm.inline(body, (partials, ()), turn, *sums, *given, *operands)


def emit_sums(
    start: int, outputs: int, size: int, token: Any, pair: Any, values: Sequence[Any], sent: Any, share: Any, row: Any
) -> None:
    """Sends two float32 numbers of a share, in `finish`. Each share has `size` of them."""
    place = code.total(place_of_pair(token, pair, row, outputs), code.scaled(share, size), pm.constant(start))
    messages.store(pm.address(sent, place), values)


def emit_rounded(
    start: int, outputs: int, dtype: Any, token: Any, pair: Any, values: Sequence[Any], sent: Any, row: Any
) -> None:
    """Sends two numbers in a word, in `finish`."""
    place = place_of_pair(token, pair, row, outputs)
    messages.store(code.word_address(sent, start, place), [code.word(code.rounded_pair(values, dtype))])


def emit_result_sums(
    outputs: int, size: int, token: Any, pair: Any, values: Sequence[Any], out: Any, share: Any, row: Any
) -> None:
    """Stores two sums that the chain computes, in `finish`."""
    place = code.total(place_of_pair(token, pair, row, outputs), code.scaled(share, size))
    vector.store(code.from_parts(values), out, [code.index(place)], alignment=8)


def emit_parts(parts: Sequence[int], dtype: Any, token: Any, pair: Any, values: Sequence[Any], *operands: Any) -> None:
    """Stores two results of the chain in the part to which their block belongs, in `finish`."""
    *refs, row = operands
    rounded, first = code.rounded_pair(values, dtype), 0
    for part, ref in zip(parts, refs, strict=True):
        inside = arith.subi(row, pm.constant(first))
        with pm.only_if(arith.cmpi(arith.CmpIPredicate.ult, inside, pm.constant(part))):
            vector.store(rounded, ref, [code.index(place_of_pair(token, pair, inside, part))], alignment=4)
        first += part


def place_of_pair(token: Any, pair: Any, row: Any, length: int) -> Any:
    """Returns the place of a token's pair of a block that begins at `row`, in [tokens, length]."""
    return code.total(code.scaled(token, length), row, code.scaled(pair, 2))


def thread() -> Thread:
    """Returns this thread's place."""
    number = pm.thread_of_program()
    lane, warp = code.lane_and_warp(number)
    column = code.total(code.scaled(warp, 32), code.scaled(arith.andi(lane, pm.constant(3)), 8))
    return Thread(lane, warp, arith.shrui(lane, pm.constant(2)), column)


def places_of(x: Vectors, first: Any, pieces: int, tokens: int) -> list[Any]:
    """Returns the places of a thread's inputs: for each piece, and for each of its tokens, that of the first of eight.

    Places are counted from the first vector on. A token that does not exist has the inputs of the last one.
    """
    here = thread()
    rows = [code.total(here.row, pm.constant(8 * half)) for half in range(halves(tokens))]
    starts = [
        code.total(code.scaled(arith.minsi(r, pm.constant(tokens - 1)), x.length), first, here.column) for r in rows
    ]
    return [code.total(start, pm.constant(piece * WIDTH)) for piece in range(pieces) for start in starts]
