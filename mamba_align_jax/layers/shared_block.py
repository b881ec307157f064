"""Adapters that each of several layers adds to a block of attention and MLP that they share (Zamba2).

An adapter is a product of low rank, up(down(x)), which is added to a projection of the block.

Sources: Glorioso et al., "The Zamba2 Suite" (2024); Hu et al., "LoRA" (2021).
"""

import jax
from flax import nnx

from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.chain import Inputs, settled
from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.split import Cut
from mamba_align_jax.sharding import Part, repeats


class AdaptedMLP(nnx.Module):
    """Computes down(gelu(gate(x)) * up(x)) with the weights of a shared MLP, and a layer's adapter of gate and up."""

    def __init__(self, shared: GatedMLP, rank: int, dtype: str, rngs: nnx.Rngs) -> None:
        """Makes an adapter of rank `rank` with random weights."""
        hidden_size, intermediate_size = shared.down_proj.weight.shape
        self.shared = shared
        self.down = Linear(hidden_size, rank, dtype, rngs)
        self.up = Linear(rank, (intermediate_size, intermediate_size), dtype, rngs)

    def __call__(self, x: jax.Array) -> Outputs:
        """Takes [tokens, hidden] to sums [splits, tokens, hidden]: see `Linear.sums`."""
        gate, up = (a + b for a, b in zip(self.shared.gate_up_proj(x), self.up(self.down(x)), strict=True))
        return self.shared.down_proj.sums(jax.nn.gelu(gate, approximate=False) * up)

    def split(self, cut: Cut) -> None:
        """Keeps one device's share of the adapter's outputs: see `SplitMixer.split`."""
        width = Part(self.up.parts[0], 1)
        cut.out(self.up, width, width)


class AdaptedAttention(Attention):
    """Shared attention with a layer's adapters of its queries, keys and values. Every layer has pages of its own."""

    takes_chains = False  # adapters read the inputs too

    def __init__(self, shared: Attention, rank: int | None, dtype: str, rngs: nnx.Rngs) -> None:
        """Makes adapters of rank `rank` with random weights; None makes none."""
        self.heads, self.kv_heads, self.head_dim = shared.heads, shared.kv_heads, shared.head_dim
        self.rotary_dim, self.rotation, self.scale = shared.rotary_dim, shared.rotation, shared.scale
        self.gated, self.norm_whole, self.q_norm, self.k_norm = False, False, None, None
        self.qkv_proj, self.o_proj = shared.qkv_proj, shared.o_proj
        inputs = shared.qkv_proj.weight.shape[1]
        self.down: Linear | None = None if rank is None else Linear(inputs, (rank, rank, rank), dtype, rngs)
        if rank is not None:
            self.q_up, self.k_up, self.v_up = (Linear(rank, size, dtype, rngs) for size in shared.qkv_proj.parts)

    def projections(self, x: Inputs, *, is_wide: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Projects the inputs [tokens, 2 * hidden] to queries, keys and values, each [tokens, channels].

        Queries are never wide, because adapters are added to them.
        """
        x = settled(x)
        q, k, v = self.qkv_proj(x)
        if self.down is None:
            return q, k, v
        to_q, to_k, to_v = self.down(x)
        return q + self.q_up(to_q), k + self.k_up(to_k), v + self.v_up(to_v)

    def split(self, cut: Cut) -> None:
        """Keeps one device's heads: see `SplitMixer`. The shared weights are split by themselves."""
        copies = repeats(self.kv_heads, cut.size)
        if self.down is not None:
            keys = Part(self.kv_heads, self.head_dim, copies)
            for up, part in ((self.q_up, Part(self.heads, self.head_dim)), (self.k_up, keys), (self.v_up, keys)):
                cut.out(up, part)
        self.heads //= cut.size
        self.kv_heads = self.kv_heads * copies // cut.size
