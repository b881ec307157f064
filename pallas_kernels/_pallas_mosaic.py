"""The only file that imports Pallas' Mosaic GPU lowering, whose interface changes with JAX.

A thread of Pallas is a warpgroup, four warps of a GPU. Tensor cores take tiles from shared memory that are stored in pieces
of eight rows, swizzled (`tiled`), or their left operand from registers. Kernels run on Hopper GPUs and need JAX 0.11.2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # what it has depends on JAX's version, so types are not checked
HOPPER = "9.0"  # the compute capability for which the tensor cores' instructions are written
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
slice_of = pl.ds
when = pl.when
loop = pl.loop
set_max_registers = plgpu.set_max_registers  # of a warpgroup; those of all warpgroups must not exceed 512
axis_index = lax.axis_index


def missing() -> str | None:
    """Returns what this JAX lacks for the kernels, or None."""
    return None if hasattr(plgpu, "mma") else f"Mosaic GPU kernels need JAX 0.11.2 or newer, got {jax.__version__}"


def unavailable() -> str | None:
    """Returns why kernels of this lowering cannot run on JAX's default device, or None. It may start JAX's backends."""
    if reason := missing():
        return reason
    if jax.default_backend() != "gpu":
        return "there is no GPU"
    found = getattr(jax.devices()[0], "compute_capability", None)
    return None if found == HOPPER else f"the kernels need a GPU of compute capability {HOPPER}, got {found}"


def tiled(*shape: int, dtype: Any, swizzle: int = SWIZZLE) -> Any:
    """Shared memory in the form that copies fill and tensor cores read. `swizzle` is the length of a tile's row in bytes."""
    tile = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return shared(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(swizzle)))


def token_tiles(shapes: Any, dtype: Any) -> Any:
    """Shared memory for tokens that start anywhere: a pair of views, one for copies and one for tensor cores.

    Copies into the second form, `tiled`, could only start at multiples of eight tokens. The first form has the same bytes,
    but its pieces have one row each. A tile's rows must have `SWIZZLE` bytes.

    Args:
        shapes: A shape [..., tokens, elements], or a dict of them.
        dtype: The dtype of the elements.
    """

    def view(rows: int) -> Any:
        tile = plgpu.TilingTransform((rows, SWIZZLE // jnp.dtype(dtype).itemsize))
        make = lambda shape: shared(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(SWIZZLE)))
        return {name: make(shape) for name, shape in shapes.items()} if isinstance(shapes, dict) else make(shapes)

    return plgpu.RefUnion(view(1), view(8))


def load(ref: Any) -> jax.Array:
    """Loads a tile [64 n, 8 m] into registers, in the layout of tensor cores."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)


def load_directly(ref: Any) -> jax.Array:
    """Loads a tile [64 n, 8 m] from the GPU's memory into registers, without shared memory between. It is slow."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)


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


def multiply_all(shape: tuple[int, int], sums: Sequence[Sequence[tuple[Any, Any]]]) -> list[jax.Array]:
    """Sums products of tiles that are in shared memory, all at once. Returns a tile per sum, in float32.

    Args:
        shape: The shape of each sum, [64 n, 8 m].
        sums: The pairs of operands of each sum.
    """

    def run(*totals: Any) -> list[jax.Array]:
        for total, pairs in zip(totals, sums, strict=True):
            for left, right in pairs:
                plgpu.wgmma(total, left, right)
        plgpu.wgmma_wait(0)
        return [total[...] for total in totals]

    results = pl.run_scoped(run, *[plgpu.ACC(shape, jnp.float32) for _ in sums])
    return list(lax.optimization_barrier(tuple(results)))


def run_by_warpgroup(bodies: Sequence[Callable[[], None]], done: Any) -> None:
    """Runs each of `bodies` in a warpgroup of its own. `done` is a barrier with as many arrivals.

    All wait for the last one: a warpgroup that ends while another one multiplies can make the GPU stop the program.
    """
    index = lax.axis_index(WARPGROUP)
    for number, body in enumerate(bodies):
        when(index == number)(body)
    arrive(done)
    wait(done)
