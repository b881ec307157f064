"""Launch configurations of causal_conv1d's kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """How the update kernel is launched.

    Attributes:
        tile: The number of channels per program, a power of two.
        num_warps: The number of warps per program.
    """

    tile: int
    num_warps: int


def default_config() -> Config:
    """Returns the configuration in which a thread holds four channels.

    With 1 to 256 rows it is the fastest of `benchmarks.tune`, or within 2 % of it, on an H200 with JAX 0.11.2.
    """
    return Config(tile=1024, num_warps=8)


@dataclass(frozen=True)
class PrefillConfig:
    """How the prefill kernel is launched.

    Attributes:
        tile: The number of channels per program, a power of two.
        block: The number of tokens per program.
        num_warps: The number of warps per program.
    """

    tile: int
    block: int
    num_warps: int


def default_prefill_config() -> PrefillConfig:
    """Returns the configuration with one warp, whose threads hold four channels each.

    With 8192 channels it is the fastest of `benchmarks.tune` on an H200 with JAX 0.11.2.
    """
    return PrefillConfig(tile=128, block=16, num_warps=1)
