"""The thread-level code of the residual stream in a chain of few tokens (SM90).

Each of 128 CTAs, the owners, has some channels of all tokens. It adds up their split-K partial sums, and sends the rounded
sums times the norm's weights, and the sum of their squares, to all CTAs. The sums times weights are the next product's
inputs. The norm's reciprocal root is a factor for each token, by which CTAs multiply the product's results.
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
    """Return the factor of weighted sums before they are sent, which keeps them in the range of float16."""
    return 2.0**-8 if dtype == jnp.float16 else 1.0


def receive_weighted(
    x: fragments.Vectors,
    squares: int,
    factors: Any,
    step: Norm,
    k_tiles: int,
    tokens: int,
    dtype: Any,
) -> jax.Array:
    """Poll GMEM for the residual stream times the norm's weights, and compute the norm's factors. `own` sends both.

    A thread sees all factors after the next barrier of the CTA.

    Args:
        x: The stream, two channels in each word. A CTA takes all channels.
        squares: The offset of each owner's sums of squares in x.ref. float32 [tokens, OWNERS]
        factors: Receives the factors, in SMEM. float32 [MOST_TOKENS]
        step: The norm.
        k_tiles: The number of K tiles, of `WIDTH` inputs each.
        tokens: The number of tokens.
        dtype: The dtype of the residual stream.

    Returns:
        The inputs of all threads: see `registers` in _fragments.py.
    """

    def body(ref: Any, factors: Any, first: Any) -> Any:
        f32, i32 = jnp.float32, jnp.int32
        addresses = [hp.word_address(ref, x.start, at) for at in fragments.offsets_of(x, first, k_tiles, tokens)]
        thread = hp.thread_of_cta()
        token = hp.minimum(thread >> 4, tokens - 1)
        owner = (thread & 15) * (OWNERS // 16)
        start = hp.add(token * OWNERS, owner, squares)
        of_squares = [hp.address(ref, start + n) for n in range(0, OWNERS // 16, 4)]
        asked_squares, asked = messages.load(of_squares, 4, f32), messages.load(addresses, fragments.PAIRS, i32)
        total = hp.add(*[n for four in messages.poll(asked_squares, of_squares, f32) for n in four])
        total = hp.sum_over_lanes(total, (1, 2, 4, 8))
        factor = hp.approximate("rsqrt", total * (1.0 / x.length) + step.epsilon)
        factor = factor * (1.0 / scale_of(dtype))
        factors[thread >> 4] = factor
        held = [hp.pack(words) for words in messages.poll(asked, addresses, i32)]
        return (held,)

    operands = (x.ref, ()), (factors, ()), x.first
    return hp.inline(body, *operands, results=[(fragments.registers(k_tiles, tokens), jnp.int32)])[0]


def own_pairs(channels: int, tokens: int) -> int:
    """Return the number of pairs of channels that a thread of an owner holds."""
    return -(-channels // 2 // OWNERS * tokens // _THREADS)


def load_own(stream: Any, cta: Any, channels: int, tokens: int) -> jax.Array:
    """Load this CTA's channels of the residual stream, [tokens * channels]; returns float32 [256 * own_pairs]."""

    def body(stream: Any, cta: Any) -> Any:
        return (_load_pairs(stream, [offset for _, _, offset in _own_offsets(cta, channels, tokens)]),)

    return hp.inline(body, (stream, ()), cta, results=[(256 * own_pairs(channels, tokens), jnp.float32)])[0]


def load_own_weights(weight: Any, cta: Any, channels: int, tokens: int) -> jax.Array:
    """Load the norm's weight, of [channels], of each element of `load_own`, in its layout."""

    def body(weight: Any, cta: Any) -> Any:
        return (_load_pairs(weight, [channel for _, channel, _ in _own_offsets(cta, channels, tokens)]),)

    return hp.inline(body, (weight, ()), cta, results=[(256 * own_pairs(channels, tokens), jnp.float32)])[0]


def _load_pairs(ref: Any, offsets: Sequence[Any]) -> Any:
    """Load two consecutive elements from each offset, as float32."""
    pairs = [hp.load_vector(ref, offset, count=2).astype(jnp.float32) for offset in offsets]
    return hp.strided([value for pair in pairs for value in hp.unpack(pair)])


def own(
    sent: Any,
    splits: Sequence[int],
    target: int,
    squares: int,
    before: jax.Array,
    weights: jax.Array,
    out: Any,
    staging: Any,
    cta: Any,
    step: Norm,
    channels: int,
    tokens: int,
    dtype: Any,
    devices: Devices | None,
) -> jax.Array:
    """Add a phase's results to this CTA's channels of the residual stream, and send them to all CTAs.

    It sends the sums times the norm's weights, and the sum of the squares of the sums. Two warpgroups run it.

    Args:
        sent: The buffer in GMEM through which CTAs exchange results.
        splits: The offsets of the split-K partial sums in it. float32 [tokens, channels] each
        target: The offset of the sums times the norm's weights, two in each word.
        squares: The offset of the sums of squares. float32 [tokens, OWNERS]
        before: This CTA's channels of the residual stream: see `load_own`.
        weights: The norm's weights: see `load_own_weights`.
        out: Receives the sums, [tokens * channels], unless it is None.
        staging: A float32 buffer in SMEM, of at least tokens * channels / 2 / OWNERS elements.
        cta: The CTA's index.
        step: The norm.
        channels: The channels of the residual stream.
        tokens: The number of tokens.
        dtype: The dtype of the residual stream, and of the products that are sent.
        devices: The devices over which the results are first summed; None for this device alone.

    Returns:
        The sums, like `before`.
    """
    each = channels // 2 // OWNERS

    def body(sent: Any, staging: Any, before: Any, weights: Any, cta: Any, *more: Any) -> Any:
        f32, kind = jnp.float32, dtype
        thread, totals, old, of_norm = hp.thread_of_cta(), [], hp.elements(before), hp.elements(weights)
        own_offsets = _own_offsets(cta, channels, tokens)
        addresses = [hp.address(sent, offset + start) for _, _, offset in own_offsets for start in splits]
        found = messages.poll(messages.load(addresses, 2, f32), addresses, f32)
        added = []
        for start in range(0, len(found), len(splits)):
            added.append([hp.add(*[pair[n] for pair in found[start : start + len(splits)]]) for n in range(2)])
        if devices is not None:
            added = added_up(devices, more[-2], more[-1], added, [offset for _, _, offset in own_offsets])
        for index, (pair, _, offset) in enumerate(own_offsets):
            both = slice(2 * index, 2 * index + 2)
            scaled = [hp.f32(step.scale) * one for one in added[index]]
            sums = [x + y for x, y in zip(old[both], scaled, strict=True)]
            rounded = hp.pack(sums).astype(kind)
            totals += hp.unpack(rounded.astype(jnp.float32))
            factors = [hp.f32(step.offset) + weight for weight in of_norm[both]]
            weighted = [x * y for x, y in zip(totals[-2:], factors, strict=True)]
            weighted = [hp.f32(scale_of(dtype)) * one for one in weighted]
            messages.store(hp.word_address(sent, target, offset), [hp.word(hp.rounded_pair(weighted, dtype))])
            if out is not None:
                hp.store_vector(rounded, more[0], offset)
            staging[pair] = hp.add(*[x * x for x in totals[-2:]])
        hp.barrier_of_warpgroups(fragments.WARPGROUPS)
        with hp.predicated(thread < tokens):
            start = thread * each
            total = hp.add(*[staging[start + n] for n in range(each)])
            offset = hp.add(thread * OWNERS, cta, squares)
            messages.store(hp.address(sent, offset), [total])
        return (hp.strided(totals),)

    operands = [(sent, ()), (staging, ()), before, weights, cta, *([] if out is None else [(out, ())])]
    operands += [] if devices is None else devices.operands
    return hp.inline(body, *operands, results=[(256 * own_pairs(channels, tokens), jnp.float32)])[0]


def _own_offsets(cta: Any, channels: int, tokens: int) -> list[tuple[Any, Any, Any]]:
    """Return the index in the CTA, the first channel, and the offset of each pair of channels that a thread holds.

    The offset is in [tokens, channels]. Threads beyond the last pair hold the last pair, too.
    """
    each, found = channels // 2 // OWNERS, []
    for n in range(own_pairs(channels, tokens)):
        pair = hp.thread_of_cta() + n * _THREADS
        pair = hp.minimum(pair, tokens * each - 1)
        token, index = pair // each, pair % each
        channel = (index + cta * each) * 2
        found.append((pair, channel, token * channels + channel))
    return found
