"""Launch configuration of ssd's kernel."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """How the kernel cuts a head's state [head_dim, state_dim]: a program holds `block_dim` rows, a power of two >= 16."""

    block_dim: int
    num_warps: int
    num_stages: int


def default_config(channels: int, state_dim: int, chunk_size: int, itemsize: int) -> Config:
    """For `channels` of all heads and rows: few of them are cut small, to fill the card.

    Best of `benchmarks.tune` on an H200 (JAX 0.11.2) for states of 64 x 128, chunks of 64 and bfloat16 inputs; the rest by
    reasoning and from compiled code. `itemsize` is that of the products' operands.
    """
    tile_bytes = chunk_size * state_dim * itemsize  # of B, and of C
    if itemsize == 4:
        return Config(block_dim=32 if tile_bytes <= 2**15 else 16, num_warps=4, num_stages=1)
    if tile_bytes <= 2**14:
        return Config(block_dim=32 if channels <= 2 * 32 * 132 else 64, num_warps=4, num_stages=2)
    return Config(block_dim=32, num_warps=8, num_stages=1)
