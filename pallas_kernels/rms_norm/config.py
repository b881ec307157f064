"""Launch configuration of add_rms_norm's kernel, and the static arguments of its implementations."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pallas_kernels._check import LaunchConfig


class Norm(NamedTuple):
    """The static arguments of `add_rms_norm`, which describes them."""

    epsilon: float
    offset: float
    scale: float
    out_dtype: np.dtype


@dataclass(frozen=True)
class Config(LaunchConfig, op="add_rms_norm"):
    """How the kernel is launched. A program takes one token.

    Attributes:
        num_warps: Warps of a program.
    """

    num_warps: int


def default_config(num_channels: int, num_splits: int) -> Config:
    """Return the configuration for tokens of `num_channels` channels: a thread has about 20 of them.

    For 2560 channels and up to four splits it is the fastest on an H200 with JAX 0.11.2. With more splits, such as one for
    each of a token's experts, a thread has a quarter of the channels. The compiler would else wait for some of its loads
    before it issues the others.
    """
    num_warps = 1 << max(num_channels // 512, 1).bit_length() - 1
    return Config(num_warps=min(16, num_warps * (4 if num_splits > 4 else 1)))
