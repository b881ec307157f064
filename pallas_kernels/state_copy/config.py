"""Launch configuration of state_copy's kernels."""

from dataclasses import dataclass

from pallas_kernels._check import LaunchConfig


@dataclass(frozen=True)
class Config(LaunchConfig, op="state_copy", positive=("programs",), tile=1):
    """How the kernels are launched.

    Attributes:
        tile: The number of elements in a tile, a power of two.
        programs: The approximate number of programs for all rows together. Each row gets at least one.
        num_warps: The number of warps per program.
    """

    tile: int
    programs: int
    num_warps: int


def default_config(itemsize: int) -> Config:
    """Return the configuration for elements of `itemsize` bytes: few programs, each of which copies many tiles.

    A launch that copies nothing is then short, and one that copies much still fills the GPU. It is the fastest of
    `benchmarks.tune` on an H200 with JAX 0.11.2.
    """
    return Config(tile=32768 // itemsize, programs=1056, num_warps=8)
