"""The gated feed-forward layer.

Source: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

import jax
from flax import nnx

from mamba_align_jax.layers.linear import linear
from mamba_align_jax.layers.split import Cut
from mamba_align_jax.sharding import Part


class GatedMLP(nnx.Module):
    """Computes down(silu(gate(x)) * up(x)) of each token."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: str, rngs: nnx.Rngs) -> None:
        """Makes a layer with random weights.

        Args:
            hidden_size: Channels of the residual stream.
            intermediate_size: Channels of gate(x) and up(x).
            dtype: Dtype of weights and products.
            rngs: Random numbers for the weights.
        """
        self.gate_proj = linear(hidden_size, intermediate_size, dtype, rngs)
        self.up_proj = linear(hidden_size, intermediate_size, dtype, rngs)
        self.down_proj = linear(intermediate_size, hidden_size, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Takes [tokens, hidden] to [tokens, hidden]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))

    def split(self, cut: Cut) -> None:
        """Keeps one device's share of the intermediate channels: see `SplitMixer.split`."""
        width = Part(self.down_proj.kernel.shape[0], 1)
        cut.out(self.gate_proj, width)
        cut.out(self.up_proj, width)
        cut.into(self.down_proj, width)
