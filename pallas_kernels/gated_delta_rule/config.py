"""Launch configurations of gated_delta_rule's kernels."""

from dataclasses import dataclass

from pallas_kernels import device
from pallas_kernels._check import LaunchConfig, require
from pallas_kernels._pallas_triton import power_of_two
from pallas_kernels.blocks import StateLayout
from pallas_kernels.chunks import CHUNK_SIZE


@dataclass(frozen=True)
class Config(LaunchConfig, op="gated_delta_rule", block_value=1, tile_value=1, segment=1):
    """How the update kernel cuts a head's state [value_dim, key_dim]. All sizes are powers of two.

    Attributes:
        block_value: The number of state rows (value dims) per program.
        tile_value: The number of state rows per tile. A program has block_value / tile_value tiles.
        segment: The number of keys in a segment. Each state row is folded into segments.
        num_warps: The number of warps per program.
    """

    block_value: int
    tile_value: int
    segment: int
    num_warps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        is_right = self.tile_value <= self.block_value
        wanted = f"config.tile_value must be at most config.block_value = {self.block_value}"
        require(is_right, f"gated_delta_rule: {wanted}, got {self.tile_value}")


def default_config(rows: int, window: int, itemsize: int, layout: StateLayout = "VK") -> Config:
    """Return the configuration for a batch of `rows` rows of at most `window` tokens and states of `itemsize` bytes.

    Tiles are small enough for one warp to handle them without shared memory. A kernel that uses shared memory would
    lose most of the L1 cache to it when XLA launches it. Tile and segment determine the order of sums, so they depend
    on the state's dtype alone. For heads of 128 x 128 it is the fastest of `benchmarks.tune`, or within 2 % of it, on
    an H200 with JAX 0.11.2. Verify rows of 16-bit states are not tuned.

    In layout "KV" the values of a tile are neighbours in memory. They fill 32 bytes, the smallest transfer of memory, so
    that half of a warp's lanes hold 16 keys each. That configuration is not tuned.
    """
    if layout == "KV":
        values = 32 // itemsize
        return Config(
            block_value=32 if window > 1 and itemsize == 4 else values, tile_value=values, segment=16, num_warps=1
        )
    if itemsize == 2:
        block_value = 16 if window > 1 else 8 if rows >= 4 else 4
        return Config(block_value, tile_value=4, segment=128, num_warps=1)
    return Config(block_value=32 if window > 1 else 4, tile_value=4, segment=64, num_warps=1)


@dataclass(frozen=True)
class PrefillConfig(LaunchConfig, op="gated_delta_rule_prefill", positive=("pieces",), tile_value=16, products_warps=1):
    """How the prefill kernels are launched. Only `pieces` changes the results.

    Attributes:
        tile_value: The number of value dims per program of the kernel that carries states.
        num_warps: The number of warps per program of the same kernel.
        num_stages: The number of chunks that this kernel loads and runs at the same time.
        products_warps: The number of warps per program of the kernel that multiplies a chunk's keys.
        pieces: If inputs are bfloat16, the number of bfloat16 terms into which float32 values are split for the
            products that states depend on. The relative error is 2^-16 with two terms and 2^-8 with one.
    """

    tile_value: int
    num_warps: int
    num_stages: int
    products_warps: int
    pieces: int


_SHARED_BYTES = 215_000  # the shared memory for the chunks in flight, out of an H200's 232,448 bytes
_SCRATCH_BYTES = 26_000  # a program's shared memory besides the chunks that are in flight after the first


def default_prefill_config(values: int, key_dim: int, itemsize: int, per_channel: bool) -> PrefillConfig:
    """Return the configuration for `values` value dims in all heads and rows together, and inputs of `itemsize` bytes.

    If there are few value dims, they are cut into small tiles, so that there are enough programs to fill the GPU. With
    a decay per key channel (`per_channel`), keys are decayed before they are multiplied, in one bfloat16 term,
    because two terms take 1.8 times as long. Measured on an H200 with JAX 0.11.2 for heads of 128 x 128 and bfloat16
    inputs; float32 inputs are not tuned. Where the GPU has less shared memory, fewer chunks are in flight.
    """
    if itemsize == 4:
        return PrefillConfig(tile_value=32, num_warps=4, num_stages=1, products_warps=8, pieces=1)
    # A chunk's operands in bfloat16: queries, keys (twice if decays are per key channel), and three squares.
    chunk_bytes = 2 * CHUNK_SIZE * ((2 + per_channel) * power_of_two(key_dim) + 3 * CHUNK_SIZE)
    stages = max(1, min(3, _SHARED_BYTES // chunk_bytes, 1 + (device.shared_bytes() - _SCRATCH_BYTES) // chunk_bytes))
    if per_channel:
        return PrefillConfig(tile_value=32, num_warps=4, num_stages=stages, products_warps=4, pieces=1)
    if values <= 32 * 132:
        return PrefillConfig(tile_value=32, num_warps=4, num_stages=stages, products_warps=2, pieces=2)
    return PrefillConfig(tile_value=64, num_warps=4, num_stages=1, products_warps=2, pieces=2)
