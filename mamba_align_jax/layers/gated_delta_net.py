"""Gated delta net: convolution, gates, delta rule, gated norm."""

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.layers.linear import ConvTaps, linear
from mamba_align_jax.layers.norm import GatedRMSNorm
from mamba_align_jax.metadata.rows import Rows, RowSplit
from mamba_align_jax.spec import ConvState, RecurrentState
from pallas_kernels import (
    Chunks,
    Implementation,
    causal_conv1d_prefill,
    causal_conv1d_update,
    gated_delta_rule_gates,
    gated_delta_rule_prefill,
    gated_delta_rule_update,
)


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
        weight = self.conv1d.weight[...]
        A_log, dt_bias = self.A_log[...], self.dt_bias[...]

        def decode(rows: Rows, qkv, a, b, conv, recurrent):
            loc, write = rows.query_start_loc, rows.write[group]
            qkv, conv = causal_conv1d_update(
                qkv, conv, layer, weight, None, loc, rows.conv_read[group], rows.conv_row, write[:, 0],
                implementation=implementation,
            )  # fmt: skip
            out, recurrent = gated_delta_rule_update(
                qkv, a, b, A_log, dt_bias, recurrent, layer, loc, rows.recurrent_read[group], write,
                allow_neg_eigval=self.allow_neg_eigval, implementation=implementation,
            )  # fmt: skip
            return out, conv, recurrent

        def prefill(rows: Rows, qkv, a, b, conv, recurrent):
            loc, write = rows.query_start_loc, rows.write[group, :, 0]
            qkv, conv = causal_conv1d_prefill(
                qkv,
                conv,
                layer,
                weight,
                None,
                loc,
                rows.conv_read[group],
                rows.conv_row,
                write,
                implementation=implementation,
            )
            q, k, v = jnp.split(qkv, [self.key_heads * self.key_dim, 2 * self.key_heads * self.key_dim], axis=1)
            heads = lambda y, dim: y.reshape(y.shape[0], -1, dim)
            q, k, v = heads(q, self.key_dim), heads(k, self.key_dim), heads(v, self.value_dim)
            g, beta = gated_delta_rule_gates(a, b, A_log, dt_bias, allow_neg_eigval=self.allow_neg_eigval)
            assert chunks is not None
            out, recurrent = gated_delta_rule_prefill(
                q, k, v, g, beta, recurrent, layer, loc, chunks, rows.recurrent_read[group], write,
                implementation=implementation,
            )  # fmt: skip
            return out, conv, recurrent

        tokens = self.in_proj_qkv(x), self.in_proj_a(x), self.in_proj_b(x)
        out, conv, recurrent = split.apply(decode, prefill, tokens, (conv, recurrent), num_decode_tokens)
        z = self.in_proj_z(x).reshape(out.shape)
        return self.out_proj(self.norm(out, z).reshape(x.shape[0], -1)), conv, recurrent
