"""Launch configuration of causal_conv1d's kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Channels of one program's tile (a power of two) and its warps."""

    tile: int
    num_warps: int


def default_config() -> Config:
    """Four channels to a thread. Best, or within 2 %, of `benchmarks.tune` on an H200 (JAX 0.11.2) at 1 to 256 rows."""
    return Config(tile=1024, num_warps=8)


@dataclass(frozen=True)
class PrefillConfig:
    """Channels of one program's tile (a power of two), its tokens, and its warps."""

    tile: int
    block: int
    num_warps: int


def default_prefill_config() -> PrefillConfig:
    """A warp whose threads hold four channels each. Best of `benchmarks.tune` on an H200 (JAX 0.11.2) at 8192 channels."""
    return PrefillConfig(tile=128, block=16, num_warps=1)
