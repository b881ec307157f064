"""Inverts triangular systems on Hopper GPUs by forward substitution, a column of the inverse per thread.

All products and sums are in float32, in a fixed order, so the error is only rounding, whatever the systems hold. A row of a
system is the same for all threads of a warp, so shared memory hands out four of its elements at once. Columns of the right
half have no elements in the upper half of the rows, and their warps leave those rows out.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm

SIZE = 64  # the rows of a system
_WARP = SIZE // 2  # threads of a warp, each with a column
_GROUP = 4  # rows that are found one after the other, and then taken out of all rows below them
_ROWS = 8  # rows whose elements are in registers at the same time


def substitute(system: Any, beta: Any, solution: Any, *, transposed: bool = False) -> None:
    """Writes (I + L)^-1 beta for two systems L, by one warpgroup. All arguments are in shared memory.

    Args:
        system: L below its diagonal, which is all that is used. float32 [2, 64, 64], `tiled`.
        beta: The factors of the columns. float32 [2, 64].
        solution: Receives the results in pieces of bfloat16, the largest first. bfloat16 [2, pieces, 64, 64]. It may take
            the place of `system`.
        transposed: Whether the results are stored transposed, eight elements of a column at a time. `solution` is `tiled`
            then.
    """

    def body(_: Any, system: Any, beta: Any, solution: Any) -> None:
        index, float32 = pm.ir.IndexType.get(), pm.ir.F32Type.get()
        number = lambda n: pm.arith.constant(index, n)
        thread = pm.arith.remui(pm.arith.index_cast(index, pm.thread_index()), number(4 * _WARP))
        warp, lane = pm.arith.divui(thread, number(_WARP)), pm.arith.remui(thread, number(_WARP))
        half, is_right = pm.arith.divui(warp, number(2)), pm.arith.remui(warp, number(2))
        column = pm.arith.addi(pm.arith.muli(is_right, number(_WARP)), lane)
        equal = lambda x, n: pm.arith.cmpi(pm.arith.CmpIPredicate.eq, x, number(n))
        vector, tile = pm.ir.VectorType.get([_GROUP], float32), pm.SWIZZLE // 4  # elements in a row of a tile

        def elements(row, first):
            """Loads the elements of a row from column `first` on, from where the swizzle of their tile puts them."""
            place = ((first % tile) // _GROUP ^ row % 8) * _GROUP
            at = [half, *map(number, (row // 8, first // tile, row % 8, place))]
            loaded = pm.vector.load(vector, system, at, alignment=16)
            return [pm.vector.extract(loaded, [], [n]) for n in range(_GROUP)]

        def eliminate(rest, begin, end):
            """Finds the rows from `begin` to `end` of the column, and takes what they give out of all rows below each."""
            rest = list(rest)
            for first in range(begin, end, _GROUP):
                for start in range(first, SIZE, _ROWS):
                    rows = range(max(start, first + 1), min(start + _ROWS, SIZE))
                    loaded = {row: elements(row, first) for row in rows}
                    for n in range(_GROUP):
                        for row in rows:
                            if row > first + n:
                                rest[row] = pm.math.fma(loaded[row][n], pm.arith.negf(rest[first + n]), rest[row])
            return rest

        zero, factor = pm.arith.constant(float32, 0.0), pm.memref.load(beta, [half, column])
        own, none = [pm.arith.select(equal(lane, n), factor, zero) for n in range(_WARP)], [zero] * _WARP
        upper: Any = pm.scf.IfOp(equal(is_right, 0), [float32] * SIZE, has_else=True)
        with pm.ir.InsertionPoint(upper.then_block):
            pm.scf.yield_(eliminate(own + none, 0, _WARP))
        with pm.ir.InsertionPoint(upper.else_block):
            pm.scf.yield_(none + own)
        found = eliminate(upper.results, _WARP, SIZE)
        pm.warpgroup_barrier()  # all threads have read the systems
        (_store_column if transposed else _store_elements)(found, solution, half, column)

    of_solution = pm.tiling(jnp.bfloat16) if transposed else ()
    pm.inline(body, (system, pm.tiling(jnp.float32)), (beta, ()), (solution, of_solution))


def _pieces(values: Sequence[Any], count: int) -> list[list[Any]]:
    """Returns the pieces of float32 numbers, the largest first, cut as in `_dot.pieces` but not yet rounded."""
    float32, int32 = pm.ir.F32Type.get(), pm.ir.IntegerType.get_signless(32)
    upper, found = pm.arith.constant(int32, -65536), []
    for _ in range(count - 1):
        bits = [pm.arith.andi(pm.arith.bitcast(int32, x), upper) for x in values]
        found.append([pm.arith.bitcast(float32, x) for x in bits])
        values = [pm.arith.subf(x, part) for x, part in zip(values, found[-1], strict=True)]
    return [*found, list(values)]


def _store_elements(column: Sequence[Any], solution: Any, half: Any, number: Any) -> None:
    """Stores a column, an element at a time."""
    constant = lambda n: pm.arith.constant(pm.ir.IndexType.get(), n)
    for row, value in enumerate(column):
        for piece, (part,) in enumerate(_pieces([value], solution.type.shape[1])):
            narrow = pm.arith.truncf(pm.ir.BF16Type.get(), part)
            pm.memref.store(narrow, solution, [half, constant(piece), constant(row), number])


def _store_column(column: Sequence[Any], solution: Any, half: Any, number: Any) -> None:
    """Stores a column as a row, eight elements at a time, where the swizzle of the row's tile puts them."""
    constant = lambda n: pm.arith.constant(pm.ir.IndexType.get(), n)
    vector = lambda dtype: pm.ir.VectorType.get([8], dtype)
    tile, row = pm.arith.divui(number, constant(8)), pm.arith.remui(number, constant(8))
    for n in range(SIZE // 8):
        place = pm.arith.muli(pm.arith.xori(row, constant(n)), constant(8))
        for piece, parts in enumerate(_pieces(column[8 * n : 8 * n + 8], solution.type.shape[1])):
            wide = pm.vector.from_elements(vector(pm.ir.F32Type.get()), parts)
            narrow = pm.arith.truncf(vector(pm.ir.BF16Type.get()), wide)
            pm.vector.store(narrow, solution, [half, constant(piece), tile, constant(0), row, place], alignment=16)
