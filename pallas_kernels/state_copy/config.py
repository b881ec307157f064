"""Launch configuration of state_copy's kernel."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Elements of one program's tile (a power of two) and its warps."""

    tile: int
    num_warps: int


def default_config(rows: int, state_size: int, itemsize: int) -> Config:
    """Tiles of 32 KiB, so that an idle launch is short, or smaller ones while a few rows would leave cores idle.

    Best of `benchmarks.tune` on an H200, JAX 0.11.2. A copy reduces nothing, so the tile may follow the number of rows.
    """
    tile = 32768 // itemsize
    while tile > 1024 and rows * state_size < 1024 * tile:
        tile //= 2
    return Config(tile=tile, num_warps=8)
