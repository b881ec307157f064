"""How much a chunk's tokens depend on earlier ones of it, on Hopper GPUs.

These weights are products of keys with keys and with queries, times norms and decays. Single threads make them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels import _thread_code as code
from pallas_kernels._pallas_mosaic import arith, ir, math, memref, vector
from pallas_kernels._pallas_triton import LOG2_E
from pallas_kernels.gated_delta_rule.prefill.sums_mosaic import SIZE, Factors
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON

_BLOCKS = SIZE // 8  # of eight columns
_GROUP = 8  # numbers of 16 bytes
_WARPS = code.THREADS // code.LANES
_PARTS = 2  # of a warp's rows, in each of which a thread has one row
_ROWS = 8  # of a part
_AT = Factors()


def find_norms(products: jax.Array | None, norms: Any, factor: float) -> None:
    """Writes the factors that normalise keys or queries, by one warpgroup.

    Args:
        products: Their products with themselves, float32 [64, 64], of which only the diagonal is used. None if tokens are
            not normalised.
        norms: Receives the factors, times `factor`. float32 [64], in shared memory. Other threads see them after the
            warpgroup's next barrier.
        factor: What all of them are multiplied with.
    """

    def body(_: Any, *operands: Any) -> None:
        *products, norms = operands
        lane, warp = code.lane_and_warp(pm.thread_index_again())
        row, pair = arith.shrui(lane, pm.constant(2)), arith.andi(lane, pm.constant(3))
        factors = [code.number(factor)] * _PARTS
        if products:
            for part, total in enumerate(_diagonal(products[0], row, warp)):
                norm = code.approximate("rsqrt", arith.addf(total, code.number(L2_EPSILON)))
                factors[part] = arith.mulf(norm, factors[part])
        has_diagonal = arith.cmpi(arith.CmpIPredicate.eq, pair, arith.shrui(row, pm.constant(1)))
        with pm.only_if(has_diagonal):
            for place, found in zip(_rows(warp, row)[1], factors, strict=True):
                memref.store(found, norms, code.indices(place))

    pm.inline(body, *([] if products is None else [products]), (norms, ()))


def _rows(warp: Any, in_piece: Any) -> tuple[list[Any], list[Any]]:
    """Returns a thread's piece of eight rows in each part, and its row, which has the place `in_piece` in both."""
    pieces = [code.total(code.scaled(warp, _PARTS), pm.constant(part)) for part in range(_PARTS)]
    return pieces, [code.total(code.scaled(piece, _ROWS), in_piece) for piece in pieces]


def _diagonal(products: Any, row: Any, warp: Any) -> list[Any]:
    """Returns the diagonal's number in each of a thread's rows. Only a thread with `lane % 4 == lane // 8` has it.

    Of its warp's 16 rows, a thread has `row` and the one eight later, and of every eight columns two.
    """
    held = [code.parts(x) for x in products.registers.flat]
    is_odd, is_odd_warp = (code.is_equal(arith.andi(x, pm.constant(1)), 1) for x in (row, warp))
    is_late_warp = code.differs(arith.andi(warp, pm.constant(2)), 0)
    found = []
    for part in range(_PARTS):
        # Each warp has its own 16 columns of the diagonal. Which of its registers they are in depends on the warp.
        pairs = [held[_PARTS * (_PARTS * of_warp + part) + part] for of_warp in range(_WARPS)]
        a, b, c, d = (code.either(is_odd, second, first) for first, second in pairs)
        found.append(code.either(is_late_warp, code.either(is_odd_warp, d, c), code.either(is_odd_warp, b, a)))
    return found


def weigh(
    keys: jax.Array, queries: jax.Array, per_row: Any, per_column: Any, norms: Any, system: Any, attention: Any
) -> None:
    """Writes the system and the weights of a chunk and value head, by one warpgroup.

    The two products are in registers, and everything else is in shared memory.

    Args:
        keys: Products of keys. float32 [64, 64].
        queries: Products of queries and keys. float32 [64, 64].
        per_row: The `Factors`. float32 [factors, 64].
        per_column: The first two of them once more. float32 [2, 64].
        norms: The factors that normalise keys, and queries. float32 [2, 64].
        system: Receives what `invert` takes. float32 [64, 64], `tiled`.
        attention: Receives the weights of corrections in outputs. bfloat16 [64, 64], `tiled`.
    """

    def body(_: Any, keys: Any, queries: Any, *refs: Any) -> None:
        per_row, per_column, norms, system, attention = refs
        lane, warp = code.lane_and_warp(pm.thread_index_again())
        in_piece, pair = arith.shrui(lane, pm.constant(2)), arith.andi(lane, pm.constant(3))
        pieces, rows = _rows(warp, in_piece)
        of_row = lambda ref, n: [memref.load(ref, code.indices(pm.constant(n), row)) for row in rows]
        coarse, fine, beta = (of_row(per_row, n) for n in (_AT.coarse, _AT.fine, _AT.beta))
        of_keys, of_queries = (of_row(norms, n) for n in (0, 1))
        of_keys = [arith.negf(arith.mulf(x, y)) for x, y in zip(of_keys, beta, strict=True)]
        nothing, kind = code.number(0.0), code.vector_type(2, ir.F32Type.get())
        # Of every eight columns of the products, this thread has two numbers in each of its two rows.
        held = [[*x.registers.flat] for x in (keys, queries)]
        for n in range(_BLOCKS):
            first = code.total(code.scaled(pair, 2), pm.constant(8 * n))
            of_column = lambda ref, at, first=first: code.parts(
                vector.load(kind, ref, code.indices(pm.constant(at), first), alignment=8)
            )
            columns = [*zip(of_column(per_column, 0), of_column(per_column, 1), of_column(norms, 0), strict=True)]
            in_tile = code.total(arith.shrui(pair, pm.constant(1)), pm.constant(2 * n % 8))
            in_group = code.scaled(arith.andi(pair, pm.constant(1)), 2)
            in_system = code.total(code.swizzled(in_tile, in_piece, 4), in_group)
            in_attention = code.total(code.swizzled(pm.constant(n), in_piece, _GROUP), code.scaled(pair, 2))
            for part in range(2):
                of_system, of_attention = [], []
                for m, (coarse_too, fine_too, norm) in enumerate(columns):
                    difference = arith.subf(coarse[part], coarse_too), arith.subf(fine[part], fine_too)
                    exponent = math.fma(difference[0], code.number(LOG2_E), difference[1])
                    weight = code.approximate("ex2", arith.minimumf(exponent, nothing))
                    weight = arith.mulf(weight, norm)
                    key, query = (code.parts(x[2 * n + part])[m] for x in held)
                    of_system.append(arith.mulf(arith.mulf(weight, key), of_keys[part]))
                    is_later = arith.cmpi(arith.CmpIPredicate.sgt, code.total(first, pm.constant(m)), rows[part])
                    known = arith.mulf(arith.mulf(weight, query), of_queries[part])
                    of_attention.append(arith.select(is_later, nothing, known))
                place = code.indices(pieces[part], pm.constant(n // 4), in_piece, in_system)
                vector.store(code.from_parts(of_system), system, place, alignment=8)
                place = code.indices(pieces[part], pm.constant(0), in_piece, in_attention)
                vector.store(code.rounded_pair(of_attention, jnp.bfloat16), attention, place, alignment=4)

    vectors = [(x, ()) for x in (per_row, per_column, norms)]
    tiles = (system, pm.tiling(jnp.float32)), (attention, pm.tiling(jnp.bfloat16))
    pm.inline(body, keys, queries, *vectors, *tiles)
