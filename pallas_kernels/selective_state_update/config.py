"""Launch configuration of selective_state_update's kernel."""

from dataclasses import dataclass

from pallas_kernels._check import LaunchConfig, require


@dataclass(frozen=True)
class Config(LaunchConfig, op="selective_state_update", block_dim=1, tile_dim=1, segment=1):
    """How the kernel cuts a head's state [head_dim, state_dim]. All sizes are powers of two.

    Attributes:
        block_dim: The number of state rows (channels) per program.
        tile_dim: The number of state rows per tile. A program has block_dim / tile_dim tiles.
        segment: The number of elements in a segment. Each state row is folded into segments.
        num_warps: The number of warps per program.
    """

    block_dim: int
    tile_dim: int
    segment: int
    num_warps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        is_right = self.tile_dim <= self.block_dim
        wanted = f"config.tile_dim must be at most config.block_dim = {self.block_dim}"
        require(is_right, f"selective_state_update: {wanted}, got {self.tile_dim}")


def default_config(window: int, state_dim: int, itemsize: int) -> Config:
    """Return the configuration for rows of at most `window` tokens and states of `itemsize` bytes.

    Tiles are small enough for one warp to handle them without shared memory. A kernel that uses shared memory would
    lose most of the L1 cache to it when XLA launches it. The order of sums is set by the segment and, if that is too
    small to give each thread 16 bytes, by the tile. Both therefore depend on the state alone. For states of 64 x 128
    and 8192 x 16 it is the fastest of `benchmarks.tune`, or within 2 % of it, on an H200 with JAX 0.11.2. Verify rows
    of 16-bit states and of Mamba-1 are not tuned.
    """
    if state_dim * itemsize < 256:
        return Config(block_dim=32, tile_dim=32, segment=32 // itemsize, num_warps=1)
    segment = 256 // itemsize
    if window > 1:
        return Config(block_dim=32, tile_dim=8, segment=segment, num_warps=1)
    if itemsize == 2:
        return Config(block_dim=8, tile_dim=4, segment=segment, num_warps=1)
    return Config(block_dim=4, tile_dim=4, segment=segment, num_warps=1)
