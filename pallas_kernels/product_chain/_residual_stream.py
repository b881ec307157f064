"""What single threads do with the residual stream in a chain of few tokens, on Hopper GPUs.

Each of 128 programs, its owners, has some channels of all tokens. It adds up what has been computed for them, and sends the
rounded sums times the norm's weights, and the sum of their squares, to all programs, which multiply what they receive as it
is. What is left of a norm is a factor for each token, by which they multiply what they have computed instead of the inputs.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels import _thread_code as code
from pallas_kernels._pallas_mosaic import arith, ir, memref, vector
from pallas_kernels.product_chain import _fragments as fragments
from pallas_kernels.product_chain import _messages as messages
from pallas_kernels.product_chain._over_devices import Devices, added_up
from pallas_kernels.product_chain._schedule import OWNERS
from pallas_kernels.product_chain._steps import Norm

_THREADS = 256  # that multiply


def scale_of(dtype: Any) -> float:
    """Returns by what weighted sums are multiplied before they are sent. Without it, they might not fit in float16."""
    return 2.0**-8 if dtype == jnp.float16 else 1.0


def receive_weighted(
    x: fragments.Vectors,
    squares: int,
    factors: Any,
    step: Norm,
    pieces: int,
    tokens: int,
    dtype: Any,
) -> jax.Array:
    """Waits for the residual stream times the norm's weights, whose parts `own` sends, and for the norm's factors.

    A thread sees all factors after the next barrier of the program.

    Args:
        x: What is waited for, two numbers in each word. A program takes the whole of it.
        squares: Where in x.ref each owner's sums of squares are. float32 [tokens, OWNERS]
        factors: Memory that all warps share, for the factors. float32 [MOST_TOKENS]
        step: The norm.
        pieces: Pieces of `WIDTH` inputs.
        tokens: The number of tokens.
        dtype: The dtype of the residual stream.

    Returns:
        The inputs of all threads: see `registers` in _fragments.py.
    """

    def body(_: Any, ref: Any, factors: Any, first: Any) -> Any:
        f32, i32 = ir.F32Type.get(), pm.integer()
        places = [code.word_address(ref, x.start, at) for at in fragments.places_of(x, first, pieces, tokens)]
        thread = pm.thread_of_program()
        token = arith.minsi(arith.shrui(thread, pm.constant(4)), pm.constant(tokens - 1))
        owner = code.scaled(arith.andi(thread, pm.constant(15)), OWNERS // 16)
        start = code.total(code.scaled(token, OWNERS), owner, pm.constant(squares))
        of_squares = [pm.address(ref, code.total(start, pm.constant(n))) for n in range(0, OWNERS // 16, 4)]
        asked_squares, asked = messages.ask(of_squares, 4, f32), messages.ask(places, fragments.PAIRS, i32)
        total = code.added([n for four in messages.arrived(asked_squares, of_squares, f32) for n in four])
        total = pm.sum_over(total, (1, 2, 4, 8))
        factor = code.approximate("rsqrt", arith.addf(code.over(total, x.length), code.number(step.epsilon)))
        factor = arith.mulf(factor, code.number(1.0 / scale_of(dtype)))
        memref.store(factor, factors, [code.index(arith.shrui(thread, pm.constant(4)))])
        held = [code.from_parts(words) for words in messages.arrived(asked, places, i32)]
        return (pm.fragments_of_spread(held, fragments.registers(pieces, tokens)),)

    operands = (x.ref, ()), (factors, ()), x.first
    return pm.inline(body, *operands, results=[(fragments.registers(pieces, tokens), jnp.int32)])[0]


def own_pairs(channels: int, tokens: int) -> int:
    """Returns how many pairs of channels of the residual stream a thread of an owner has."""
    return -(-channels // 2 // OWNERS * tokens // _THREADS)


def load_own(stream: Any, program: Any, channels: int, tokens: int) -> jax.Array:
    """Loads this program's part of the residual stream, [tokens * channels]. Returns float32 [256 * own_pairs]."""

    def body(_: Any, stream: Any, program: Any) -> Any:
        return (_load_pairs(stream, [place for _, _, place in _own_places(program, channels, tokens)]),)

    return pm.inline(body, (stream, ()), program, results=[(256 * own_pairs(channels, tokens), jnp.float32)])[0]


def load_own_weights(weight: Any, program: Any, channels: int, tokens: int) -> jax.Array:
    """Loads the weights of a norm, [channels], for each number of `load_own`, in its layout."""

    def body(_: Any, weight: Any, program: Any) -> Any:
        return (_load_pairs(weight, [channel for _, channel, _ in _own_places(program, channels, tokens)]),)

    return pm.inline(body, (weight, ()), program, results=[(256 * own_pairs(channels, tokens), jnp.float32)])[0]


def _load_pairs(ref: Any, places: Sequence[Any]) -> Any:
    """Loads two neighbours from each place, as an array of float32."""
    pairs = [code.wide(code.load(ref, place, 2)) for place in places]
    return code.array([number for pair in pairs for number in code.parts(pair)])


def own(
    sent: Any,
    shares: Sequence[int],
    target: int,
    squares: int,
    before: jax.Array,
    weights: jax.Array,
    out: Any,
    staging: Any,
    program: Any,
    step: Norm,
    channels: int,
    tokens: int,
    dtype: Any,
    devices: Devices | None,
) -> jax.Array:
    """Adds what was computed to this program's part of the residual stream. Sends the sums, weighted, and their squares.

    Args:
        sent: Memory that programs share.
        shares: Where the shares of what is added are in it. float32 [tokens, channels]
        target: Where the sums times the norm's weights go, two in each word.
        squares: Where sums of squares go. float32 [tokens, OWNERS]
        before: The part of the residual stream: see `load_own`.
        weights: The norm's weights: see `load_own_weights`.
        out: Where the sums go, [tokens * channels], or None.
        staging: float32 memory of at least tokens * channels / 2 / OWNERS numbers that all warps share.
        program: The program's number.
        step: The norm.
        channels: The channels of the residual stream.
        tokens: The number of tokens.
        dtype: The dtype of the residual stream, and of what is sent.
        devices: The devices over which the sums are first added up; None if they are those of one device.

    Returns:
        The sums, like `before`.
    """
    each = channels // 2 // OWNERS

    def body(_: Any, sent: Any, staging: Any, before: Any, weights: Any, program: Any, *more: Any) -> Any:
        f32, kind = ir.F32Type.get(), pm.type_of(dtype)
        thread, totals, old, of_norm = pm.thread_of_program(), [], code.elements(before), code.elements(weights)
        own_places = _own_places(program, channels, tokens)
        places = [
            pm.address(sent, code.total(place, pm.constant(start))) for _, _, place in own_places for start in shares
        ]
        found = messages.arrived(messages.ask(places, 2, f32), places, f32)
        added = []
        for start in range(0, len(found), len(shares)):
            added.append([code.added([share[n] for share in found[start : start + len(shares)]]) for n in range(2)])
        if devices is not None:
            added = added_up(devices, more[-2], more[-1], added, [place for _, _, place in own_places])
        for number, (pair, _, place) in enumerate(own_places):
            both = slice(2 * number, 2 * number + 2)
            scaled = [arith.mulf(code.number(step.scale), one) for one in added[number]]
            sums = [arith.addf(*terms) for terms in zip(old[both], scaled, strict=True)]
            rounded = arith.truncf(code.vector_type(2, kind), code.from_parts(sums))
            totals += code.parts(code.wide(rounded))
            factors = [arith.addf(code.number(step.offset), weight) for weight in of_norm[both]]
            weighted = [arith.mulf(*terms) for terms in zip(totals[-2:], factors, strict=True)]
            weighted = [arith.mulf(code.number(scale_of(dtype)), one) for one in weighted]
            messages.store(code.word_address(sent, target, place), [code.word(code.rounded_pair(weighted, dtype))])
            if out is not None:
                vector.store(rounded, more[0], [code.index(place)], alignment=4)
            memref.store(code.added([arith.mulf(x, x) for x in totals[-2:]]), staging, [code.index(pair)])
        pm.barrier_of_warpgroups(fragments.WARPGROUPS)
        with pm.only_if(code.is_less(thread, tokens)):
            start = code.scaled(thread, each)
            total = code.added(
                [memref.load(staging, [code.index(code.total(start, pm.constant(n)))]) for n in range(each)]
            )
            place = code.total(code.scaled(thread, OWNERS), program, pm.constant(squares))
            messages.store(pm.address(sent, place), [total])
        return (code.array(totals),)

    operands = [(sent, ()), (staging, ()), before, weights, program, *([] if out is None else [(out, ())])]
    operands += [] if devices is None else devices.operands
    return pm.inline(body, *operands, results=[(256 * own_pairs(channels, tokens), jnp.float32)])[0]


def _own_places(program: Any, channels: int, tokens: int) -> list[tuple[Any, Any, Any]]:
    """Returns, for each pair of channels that a thread has, its number in the program, its first channel, and its place.

    The place is one in [tokens, channels]. Threads that are left over have the last pair, too.
    """
    each, found = channels // 2 // OWNERS, []
    for turn in range(own_pairs(channels, tokens)):
        pair = code.total(pm.thread_of_program(), pm.constant(turn * _THREADS))
        pair = arith.minsi(pair, pm.constant(tokens * each - 1))
        token, number = arith.divui(pair, pm.constant(each)), arith.remui(pair, pm.constant(each))
        channel = code.scaled(code.total(number, code.scaled(program, each)), 2)
        found.append((pair, channel, code.total(code.scaled(token, channels), channel)))
    return found
