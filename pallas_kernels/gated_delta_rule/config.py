"""Launch configuration of gated_delta_rule's kernels."""

from dataclasses import dataclass

from pallas_kernels._pallas_triton import power_of_two
from pallas_kernels.chunks import CHUNK_SIZE


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


@dataclass(frozen=True)
class PrefillConfig:
    """How prefill's kernels share the work. Of these, only `pieces` changes what is computed.

    The kernel that carries states gives a program `tile_value` of a head's value dims, `num_warps` warps, and `num_stages`
    chunks in flight; the one that multiplies a chunk's keys takes `products_warps`. Where inputs are bfloat16, float32
    values enter the products that make states in `pieces` of bfloat16: an error of 2^-16 with two, of 2^-8 with one.
    """

    tile_value: int
    num_warps: int
    num_stages: int
    products_warps: int
    pieces: int


_SHARED_BYTES = 215_000  # for the chunks in flight, of an H200's 232,448


def default_prefill_config(values: int, key_dim: int, itemsize: int, per_channel: bool) -> PrefillConfig:
    """For `values` value dims of all heads and rows: few of them are cut small, to fill the card.

    Measured on an H200 (JAX 0.11.2) for heads of 128 x 128 and bfloat16 inputs; float32 inputs are not tuned. With a decay
    per key channel keys are decayed before they are multiplied, in bfloat16: a second piece would cost 1.8 times the time.
    """
    if itemsize == 4:
        return PrefillConfig(tile_value=32, num_warps=4, num_stages=1, products_warps=8, pieces=1)
    # In bfloat16: queries and keys, which with decays of their own come twice, and three squares.
    chunk_bytes = 2 * CHUNK_SIZE * ((2 + per_channel) * power_of_two(key_dim) + 3 * CHUNK_SIZE)
    stages = max(1, min(3, _SHARED_BYTES // chunk_bytes))
    if per_channel:
        return PrefillConfig(tile_value=32, num_warps=4, num_stages=stages, products_warps=4, pieces=1)
    if values <= 32 * 132:
        return PrefillConfig(tile_value=32, num_warps=4, num_stages=stages, products_warps=2, pieces=2)
    return PrefillConfig(tile_value=64, num_warps=4, num_stages=1, products_warps=2, pieces=2)
