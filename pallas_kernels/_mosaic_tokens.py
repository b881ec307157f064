"""Tiles of tokens that are not full, on Hopper GPUs. A copy always has a whole tile, so threads do the rest.

A tile has 64 numbers for each of its tokens, of which a thread has 16 bytes at a time.
"""

from typing import Any

import jax

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels import _thread_code as code
from pallas_kernels._pallas_mosaic import arith, ir
from pallas_kernels._warpgroup import THREADS

_PIECE = 8  # tokens whose parts of 16 bytes change places


def keep_rows(tile: Any, count: jax.Array) -> None:
    """Sets the tokens of a tile in shared memory from `count` on to zero, without a `commit`.

    Args:
        tile: The tile, [16 n, 64], `tiled`.
        count: The number of tokens that it keeps.
    """

    def body(_: Any, tile: Any, count: Any) -> None:
        kind = ir.MemRefType(tile.type)
        pieces, across, _, length = kind.shape
        (of_piece, of_group, of_row, _), numbers = kind.get_strides_and_offset()[0], _numbers_of(kind)

        def place(token: Any, part: Any) -> Any:
            column = code.scaled(part, numbers)
            if across == 1 and of_piece == _PIECE * of_row:
                # Tokens follow each other in memory, which takes fewer instructions.
                return code.total(code.scaled(token, of_row), column)
            piece, row = arith.shrui(token, pm.constant(3)), arith.andi(token, pm.constant(_PIECE - 1))
            group, rest = arith.divui(column, pm.constant(length)), arith.remui(column, pm.constant(length))
            return code.total(
                code.scaled(piece, of_piece), code.scaled(group, of_group), code.scaled(row, of_row), rest
            )

        for token, part in _places(pieces * _PIECE, across * length // numbers):
            is_other = arith.cmpi(arith.CmpIPredicate.sge, token, count)
            code.clear_shared_words_if(is_other, pm.address_in_shared(tile, place(token, part)))

    pm.inline(body, (tile, pm.tiling(tile.dtype)), count)


def store_rows(source: Any, count: jax.Array, target: Any) -> None:
    """Stores the first tokens of a tile in the GPU's memory. All of them leave in a copy, and fewer are stored by threads.

    Args:
        source: The view of `token_tiles` for copies, [64, 64], of numbers of 16 bits.
        count: The number of tokens, 1 to 64.
        target: Where they go, [64, 64], of which only the first `count` rows need to exist.
    """
    full = source.shape[0]
    pm.when(count == full)(lambda: pm.copy_out(source, target))

    def body(_: Any, source: Any, target: Any, count: Any) -> None:
        kind = ir.MemRefType(source.type)
        tokens, _, _, length = kind.shape
        numbers = _numbers_of(kind)
        for token, part in _places(tokens, length // numbers):
            held = code.swizzled(part, arith.andi(token, pm.constant(_PIECE - 1)), numbers)
            place = pm.address_in_shared(source, code.total(code.scaled(token, length), held))
            _store(target, token, part, count, code.load_shared_words(place))

    @pm.when(count < full)
    def _() -> None:
        pm.inline(body, (source, pm.tiling(source.dtype, rows=1)), (target, ()), count)


def clear_rows(target: Any, count: jax.Array) -> None:
    """Writes zeros to the GPU's memory.

    Args:
        target: Where they go, [64, 64], of which only the first `count` rows need to exist.
        count: The number of rows, up to 64.
    """

    def body(_: Any, target: Any, count: Any) -> None:
        kind = ir.MemRefType(target.type)
        tokens, length = kind.shape
        for token, part in _places(tokens, length // _numbers_of(kind)):
            _store(target, token, part, count, [pm.constant(0)] * 4)

    pm.inline(body, (target, ()), count)


def _numbers_of(kind: Any) -> int:
    """Returns how many of an array's numbers 16 bytes hold."""
    return 16 // pm.bytes_of(kind.element_type)


def _places(tokens: int, parts: int) -> list[tuple[Any, Any]]:
    """Returns the tokens of a tile that have a part for this thread, and which of so many parts of 16 bytes it is."""
    thread, step = pm.thread_index_again(), THREADS // parts
    first, part = arith.divui(thread, pm.constant(parts)), arith.remui(thread, pm.constant(parts))
    return [(code.total(first, pm.constant(n)), part) for n in range(0, tokens, step)]


def _store(target: Any, token: Any, part: Any, count: Any, words: list[Any]) -> None:
    """Stores a thread's part of a token, if it is one of the first `count` ones."""
    place = pm.address_in_row(target, token, code.scaled(part, _numbers_of(ir.MemRefType(target.type))))
    code.store_words_if(arith.cmpi(arith.CmpIPredicate.slt, token, count), place, words)
