"""Launch configuration of gated_delta_rule's kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """How the update kernel cuts a head's state [value_dim, key_dim]. Sizes are powers of two.

    A program holds `block_value` rows as tiles of `tile_value` rows; a row is folded into segments of `segment` keys.
    """

    block_value: int
    tile_value: int
    segment: int
    num_warps: int


def default_config(rows: int, window: int, itemsize: int) -> Config:
    """Tiles small enough for a warp to lay out without shared memory: XLA would pay for that with most of the L1 cache.

    Tile and segment set the order of sums, so they depend on the state's dtype alone. Best, or within 2 %, of
    `benchmarks.tune` on an H200 (JAX 0.11.2) for heads of 128 x 128; verify rows of 16-bit states are not tuned.
    """
    if itemsize == 2:
        block_value = 16 if window > 1 else 8 if rows >= 4 else 4
        return Config(block_value, tile_value=4, segment=128, num_warps=1)
    return Config(block_value=32 if window > 1 else 4, tile_value=4, segment=64, num_warps=1)
