"""Launch configuration of ssd's kernel."""

from dataclasses import dataclass

from pallas_kernels._check import LaunchConfig


@dataclass(frozen=True)
class Config(LaunchConfig, op="ssd", block_dim=16):
    """How the kernel cuts a head's state [head_dim, state_dim].

    Attributes:
        block_dim: The number of state rows (channels) per program, a power of two of at least 16.
        num_warps: The number of warps per program.
        num_stages: The number of chunks that are loaded and run at the same time.
    """

    block_dim: int
    num_warps: int
    num_stages: int


def default_config(channels: int, state_dim: int, chunk_size: int, itemsize: int) -> Config:
    """Return the configuration for `channels` channels in all heads and rows together.

    If there are few channels, they are cut into small blocks, so that there are enough programs to fill the GPU. For
    states of 64 x 128, chunks of 64 tokens and bfloat16 inputs it is the fastest of `benchmarks.tune` on an H200 with
    JAX 0.11.2. The other choices were made by reasoning and from compiled code. `itemsize` is the size of
    the products' operands.
    """
    tile_bytes = chunk_size * state_dim * itemsize  # the size of a chunk's B, and of its C
    if itemsize == 4:
        return Config(block_dim=32 if tile_bytes <= 2**15 else 16, num_warps=4, num_stages=1)
    if tile_bytes <= 2**14:
        return Config(block_dim=32 if channels <= 2 * 32 * 132 else 64, num_warps=4, num_stages=2)
    return Config(block_dim=32, num_warps=8, num_stages=1)
