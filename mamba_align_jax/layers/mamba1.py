"""Mamba-1: convolution, steps and projections that depend on the input, the selective scan, a gate."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.align.config import ConvState, RecurrentState
from mamba_align_jax.layers.causal_conv import CausalConv1d
from mamba_align_jax.layers.linear import linear
from mamba_align_jax.metadata.rows import Rows, RowSplit
from pallas_kernels import Chunks, Implementation, selective_scan, selective_state_update


class Mamba1Mixer(nnx.Module):
    """One layer; its states are blocks of `conv` [layers, blocks, window, channels] and `recurrent`, of one head."""

    kind = "mamba1"

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        state_dim: int,
        dt_rank: int,
        width: int,
        dtype: str,
        rngs: nnx.Rngs,
        *,
        conv_bias: bool = True,
        proj_bias: bool = False,
        norm: Callable[[int], nnx.Module] | None = None,
    ) -> None:
        """Makes a layer with random weights.

        Args:
            hidden_size: Of the residual stream.
            inner_size: Channels of the recurrence.
            state_dim: State of a channel, and what B and C have.
            dt_rank: Of the step sizes before their projection to the channels.
            width: Of the convolution.
            dtype: Of the weights.
            rngs: Draws the weights.
            conv_bias: Whether the convolution has a bias.
            proj_bias: Whether the input and output projections have.
            norm: Makes the norms of the low-rank step sizes, B and C, from their sizes (Falcon-Mamba, Jamba).
        """
        self.state_dim, self.dt_rank = state_dim, dt_rank
        self.in_proj = linear(hidden_size, 2 * inner_size, dtype, rngs, bias=proj_bias)
        self.conv1d = CausalConv1d(width, inner_size, dtype, rngs, bias=conv_bias)
        self.x_proj = linear(inner_size, dt_rank + 2 * state_dim, dtype, rngs)
        sizes = dt_rank, state_dim, state_dim
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = map(norm, sizes) if norm else (None, None, None)
        self.dt_proj = linear(dt_rank, inner_size, dtype, rngs)
        # Beside its projection: the kernels add it in float32.
        self.dt_proj_bias = nnx.Param(jnp.zeros(inner_size, jnp.float32))
        rates = jnp.broadcast_to(jnp.arange(1, state_dim + 1, dtype=jnp.float32), (inner_size, state_dim))
        self.A_log = nnx.Param(jnp.log(rates))
        self.D = nnx.Param(jnp.ones(inner_size, jnp.float32))
        self.out_proj = linear(inner_size, hidden_size, dtype, rngs, bias=proj_bias)

    def states(self, conv_dtype: str, state_dtype: str) -> tuple[ConvState, RecurrentState]:
        """What a block holds of this layer."""
        return self.conv1d.state(conv_dtype), RecurrentState((1, *self.A_log.shape), state_dtype)

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
            chunks: Not needed: the scan goes token by token.
            conv: Pool of windows. Donate it.
            recurrent: Pool of states. Donate it.
            layer: This layer's place in the pools.
            group: This layer's place among the groups of block ids.
            num_decode_tokens: Static bound on the tokens of decode and verify rows.
            implementation: Of the ops.

        Returns:
            [tokens, hidden] and the pools.
        """
        del chunks
        x, z = jnp.split(self.in_proj(x), 2, axis=1)
        x, conv = self.conv1d(
            x, split, conv, layer, group=group, num_decode_tokens=num_decode_tokens, implementation=implementation
        )
        parts = jnp.split(self.x_proj(x), [self.dt_rank, self.dt_rank + self.state_dim], axis=1)
        norms = self.dt_layernorm, self.b_layernorm, self.c_layernorm
        dt, B, C = (part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True))
        A = -jnp.exp(self.A_log[...].astype(jnp.float32))[None]
        D, dt_bias = self.D[...][None], self.dt_proj_bias[...][None]

        def run(op, rows: Rows, write, x, dt, B, C, z, recurrent):
            return op(
                x, dt, A, B, C, recurrent, layer, rows.query_start_loc, rows.recurrent_read[group], write,
                D=D, z=z, dt_bias=dt_bias, implementation=implementation,
            )  # fmt: skip

        decode = lambda rows, *operands: run(selective_state_update, rows, rows.write[group], *operands)
        prefill = lambda rows, *operands: run(selective_scan, rows, rows.write[group, :, 0], *operands)
        tokens = tuple(y[:, None] for y in (x, self.dt_proj(dt), B, C, z))
        out, recurrent = split.apply(decode, prefill, tokens, (recurrent,), num_decode_tokens)
        return self.out_proj(out[:, 0]), conv, recurrent
