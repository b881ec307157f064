"""Launch configuration of rotate_and_store's kernel."""

from dataclasses import dataclass

from pallas_kernels._check import LaunchConfig

_ELEMENTS = 2048  # of a tile


@dataclass(frozen=True)
class Config(LaunchConfig, op="rotate_and_store", heads=1):
    """How the kernel is launched. A program handles a tile of heads of one token.

    Attributes:
        heads: The most heads of a program, a power of two.
        num_warps: Warps of a program.
    """

    heads: int
    num_warps: int


def default_config(dim: int) -> Config:
    """Return the configuration for heads of `dim` dims.

    It does not depend on the number of tokens, because it can change the order of a norm's sum. It is among the fastest of
    `benchmarks.rotary --tune` for 1 to 8192 tokens with heads of 128 and 256 on an H200 with JAX 0.11.2.
    """
    if dim >= 256:
        return Config(heads=1, num_warps=2)
    return Config(heads=max(1, _ELEMENTS >> max(dim - 1, 0).bit_length()), num_warps=4)
