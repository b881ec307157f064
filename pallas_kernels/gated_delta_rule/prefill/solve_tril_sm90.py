"""The inverse of unit lower triangular systems on Hopper GPUs, in blocks of 16 rows and columns, of which WY is made.

With D for a block on the diagonal of I + L, T for a block of the inverse, and i, j and k for the indices of blocks,

    T[j, j] = D[j]^-1        T[i, j] = -D[i]^-1 (L[i, j] T[j, j] + ... + L[i, i - 1] T[i - 1, j])    for i > j

Half a warp inverts a D by forward substitution, a column per thread. Then a warp computes two columns of blocks, from their
diagonal down, on tensor cores. Float32 numbers are split into hi and lo terms of tf32, so the error is about 2^-20, whatever
the systems hold. Blocks of the inverse are transposed: the result of one product is then the left operand of the next, and
stays in a thread's registers.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels import hopper as hp

SIZE = 64  # the rows of a system
_BLOCK = 16
_BLOCKS = SIZE // _BLOCK
_OF_THREAD = 8  # elements of a block that a thread has
_WORDS = _OF_THREAD // 2  # of a bfloat16 term of them
_PIECE = 8  # rows over which the swizzle repeats, and columns of a product on tensor cores
_OF_TILE = hp.SWIZZLE // 4 // _BLOCK  # a system's blocks side by side in a tile
_VECTOR = 4  # float32 numbers of 16 bytes, which the swizzle keeps together

# A thread's elements of a block: four of each half of its columns, as `mma` returns them.
Tile = list[Any]
# The same elements as hi and lo terms, in the order of left operands.
Split = list[Sequence[Any]]


def solve_tril(system: Any, beta: Any, solution: Any) -> None:
    """Stores the transposes of (I + L)^-1 beta for two systems L, by one warpgroup. All arguments are in SMEM.

    Args:
        system: -L below its diagonal, which is all that is used. float32 [2, 64, 64], `tiled`. The blocks on its diagonal
            are overwritten.
        beta: The factors of the inverses' columns. float32 [2, 64].
        solution: Receives the results as bfloat16 terms, hi first. bfloat16 [2, terms, 64, 64], `tiled`. It may share the
            bytes of `system`.
    """

    def body(system: Any, beta: Any, solution: Any) -> None:
        lane, warp = hp.lane_and_warp(hp.thread_index_again())
        half, share = warp >> 1, warp & 1
        _invert_block(system, half, share, lane)
        hp.warpgroup_barrier()
        # A warp finds the columns 0 and 3, or 1 and 2, which have about as many products. A loop keeps the code short.
        other, count = hp.i32(_BLOCKS - 1) - share, solution.shape[1]
        of_column = _BLOCKS * count * _WORDS

        def find(n: Any, held: list[Any]) -> list[Any]:
            """Computes the n-th column, and returns its words before those of the column before."""
            is_first = n == 0
            tiles = _find_column(system, beta, half, lane, hp.select(is_first, share, other))
            return [word for tile in tiles for word in _words(tile, count)] + held[:of_column]

        start, stop = (hp.index(hp.i32(n)) for n in (0, 2))
        held = hp.for_range(start, stop, find, [hp.i32(0)] * (2 * of_column))
        hp.warpgroup_barrier()  # all threads have read the systems
        for column, words in ((other, held[:of_column]), (share, held[of_column:])):
            _store(words, solution, half, lane, column)

    hp.inline(body, (system, hp.tiling(jnp.float32)), (beta, ()), (solution, hp.tiling(jnp.bfloat16)))


def _invert_block(system: Any, half: Any, share: Any, lane: Any) -> None:
    """Inverts a block on the diagonal in place, by half of a warp."""
    column = lane & 15
    number = share * 2 + (lane >> 4)
    tile, first = number >> 1, number & 1

    def at(row: int, group: Any) -> list[Any]:
        """Returns the indices in SMEM of column group `group` (4 elements) in row `row` of the swizzled 16 x 16 block."""
        piece = number * (_BLOCK // _PIECE) + row // _PIECE
        in_tile, in_piece = first * (_BLOCK // _VECTOR) + group, hp.i32(row % _PIECE)
        return [half, piece, tile, in_piece, hp.swizzled(in_tile, in_piece, _VECTOR)]

    found: list[Any] = []
    for row in range(_BLOCK):
        elements: list[Any] = []
        for group in range(-(-row // _VECTOR)):
            elements += hp.unpack(hp.load_vector(system, *at(row, hp.i32(group)), count=_VECTOR))
        x = hp.select(column == row, 1.0, 0.0)
        for element, earlier in zip(elements, found, strict=False):
            x = hp.fma(element, earlier, x)
        found.append(x)
    hp.warp_barrier()  # all threads of the warp have read the block
    for row, x in enumerate(found):
        *outer, place = at(row, column >> 2)
        system[*outer, place + (column & 3)] = x


def _find_column(system: Any, beta: Any, half: Any, lane: Any, column: Any) -> list[Tile]:
    """Returns a column of the inverse's blocks, transposed, from the diagonal down. Blocks beyond the last row are zeros.

    All are multiplied with the column's factors, because the block on the diagonal is, from which the others come.
    """
    nothing = [hp.f32(0.0)] * _OF_THREAD
    found, parts = [_load_transposed(system, beta, half, lane, column)], list[Split]()
    for distance in range(1, _BLOCKS):
        row = column + distance
        parts.append(_split(found[-1]))

        def block(row=row) -> Tile:
            earlier = [column + n for n in range(len(parts))]
            blocks = [_load_block(system, half, lane, row, each) for each in earlier]
            total = _multiply([*zip(parts, blocks, strict=True)])
            return _multiply([(_split(total), _load_block(system, half, lane, row, row))])

        found.append(hp.branch(row < _BLOCKS, block, nothing))
    return found


def _load_transposed(system: Any, beta: Any, half: Any, lane: Any, number: Any) -> Tile:
    """Loads the transpose of a block on the diagonal, times its factors, as a thread has the results of products."""
    row, pair, tile = lane >> 2, lane & 3, []
    for part in range(2):
        for of_column in range(2):
            column = row + _PIECE * of_column
            factor = beta[half, number * _BLOCK + column]
            for n in range(2):
                in_piece = pair * 2 + n
                place = _indices(number, part, in_piece, number, column)
                tile.append(system[half, *place] * factor)
    return tile


def _load_block(system: Any, half: Any, lane: Any, row: Any, column: Any) -> list[list[Any]]:
    """Loads a block as the right operand of products, for each half of its rows and then of its columns two elements."""
    in_piece, pair, found = lane >> 2, lane & 3, []
    for piece in range(2):
        for part in range(2):
            first = pair * 2 + _PIECE * part
            at = _indices(row, piece, in_piece, column, first)
            found.append(hp.unpack(hp.load_vector(system, half, *at, count=2)))
    return found


def _indices(of_row: Any, piece: int, row: Any, of_column: Any, column: Any) -> list[Any]:
    """Returns the indices in SMEM of an element of a swizzled system, without the system's own index.

    Args:
        of_row: The index of the block's row of blocks.
        piece: The half of the block's rows that has the element, 0 or 1.
        row: The row in that half.
        of_column: The index of the block's column of blocks.
        column: The column in the block.
    """
    in_tile = (of_column & (_OF_TILE - 1)) * (_BLOCK // _VECTOR)
    group = (column >> 2) + in_tile
    place = hp.swizzled(group, row, _VECTOR) + (column & (_VECTOR - 1))
    return [of_row * 2 + piece, of_column >> 1, row, place]


def _split(tile: Tile) -> Split:
    """Returns the hi and lo terms of a product's results, as the left operand of the next product.

    Of eight columns, a thread has the two that follow each other from `lane % 4 * 2` on, where tensor cores want those of
    `lane % 4` and four later. Which is which does not matter, as the right operand has its rows in the same order.
    """
    parts = [_hi_and_lo(x) for x in tile]
    return [[parts[4 * n + place][which] for place in (0, 2, 1, 3)] for n in (0, 1) for which in (0, 1)]


def _multiply(products: Sequence[tuple[Split, list[list[Any]]]]) -> Tile:
    """Returns the sum of products of 16 x 16 blocks of float32 with transposes of such blocks.

    Products of lo terms have sums of their own, so that fewer products wait for each other.
    """
    sums = [[[hp.f32(0.0)] * 4 for _ in (0, 1)] for _ in (0, 1)]
    for left, right in products:
        for n in (0, 1):
            for part in (0, 1):
                large, small = zip(*(_hi_and_lo(x) for x in right[2 * n + part]), strict=True)
                of_left, rest = left[2 * part], left[2 * part + 1]
                sums[0][n] = hp.mma_tf32(sums[0][n], of_left, large)
                sums[1][n] = hp.mma_tf32(sums[1][n], rest, large)
                sums[1][n] = hp.mma_tf32(sums[1][n], of_left, small)
    return [x + y for n in (0, 1) for x, y in zip(sums[0][n], sums[1][n], strict=True)]


def _hi_and_lo(x: Any) -> tuple[Any, Any]:
    """Returns the hi and lo terms of a float32 number, whose sum it is. The hi term is a tf32 number, of 13 bits less."""
    return _cut(x, 13)


def _cut(x: Any, bits: int) -> tuple[Any, Any]:
    """Returns a float32 number without its last bits, and the rest."""
    large = hp.bitcast(hp.bitcast(x, jnp.int32) & -(1 << bits), jnp.float32)
    return large, x - large


def _words(tile: Tile, count: int) -> list[Any]:
    """Returns a block as `count` bfloat16 terms, hi first. A term is four words, one for each quarter of the block."""
    words: list[list[Any]] = [[] for _ in range(count)]
    for of_column in range(2):
        for part in range(2):
            values = tile[4 * part + 2 * of_column :][:2]
            for of_term, numbers in zip(words, _terms(values, count), strict=True):
                of_term.append(hp.word(hp.rounded_pair(numbers, jnp.bfloat16)))
    return [word for of_term in words for word in of_term]


def _store(words: Sequence[Any], solution: Any, half: Any, lane: Any, column: Any) -> None:
    """Stores the words of a column of blocks. The zeros beyond the last row go to the blocks above the diagonal."""
    count = solution.shape[1]
    # A transposed block has four matrices: the halves of its first eight rows, and those of its last ones.
    in_matrix, matrix = lane & (_PIECE - 1), lane >> 3
    in_block = (matrix >> 1) * _PIECE + in_matrix
    row = hp.add(half * (count * SIZE), column * _BLOCK, in_block)
    for number in range(_BLOCKS):
        block = (column + number) & (_BLOCKS - 1)
        group = block * 2 + (matrix & 1)
        for n in range(count):
            place = hp.add(row * SIZE, hp.swizzled(group, in_matrix, _PIECE), n * SIZE * SIZE)
            first = (number * count + n) * _WORDS
            hp.stmatrix(hp.smem_address(solution, place), words[first:][:_WORDS])


def _terms(values: Sequence[Any], count: int) -> list[list[Any]]:
    """Returns the terms of float32 numbers, hi first, split as in `_dot.pieces` but not yet rounded."""
    found = []
    for _ in range(count - 1):
        large, values = zip(*(_cut(x, 16) for x in values), strict=True)
        found.append(list(large))
    return [*found, list(values)]
