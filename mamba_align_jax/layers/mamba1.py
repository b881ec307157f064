"""Mamba-1: a recurrence whose step sizes and projections depend on the input, with a state per channel.

Source: Gu, Dao, "Mamba" (2023).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.align.config import ConvState, RecurrentState
from mamba_align_jax.layers.causal_conv import CausalConv1d
from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.split import Cut
from mamba_align_jax.metadata.layer_step import LayerStep
from mamba_align_jax.sharding import Part
from pallas_kernels import Rows, selective_scan, selective_state_update


class Mamba1Mixer(nnx.Module):
    """Mamba-1: projections, a convolution, the selective scan with a gate, and an output projection.

    For one channel with state S [state_dim], input x, and the step size dt, B and C that are computed from x::

        dt = softplus(dt + dt_bias);  S = exp(-exp(A_log) * dt) * S + dt * x * B;  y = (S C + D * x) * silu(z)

    Its states are a convolution window [window, inner_size] and S for all channels, [1, inner_size, state_dim].
    """

    kind = "mamba1"
    keeps_interior = True

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
            hidden_size: Channels of the residual stream.
            inner_size: Channels of the recurrence.
            state_dim: Numbers in a channel's state, in B and in C.
            dt_rank: Size of the step sizes before they are projected to the channels.
            width: Number of inputs that an output of the convolution sees.
            dtype: Dtype of weights and products. Decay rates, D and the bias of the step sizes are float32.
            rngs: Random numbers for the weights.
            conv_bias: Whether the convolution has a bias.
            proj_bias: Whether the input and output projections have biases.
            norm: Makes a norm from its number of channels, for the low-rank step sizes, B and C (Falcon-Mamba, Jamba).
                With None they have no norms.
        """
        self.in_proj = Linear(hidden_size, (inner_size, inner_size), dtype, rngs, bias=proj_bias)
        self.conv1d = CausalConv1d(width, inner_size, dtype, rngs, bias=conv_bias)
        self.x_proj = Linear(inner_size, (dt_rank, state_dim, state_dim), dtype, rngs)
        sizes = dt_rank, state_dim, state_dim
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = map(norm, sizes) if norm else (None, None, None)
        self.dt_proj = Linear(dt_rank, inner_size, dtype, rngs)
        # The bias is not part of `dt_proj`, because the kernels add it in float32.
        self.dt_proj_bias = nnx.Param(jnp.zeros(inner_size, jnp.float32))
        rates = jnp.broadcast_to(jnp.arange(1, state_dim + 1, dtype=jnp.float32), (inner_size, state_dim))
        self.A_log = nnx.Param(jnp.log(rates))
        self.D = nnx.Param(jnp.ones(inner_size, jnp.float32))
        self.out_proj = Linear(inner_size, hidden_size, dtype, rngs, bias=proj_bias)

    def states(self, conv_dtype: str, state_dtype: str) -> tuple[ConvState, RecurrentState]:
        """Describes the window and the recurrent state that a block holds for this layer: see `Mixer`."""
        return self.conv1d.state(conv_dtype), RecurrentState((1, *self.A_log.shape), state_dtype)

    def __call__(self, x: jax.Array, at: LayerStep, *pools: jax.Array) -> tuple[Outputs, *tuple[jax.Array, ...]]:
        """Runs a step's packed tokens: see `Mixer`. The pools are windows and recurrent states."""
        conv, recurrent = pools
        x, z = self.in_proj(x)
        x, conv = self.conv1d(x, at, conv)
        norms = self.dt_layernorm, self.b_layernorm, self.c_layernorm
        dt, B, C = (part if norm is None else norm(part) for part, norm in zip(self.x_proj(x), norms, strict=True))
        A = -jnp.exp(self.A_log[...].astype(jnp.float32))[None]
        D, dt_bias = self.D[...][None], self.dt_proj_bias[...][None]

        options = dict(D=D, dt_bias=dt_bias, run=at.run)

        def decode(rows: Rows, x, dt, B, C, z, recurrent):
            return selective_state_update(x, dt, A, B, C, recurrent, rows, z=z, **options)

        def prefill(rows: Rows, x, dt, B, C, z, recurrent):
            return selective_scan(x, dt, A, B, C, recurrent, rows, z=z, **options)

        tokens = tuple(y[:, None] for y in (x, self.dt_proj(dt), B, C, z))
        out, recurrent = at.apply(decode, prefill, tokens, (recurrent,))
        return self.out_proj.sums(out[:, 0]), conv, recurrent

    def split(self, cut: Cut) -> None:
        """Keeps one device's channels: see `SplitMixer`."""
        channel = Part(self.D.shape[0], 1)
        cut.out(self.in_proj, channel, channel)
        cut.put(self.conv1d.weight, 1, [channel])
        if self.conv1d.bias is not None:
            cut.put(self.conv1d.bias, 0, [channel])
        cut.into(self.x_proj, channel)
        cut.out(self.dt_proj, channel)
        for variable in (self.dt_proj_bias, self.A_log, self.D):
            cut.put(variable, 0, [channel])
        cut.into(self.out_proj, channel)
