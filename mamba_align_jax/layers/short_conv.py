"""The gated short convolution of LFM2: a mixer whose only state is the window of its convolution.

Source: Liquid AI, "LFM2 Technical Report" (2025).
"""

import jax
from flax import nnx

from mamba_align_jax.align.config import ConvState
from mamba_align_jax.layers.causal_conv import CausalConv1d
from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.split import Cut
from mamba_align_jax.metadata.layer_step import LayerStep
from mamba_align_jax.sharding import Part


class ShortConv(nnx.Module):
    """Computes out_proj(C * conv(B * x)), where B, C and x are projections of the inputs.

    Its state is the window of the convolution's last inputs, [window, hidden].
    """

    kind = "short_conv"
    keeps_interior = True

    def __init__(self, hidden_size: int, width: int, dtype: str, rngs: nnx.Rngs, *, bias: bool = False) -> None:
        """Makes a layer with random weights.

        Args:
            hidden_size: Channels of the residual stream and of the convolution.
            width: Number of inputs that an output of the convolution sees.
            dtype: Dtype of weights and products.
            rngs: Random numbers for the weights.
            bias: Whether the projections and the convolution have biases.
        """
        self.in_proj = Linear(hidden_size, (hidden_size, hidden_size, hidden_size), dtype, rngs, bias=bias)
        self.conv = CausalConv1d(width, hidden_size, dtype, rngs, bias=bias)
        self.conv.activation = None
        self.out_proj = Linear(hidden_size, hidden_size, dtype, rngs, bias=bias)

    def states(self, conv_dtype: str, state_dtype: str) -> tuple[ConvState]:
        """Describes the window that a block holds for this layer: see `Mixer`."""
        return (self.conv.state(conv_dtype),)

    def __call__(self, x: jax.Array, at: LayerStep, *pools: jax.Array) -> tuple[Outputs, *tuple[jax.Array, ...]]:
        """Runs a step's packed tokens: see `Mixer`. The pool holds windows."""
        (windows,) = pools
        B, C, inputs = self.in_proj(x)
        convolved, windows = self.conv(B * inputs, at, windows)
        return self.out_proj.sums(C * convolved), windows

    def split(self, cut: Cut) -> None:
        """Keeps one device's channels: see `SplitMixer`."""
        channel = Part(self.conv.weight.shape[1], 1)
        cut.out(self.in_proj, channel, channel, channel)
        cut.put(self.conv.weight, 1, [channel])
        if self.conv.bias is not None:
            cut.put(self.conv.bias, 0, [channel])
        cut.into(self.out_proj, channel)
