"""The gated feed-forward layer.

Source: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from flax import nnx

from mamba_align_jax.layers.chain import Inputs
from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.split import Cut
from mamba_align_jax.sharding import Part


class GatedMLP(nnx.Module):
    """Computes down(silu(gate(x)) * up(x)) of each token."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, dtype: str, rngs: nnx.Rngs, *, bias: bool = False
    ) -> None:
        """Makes a layer with random weights. gate(x) and up(x) have `intermediate_size` channels."""
        self.gate_up_proj = Linear(hidden_size, (intermediate_size, intermediate_size), dtype, rngs, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype, rngs, bias=bias)

    takes_chains = True

    def __call__(self, x: Inputs) -> Outputs:
        """Takes [tokens, hidden] to sums [splits, tokens, hidden]: see `Linear.sums`. It continues a chain."""
        return self.down_proj.sums(self.gate_up_proj.gated(x))

    def split(self, cut: Cut) -> None:
        """Keeps one device's share of the intermediate channels: see `SplitMixer.split`."""
        width = Part(self.down_proj.weight.shape[1], 1)
        cut.out(self.gate_up_proj, width, width)
        cut.into(self.down_proj, width)
