"""Launch configuration of selective_state_update's kernel."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """How the kernel cuts a head's state [head_dim, state_dim]. Sizes are powers of two.

    A program holds `block_dim` rows as tiles of `tile_dim` rows; a row is folded into segments of `segment` elements.
    """

    block_dim: int
    tile_dim: int
    segment: int
    num_warps: int


def default_config(window: int, state_dim: int, itemsize: int) -> Config:
    """Tiles small enough for a warp to lay out without shared memory: XLA would pay for that with most of the L1 cache.

    What sets the order of sums depends on the state alone: the segment, and the tile where it is too small to give each
    thread 16 bytes. Best, or within 2 %, of `benchmarks.tune` on an H200 (JAX 0.11.2) for states of 64 x 128 and
    8192 x 16; verify rows of 16-bit and of Mamba-1 states are not tuned.
    """
    if state_dim * itemsize < 256:
        return Config(block_dim=32, tile_dim=32, segment=32 // itemsize, num_warps=1)
    segment = 256 // itemsize
    if window > 1:
        return Config(block_dim=32, tile_dim=8, segment=segment, num_warps=1)
    if itemsize == 2:
        return Config(block_dim=8, tile_dim=4, segment=segment, num_warps=1)
    return Config(block_dim=4, tile_dim=4, segment=segment, num_warps=1)
