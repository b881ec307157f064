"""Layouts of arrays in the registers of a warpgroup's threads."""

from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels._warpgroup import pack_of_spread

plgpu: Any = mosaic_gpu  # its names depend on JAX's version, so types are not checked


def spread(length: int) -> Any:
    """Layout of a vector whose packs are spread over a warpgroup's threads. Its length is a multiple of 128."""
    return plgpu.Layout.WG_STRIDED((length,), vec_size=pack_of_spread(length))


def by_warp() -> Any:
    """Layout of a tile [4, 256 n] of which each warp has a row, and a lane eight of every 256 columns."""
    tiling = fragments.Tiling(((4, 256), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
