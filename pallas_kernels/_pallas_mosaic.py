"""The only file that imports Pallas' Mosaic GPU lowering, whose interface changes with JAX.

A thread of Pallas is a warpgroup, four warps of a GPU. Tensor cores take tiles from shared memory that are stored in pieces
of eight rows, swizzled (`tiled`), or their left operand from registers. Kernels run on Hopper GPUs and need JAX 0.11.2.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jax.extend.mlir import ir as ir
from jax.extend.mlir.dialects import arith as arith
from jax.extend.mlir.dialects import math as math
from jax.extend.mlir.dialects import memref as memref
from jax.extend.mlir.dialects import scf as scf
from jax.extend.mlir.dialects import vector as vector
from jaxlib.mlir.dialects import llvm, nvvm

from pallas_kernels._warpgroup import pack_of_spread as pack_of_spread

plgpu: Any = mosaic_gpu  # what it has depends on JAX's version, so types are not checked
SWIZZLE = 128  # bytes
WARPGROUP = "warpgroup"  # the axis of a kernel with several warpgroups

kernel = plgpu.kernel
copy_in = plgpu.copy_gmem_to_smem
copy_out = plgpu.copy_smem_to_gmem
wait_for_copies_out = plgpu.wait_smem_to_gmem
commit = plgpu.commit_smem  # makes stores to shared memory visible to copies and to tensor cores
wait = plgpu.barrier_wait
arrive = plgpu.barrier_arrive
Barrier = plgpu.Barrier
shared = plgpu.SMEM
union = plgpu.RefUnion  # descriptions of shared memory that take the same place
slice_of = pl.ds
multiple_of = pl.multiple_of
when = pl.when
loop = pl.loop
# Of a warpgroup. Those of all warpgroups must not exceed what they start with together, 504 for three and 512 for four: a
# warpgroup waits until others have given up what it takes.
set_max_registers = plgpu.set_max_registers
axis_index = lax.axis_index
computed = lax.optimization_barrier  # values that have been computed before what follows
warpgroup_barrier = mosaic.warpgroup_barrier  # in `inline`


def counters(count: int) -> Any:
    """Numbers in the GPU's memory that all programs of a kernel see, 0 when it starts."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))


def signal(counter: Any) -> None:
    """Adds 1 to one of the `counters`, after all that the warpgroup has done before."""
    plgpu.semaphore_signal(counter, memory_scope="gpu")


def wait_for_signal(counter: Any) -> None:
    """Waits until one of the `counters` is at least 1. What its program did before its signal is then visible."""
    plgpu.semaphore_wait(counter, decrement=False, memory_scope="gpu")


def thread_index() -> Any:
    """Returns a thread's place in its warpgroup, int32, in `inline`."""
    return arith.andi(mosaic.thread_idx(), constant(127))


def thread_index_again() -> Any:
    """Returns what `thread_index` returns, but reads it anew.

    The compiler does not know that the two are equal. So it computes nothing from this one before the place where it is
    read, where it would be kept in registers over the code between.
    """
    return arith.andi(assembly("mov.u32 $0, %tid.x;", "=r", integer(), []), constant(127))


def warp_barrier() -> None:
    """Waits until all threads of the warp are here, and sees what they have stored to shared memory, in `inline`."""
    assembly("bar.warp.sync 0xffffffff;", "", None, [])


def thread_of_program() -> Any:
    """Returns a thread's place in its program, of all warpgroups, int32, in `inline`."""
    return mosaic.thread_idx()


def barrier_of_warpgroups(count: int) -> None:
    """Waits until all threads of the first `count` warpgroups are here, in `inline`.

    They see then what the others have stored in shared memory. The lowering itself has the barriers 0 (the program's) and 1
    to 4 (one for each warpgroup).
    """
    assembly(f"bar.sync 8, {128 * count};", "", None, [])


def tiling(dtype: Any, *, rows: int = 8, swizzle: int = SWIZZLE) -> tuple[Any, Any]:
    """Describes how tiles are cut into pieces of `rows` rows of `swizzle` bytes, whose parts of 16 bytes change places."""
    return plgpu.TilingTransform((rows, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)


def tiled(*shape: int, dtype: Any, swizzle: int = SWIZZLE) -> Any:
    """Shared memory in the form that copies fill and tensor cores read. `swizzle` is the length of a tile's row in bytes."""
    return shared(shape, dtype, transforms=tiling(dtype, swizzle=swizzle))


def views_of_tokens(shapes: Any, dtype: Any, *, swizzle: int = SWIZZLE) -> tuple[Any, Any]:
    """Describes shared memory for tokens that start anywhere: a view for copies, and one for tensor cores.

    Copies into the second form, `tiled`, could only start at multiples of eight tokens. The first form has the same bytes,
    but its pieces have one row each. A tile's rows must have `swizzle` bytes.

    Args:
        shapes: A shape [..., tokens, elements], or a dict of them.
        dtype: The dtype of the elements.
        swizzle: The length of a tile's row in bytes.
    """

    def view(rows: int) -> Any:
        make = lambda shape: shared(shape, dtype, transforms=tiling(dtype, rows=rows, swizzle=swizzle))
        return {name: make(shape) for name, shape in shapes.items()} if isinstance(shapes, dict) else make(shapes)

    return view(1), view(8)


def token_tiles(shapes: Any, dtype: Any) -> Any:
    """Shared memory with the two views of `views_of_tokens`."""
    return union(*views_of_tokens(shapes, dtype))


def inline(body: Callable[..., Any], *operands: Any, results: Sequence[tuple[Any, Any]] = ()) -> list[jax.Array]:
    """Runs code of single threads, which `body` writes as operations of MLIR.

    Args:
        body: Gets the lowering's context, and each of `operands`: memory as its bytes are, where a tiled one has its pieces'
            axes last; an array as a `FragmentedArray`; and a number as it is. It returns a tuple with an array for each of
            `results`, made by `fragments_of_spread` or `fragments_of_tile`, or None if there are none.
        operands: Pairs of a reference to memory and its `tiling`, or () if it has none; arrays in the layout `spread`, and
            tiles in that of tensor cores, of which each thread has its part; arrays [4] with a number for each warp; and
            numbers.
        results: The length and the dtype of each array that is returned, in the layout `spread`, or the shape of a tile, in
            that of tensor cores.

    Returns:
        The arrays.
    """
    is_number = lambda x: not isinstance(x, tuple) and jnp.ndim(x) == 0

    def kind(x: Any) -> Any:
        if isinstance(x, tuple):
            return plgpu.RefType(x[1])
        if is_number(x):
            return plgpu.Layout.WG_SPLAT
        if len(x.shape) == 2:
            return plgpu.Layout.WGMMA
        return _by_warp().reduce(1) if x.shape == (4,) else spread(x.shape[0])

    numbers = [is_number(x) for x in operands]

    def run(context: Any, *given: Any) -> Any:
        # A number comes as an array without axes.
        pairs = zip(numbers, given, strict=True)
        return body(context, *(x.registers.item() if is_one else x for is_one, x in pairs))

    def described(size: Any, dtype: Any) -> Any:
        if isinstance(size, tuple):
            return plgpu.ShapeDtypeStruct(size, dtype, plgpu.Layout.WGMMA)
        return plgpu.ShapeDtypeStruct((size,), dtype, spread(size))

    types = tuple(described(*each) for each in results)
    written = plgpu.inline_mgpu(arg_types=tuple(map(kind, operands)), return_type=types or None)(run)
    found = written(*(x[0] if isinstance(x, tuple) else x for x in operands))
    return list(found) if types else []


def repeated(start: Any, stop: Any, body: Callable[[Any, list[Any]], list[Any]], values: Sequence[Any]) -> list[Any]:
    """Runs values = body(n, values) for each n from `start` up to `stop`, in `inline`. Returns the last values."""
    repeat = scf.ForOp(start, stop, arith.constant(ir.IndexType.get(), 1), list(values))
    with ir.InsertionPoint(repeat.body):
        scf.yield_(body(repeat.induction_variable, list(repeat.inner_iter_args)))
    return list(repeat.results)


def from_earlier(x: Any, distance: int) -> Any:
    """Returns the float32 number of the thread so many threads before, in `inline`. A warp's first threads get their own.

    All threads of the warp must take part.
    """
    return _shuffled(x, distance, 0, nvvm.ShflKind.up)


def sum_over(x: Any, distances: Iterable[int]) -> Any:
    """Returns the sum of the float32 numbers of several threads, in `inline`. All threads of a warp must take part.

    Args:
        x: This thread's number.
        distances: Powers of two. Added up are the numbers of threads whose places in the warp differ in these bits only.
    """
    for distance in distances:
        x = arith.addf(x, from_partner(x, distance))
    return x


def from_partner(x: Any, distance: int) -> Any:
    """Returns the float32 number of another thread, in `inline`. All threads of a warp must take part.

    Args:
        x: This thread's number.
        distance: A power of two. The places of two partners in the warp differ in this bit only.
    """
    return _shuffled(x, distance, 31, nvvm.ShflKind.bfly)


def from_lane(x: Any, lane: int, *, of: int = 32) -> Any:
    """Returns the float32 number of one of so many neighbouring lanes, in `inline`. All threads of the warp must take part.

    Args:
        x: This thread's number.
        lane: The place of the lane among its neighbours.
        of: Their number, a power of two.
    """
    return _shuffled(x, lane, (32 - of) << 8 | 31, nvvm.ShflKind.idx)


def _shuffled(x: Any, operand: int, last: int, kind: Any) -> Any:
    """Returns another thread's float32 number: see "shfl.sync" in NVIDIA's PTX ISA."""
    bits = arith.bitcast(integer(), x)
    return arith.bitcast(x.type, nvvm.shfl_sync(constant(-1), bits, constant(operand), constant(last), kind))


@contextlib.contextmanager
def only_if(condition: Any) -> Iterator[None]:
    """Makes what is written in it code that only threads run which meet a condition, in `inline`."""
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def value_if(condition: Any, value: Callable[[], Sequence[Any]], otherwise: Sequence[Any]) -> list[Any]:
    """Returns the numbers or vectors that `value` makes where a condition is met, and else `otherwise`, in `inline`."""
    branch = scf.IfOp(condition, [x.type for x in otherwise], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(list(value()))
    assert branch.else_block is not None
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(list(otherwise))
    return list(branch.results)


def assembly(text: str, constraints: str, results: Any, operands: Sequence[Any], *, has_effects: bool = True) -> Any:
    """Writes instructions in `inline`. They keep their order if they have effects besides their results."""
    return llvm.inline_asm(results, operands, text, constraints, has_side_effects=has_effects)


def address(ref: Any, index: Any) -> Any:
    """Returns the address of an element of an array of one axis, in `inline`."""
    return utils.getelementptr(utils.memref_ptr(ref), [index], ir.MemRefType(ref.type).element_type)


def address_in_shared(ref: Any, index: Any) -> Any:
    """Returns the address of an element of shared memory, whose axes are taken as one, in `inline`. It has 32 bits."""
    return llvm.ptrtoint(integer(), address(ref, index))


def address_in_row(ref: Any, row: Any, column: Any) -> Any:
    """Returns the address of an element of an array of two axes, or of a part of one, in `inline`."""
    stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
    return address(ref, arith.addi(arith.muli(row, constant(stride)), column))


def constant(number: int) -> Any:
    """Returns an int32 number, in `inline`."""
    return arith.constant(ir.IntegerType.get_signless(32), number)


def integer() -> Any:
    """Returns the type of int32 numbers, in `inline`."""
    return ir.IntegerType.get_signless(32)


def long() -> Any:
    """Returns the type of numbers of 64 bits, in `inline`."""
    return ir.IntegerType.get_signless(64)


def type_of(dtype: Any) -> Any:
    """Returns the type of numbers of a dtype, in `inline`."""
    return utils.dtype_to_ir_type(dtype)


def bytes_of(kind: Any) -> int:
    """Returns the bytes of a number of a type, in `inline`."""
    return utils.bitwidth(kind) // 8


def element_of_struct(struct: Any, place: int, kind: Any) -> Any:
    """Returns one of the results of `assembly`, in `inline`."""
    return llvm.extractvalue(kind, struct, [place])


def spread(length: int) -> Any:
    """The layout of a vector that a warpgroup's threads share. Its length is a multiple of 128."""
    return plgpu.Layout.WG_STRIDED((length,), vec_size=pack_of_spread(length))


def fragments_of_spread(registers: Sequence[Any], length: int) -> Any:
    """Makes an array in the layout `spread`, in `inline`. Each thread gives its own part, in vectors of `pack_of_spread`."""
    return _held(registers, fragments.WGStridedFragLayout((length,), pack_of_spread(length)), (length,))


def fragments_of_tile(registers: Sequence[Any], shape: tuple[int, int]) -> Any:
    """Makes a tile in the layout of tensor cores, in `inline`. Each thread gives its part, in vectors of two numbers.

    They are ordered by their eight columns, and then by their half of the warp's 16 rows.
    """
    return _held(registers, plgpu.Layout.WGMMA.to_mgpu(), shape)


def _held(registers: Sequence[Any], layout: Any, shape: tuple[int, ...]) -> Any:
    """Makes an array of which each thread has its part in registers."""
    held = np.empty((len(registers),), object)
    held[:] = registers
    is_signed = True if isinstance(registers[0].type.element_type, ir.IntegerType) else None
    held = held.reshape(layout.registers_shape(shape))
    return fragments.FragmentedArray(_registers=held, _layout=layout, _is_signed=is_signed)


def load_spread(ref: Any) -> jax.Array:
    """Loads a vector that a warpgroup's threads share, as float32."""
    return plgpu.load(ref, layout=spread(ref.shape[0])).astype(jnp.float32)


def load_for_each_head(ref: Any, length: int) -> jax.Array:
    """Loads weights that all heads of a vector in the layout `spread` share, as a float32 vector of the same layout.

    Args:
        ref: The weights of a head, float32, in the GPU's memory. Their number is as in `sums_of_heads`.
        length: The length of the vector.
    """
    pack = pack_of_spread(length)

    def body(_: Any, ref: Any) -> Any:
        # The warpgroup's threads take whole heads at a time, so each thread has the same channels of every head.
        place = arith.remui(arith.muli(thread_index(), constant(pack)), constant(ref.type.shape[0]))
        weights = vector.load(
            ir.VectorType.get((pack,), ir.F32Type.get()), ref, [arith.index_cast(ir.IndexType.get(), place)]
        )
        return (fragments_of_spread([weights] * (length // (128 * pack)), length),)

    return inline(body, (ref, ()), results=[(length, jnp.float32)])[0]


def sums_of_heads(x: jax.Array, dim: int) -> jax.Array:
    """Gives each element of a float32 vector in the layout `spread` the sum of its head, `dim` elements in a row.

    A head must be in one warp's registers: `dim` is `pack_of_spread` times a power of two up to 32.
    """
    (length,) = x.shape
    pack = pack_of_spread(length)

    def body(_: Any, x: Any) -> Any:
        kind = ir.VectorType.get((pack,), ir.F32Type.get())
        sums = [vector.reduction(kind.element_type, vector.CombiningKind.ADD, held) for held in x.registers.flat]
        distance = 1
        while distance < dim // pack:
            sums = [sum_over(each, [distance]) for each in sums]
            distance *= 2
        return (fragments_of_spread([vector.broadcast(kind, each) for each in sums], length),)

    return inline(body, x, results=[(length, jnp.float32)])[0]


def _by_warp() -> Any:
    tiling = fragments.Tiling(((4, 256), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def load_rows_by_warp(ref: Any) -> jax.Array:
    """Loads a tile [4, 256 n] as float32. Each of the four warps gets a row, and a lane gets eight of every 256 columns."""
    return plgpu.load(ref, layout=_by_warp()).astype(jnp.float32)


def load_for_each_warp(ref: Any) -> jax.Array:
    """Loads a vector [256 n] into every warp. Its lanes get the columns that they get from `load_rows_by_warp`."""
    return plgpu.load(ref, layout=_by_warp().reduce(0), optimized=False)


def store_tiles(tiles: Sequence[jax.Array], refs: Sequence[Any], *, is_visible: bool = False) -> None:
    """Stores tiles in shared memory. Each thread does so for itself, and waits for no other.

    Args:
        tiles: Tiles in registers, in the layout of tensor cores.
        refs: Where they go, `tiled`. Nothing reads it any more when any of the threads gets here.
        is_visible: Whether tensor cores and copies then see what the thread has stored. Else they do after a `commit`.
    """

    def body(_: Any, tiles: Sequence[Any], refs: Sequence[Any]) -> None:
        for tile, ref in zip(tiles, refs, strict=True):
            tile.store_tiled(ref, swizzle=SWIZZLE)
        if is_visible:
            nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    types = [plgpu.Layout.WGMMA] * len(tiles), [plgpu.RefType(tiling(x.dtype)) for x in tiles]
    plgpu.inline_mgpu(arg_types=types)(body)(list(tiles), list(refs))


def hand_over(tiles: Sequence[jax.Array], refs: Sequence[Any], barrier: Any) -> None:
    """Stores tiles in shared memory for tensor cores, and arrives at a barrier at which their reader waits.

    Each thread does so for itself: see `store_tiles`. With `commit`, the warpgroup's threads would wait for each other.
    """
    store_tiles(tiles, refs, is_visible=True)
    arrive(barrier)


def load(ref: Any) -> jax.Array:
    """Loads a tile [64 n, 8 m] into registers, in the layout of tensor cores."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)


def load_directly(ref: Any, *, transposed: bool = False) -> jax.Array:
    """Loads a tile [64 n, 8 m] from the GPU's memory into registers, without shared memory between. It is slow.

    If `transposed` is set, the array in memory is the tile's transpose.
    """
    if not transposed:
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
    tile = plgpu.load(ref.T, layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
    return plgpu.layout_cast(tile, plgpu.Layout.WGMMA)


def store_directly(ref: Any, tile: jax.Array, *, transposed: bool = False) -> None:
    """Stores a tile, its transpose, or a vector from registers to the GPU's memory, without shared memory between."""
    if transposed:
        ref, tile = ref.T, plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
    if hasattr(plgpu, "store"):  # from JAX 0.12 on, where plain stores must fill whole sectors of 32 bytes
        plgpu.store(ref, tile, optimized=False)
    else:
        ref[...] = tile


def store_transposed(ref: Any, tile: jax.Array) -> None:
    """Stores the transpose of a tile in shared memory."""
    ref.T[...] = plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)


def load_transposed(ref: Any) -> jax.Array:
    """Loads the transpose [64 n, 8 m] of a tile in shared memory."""
    return plgpu.layout_cast(plgpu.load(ref.T, layout=plgpu.Layout.WGMMA_TRANSPOSED), plgpu.Layout.WGMMA)


def load_per_row(ref: Any) -> jax.Array:
    """Loads a vector with a value for each row of tiles."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1))


def load_per_column(ref: Any) -> jax.Array:
    """Loads a vector with a value for each column of tiles."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))


def zeros(shape: tuple[int, int], dtype: Any) -> jax.Array:
    """Returns a tile of zeros in registers."""
    return plgpu.layout_cast(jnp.zeros(shape, dtype), plgpu.Layout.WGMMA)


def zeros_per_row(rows: int, dtype: Any) -> jax.Array:
    """Returns a vector of zeros, with a value for each row of tiles."""
    return plgpu.layout_cast(jnp.zeros((rows,), dtype), plgpu.Layout.WGMMA.reduce(1))


def rows(shape: tuple[int, int]) -> jax.Array:
    """Returns a tile whose elements are their own row, int32."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)


def columns(shape: tuple[int, int]) -> jax.Array:
    """Returns a tile whose elements are their own column, int32."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def along_columns(vector: jax.Array, rows: int) -> jax.Array:
    """Returns a tile all of whose rows are `vector`."""
    return lax.broadcast_in_dim(vector, (rows, *vector.shape), [1])


def along_rows(vector: jax.Array, count: int) -> jax.Array:
    """Returns a tile all of whose `count` columns are `vector`."""
    return lax.broadcast_in_dim(vector, (*vector.shape, count), [0])


def scale_rows(tile: jax.Array, factors: jax.Array) -> jax.Array:
    """Multiplies the rows of a float32 tile by factors. A warp does nothing if all factors of its rows are 1."""
    layout = plgpu.Layout.WGMMA

    def scaled(_: Any, tile: Any, factors: Any) -> Any:
        one = arith.constant(ir.F32Type.get(), 1.0)
        is_other = lambda factor: arith.cmpf(arith.CmpFPredicate.UNE, vector.extract(factor, [], [0]), one)
        others = functools.reduce(arith.ori, [is_other(factor) for factor in factors.registers.flat])
        vote = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
        some = assembly(vote, "=r,r", integer(), [arith.extui(integer(), others)])
        before = [*tile.registers.flat]
        product = lambda: (tile * factors.broadcast_in_dim(tile.shape, (0,), tile.layout)).registers.flat
        found = value_if(arith.cmpi(arith.CmpIPredicate.ne, some, constant(0)), product, before)
        return _held(found, tile.layout, tile.shape)

    result = plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout)
    return plgpu.inline_mgpu(arg_types=(layout, layout.reduce(1)), return_type=result)(scaled)(tile, factors)


def multiply(shape: tuple[int, int], steps: Sequence[Any]) -> jax.Array:
    """Sums products of tiles on tensor cores, in float32.

    Args:
        shape: The shape of the sum, [64 n, 8 m].
        steps: Functions that return a list of left operands, in registers, and their right operand, in shared memory. Only
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
    """Sums products of tiles on tensor cores, all at once.

    Args:
        shape: The shape of each sum, [64 n, 8 m].
        sums: The pairs of operands of each sum. Left ones are in shared memory, or they are functions that return them in
            registers and that are called when the products before have been started.
        meanwhile: What the warpgroup does while the tensor cores work. It may return arrays.

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
    """Adds a product of tiles to a sum on tensor cores, in float32.

    Args:
        total: The sum, [64 n, 8 m].
        left: The left operand, in registers.
        right: The right operand, in shared memory.
    """

    def run(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, left, right)

    # Without the barrier the compiler may move arithmetic on the sum before the tensor cores have finished it.
    return lax.optimization_barrier(pl.run_state(run)(plgpu.ACC.init(total)))


def keep_if(condition: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `value`, or zeros if the condition, a boolean, is not met."""
    return lax.select_n(lax.broadcast(condition, value.shape), jnp.zeros(value.shape, value.dtype), value)


def fast_math() -> Any:
    """Compiler parameters with which exponentials and quotients are the GPU's approximations, right to about 2e-7."""
    return plgpu.CompilerParams(approx_math=True)


def run_by_warpgroup(bodies: Sequence[Callable[[], None]], done: Any) -> None:
    """Runs each of `bodies` in a warpgroup of its own, and then `finish_together`."""
    index = lax.axis_index(WARPGROUP)
    for number, body in enumerate(bodies):
        when(index == number)(body)
    finish_together(done)


def finish_together(done: Any) -> None:
    """Waits until all warpgroups are here. `done` is a barrier with as many arrivals.

    A warpgroup that ends while another one multiplies can make the GPU stop the program.
    """
    arrive(done)
    wait(done)
