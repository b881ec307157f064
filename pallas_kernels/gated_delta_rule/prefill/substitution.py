"""Inverts triangular systems on Hopper GPUs by forward substitution, a column of the inverse per thread.

All products and sums are in float32, in a fixed order, so the error is only rounding, whatever the systems hold. A row of a
system is the same for all threads of a warp, so shared memory hands out four of its elements at once.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm

SIZE = 64  # the rows of a system, and the columns that half of a warpgroup has


def substitute(system: Any, beta: Any, solution: Any) -> None:
    """Writes (I + L)^-1 beta for two systems L, by one warpgroup. All arguments are in shared memory.

    Args:
        system: L below its diagonal, which is all that is read. float32 [2, 64, 64], `tiled`.
        beta: The factors of the columns. float32 [2, 64].
        solution: Receives the results in pieces of bfloat16, the largest first. bfloat16 [2, pieces, 64, 64]. It may take
            the place of `system`.
    """

    def body(_, system, beta, solution):
        index, float32, int32 = pm.ir.IndexType.get(), pm.ir.F32Type.get(), pm.ir.IntegerType.get_signless(32)
        number = lambda n: pm.arith.constant(index, n)
        thread = pm.arith.index_cast(index, pm.thread_index())
        half, column = pm.arith.divui(thread, number(SIZE)), pm.arith.remui(thread, number(SIZE))
        vector, zero, one = pm.ir.VectorType.get([4], float32), *(pm.arith.constant(float32, x) for x in (0.0, 1.0))
        tile = pm.SWIZZLE // 4  # elements in a row of a tile of the system
        found, negative = [], []
        for row in range(SIZE):
            is_one = pm.arith.cmpi(pm.arith.CmpIPredicate.eq, column, number(row))
            # Four sums, so that an addition need not wait for the one before it.
            sums = [pm.arith.select(is_one, one, zero), *[zero] * 3]
            for first in range(0, row, 4):
                # Where the tile's swizzle puts four elements of a row.
                place = ((first % tile) // 4 ^ row % 8) * 4
                at = [half, *map(number, (row // 8, first // tile, row % 8, place))]
                elements = pm.vector.load(vector, system, at, alignment=16)
                for n in range(min(4, row - first)):
                    element = pm.vector.extract(elements, [], [n])
                    sums[n] = pm.math.fma(element, negative[first + n], sums[n])
            found.append(pm.arith.addf(pm.arith.addf(sums[0], sums[1]), pm.arith.addf(sums[2], sums[3])))
            negative.append(pm.arith.negf(found[-1]))
        factor = pm.memref.load(beta, [half, column])
        count, upper = solution.type.shape[1], pm.arith.constant(int32, -65536)
        pm.warpgroup_barrier()  # all threads have read the systems
        for row in range(SIZE):
            rest = pm.arith.mulf(found[row], factor)
            for piece in range(count):
                part = rest
                if piece < count - 1:  # cut, as in _dot.pieces
                    part = pm.arith.bitcast(float32, pm.arith.andi(pm.arith.bitcast(int32, rest), upper))
                    rest = pm.arith.subf(rest, part)
                part = pm.arith.truncf(pm.ir.BF16Type.get(), part)
                pm.memref.store(part, solution, [half, number(piece), number(row), column])

    pm.inline(body, (system, pm.tiling(jnp.float32)), (beta, ()), (solution, ()))
