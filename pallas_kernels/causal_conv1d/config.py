"""Launch configurations of causal_conv1d's kernels, and the static arguments of its implementations."""

from dataclasses import dataclass
from typing import NamedTuple

from pallas_kernels._check import LaunchConfig
from pallas_kernels.blocks import WindowLayout


class Options(NamedTuple):
    """The static arguments. `causal_conv1d_update` describes them."""

    activation: str | None
    parts: tuple[int, ...]
    layout: WindowLayout

    @property
    def axis(self) -> int:
        """The axis of the pool that has the rows of a window."""
        return 2 if self.layout == "SD" else 3


@dataclass(frozen=True)
class Config(LaunchConfig, op="causal_conv1d_update", tile=1):
    """How the update kernel is launched.

    Attributes:
        tile: The number of channels per program, a power of two.
        num_warps: The number of warps per program.
    """

    tile: int
    num_warps: int


def default_config(layout: WindowLayout = "SD") -> Config:
    """Return the configuration in which a thread holds four channels, or one channel for windows of layout "DS".

    With 1 to 256 rows and layout "SD" it is the fastest of `benchmarks.tune`, or within 2 % of it, on an H200 with JAX
    0.11.2. In layout "DS" the channels of a window row are not neighbours in memory, so a thread cannot access four of
    them at once. With one channel per thread, the same threads hold windows and tokens. That
    configuration is not tuned.
    """
    return Config(tile=1024, num_warps=8) if layout == "SD" else Config(tile=128, num_warps=4)


@dataclass(frozen=True)
class PrefillConfig(LaunchConfig, op="causal_conv1d_prefill", positive=("block",), tile=1):
    """How the prefill kernel is launched.

    Attributes:
        tile: The number of channels per program, a power of two.
        block: The number of tokens per program.
        num_warps: The number of warps per program.
    """

    tile: int
    block: int
    num_warps: int


def default_prefill_config(layout: WindowLayout = "SD") -> PrefillConfig:
    """Return the configuration with one warp, whose threads hold four channels each, or one for layout "DS".

    With 8192 channels and layout "SD" it is the fastest of `benchmarks.tune` on an H200 with JAX 0.11.2. For layout "DS"
    see `default_config`; it is not tuned.
    """
    return PrefillConfig(tile=128, block=16, num_warps=1 if layout == "SD" else 4)
