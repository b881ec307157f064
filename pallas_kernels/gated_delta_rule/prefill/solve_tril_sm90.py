"""The inverse of unit lower triangular systems on Hopper GPUs, in blocks of 16 rows and columns, for the WY representation.

With D for a block on the diagonal of I + L, T for a block of the inverse, and i, j and k for the indices of blocks,

    T[j, j] = D[j]^-1        T[i, j] = -D[i]^-1 (L[i, j] T[j, j] + ... + L[i, i - 1] T[i - 1, j])    for i > j

Half a warp inverts a D by forward substitution, a column per thread. Then a warp computes two columns of blocks, from their
diagonal down, on tensor cores. Float32 values are split into hi and lo terms of tf32, so the error is about 2^-20, whatever
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
_WORDS = _OF_THREAD // 2  # words of one bfloat16 term of these elements
_ROWS = 8  # rows over which the swizzle repeats, and columns of a product on tensor cores
_OF_TILE = hp.SWIZZLE // 4 // _BLOCK  # a system's blocks side by side in a tile
_VECTOR = 4  # float32 elements of 16 bytes, which the swizzle keeps together

# A thread's elements of a block: four of each half of its columns, as `mma` returns them.
Tile = list[Any]
# The same elements as hi and lo terms, in the order of left operands.
Split = list[Sequence[Any]]


def solve_tril(system: Any, beta: Any, solution: Any) -> None:
    """Store the transposes of (I + L)^-1 beta for two systems L, by one warpgroup. All arguments are in SMEM.

    Args:
        system: -L below its diagonal. The rest is not used. float32 [2, 64, 64], `tiled`. The blocks on its diagonal
            are overwritten.
        beta: The factors of the inverses' columns. float32 [2, 64].
        solution: Receives the results as bfloat16 terms, hi first. bfloat16 [2, terms, 64, 64], `tiled`. It may share the
            bytes of `system`.
    """

    def body(system: Any, beta: Any, solution: Any) -> None:
        lane, warp = hp.lane_and_warp(hp.thread_index_again())
        half, warp_in_system = warp >> 1, warp & 1
        _invert_block(system, half, warp_in_system, lane)
        hp.warpgroup_barrier()
        # A warp finds the columns 0 and 3, or 1 and 2, which have about as many products. A loop keeps the code short.
        other, count = hp.i32(_BLOCKS - 1) - warp_in_system, solution.shape[1]
        of_column = _BLOCKS * count * _WORDS

        def find(n: Any, held: list[Any]) -> list[Any]:
            """Compute the n-th column, and return its words, followed by the words of the column before."""
            is_first = n == 0
            tiles = _find_column(system, beta, half, lane, hp.select(is_first, warp_in_system, other))
            return [word for tile in tiles for word in _words(tile, count)] + held[:of_column]

        start, stop = (hp.index(hp.i32(n)) for n in (0, 2))
        held = hp.for_range(start, stop, find, [hp.i32(0)] * (2 * of_column))
        hp.warpgroup_barrier()  # all threads have read the systems
        for column, words in ((other, held[:of_column]), (warp_in_system, held[of_column:])):
            _store(words, solution, half, lane, column)

    hp.inline(body, (system, hp.tiling(jnp.float32)), (beta, ()), (solution, hp.tiling(jnp.bfloat16)))


def _invert_block(system: Any, half: Any, warp_in_system: Any, lane: Any) -> None:
    """Invert a block on the diagonal in place, by half of a warp, the first or second of two warps of the system."""
    column = lane & 15
    index = warp_in_system * 2 + (lane >> 4)
    tile, first = index >> 1, index & 1

    def at(row: int, group: Any) -> list[Any]:
        """Return the indices in SMEM of column group `group` (4 elements) in row `row` of the swizzled 16 x 16 block."""
        row_group = index * (_BLOCK // _ROWS) + row // _ROWS
        in_tile, in_group = first * (_BLOCK // _VECTOR) + group, hp.i32(row % _ROWS)
        return [half, row_group, tile, in_group, hp.swizzled(in_tile, in_group, _VECTOR)]

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
        *outer, first_column = at(row, column >> 2)
        system[*outer, first_column + (column & 3)] = x


def _find_column(system: Any, beta: Any, half: Any, lane: Any, column: Any) -> list[Tile]:
    """Return a column of the inverse's blocks, transposed, from the diagonal down. Blocks beyond the last row are zeros.

    All are multiplied with the column's factors, because the block on the diagonal is, from which the others come.
    """
    nothing = [hp.f32(0.0)] * _OF_THREAD
    found, terms = [_load_transposed(system, beta, half, lane, column)], list[Split]()
    for distance in range(1, _BLOCKS):
        row = column + distance
        terms.append(_split(found[-1]))

        def block(row=row) -> Tile:
            earlier = [column + n for n in range(len(terms))]
            blocks = [_load_block(system, half, lane, row, each) for each in earlier]
            total = _multiply([*zip(terms, blocks, strict=True)])
            return _multiply([(_split(total), _load_block(system, half, lane, row, row))])

        found.append(hp.branch(row < _BLOCKS, block, nothing))
    return found


def _load_transposed(system: Any, beta: Any, half: Any, lane: Any, index: Any) -> Tile:
    """Load the transpose of a block on the diagonal, times its factors, in the layout of the results of products."""
    row, pair, tile = lane >> 2, lane & 3, []
    for row_half in range(2):
        for column_half in range(2):
            column = row + _ROWS * column_half
            factor = beta[half, index * _BLOCK + column]
            for n in range(2):
                in_half = pair * 2 + n
                at = _indices(index, row_half, in_half, index, column)
                tile.append(system[half, *at] * factor)
    return tile


def _load_block(system: Any, half: Any, lane: Any, row: Any, column: Any) -> list[list[Any]]:
    """Load a block as the right operand of products, for each half of its rows and then of its columns two elements."""
    in_half, pair, found = lane >> 2, lane & 3, []
    for row_half in range(2):
        for column_half in range(2):
            first = pair * 2 + _ROWS * column_half
            at = _indices(row, row_half, in_half, column, first)
            found.append(hp.unpack(hp.load_vector(system, half, *at, count=2)))
    return found


def _indices(of_row: Any, row_half: int, row: Any, of_column: Any, column: Any) -> list[Any]:
    """Return the indices in SMEM of an element of a swizzled system, without the system's own index.

    The element is in the block (of_row, of_column), in row `row` of the half `row_half` of its rows, and in column `column`.
    """
    in_tile = (of_column & (_OF_TILE - 1)) * (_BLOCK // _VECTOR)
    group = (column >> 2) + in_tile
    in_row = hp.swizzled(group, row, _VECTOR) + (column & (_VECTOR - 1))
    return [of_row * 2 + row_half, of_column >> 1, row, in_row]


def _split(tile: Tile) -> Split:
    """Return the hi and lo terms of a product's results, as the left operand of the next product.

    Of eight columns, a thread has the neighbours `lane % 4 * 2` and `lane % 4 * 2 + 1`, and a left operand has the columns
    `lane % 4` and `lane % 4 + 4`. The sum is the same, because the right operand has its rows in the same order.
    """
    terms = [_hi_and_lo(x) for x in tile]
    return [[terms[4 * n + m][which] for m in (0, 2, 1, 3)] for n in (0, 1) for which in (0, 1)]


def _multiply(products: Sequence[tuple[Split, list[list[Any]]]]) -> Tile:
    """Return the sum of products of 16 x 16 blocks of float32 with transposes of such blocks.

    Products of lo terms have sums of their own, so that fewer products wait for each other.
    """
    sums = [[[hp.f32(0.0)] * 4 for _ in (0, 1)] for _ in (0, 1)]
    for left, right in products:
        for n in (0, 1):
            for half in (0, 1):
                hi, lo = zip(*(_hi_and_lo(x) for x in right[2 * n + half]), strict=True)
                left_hi, left_lo = left[2 * half], left[2 * half + 1]
                sums[0][n] = hp.mma_tf32(sums[0][n], left_hi, hi)
                sums[1][n] = hp.mma_tf32(sums[1][n], left_lo, hi)
                sums[1][n] = hp.mma_tf32(sums[1][n], left_hi, lo)
    return [x + y for n in (0, 1) for x, y in zip(sums[0][n], sums[1][n], strict=True)]


def _hi_and_lo(x: Any) -> tuple[Any, Any]:
    """Return the hi and lo terms of a float32 value, which is their sum. The hi term is tf32, without the last 13 bits."""
    return _cut(x, 13)


def _cut(x: Any, bits: int) -> tuple[Any, Any]:
    """Return a float32 value without its last bits, and the rest."""
    hi = hp.bitcast(hp.bitcast(x, jnp.int32) & -(1 << bits), jnp.float32)
    return hi, x - hi


def _words(tile: Tile, count: int) -> list[Any]:
    """Return a block as `count` bfloat16 terms, hi first. A term is four words, one for each quarter of the block."""
    words: list[list[Any]] = [[] for _ in range(count)]
    for column_half in range(2):
        for row_half in range(2):
            pair = tile[4 * row_half + 2 * column_half :][:2]
            for of_term, values in zip(words, _terms(pair, count), strict=True):
                of_term.append(hp.word(hp.rounded_pair(values, jnp.bfloat16)))
    return [word for of_term in words for word in of_term]


def _store(words: Sequence[Any], solution: Any, half: Any, lane: Any, column: Any) -> None:
    """Store the words of a column of blocks. The zeros beyond the last row go to the blocks above the diagonal."""
    count = solution.shape[1]
    # A transposed block has four matrices: the halves of its first eight rows, and the halves of its last eight rows.
    in_matrix, matrix = lane & (_ROWS - 1), lane >> 3
    in_block = (matrix >> 1) * _ROWS + in_matrix
    row = hp.add(half * (count * SIZE), column * _BLOCK, in_block)
    for distance in range(_BLOCKS):
        block = (column + distance) & (_BLOCKS - 1)
        group = block * 2 + (matrix & 1)
        for n in range(count):
            offset = hp.add(row * SIZE, hp.swizzled(group, in_matrix, _ROWS), n * SIZE * SIZE)
            first = (distance * count + n) * _WORDS
            hp.stmatrix(hp.smem_address(solution, offset), words[first:][:_WORDS])


def _terms(values: Sequence[Any], count: int) -> list[list[Any]]:
    """Return the terms of float32 values, hi first, split as in `_dot.as_terms` but not yet rounded."""
    found = []
    for _ in range(count - 1):
        hi, values = zip(*(_cut(x, 16) for x in values), strict=True)
        found.append(list(hi))
    return [*found, list(values)]
