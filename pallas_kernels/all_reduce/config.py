"""Launch configuration of all_reduce's kernels."""

from dataclasses import dataclass

from pallas_kernels._check import LaunchConfig

_ELEMENTS = 4  # of a thread. With more, fewer threads send and wait concurrently.
_MAX_WARPS = 32


@dataclass(frozen=True)
class Config(LaunchConfig, op="all_reduce", pack=1):
    """How a kernel is launched. A program takes one token.

    Attributes:
        num_warps: Warps of a program.
        pack: The number of values that a thread sends before it waits for the first one. A power of two.
    """

    num_warps: int
    pack: int


def default_config(num_channels: int) -> Config:
    """Return the configuration for tokens of `num_channels` channels.

    A thread sends all of its values before it waits, and has four values if there are enough threads. On two H200s with
    JAX 0.11.2 four are faster than eight.
    """
    tile = 1 << max(num_channels - 1, 0).bit_length()
    num_warps = min(_MAX_WARPS, max(1, tile // (32 * _ELEMENTS)))
    return Config(num_warps, pack=max(1, tile // (32 * num_warps)))
