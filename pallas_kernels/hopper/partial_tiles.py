"""Tiles of tokens that are not full, on Hopper GPUs. A copy always has a whole tile, so threads do the rest.

A tile has 64 numbers for each of its tokens, of which a thread has 16 bytes at a time.
"""

from typing import Any

import jax

from pallas_kernels import hopper as hp
from pallas_kernels._warpgroup import THREADS

_PIECE = 8  # tokens whose parts of 16 bytes change places


def keep_rows(tile: Any, count: jax.Array) -> None:
    """Sets the tokens of a tile in shared memory from `count` on to zero, without a `commit`.

    Args:
        tile: The tile, [16 n, 64], `tiled`.
        count: The number of tokens that it keeps.
    """

    def body(tile: Any, count: Any) -> None:
        pieces, across, _, length = tile.shape
        (of_piece, of_group, of_row, _), numbers = tile.strides, _numbers_of(tile)

        def place(token: Any, part: Any) -> Any:
            column = part * numbers
            if across == 1 and of_piece == _PIECE * of_row:
                # Tokens follow each other in memory, which takes fewer instructions.
                return token * of_row + column
            piece, row = token >> 3, token & (_PIECE - 1)
            group, rest = column // length, column % length
            return hp.add(piece * of_piece, group * of_group, row * of_row, rest)

        for token, part in _places(pieces * _PIECE, across * length // numbers):
            is_other = token >= count
            hp.clear_smem_words_if(is_other, hp.smem_address(tile, place(token, part)))

    hp.inline(body, (tile, hp.tiling(tile.dtype)), count)


def store_rows(source: Any, count: jax.Array, target: Any) -> None:
    """Stores the first tokens of a tile in the GPU's memory. All of them leave in a copy, and fewer are stored by threads.

    Args:
        source: The view of `token_tiles` for copies, [64, 64], of numbers of 16 bits.
        count: The number of tokens, 1 to 64.
        target: Where they go, [64, 64], of which only the first `count` rows need to exist.
    """
    full = source.shape[0]
    hp.when(count == full)(lambda: hp.copy_smem_to_gmem(source, target))

    def body(source: Any, target: Any, count: Any) -> None:
        tokens, _, _, length = source.shape
        numbers = _numbers_of(source)
        for token, part in _places(tokens, length // numbers):
            held = hp.swizzled(part, token & (_PIECE - 1), numbers)
            place = hp.smem_address(source, token * length + held)
            _store(target, token, part, count, hp.load_smem_words(place))

    @hp.when(count < full)
    def _() -> None:
        hp.inline(body, (source, hp.tiling(source.dtype, rows=1)), (target, ()), count)


def clear_rows(target: Any, count: jax.Array) -> None:
    """Writes zeros to the GPU's memory.

    Args:
        target: Where they go, [64, 64], of which only the first `count` rows need to exist.
        count: The number of rows, up to 64.
    """

    def body(target: Any, count: Any) -> None:
        tokens, length = target.shape
        for token, part in _places(tokens, length // _numbers_of(target)):
            _store(target, token, part, count, [hp.i32(0)] * 4)

    hp.inline(body, (target, ()), count)


def _numbers_of(memory: Any) -> int:
    """Returns how many of an array's numbers 16 bytes hold."""
    return 16 // memory.dtype.itemsize


def _places(tokens: int, parts: int) -> list[tuple[Any, Any]]:
    """Returns the tokens of a tile that have a part for this thread, and which of so many parts of 16 bytes it is."""
    thread, step = hp.thread_index_again(), THREADS // parts
    first, part = thread // parts, thread % parts
    return [(first + n, part) for n in range(0, tokens, step)]


def _store(target: Any, token: Any, part: Any, count: Any, words: list[Any]) -> None:
    """Stores a thread's part of a token, if it is one of the first `count` ones."""
    place = hp.row_address(target, token, part * _numbers_of(target))
    hp.store_words_if(token < count, place, words)
