"""The names of Pallas that kernels use: launches, memory, copies and control flow of a warpgroup."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.layouts import plgpu

SWIZZLE = 128  # bytes

kernel = plgpu.kernel
copy_gmem_to_smem = plgpu.copy_gmem_to_smem
copy_smem_to_gmem = plgpu.copy_smem_to_gmem
wait_smem_to_gmem = plgpu.wait_smem_to_gmem
commit_smem = (
    plgpu.commit_smem
)  # makes stores to SMEM visible to copies and to tensor cores, after a warpgroup's barrier
SMEM = plgpu.SMEM
RefUnion = plgpu.RefUnion  # descriptions of SMEM that share the same bytes
ds = pl.ds
multiple_of = pl.multiple_of
when = pl.when
loop = pl.loop
# Sets the registers of each thread of a warpgroup. Their sum over a CTA's warpgroups must not exceed that at launch, 504 for
# three warpgroups and 512 for four: a warpgroup that asks for more waits until others have given up as many.
set_max_registers = plgpu.set_max_registers
axis_index = lax.axis_index
optimization_barrier = lax.optimization_barrier  # its arguments are computed before later operations


def fast_math() -> Any:
    """Compiler parameters with which exponentials and quotients are the GPU's approximations, right to about 2e-7."""
    return plgpu.CompilerParams(approx_math=True)


def tiling(dtype: Any, *, rows: int = 8, swizzle: int = SWIZZLE) -> tuple[Any, Any]:
    """Describe SMEM in tiles of `rows` rows of `swizzle` bytes each, whose groups of 16 bytes are swizzled."""
    return plgpu.TilingTransform((rows, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)


def tiled(*shape: int, dtype: Any, swizzle: int = SWIZZLE) -> Any:
    """SMEM in the layout that copies fill and tensor cores read. `swizzle` is the length of a tile's row in bytes."""
    return SMEM(shape, dtype, transforms=tiling(dtype, swizzle=swizzle))


def views_of_tokens(shapes: Any, dtype: Any, *, swizzle: int = SWIZZLE) -> tuple[Any, Any]:
    """Describe SMEM for tokens that start anywhere: a view for copies, and one for tensor cores.

    Copies into the second view, `tiled`, could only start at multiples of eight tokens. The first one has the same bytes, in
    tiles of one row each. A tile's rows must have `swizzle` bytes.

    Args:
        shapes: A shape [..., tokens, elements], or a dict of them.
        dtype: The dtype of the elements.
        swizzle: The length of a tile's row in bytes.
    """

    def view(rows: int) -> Any:
        make = lambda shape: SMEM(shape, dtype, transforms=tiling(dtype, rows=rows, swizzle=swizzle))
        return {name: make(shape) for name, shape in shapes.items()} if isinstance(shapes, dict) else make(shapes)

    return view(1), view(8)


def token_tiles(shapes: Any, dtype: Any) -> Any:
    """SMEM with the two views of `views_of_tokens`."""
    return RefUnion(*views_of_tokens(shapes, dtype))


def keep_if(condition: jax.Array, value: jax.Array) -> jax.Array:
    """Return `value`, or zeros if the condition, a boolean, is not met."""
    return lax.select_n(lax.broadcast(condition, value.shape), jnp.zeros(value.shape, value.dtype), value)
