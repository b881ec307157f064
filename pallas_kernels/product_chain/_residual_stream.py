"""What single threads do with the residual stream in a chain of few tokens, on Hopper GPUs.

Each of 128 CTAs, its owners, has some channels of all tokens. It adds up their split-K partial sums, and sends the rounded
sums times the norm's weights, and the sum of their squares, to all CTAs, which multiply these products as they are. The rest
of the norm is a factor for each token, by which CTAs multiply their results instead of the inputs.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.hopper import messages
from pallas_kernels.product_chain import _fragments as fragments
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

    A thread sees all factors after the next barrier of the CTA.

    Args:
        x: The memory that is polled, two numbers in each word. A CTA takes the whole of it.
        squares: The offset of each owner's sums of squares in x.ref. float32 [tokens, OWNERS]
        factors: Memory that all warps share, for the factors. float32 [MOST_TOKENS]
        step: The norm.
        pieces: Pieces of `WIDTH` inputs.
        tokens: The number of tokens.
        dtype: The dtype of the residual stream.

    Returns:
        The inputs of all threads: see `registers` in _fragments.py.
    """

    def body(ref: Any, factors: Any, first: Any) -> Any:
        f32, i32 = jnp.float32, jnp.int32
        places = [hp.word_address(ref, x.start, at) for at in fragments.places_of(x, first, pieces, tokens)]
        thread = hp.thread_of_cta()
        token = hp.minimum(thread >> 4, tokens - 1)
        owner = (thread & 15) * (OWNERS // 16)
        start = hp.add(token * OWNERS, owner, squares)
        of_squares = [hp.address(ref, start + n) for n in range(0, OWNERS // 16, 4)]
        asked_squares, asked = messages.load(of_squares, 4, f32), messages.load(places, fragments.PAIRS, i32)
        total = hp.add(*[n for four in messages.poll(asked_squares, of_squares, f32) for n in four])
        total = hp.sum_over_lanes(total, (1, 2, 4, 8))
        factor = hp.approximate("rsqrt", total * (1.0 / x.length) + step.epsilon)
        factor = factor * (1.0 / scale_of(dtype))
        factors[thread >> 4] = factor
        held = [hp.pack(words) for words in messages.poll(asked, places, i32)]
        return (held,)

    operands = (x.ref, ()), (factors, ()), x.first
    return hp.inline(body, *operands, results=[(fragments.registers(pieces, tokens), jnp.int32)])[0]


def own_pairs(channels: int, tokens: int) -> int:
    """Returns how many pairs of channels of the residual stream a thread of an owner has."""
    return -(-channels // 2 // OWNERS * tokens // _THREADS)


def load_own(stream: Any, program: Any, channels: int, tokens: int) -> jax.Array:
    """Loads this CTA's channels of the residual stream, [tokens * channels]. Returns float32 [256 * own_pairs]."""

    def body(stream: Any, program: Any) -> Any:
        return (_load_pairs(stream, [place for _, _, place in _own_places(program, channels, tokens)]),)

    return hp.inline(body, (stream, ()), program, results=[(256 * own_pairs(channels, tokens), jnp.float32)])[0]


def load_own_weights(weight: Any, program: Any, channels: int, tokens: int) -> jax.Array:
    """Loads the weights of a norm, [channels], for each number of `load_own`, in its layout."""

    def body(weight: Any, program: Any) -> Any:
        return (_load_pairs(weight, [channel for _, channel, _ in _own_places(program, channels, tokens)]),)

    return hp.inline(body, (weight, ()), program, results=[(256 * own_pairs(channels, tokens), jnp.float32)])[0]


def _load_pairs(ref: Any, places: Sequence[Any]) -> Any:
    """Loads two neighbours from each offset, as an array of float32."""
    pairs = [hp.load_vector(ref, place, count=2).astype(jnp.float32) for place in places]
    return hp.strided([number for pair in pairs for number in hp.unpack(pair)])


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
    """Adds a phase's results to this CTA's channels of the residual stream, and sends the sums to all CTAs.

    What it sends are the sums times the norm's weights, and the sums of their squares.

    Args:
        sent: Memory that CTAs share.
        shares: The offsets of the split-K partial sums in it. float32 [tokens, channels] each
        target: The offset of the sums times the norm's weights, two in each word.
        squares: The offset of the sums of squares. float32 [tokens, OWNERS]
        before: This CTA's channels of the residual stream: see `load_own`.
        weights: The norm's weights: see `load_own_weights`.
        out: Receives the sums, [tokens * channels], unless it is None.
        staging: float32 memory of at least tokens * channels / 2 / OWNERS numbers that all warps share.
        program: The CTA's number.
        step: The norm.
        channels: The channels of the residual stream.
        tokens: The number of tokens.
        dtype: The dtype of the residual stream, and of the products that are sent.
        devices: The devices over which the sums are first added up; None if they are those of one device.

    Returns:
        The sums, like `before`.
    """
    each = channels // 2 // OWNERS

    def body(sent: Any, staging: Any, before: Any, weights: Any, program: Any, *more: Any) -> Any:
        f32, kind = jnp.float32, dtype
        thread, totals, old, of_norm = hp.thread_of_cta(), [], hp.elements(before), hp.elements(weights)
        own_places = _own_places(program, channels, tokens)
        places = [hp.address(sent, place + start) for _, _, place in own_places for start in shares]
        found = messages.poll(messages.load(places, 2, f32), places, f32)
        added = []
        for start in range(0, len(found), len(shares)):
            added.append([hp.add(*[share[n] for share in found[start : start + len(shares)]]) for n in range(2)])
        if devices is not None:
            added = added_up(devices, more[-2], more[-1], added, [place for _, _, place in own_places])
        for number, (pair, _, place) in enumerate(own_places):
            both = slice(2 * number, 2 * number + 2)
            scaled = [hp.f32(step.scale) * one for one in added[number]]
            sums = [x + y for x, y in zip(old[both], scaled, strict=True)]
            rounded = hp.pack(sums).astype(kind)
            totals += hp.unpack(rounded.astype(jnp.float32))
            factors = [hp.f32(step.offset) + weight for weight in of_norm[both]]
            weighted = [x * y for x, y in zip(totals[-2:], factors, strict=True)]
            weighted = [hp.f32(scale_of(dtype)) * one for one in weighted]
            messages.store(hp.word_address(sent, target, place), [hp.word(hp.rounded_pair(weighted, dtype))])
            if out is not None:
                hp.store_vector(rounded, more[0], place)
            staging[pair] = hp.add(*[x * x for x in totals[-2:]])
        hp.barrier_of_warpgroups(fragments.WARPGROUPS)
        with hp.predicated(thread < tokens):
            start = thread * each
            total = hp.add(*[staging[start + n] for n in range(each)])
            place = hp.add(thread * OWNERS, program, squares)
            messages.store(hp.address(sent, place), [total])
        return (hp.strided(totals),)

    operands = [(sent, ()), (staging, ()), before, weights, program, *([] if out is None else [(out, ())])]
    operands += [] if devices is None else devices.operands
    return hp.inline(body, *operands, results=[(256 * own_pairs(channels, tokens), jnp.float32)])[0]


def _own_places(program: Any, channels: int, tokens: int) -> list[tuple[Any, Any, Any]]:
    """Returns, for each pair of channels that a thread has, its index in the CTA, its first channel, and its offset.

    The offset is in [tokens, channels]. Threads that are left over have the last pair, too.
    """
    each, found = channels // 2 // OWNERS, []
    for turn in range(own_pairs(channels, tokens)):
        pair = hp.thread_of_cta() + turn * _THREADS
        pair = hp.minimum(pair, tokens * each - 1)
        token, number = pair // each, pair % each
        channel = (number + program * each) * 2
        found.append((pair, channel, token * channels + channel))
    return found
