"""Launch configurations of the Triton kernels of deferred states."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeferredConfig:
    """How the kernel that reads states cuts a head's state [value_dim, key_dim]. Sizes are powers of two.

    Attributes:
        tile_value: The number of value dims per program.
        segment: The number of keys in a segment. Each row of the state is folded into segments. It sets the order of sums.
        num_warps: The number of warps per program.
    """

    tile_value: int
    segment: int
    num_warps: int


def default_config(itemsize: int) -> DeferredConfig:
    """Returns the configuration for states of `itemsize` bytes.

    It does not depend on the number of rows, because a tile may set the order of sums. A thread has 16 bytes of a segment,
    so that eight threads share a row of the state.
    """
    return DeferredConfig(tile_value=16, segment=32 if itemsize == 4 else 64, num_warps=1)
