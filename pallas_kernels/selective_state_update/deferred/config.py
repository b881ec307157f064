"""Launch configurations of the kernel of deferred states of Mamba-2."""

from dataclasses import dataclass

from pallas_kernels._check import LaunchConfig


@dataclass(frozen=True)
class DeferredConfig(LaunchConfig, op="selective_state_deferred", positive=("pieces",), block_dim=16):
    """How the kernel cuts a head's state [head_dim, state_dim], and how it multiplies. Sizes are powers of two.

    Attributes:
        block_dim: The number of state rows (channels) per program, at least 16. It changes no bit.
        num_warps: The number of warps per program.
        pieces: The number of bfloat16 terms into which float32 values are split for products. The relative error is
            2^-8 with one term, 2^-16 with two and 2^-24 with three.
        dims_first: Whether the product with the state is computed as [channels, tokens] and not as [tokens, channels].
            With four warps and 64 channels, [channels, tokens] uses the tensor cores' wider instruction.
    """

    block_dim: int
    num_warps: int
    pieces: int
    dims_first: bool


def default_config(state_dim: int, itemsize: int) -> DeferredConfig:
    """Return the configuration for states of `itemsize` bytes.

    It depends on the state alone, because it determines the order of sums.
    """
    pieces = 3 if itemsize == 4 else 2
    if state_dim > 128:
        return DeferredConfig(32, num_warps=4, pieces=pieces, dims_first=False)
    return DeferredConfig(64, num_warps=4, pieces=pieces, dims_first=True)
