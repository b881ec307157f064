"""The register fragments of `mma.m16n8k16`, in which threads hold the inputs of several tokens (SM90).

The eight warps of two warpgroups multiply a block of eight outputs together. Of every 256 inputs (a K tile), each warp takes
32, and the lanes of a row take eight consecutive inputs each. A lane holds its inputs of the tokens `lane // 4` and
`lane // 4 + 8`, and multiplies by its weights of the output `lane // 4`. The instruction allows any order of inputs that is
also the order of weights, so eight weights are read by one load and used without shuffles.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._lazy_hopper import hp, messages
from pallas_kernels.product_chain.schedule import FEW_TOKENS, MOST_TOKENS, WIDTH

WARPGROUPS = 2  # that multiply
WARPS = 8  # of them
OUTPUTS = FEW_TOKENS.rows
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
    """Return the size of the SMEM buffer for the warps' partial sums of two blocks, in float32 elements."""
    return 2 * terms * WARPS * MOST_TOKENS * OUTPUTS


def load(x: Vectors, k_tiles: int, tokens: int) -> jax.Array:
    """Load the inputs of all threads from GMEM to registers. See `registers`."""

    def body(ref: Any, first: Any) -> Any:
        loaded = [hp.words(hp.load_vector(ref, at, count=8)) for at in offsets_of(x, first, k_tiles, tokens)]
        return (loaded,)

    return hp.inline(body, (x.ref, ()), x.first, results=[(registers(k_tiles, tokens), jnp.int32)])[0]


def receive(x: Vectors, k_tiles: int, tokens: int) -> jax.Array:
    """Poll GMEM for inputs that other CTAs send, two in each word of 32 bits. See `registers`."""

    def body(ref: Any, first: Any) -> Any:
        addresses = [hp.word_address(ref, x.start, at) for at in offsets_of(x, first, k_tiles, tokens)]
        kind = jnp.int32
        found = messages.poll(messages.load(addresses, PAIRS, kind), addresses, kind)
        held = [hp.pack(words) for words in found]
        return (held,)

    return hp.inline(body, (x.ref, ()), x.first, results=[(registers(k_tiles, tokens), jnp.int32)])[0]


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
