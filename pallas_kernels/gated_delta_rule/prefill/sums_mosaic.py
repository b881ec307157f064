"""Sums of a chunk's log decays on Hopper GPUs, a token of one of two heads per thread.

Sums over the tokens before each token have no lowering in Mosaic GPU, so this is written in operations of MLIR.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels._pallas_triton import LOG2_E

SIZE = 64  # the tokens of a chunk
_WARP = 32  # threads of a warp


class Factors(NamedTuple):
    """The vectors of a chunk and value head, one value per token, in the order in which `sum_log_decays` writes them.

    Attributes:
        coarse: The running sums of the log decays' first parts. See `sums_on_scaled_grid` in products.py.
        fine: The running sums of their second parts, in log2.
        before: The log2 of the decay from the start of the chunk to each token.
        after: The log2 of the decay from each token to the end of the chunk.
        total: The log2 of the decay over the chunk, the same for all tokens.
        beta: The correction strengths, 0 for places without a token.
    """

    coarse: Any = 0
    fine: Any = 1
    before: Any = 2
    after: Any = 3
    total: Any = 4
    beta: Any = 5


def sum_log_decays(
    g: Any,
    beta: Any,
    start: jax.Array,
    count: jax.Array,
    heads: Sequence[jax.Array],
    per_row: Any,
    per_column: Any,
    sums: Any,
) -> None:
    """Writes the `Factors` of a chunk for two heads, by one warpgroup, whose warps no longer read the memory's old values.

    Args:
        g: Log decays, float32 [tokens, heads], in the GPU's memory.
        beta: Correction strengths, float32 [tokens, heads], in the GPU's memory.
        start: The chunk's first token.
        count: The number of its tokens.
        heads: The two heads.
        per_row: Receives the factors. float32 [2, factors, 64], in shared memory.
        per_column: Receives the first two of them once more. float32 [2, 2, 64], in shared memory.
        sums: Memory for sums of warps, float32 [3, 4], in shared memory.
    """

    def body(_: Any, g, beta, start, count, head_0, head_1, per_row, per_column, sums) -> None:
        index, float32 = pm.ir.IndexType.get(), pm.ir.F32Type.get()
        number = lambda n: pm.arith.constant(index, n)
        real = lambda x: pm.arith.constant(float32, x)
        cast = lambda x: pm.arith.index_cast(index, x)
        thread = cast(pm.thread_index_again())
        warp, lane = pm.arith.divui(thread, number(_WARP)), pm.arith.remui(thread, number(_WARP))
        half, token = pm.arith.divui(thread, number(SIZE)), pm.arith.remui(thread, number(SIZE))
        equal = lambda x, n: pm.arith.cmpi(pm.arith.CmpIPredicate.eq, x, number(n))
        head = pm.arith.select(equal(half, 0), cast(head_0), cast(head_1))
        is_live = pm.arith.cmpi(pm.arith.CmpIPredicate.ult, token, cast(count))
        loaded: Any = pm.scf.IfOp(is_live, [float32, float32], has_else=True)
        with pm.ir.InsertionPoint(loaded.then_block):
            at = [pm.arith.addi(cast(start), token), head]
            pm.scf.yield_([pm.memref.load(g, at), pm.memref.load(beta, at)])
        with pm.ir.InsertionPoint(loaded.else_block):
            pm.scf.yield_([real(0.0), real(0.0)])
        x, strength = loaded.results

        def share(kind: int, value: Any, is_source: Any) -> list[Any]:
            """Returns a value of the first and of the second warp of this thread's head."""
            with pm.only_if(is_source):
                pm.memref.store(value, sums, [number(kind), warp])
            pm.warpgroup_barrier()
            first = pm.arith.muli(half, number(2))
            places = first, pm.arith.addi(first, number(1))
            return [pm.memref.load(sums, [number(kind), place]) for place in places]

        def running(kind: int, x: Any) -> tuple[Any, Any]:
            """Returns the sum of the values up to this token, and that of all."""
            for distance in (1, 2, 4, 8, 16):
                has_earlier = pm.arith.cmpi(pm.arith.CmpIPredicate.uge, lane, number(distance))
                earlier = pm.arith.select(has_earlier, pm.from_earlier(x, distance), real(0.0))
                x = pm.arith.addf(x, earlier)
            first, second = share(kind, x, equal(lane, _WARP - 1))
            in_second = equal(pm.arith.remui(warp, number(2)), 1)
            return pm.arith.addf(x, pm.arith.select(in_second, first, real(0.0))), pm.arith.addf(second, first)

        total = pm.sum_over(x, (1, 2, 4, 8, 16))
        magic = pm.arith.mulf(pm.arith.addf(*share(0, total, equal(lane, 0))), real(-4.0))
        rounded = pm.arith.subf(pm.arith.addf(x, magic), magic)
        coarse, coarse_total = running(1, rounded)
        fine, fine_total = running(2, pm.arith.subf(x, rounded))

        def log2_of(a: Any, b: Any) -> Any:
            return pm.arith.mulf(pm.arith.minimumf(pm.arith.addf(a, b), real(0.0)), real(LOG2_E))

        rest = [pm.arith.subf(whole, part) for whole, part in ((coarse_total, coarse), (fine_total, fine))]
        found = Factors(
            coarse=coarse,
            fine=pm.arith.mulf(fine, real(LOG2_E)),
            before=log2_of(coarse, fine),
            after=log2_of(*rest),
            total=log2_of(coarse_total, fine_total),
            beta=strength,
        )
        for n, value in enumerate(found):
            pm.memref.store(value, per_row, [half, number(n), token])
        for n, value in enumerate(found[:2]):
            pm.memref.store(value, per_column, [half, number(n), token])
        pm.warpgroup_barrier()

    refs = [(x, ()) for x in (per_row, per_column, sums)]
    pm.inline(body, (g, ()), (beta, ()), start, count, *heads, *refs)
