"""Launch configuration of linear's kernel, and the static arguments of its implementations."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from pallas_kernels import _weight_tiles, device
from pallas_kernels._check import LaunchConfig
from pallas_kernels.quantized import QuantizedWeight

# A product of more tokens is bound by arithmetic, and XLA's own is faster.
MAX_TOKENS = 64
_PROGRAMS = 264  # two for each of an H200's SMs


class Options(NamedTuple):
    """The static arguments of `linear`, which describes them."""

    is_gated: bool
    parts: tuple[int, ...]
    out_dtype: np.dtype


@dataclass(frozen=True)
class Config(LaunchConfig, op="linear", inputs=16, shares=1):
    """How the kernel tiles a product. Sizes are powers of two.

    Attributes:
        tokens: Tokens of a tile: at least 16, or 1 for the kernel of a single token.
        outputs: Outputs of a tile, at least 16 if it has 16 tokens.
        inputs: Inputs of a tile, at least 16. The kernel of a single token loads all inputs at once, in
            blocks of this size.
        shares: The number of split-K programs, which divide the inputs of a tile of outputs among them. Another kernel adds
            their partial sums.
        num_warps: Warps of a program.
        num_stages: The software-pipelining depth of the loop over inputs.
    """

    tokens: int
    outputs: int
    inputs: int
    shares: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("tokens", "outputs"):
            self.require_power(field, 1 if self.tokens == 1 else 16)


def _of_one_token(row_bytes: int, itemsize: int, is_gated: bool) -> Config | None:
    """Return the configuration for a single token, or None if the weights of an output do not fit into registers.

    A thread has about 20 loads of 16 bytes in flight, and a program is one warp, without SMEM.
    """
    if row_bytes * (1 + is_gated) > 20480:
        return None
    outputs = 1 if row_bytes * (1 + is_gated) > 5120 else 2
    return Config(tokens=1, outputs=outputs, inputs=512 // itemsize, shares=1, num_warps=1, num_stages=1)


def default_config(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: jax.Array | jax.ShapeDtypeStruct | QuantizedWeight,
    *,
    is_gated: bool = False,
    is_summed: bool = False,
) -> Config:
    """Return the configuration for a product.

    For bfloat16 it is among the fastest of `benchmarks.linear --tune` on an H200 with JAX 0.11.2. Where the GPU has less
    shared memory, fewer blocks of inputs are in flight. Of the arrays, only shapes and dtypes are used. If `is_summed`, the
    op that reads the product adds up its partial sums; if not, they take a launch of their own.
    """
    if isinstance(weight, QuantizedWeight):
        return _of_quantized(x, weight, is_gated=is_gated)
    (num_tokens, num_inputs), num_outputs, itemsize = x.shape, weight.shape[0], weight.dtype.itemsize
    # Products of fewer outputs take split-K, and tiles of more outputs keep the memory busy anyhow.
    if num_tokens == 1 and not is_summed and 32 * _PROGRAMS // 2 < num_outputs < 64 * 8 * _PROGRAMS:
        of_one = _of_one_token(num_inputs * itemsize, itemsize, is_gated)
        if of_one is not None:
            return of_one
    tokens = min(64, max(16, 1 << (num_tokens - 1).bit_length()))
    num_warps, num_stages, splits = 4, 4, 1
    if is_gated:
        outputs, inputs = 64 if tokens == 16 else 128, 128 // itemsize
        num_warps, num_stages = (8, 6) if tokens == 32 else (4, 5)
        # A shard of a model over devices, or a small model, has fewer outputs than all SMs need.
        width = num_outputs // 2
        if tokens == 16 and width < 64 * _PROGRAMS // 2:
            outputs, inputs, num_stages = 32, (256 if width >= 32 * _PROGRAMS // 2 else 512) // itemsize, 4
        while tokens > 16 < outputs and width // outputs < _PROGRAMS // 4:
            outputs //= 2
    elif tokens == 16 and not is_summed and 32 * _PROGRAMS // 4 <= num_outputs <= 32 * _PROGRAMS // 2:
        # Tiles for half of the SMs or more: a shard of the projections of a model over devices.
        outputs, inputs, num_stages = 32, 256 // itemsize, 6
    elif num_outputs <= 32 * _PROGRAMS // 2:
        # Too few tiles of outputs for all SMs: split-K. More than four splits gain less than adding them costs.
        outputs, inputs, num_stages = (64, 128 // itemsize, 6) if tokens == 64 else (32, 256 // itemsize, 4)
        while splits < 4 and num_inputs > 2 * splits * inputs:
            splits *= 2
    elif tokens == 64:
        outputs, inputs, num_stages = 64, 128 // itemsize, 6
    elif num_outputs >= 64 * 8 * _PROGRAMS:
        outputs, inputs = 64, 256 // itemsize
    else:
        outputs, inputs, num_warps = 32, 256 // itemsize, 2 if tokens == 16 else 4
    block_bytes = (tokens + (1 + is_gated) * outputs) * inputs * itemsize
    num_stages = min(num_stages, 1 + device.shared_bytes() // block_bytes)
    return Config(tokens, outputs, inputs, splits, num_warps, num_stages)


def _of_quantized(x: jax.Array | jax.ShapeDtypeStruct, weight: QuantizedWeight, *, is_gated: bool) -> Config:
    """Return the configuration for a quantised weight, whose tiles of inputs lie within its blocks."""
    num_tokens, (num_outputs, num_inputs) = x.shape[0], weight.shape
    tokens = min(64, max(16, 1 << (num_tokens - 1).bit_length()))
    inputs = max(16, _weight_tiles.depth(weight, 128))
    outputs, splits = 64 if tokens == 64 and not is_gated else 32, 1
    width = num_outputs // (1 + is_gated)
    while (
        not is_gated and splits < 4 and width // outputs * splits < _PROGRAMS // 2 and num_inputs > 2 * splits * inputs
    ):
        splits *= 2
    block_bytes = tokens * inputs * x.dtype.itemsize + (1 + is_gated) * outputs * inputs * _weight_tiles.itemsize(
        weight
    )
    return Config(tokens, outputs, inputs, splits, 4, min(4, 1 + device.shared_bytes() // block_bytes))
