"""Kimi delta attention: a delta rule whose decay is per key channel, and an output gate through a sigmoid.

Source: Kimi Team, "Kimi Linear" (2025); the bounded gate is that of Ling 3 and GLM 5.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.align.config import ConvState, RecurrentState
from mamba_align_jax.layers.delta_rule import convolved_delta_rule
from mamba_align_jax.layers.linear import ConvTaps, linear
from mamba_align_jax.layers.norm import GatedRMSNorm
from mamba_align_jax.metadata.rows import RowSplit
from pallas_kernels import Chunks, Implementation


class KimiDeltaAttention(nnx.Module):
    """One layer; its states are block rows of `conv` [layers, blocks, window, channels] and `recurrent`.

    `f_rank` and `g_rank` are the inner sizes of the decay's and the output gate's projections, None where each is one
    product. `lower_bound` is the least log decay of the bounded gate, None for the softplus gate.
    """

    kind = "kda"

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        head_dim: int,
        width: int,
        epsilon: float,
        dtype: str,
        rngs: nnx.Rngs,
        *,
        f_rank: int | None = None,
        g_rank: int | None = None,
        lower_bound: float | None = None,
    ) -> None:
        self.heads, self.head_dim, self.lower_bound = heads, head_dim, lower_bound
        channels = heads * head_dim
        self.in_proj_qkv = linear(hidden_size, 3 * channels, dtype, rngs)
        if f_rank is None:
            self.f_proj = linear(hidden_size, channels, dtype, rngs)
        else:
            self.f_a_proj = linear(hidden_size, f_rank, dtype, rngs)
            self.f_b_proj = linear(f_rank, channels, dtype, rngs)
        if g_rank is None:
            self.g_proj = linear(hidden_size, channels, dtype, rngs)
        else:
            self.g_a_proj = linear(hidden_size, g_rank, dtype, rngs)
            self.g_b_proj = linear(g_rank, channels, dtype, rngs)
        self.b_proj = linear(hidden_size, heads, dtype, rngs)
        self.conv1d = ConvTaps(width, 3 * channels, dtype, rngs)
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1.0, 16.0)))
        self.dt_bias = nnx.Param(jnp.ones(channels, jnp.float32))
        self.o_norm = GatedRMSNorm(head_dim, epsilon, jax.nn.sigmoid)
        self.o_proj = linear(channels, hidden_size, dtype, rngs)

    def states(self, conv_dtype: str, state_dtype: str) -> tuple[ConvState, RecurrentState]:
        """What a block holds of this layer."""
        width, channels = self.conv1d.weight.shape
        shape = (self.heads, self.head_dim, self.head_dim)
        return ConvState(width, channels, conv_dtype), RecurrentState(shape, state_dtype)

    def __call__(
        self,
        x: jax.Array,
        split: RowSplit,
        chunks: Chunks | None,
        conv: jax.Array,
        recurrent: jax.Array,
        layer: jax.Array,
        *,
        group: int = 0,
        num_decode_tokens: int = 0,
        implementation: Implementation | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs packed tokens [tokens, hidden].

        Args:
            x: Decode and verify rows first.
            split: The step's rows.
            chunks: `chunk_rows` of the prefill rows; None without such rows.
            conv: Pool of windows. Donate it.
            recurrent: Pool of states. Donate it.
            layer: This layer's place in the pools.
            group: This layer's place among the groups of block ids.
            num_decode_tokens: Static bound on the tokens of decode and verify rows.
            implementation: Of the ops.

        Returns:
            [tokens, hidden] and the pools.
        """
        heads = lambda y: y.reshape(*y.shape[:-1], self.heads, self.head_dim)
        f = self.f_proj(x) if hasattr(self, "f_proj") else self.f_b_proj(self.f_a_proj(x))
        out, conv, recurrent = convolved_delta_rule(
            self.in_proj_qkv(x), heads(f), self.b_proj(x), self.conv1d.weight[...], self.A_log[...],
            heads(self.dt_bias[...]), split, chunks, conv, recurrent, layer, group=group,
            num_decode_tokens=num_decode_tokens, lower_bound=self.lower_bound, implementation=implementation,
        )  # fmt: skip
        z = self.g_proj(x) if hasattr(self, "g_proj") else self.g_b_proj(self.g_a_proj(x))
        return self.o_proj(self.o_norm(out, heads(z)).reshape(x.shape[0], -1)), conv, recurrent
