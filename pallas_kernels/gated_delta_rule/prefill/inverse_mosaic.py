"""Inverts triangular systems on Hopper GPUs, in blocks of 16 rows and columns.

With D for a block on the diagonal of I + L, T for a block of the inverse, and i, j and k for the places of blocks,

    T[j, j] = D[j]^-1        T[i, j] = -D[i]^-1 (L[i, j] T[j, j] + ... + L[i, i - 1] T[i - 1, j])    for i > j

Half a warp inverts a D by forward substitution, a column per thread. Then a warp finds two columns of blocks, from their
diagonal down, on tensor cores. Numbers of float32 are multiplied as two of tf32 each, so the error is about 2^-20, whatever
the systems hold. Blocks of the inverse are transposed: what one product gives is then the left operand of the next, and
stays in a thread's registers.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels import _thread_code as code
from pallas_kernels._pallas_mosaic import arith, ir, math, memref, vector

SIZE = 64  # the rows of a system
_BLOCK = 16
_BLOCKS = SIZE // _BLOCK
_OF_THREAD = 8  # elements of a block that a thread has
_WORDS = _OF_THREAD // 2  # of a piece of them
_PIECE = 8  # rows of a tile's piece, and columns of what tensor cores multiply at once
_OF_TILE = pm.SWIZZLE // 4 // _BLOCK  # a system's blocks side by side in a tile
_VECTOR = 4  # float32 numbers of 16 bytes, which the swizzle keeps together

# What a thread has of a block: four numbers of each half of its columns, as `multiply_tile` returns them.
Tile = list[Any]
# The same numbers as their larger and smaller parts, in the order of left operands.
Split = list[Sequence[Any]]


def invert(system: Any, beta: Any, solution: Any) -> None:
    """Writes the transposes of (I + L)^-1 beta for two systems L, by one warpgroup. All arguments are in shared memory.

    Args:
        system: -L below its diagonal, which is all that is used. float32 [2, 64, 64], `tiled`. The blocks on its diagonal
            are overwritten.
        beta: The factors of the inverses' columns. float32 [2, 64].
        solution: Receives the results in pieces of bfloat16, the largest first. bfloat16 [2, pieces, 64, 64], `tiled`. It
            may take the place of `system`.
    """

    def body(_: Any, system: Any, beta: Any, solution: Any) -> None:
        lane, warp = code.lane_and_warp(pm.thread_index_again())
        half, share = arith.shrui(warp, pm.constant(1)), arith.andi(warp, pm.constant(1))
        _invert_block(system, half, share, lane)
        pm.warpgroup_barrier()
        # A warp finds the columns 0 and 3, or 1 and 2, which have about as many products. A loop keeps the code short.
        other, count = arith.subi(pm.constant(_BLOCKS - 1), share), solution.type.shape[1]
        of_column = _BLOCKS * count * _WORDS

        def find(n: Any, held: list[Any]) -> list[Any]:
            """Finds the n-th column, and returns its words before those that are held."""
            is_first = code.is_equal(arith.index_cast(pm.integer(), n), 0)
            tiles = _find_column(system, beta, half, lane, arith.select(is_first, share, other))
            return [word for tile in tiles for word in _words(tile, count)] + held[:of_column]

        start, stop = (code.index(pm.constant(n)) for n in (0, 2))
        held = pm.repeated(start, stop, find, [pm.constant(0)] * (2 * of_column))
        pm.warpgroup_barrier()  # all threads have read the systems
        for column, words in ((other, held[:of_column]), (share, held[of_column:])):
            _store(words, solution, half, lane, column)

    pm.inline(body, (system, pm.tiling(jnp.float32)), (beta, ()), (solution, pm.tiling(jnp.bfloat16)))


def _invert_block(system: Any, half: Any, share: Any, lane: Any) -> None:
    """Inverts a block on the diagonal by half of a warp, and puts the inverse into its place."""
    column = arith.andi(lane, pm.constant(15))
    number = code.total(code.scaled(share, 2), arith.shrui(lane, pm.constant(4)))
    tile, first = arith.shrui(number, pm.constant(1)), arith.andi(number, pm.constant(1))

    def at(row: int, group: Any) -> list[Any]:
        """Returns where the block's row has so many groups of four elements before."""
        piece = code.total(code.scaled(number, _BLOCK // _PIECE), pm.constant(row // _PIECE))
        in_tile, in_piece = code.total(code.scaled(first, _BLOCK // _VECTOR), group), pm.constant(row % _PIECE)
        return [half, piece, tile, in_piece, code.swizzled(in_tile, in_piece, _VECTOR)]

    found: list[Any] = []
    for row in range(_BLOCK):
        elements: list[Any] = []
        for group in range(-(-row // _VECTOR)):
            kind = code.vector_type(_VECTOR, ir.F32Type.get())
            elements += code.parts(vector.load(kind, system, code.indices(*at(row, pm.constant(group))), alignment=16))
        x = arith.select(code.is_equal(column, row), code.number(1.0), code.number(0.0))
        for element, earlier in zip(elements, found, strict=False):
            x = math.fma(element, earlier, x)
        found.append(x)
    pm.warp_barrier()  # all threads of the warp have read the block
    for row, x in enumerate(found):
        *outer, place = at(row, arith.shrui(column, pm.constant(2)))
        memref.store(x, system, code.indices(*outer, code.total(place, arith.andi(column, pm.constant(3)))))


def _find_column(system: Any, beta: Any, half: Any, lane: Any, column: Any) -> list[Tile]:
    """Returns a column of the inverse's blocks, transposed, from the diagonal down. Blocks beyond the last row are zeros.

    All are multiplied with the column's factors, because the block on the diagonal is, from which the others come.
    """
    nothing = [code.number(0.0)] * _OF_THREAD
    found, parts = [_load_transposed(system, beta, half, lane, column)], list[Split]()
    for distance in range(1, _BLOCKS):
        row = code.total(column, pm.constant(distance))
        parts.append(_split(found[-1]))

        def block(row=row) -> Tile:
            earlier = [code.total(column, pm.constant(n)) for n in range(len(parts))]
            blocks = [_load_block(system, half, lane, row, each) for each in earlier]
            total = _multiply([*zip(parts, blocks, strict=True)])
            return _multiply([(_split(total), _load_block(system, half, lane, row, row))])

        found.append(pm.value_if(code.is_less(row, _BLOCKS), block, nothing))
    return found


def _load_transposed(system: Any, beta: Any, half: Any, lane: Any, number: Any) -> Tile:
    """Loads the transpose of a block on the diagonal, times its factors, as a thread has the results of products."""
    row, pair, tile = arith.shrui(lane, pm.constant(2)), arith.andi(lane, pm.constant(3)), []
    for part in range(2):
        for of_column in range(2):
            column = code.total(row, pm.constant(_PIECE * of_column))
            factor = memref.load(beta, code.indices(half, code.total(code.scaled(number, _BLOCK), column)))
            for n in range(2):
                in_piece = code.total(code.scaled(pair, 2), pm.constant(n))
                place = _place(number, part, in_piece, number, column)
                tile.append(arith.mulf(memref.load(system, code.indices(half, *place)), factor))
    return tile


def _load_block(system: Any, half: Any, lane: Any, row: Any, column: Any) -> list[list[Any]]:
    """Loads a block as the right operand of products, for each half of its rows and then of its columns two elements."""
    in_piece, pair, found = arith.shrui(lane, pm.constant(2)), arith.andi(lane, pm.constant(3)), []
    for piece in range(2):
        for part in range(2):
            first = code.total(code.scaled(pair, 2), pm.constant(_PIECE * part))
            at = _place(row, piece, in_piece, column, first)
            kind = code.vector_type(2, ir.F32Type.get())
            found.append(code.parts(vector.load(kind, system, code.indices(half, *at), alignment=8)))
    return found


def _place(of_row: Any, piece: int, row: Any, of_column: Any, column: Any) -> list[Any]:
    """Returns where the swizzle puts an element of a system: the place in memory, without the system's number.

    Args:
        of_row: The place of the block's row of blocks.
        piece: The piece of the block that has the element's row, 0 or 1.
        row: The row in the piece.
        of_column: The place of the block's column of blocks.
        column: The column in the block.
    """
    in_tile = code.scaled(arith.andi(of_column, pm.constant(_OF_TILE - 1)), _BLOCK // _VECTOR)
    group = code.total(arith.shrui(column, pm.constant(2)), in_tile)
    place = code.total(code.swizzled(group, row, _VECTOR), arith.andi(column, pm.constant(_VECTOR - 1)))
    return [code.total(code.scaled(of_row, 2), pm.constant(piece)), arith.shrui(of_column, pm.constant(1)), row, place]


def _split(tile: Tile) -> Split:
    """Returns the larger and smaller parts of a product's results, as the left operand of the next product.

    Of eight columns, a thread has the two that follow each other from `lane % 4 * 2` on, where tensor cores want those of
    `lane % 4` and four later. Which is which does not matter, as the right operand has its rows in the same order.
    """
    parts = [_parts(x) for x in tile]
    return [[parts[4 * n + place][which] for place in (0, 2, 1, 3)] for n in (0, 1) for which in (0, 1)]


def _multiply(products: Sequence[tuple[Split, list[list[Any]]]]) -> Tile:
    """Returns the sum of products of 16 x 16 blocks of float32 with transposes of such blocks.

    Products of smaller parts have sums of their own, so that fewer products wait for each other.
    """
    sums = [[[code.number(0.0)] * 4 for _ in (0, 1)] for _ in (0, 1)]
    for left, right in products:
        for n in (0, 1):
            for part in (0, 1):
                large, small = zip(*(_parts(x) for x in right[2 * n + part]), strict=True)
                of_left, rest = left[2 * part], left[2 * part + 1]
                sums[0][n] = code.multiply_tile_of_tf32(sums[0][n], of_left, large)
                sums[1][n] = code.multiply_tile_of_tf32(sums[1][n], rest, large)
                sums[1][n] = code.multiply_tile_of_tf32(sums[1][n], of_left, small)
    return [arith.addf(x, y) for n in (0, 1) for x, y in zip(sums[0][n], sums[1][n], strict=True)]


def _parts(x: Any) -> tuple[Any, Any]:
    """Returns two float32 numbers of which x is the sum. The larger one is one of tf32, which has 13 bits less."""
    return _cut(x, 13)


def _cut(x: Any, bits: int) -> tuple[Any, Any]:
    """Returns a float32 number without its last bits, and what is left."""
    large = arith.bitcast(ir.F32Type.get(), arith.andi(arith.bitcast(pm.integer(), x), pm.constant(-(1 << bits))))
    return large, arith.subf(x, large)


def _words(tile: Tile, count: int) -> list[Any]:
    """Returns so many pieces of a block, the largest first, as words. A piece has one for each quarter of the block."""
    words: list[list[Any]] = [[] for _ in range(count)]
    for of_column in range(2):
        for part in range(2):
            values = tile[4 * part + 2 * of_column :][:2]
            for of_piece, numbers in zip(words, _pieces(values, count), strict=True):
                of_piece.append(code.word(code.rounded_pair(numbers, jnp.bfloat16)))
    return [word for of_piece in words for word in of_piece]


def _store(words: Sequence[Any], solution: Any, half: Any, lane: Any, column: Any) -> None:
    """Stores the words of a column of blocks. The zeros beyond the last row go to the blocks above the diagonal."""
    count = solution.type.shape[1]
    # A transposed block has four matrices: the halves of its first eight rows, and those of its last ones.
    in_matrix, matrix = arith.andi(lane, pm.constant(_PIECE - 1)), arith.shrui(lane, pm.constant(3))
    in_block = code.total(code.scaled(arith.shrui(matrix, pm.constant(1)), _PIECE), in_matrix)
    row = code.total(code.scaled(half, count * SIZE), code.scaled(column, _BLOCK), in_block)
    for number in range(_BLOCKS):
        block = arith.andi(code.total(column, pm.constant(number)), pm.constant(_BLOCKS - 1))
        group = code.total(code.scaled(block, 2), arith.andi(matrix, pm.constant(1)))
        for n in range(count):
            place = code.total(
                code.scaled(row, SIZE), code.swizzled(group, in_matrix, _PIECE), pm.constant(n * SIZE * SIZE)
            )
            first = (number * count + n) * _WORDS
            code.store_matrices(pm.address_in_shared(solution, place), words[first:][:_WORDS])


def _pieces(values: Sequence[Any], count: int) -> list[list[Any]]:
    """Returns the pieces of float32 numbers, the largest first, cut as in `_dot.pieces` but not yet rounded."""
    found = []
    for _ in range(count - 1):
        large, values = zip(*(_cut(x, 16) for x in values), strict=True)
        found.append(list(large))
    return [*found, list(values)]
