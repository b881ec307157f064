"""Gated delta net: convolution, gates, delta rule, gated norm."""

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.align.config import ConvState, RecurrentState
from mamba_align_jax.layers.delta_rule import convolved_delta_rule
from mamba_align_jax.layers.linear import ConvTaps, linear
from mamba_align_jax.layers.norm import GatedRMSNorm
from mamba_align_jax.metadata.rows import RowSplit
from pallas_kernels import Chunks, Implementation


class GatedDeltaNet(nnx.Module):
    """One layer; its states are block rows of `conv` [layers, blocks, window, channels] and `recurrent`."""

    kind = "gdn"

    def __init__(
        self,
        hidden_size: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        width: int,
        epsilon: float,
        dtype: str,
        rngs: nnx.Rngs,
        *,
        allow_neg_eigval: bool = False,
    ) -> None:
        self.allow_neg_eigval = allow_neg_eigval
        self.key_heads, self.value_heads = key_heads, value_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        keys, values = key_heads * key_dim, value_heads * value_dim
        self.in_proj_qkv = linear(hidden_size, 2 * keys + values, dtype, rngs)
        self.in_proj_z = linear(hidden_size, values, dtype, rngs)
        self.in_proj_b = linear(hidden_size, value_heads, dtype, rngs)
        self.in_proj_a = linear(hidden_size, value_heads, dtype, rngs)
        self.conv1d = ConvTaps(width, 2 * keys + values, dtype, rngs)
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (value_heads,), jnp.float32, 1.0, 16.0)))
        self.dt_bias = nnx.Param(jnp.ones(value_heads, jnp.float32))
        self.norm = GatedRMSNorm(value_dim, epsilon)
        self.out_proj = linear(values, hidden_size, dtype, rngs)

    def states(self, conv_dtype: str, state_dtype: str) -> tuple[ConvState, RecurrentState]:
        """What a block holds of this layer."""
        width, channels = self.conv1d.weight.shape
        shape = (self.value_heads, self.value_dim, self.key_dim)
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
        out, conv, recurrent = convolved_delta_rule(
            self.in_proj_qkv(x), self.in_proj_a(x), self.in_proj_b(x), self.conv1d.weight[...], self.A_log[...],
            self.dt_bias[...], split, chunks, conv, recurrent, layer, group=group, num_decode_tokens=num_decode_tokens,
            allow_neg_eigval=self.allow_neg_eigval, implementation=implementation,
        )  # fmt: skip
        z = self.in_proj_z(x).reshape(out.shape)
        return self.out_proj(self.norm(out, z).reshape(x.shape[0], -1)), conv, recurrent
