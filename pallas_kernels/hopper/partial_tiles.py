"""Tiles of fewer tokens than rows, on Hopper GPUs. A copy always has a whole tile, so threads clear and store partial ones.

A tile has 64 elements for each of its tokens. A thread handles 16 bytes of them at a time.
"""

from typing import Any

import jax

from pallas_kernels import hopper as hp
from pallas_kernels._warpgroup import THREADS

_ROWS = 8  # over which the swizzle repeats


def keep_rows(tile: Any, count: jax.Array) -> None:
    """Set the tokens of a tile in SMEM, [16 n, 64], `tiled`, from `count` on to zero, without `commit_smem`."""

    def body(tile: Any, count: Any) -> None:
        groups, across, _, length = tile.shape
        (of_rows, of_group, of_row, _), elements = tile.strides, _elements_of(tile)

        def offset(token: Any, vector: Any) -> Any:
            column = vector * elements
            if across == 1 and of_rows == _ROWS * of_row:
                # Tokens follow each other in memory, which takes fewer instructions.
                return token * of_row + column
            row_group, row = token >> 3, token & (_ROWS - 1)
            group, rest = column // length, column % length
            return hp.add(row_group * of_rows, group * of_group, row * of_row, rest)

        for token, vector in _vectors(groups * _ROWS, across * length // elements):
            is_other = token >= count
            hp.clear_smem_words_if(is_other, hp.smem_address(tile, offset(token, vector)))

    hp.inline(body, (tile, hp.tiling(tile.dtype)), count)


def store_rows(source: Any, count: jax.Array, target: Any) -> None:
    """Store the first tokens of a tile in GMEM: all of them by a copy, and fewer by threads.

    Args:
        source: The view of `token_tiles` for copies, [64, 64], of 16-bit elements, in SMEM.
        count: The number of tokens, 1 to 64.
        target: Receives the tokens. [64, 64] in GMEM, of which only the first `count` rows need to exist.
    """
    full = source.shape[0]
    hp.when(count == full)(lambda: hp.copy_smem_to_gmem(source, target))

    def body(source: Any, target: Any, count: Any) -> None:
        tokens, _, _, length = source.shape
        elements = _elements_of(source)
        for token, vector in _vectors(tokens, length // elements):
            held = hp.swizzled(vector, token & (_ROWS - 1), elements)
            offset = hp.smem_address(source, token * length + held)
            _store(target, token, vector, count, hp.load_smem_words(offset))

    @hp.when(count < full)
    def _() -> None:
        hp.inline(body, (source, hp.tiling(source.dtype, rows=1)), (target, ()), count)


def clear_rows(target: Any, count: jax.Array) -> None:
    """Store zeros in the first `count` rows of a tile in GMEM, [64, 64], of which only these need to exist."""

    def body(target: Any, count: Any) -> None:
        tokens, length = target.shape
        for token, vector in _vectors(tokens, length // _elements_of(target)):
            _store(target, token, vector, count, [hp.i32(0)] * 4)

    hp.inline(body, (target, ()), count)


def _elements_of(memory: Any) -> int:
    """Return the number of elements of an array in 16 bytes."""
    return 16 // memory.dtype.itemsize


def _vectors(tokens: int, vectors: int) -> list[tuple[Any, Any]]:
    """Return (token, vector) for each 16-byte vector of a tile that this thread handles, of `vectors` per token."""
    thread, step = hp.thread_index_again(), THREADS // vectors
    first, vector = thread // vectors, thread % vectors
    return [(first + n, vector) for n in range(0, tokens, step)]


def _store(target: Any, token: Any, vector: Any, count: Any, words: list[Any]) -> None:
    """Store one 16-byte vector of a token, if it is one of the first `count` tokens."""
    offset = hp.row_address(target, token, vector * _elements_of(target))
    hp.store_words_if(token < count, offset, words)
