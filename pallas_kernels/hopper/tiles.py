"""Tiles and vectors in a warpgroup's registers, and products on its tensor cores.

Tensor cores take tiles from SMEM that are `tiled`, or their left operand from registers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import nvvm

from pallas_kernels._warpgroup import THREADS, pack_of_spread
from pallas_kernels.hopper.barriers import barrier_arrive
from pallas_kernels.hopper.control import assembly, branch, held, inline, thread_index
from pallas_kernels.hopper.layouts import by_warp, plgpu, spread
from pallas_kernels.hopper.lowering import SWIZZLE, tiling
from pallas_kernels.hopper.registers import Register, broadcast, f32, load_vector, reduce_add, type_of
from pallas_kernels.hopper.shuffles import sum_over_lanes


def load_spread(ref: Any) -> jax.Array:
    """Load a vector as float32 in the layout `spread`."""
    return plgpu.load(ref, layout=spread(ref.shape[0])).astype(jnp.float32)


def load_for_each_head(ref: Any, length: int) -> jax.Array:
    """Load the parameters of one head once per head of a vector, as a float32 vector in the layout `spread`.

    Args:
        ref: The parameters of a head, float32, in GMEM. Their number is `dim` of `sums_of_heads`.
        length: The length of the vector.
    """
    count = pack_of_spread(length)

    def body(ref: Any) -> Any:
        # The warpgroup's threads take whole heads at a time, so each thread has the same channels of every head.
        first = thread_index() * count % ref.shape[0]
        return ([load_vector(ref, first, count=count, is_aligned=False)] * (length // (THREADS * count)),)

    return inline(body, (ref, ()), results=[(length, jnp.float32)])[0]


def sums_of_heads(x: jax.Array, dim: int) -> jax.Array:
    """Give each element of a float32 vector in the layout `spread` the sum of its head, `dim` elements in a row.

    A head must be in one warp's registers: `dim` is `pack_of_spread` times a power of two up to 32.
    """
    (length,) = x.shape
    count = pack_of_spread(length)

    def body(x: Any) -> Any:
        sums, distance = [reduce_add(each) for each in x], 1
        while distance < dim // count:
            sums = [sum_over_lanes(each, [distance]) for each in sums]
            distance *= 2
        return ([broadcast(each, count) for each in sums],)

    return inline(body, x, results=[(length, jnp.float32)])[0]


def load_rows_by_warp(ref: Any) -> jax.Array:
    """Load a tile [4, 256 n] as float32. Each of the four warps gets a row, and a lane gets eight of every 256 columns."""
    return plgpu.load(ref, layout=by_warp()).astype(jnp.float32)


def load_for_each_warp(ref: Any) -> jax.Array:
    """Load a vector [256 n] into every warp. Its lanes get the columns that they get from `load_rows_by_warp`."""
    return plgpu.load(ref, layout=by_warp().reduce(0), optimized=False)


def store_tiles(tiles: Sequence[jax.Array], refs: Sequence[Any], *, is_visible: bool = False) -> None:
    """Store tiles in SMEM. Each thread stores its own registers, and waits for no other.

    Args:
        tiles: Tiles in registers, in the layout of tensor cores.
        refs: Receive the tiles, `tiled`. Nothing reads their old contents any more when any of the threads gets here.
        is_visible: Whether tensor cores and copies see the stores at once. Otherwise they do after `commit_smem`.
    """

    def body(_: Any, tiles: Sequence[Any], refs: Sequence[Any]) -> None:
        for tile, ref in zip(tiles, refs, strict=True):
            tile.store_tiled(ref, swizzle=SWIZZLE)
        if is_visible:
            nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    types = [plgpu.Layout.WGMMA] * len(tiles), [plgpu.RefType(tiling(x.dtype)) for x in tiles]
    plgpu.inline_mgpu(arg_types=types)(body)(list(tiles), list(refs))


def store_and_arrive(tiles: Sequence[jax.Array], refs: Sequence[Any], barrier: Any) -> None:
    """Store tiles in SMEM for tensor cores, and arrive at a barrier at which their reader waits.

    With `commit_smem`, the warpgroup's threads would wait for each other.
    """
    store_tiles(tiles, refs, is_visible=True)
    barrier_arrive(barrier)


def load_tile(ref: Any) -> jax.Array:
    """Load a tile [64 n, 8 m] into registers, in the layout of tensor cores."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)


def load_gmem_tile(ref: Any, *, transposed: bool = False) -> jax.Array:
    """Load a tile [64 n, 8 m] from GMEM into registers, without SMEM between. It is slow.

    If `transposed` is set, the array in memory is the tile's transpose.
    """
    if not transposed:
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
    tile = plgpu.load(ref.T, layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
    return plgpu.layout_cast(tile, plgpu.Layout.WGMMA)


def store_gmem(ref: Any, tile: jax.Array, *, transposed: bool = False) -> None:
    """Store a tile, its transpose, or a vector from registers to GMEM, not by a copy from SMEM."""
    if transposed:
        ref, tile = ref.T, plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
    if hasattr(plgpu, "store"):  # from JAX 0.12 on, where plain stores must fill whole sectors of 32 bytes
        plgpu.store(ref, tile, optimized=False)
    else:
        ref[...] = tile


def store_transposed(ref: Any, tile: jax.Array) -> None:
    """Store the transpose of a tile in SMEM."""
    ref.T[...] = plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)


def load_transposed(ref: Any) -> jax.Array:
    """Load the transpose [64 n, 8 m] of a tile in SMEM."""
    return plgpu.layout_cast(plgpu.load(ref.T, layout=plgpu.Layout.WGMMA_TRANSPOSED), plgpu.Layout.WGMMA)


def load_per_row(ref: Any) -> jax.Array:
    """Load a vector with a value for each row of tiles."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1))


def load_per_column(ref: Any) -> jax.Array:
    """Load a vector with a value for each column of tiles."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))


def zeros(shape: tuple[int, int], dtype: Any) -> jax.Array:
    """Return a tile of zeros in registers."""
    return plgpu.layout_cast(jnp.zeros(shape, dtype), plgpu.Layout.WGMMA)


def zeros_per_row(rows: int, dtype: Any) -> jax.Array:
    """Return a vector of zeros, with a value for each row of tiles."""
    return plgpu.layout_cast(jnp.zeros((rows,), dtype), plgpu.Layout.WGMMA.reduce(1))


def rows(shape: tuple[int, int]) -> jax.Array:
    """Return a tile whose elements are their own row, int32."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)


def columns(shape: tuple[int, int]) -> jax.Array:
    """Return a tile whose elements are their own column, int32."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def along_columns(vector: jax.Array, rows: int) -> jax.Array:
    """Return a tile all of whose rows are `vector`."""
    return lax.broadcast_in_dim(vector, (rows, *vector.shape), [1])


def along_rows(vector: jax.Array, count: int) -> jax.Array:
    """Return a tile all of whose `count` columns are `vector`."""
    return lax.broadcast_in_dim(vector, (*vector.shape, count), [0])


def scale_rows(tile: jax.Array, factors: jax.Array) -> jax.Array:
    """Multiply the rows of a float32 tile by factors. A warp does nothing if all factors of its rows are 1."""
    layout = plgpu.Layout.WGMMA

    def scaled(_: Any, tile: Any, factors: Any) -> Any:
        one = f32(1.0).value
        is_other = lambda factor: arith.cmpf(arith.CmpFPredicate.UNE, vector.extract(factor, [], [0]), one)
        others = functools.reduce(arith.ori, [is_other(factor) for factor in factors.registers.flat])
        vote = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
        some = assembly(vote, "=r,r", jnp.int32, [Register(arith.extui(type_of(jnp.int32), others))])
        before = [Register(x) for x in tile.registers.flat]
        product = lambda: tile * factors.broadcast_in_dim(tile.shape, (0,), tile.layout)
        found = branch(some != 0, lambda: [Register(x) for x in product().registers.flat], before)
        return held([x.value for x in found], tile.layout, tile.shape)

    result = plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout)
    return plgpu.inline_mgpu(arg_types=(layout, layout.reduce(1)), return_type=result)(scaled)(tile, factors)


def multiply(shape: tuple[int, int], steps: Sequence[Any]) -> jax.Array:
    """Sum products of tiles on tensor cores, in float32.

    Args:
        shape: The shape of the sum, [64 n, 8 m].
        steps: Functions that return a list of left operands, in registers, and their right operand, in SMEM. Only
            one step's operands are held at a time.
    """

    def run(total: Any) -> jax.Array:
        for step in steps:
            left, right = step()
            for each in left:
                plgpu.wgmma(total, each, right)
            plgpu.wgmma_wait(0)
        return total[...]

    # Without the barrier the compiler may move arithmetic on the sum before the tensor cores have finished it.
    return lax.optimization_barrier(pl.run_scoped(run, plgpu.ACC(shape, jnp.float32)))


def multiply_all(
    shape: tuple[int, int],
    sums: Sequence[Sequence[tuple[Any, Any]]],
    meanwhile: Callable[[], Sequence[jax.Array] | None] = lambda: None,
) -> list[jax.Array]:
    """Sum products of tiles on tensor cores, all at once.

    Args:
        shape: The shape of each sum, [64 n, 8 m].
        sums: The pairs of operands of each sum. Left ones are in SMEM, or they are functions that return them in
            registers and that are called when the products before have been started.
        meanwhile: The warpgroup calls it while the tensor cores work. It may return arrays.

    Returns:
        A tile per sum, in float32, and the arrays.
    """

    def run(*totals: Any) -> list[jax.Array]:
        for total, pairs in zip(totals, sums, strict=True):
            for left, right in pairs:
                plgpu.wgmma(total, left() if callable(left) else left, right)
        others = meanwhile() or ()
        plgpu.wgmma_wait(0)
        return [*(total[...] for total in totals), *others]

    results = pl.run_scoped(run, *[plgpu.ACC(shape, jnp.float32) for _ in sums])
    # Without the barrier the compiler may move arithmetic on the sums before the tensor cores have finished them.
    return list(lax.optimization_barrier(tuple(results)))


def accumulate(total: jax.Array, left: jax.Array, right: Any) -> jax.Array:
    """Add a product of tiles to a sum on tensor cores, in float32.

    Args:
        total: The sum, [64 n, 8 m].
        left: The left operand, in registers.
        right: The right operand, in SMEM.
    """

    def run(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, left, right)

    # Without the barrier the compiler may move arithmetic on the sum before the tensor cores have finished it.
    return lax.optimization_barrier(pl.run_state(run)(plgpu.ACC.init(total)))
