"""Inverts triangular systems on Hopper GPUs by forward substitution, a column of the inverse per thread.

All products and sums are in float32, in a fixed order, so the error is only rounding, whatever the systems hold. A row of a
system is the same for all threads of a warp, so shared memory hands out four of its elements at once. Columns of the right
half have no elements in the upper half of the rows, and their warps leave those rows out. The code is a loop, because cores
take long to fetch instructions that they run once.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm

SIZE = 64  # the rows of a system
_WARP = SIZE // 2  # threads of a warp, each with a column
_GROUP = (
    8  # rows that are found one after the other, and then taken out of all rows below them: those of a tile's piece
)
_VECTOR = 4  # elements that are loaded at once


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
        thread = pm.arith.index_cast(index, pm.thread_index())
        warp, lane = pm.arith.divui(thread, number(_WARP)), pm.arith.remui(thread, number(_WARP))
        half, is_right = pm.arith.divui(warp, number(2)), pm.arith.remui(warp, number(2))
        column = pm.arith.addi(pm.arith.muli(is_right, number(_WARP)), lane)
        equal = lambda x, n: pm.arith.cmpi(pm.arith.CmpIPredicate.eq, x, number(n))
        vector, tile = pm.ir.VectorType.get([_VECTOR], float32), pm.SWIZZLE // 4  # elements in a row of a tile
        groups, of_tile = SIZE // _GROUP, tile // _GROUP

        def eliminate(group, rest):
            """Finds the rows of a group, and takes what they give out of all rows below.

            `rest` are the rows from the group's first one on, and then those that have been found. It is returned with the
            group's rows at its end.
            """
            at_tile, in_tile = pm.arith.divui(group, number(of_tile)), pm.arith.remui(group, number(of_tile))
            # Where the swizzle puts the parts of a row that are multiplied with this group.
            part = lambda n: pm.arith.addi(pm.arith.muli(in_tile, number(_GROUP // _VECTOR)), number(n))
            places = [
                [pm.arith.muli(pm.arith.xori(part(n), number(row)), number(_VECTOR)) for n in range(_GROUP // _VECTOR)]
                for row in range(_GROUP)
            ]

            def elements(below, row, n):
                """Loads the n-th part of a row of the group that comes so many groups later."""
                at = [half, pm.arith.addi(group, number(below)), at_tile, number(row), places[row][n]]
                loaded = pm.vector.load(vector, system, at, alignment=16)
                return [pm.vector.extract(loaded, [], [i]) for i in range(_VECTOR)]

            def take_out(below, rows, found):
                """Takes the found rows out of the rows of a group, which may be the same ones."""
                rows = list(rows)
                for n in range(_GROUP // _VECTOR):
                    last = lambda row: row if below == 0 else _GROUP  # of the found rows that this row has elements of
                    loaded = {row: elements(below, row, n) for row in range(_GROUP) if last(row) > n * _VECTOR}
                    for i in range(n * _VECTOR, (n + 1) * _VECTOR):
                        factor = pm.arith.negf(rows[i] if below == 0 else found[i])
                        for row in range(_GROUP):
                            if last(row) > i:
                                rows[row] = pm.math.fma(loaded[row][i - n * _VECTOR], factor, rows[row])
                return rows

            found, after = take_out(0, rest[:_GROUP], None), []
            for below in range(1, groups):
                rows = rest[below * _GROUP : (below + 1) * _GROUP]
                exists = pm.arith.cmpi(pm.arith.CmpIPredicate.ult, pm.arith.addi(group, number(below)), number(groups))
                branch: Any = pm.scf.IfOp(exists, [float32] * _GROUP, has_else=True)
                with pm.ir.InsertionPoint(branch.then_block):
                    pm.scf.yield_(take_out(below, rows, found))
                with pm.ir.InsertionPoint(branch.else_block):
                    pm.scf.yield_(rows)
                after += branch.results
            return [*after, *found]

        zero, factor = pm.arith.constant(float32, 0.0), pm.memref.load(beta, [half, column])
        own = [pm.arith.select(equal(lane, n), factor, zero) for n in range(_WARP)]
        first = pm.arith.muli(is_right, number(groups // 2))
        found = pm.repeated(first, number(groups), eliminate, own + [zero] * _WARP)
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
