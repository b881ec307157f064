"""Mamba-2: a recurrence with one decay per head and token, whose chunks are computed by matrix products.

Source: Dao, Gu, "Transformers are SSMs" (2024).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_align_jax.align.config import ConvState, RecurrentState
from mamba_align_jax.align.ring import Mamba2Ring
from mamba_align_jax.layers.causal_conv import CausalConv1d
from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.norm import GatedGroupNorm
from mamba_align_jax.layers.split import Cut, SplitGroupNorm
from mamba_align_jax.metadata.layer_step import LayerStep
from mamba_align_jax.sharding import Part, repeats
from pallas_kernels import Mamba2Entries, Rows, selective_state_deferred, selective_state_update, ssd


class Mamba2Mixer(nnx.Module):
    """Mamba-2: projections, a convolution, the state space recurrence, a gated norm and an output projection.

    For one head with state S [head_dim, state_dim] and input x [head_dim], and the B and C of its group::

        dt = softplus(dt + dt_bias);  S = exp(-exp(A_log) * dt) * S + (dt * x) B^T;  y = S C + D * x

    Its states are a convolution window [window, channels] of x, B and C, and S for all heads,
    [heads, head_dim, state_dim].
    """

    kind = "mamba2"
    keeps_interior = True

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        head_dim: int,
        state_dim: int,
        groups: int,
        width: int,
        dtype: str,
        rngs: nnx.Rngs,
        *,
        epsilon: float = 1e-5,
        norm: bool = True,
        norm_before_gate: bool = False,
        conv_bias: bool = True,
        in_bias: bool = False,
        out_bias: bool = False,
        multipliers: tuple[float, float, float, float, float] | None = None,
    ) -> None:
        """Makes a layer with random weights.

        Args:
            hidden_size: Channels of the residual stream.
            heads: Number of heads. Each has a state.
            head_dim: Channels of a head.
            state_dim: Dims of B and C.
            groups: Number of groups of heads that share B and C; divides `heads`.
            width: Number of inputs that an output of the convolution sees.
            dtype: Dtype of weights and products. Decay rates, D, the bias of the step sizes and the norm are float32.
            rngs: Random numbers for the weights.
            epsilon: Added to the mean square in the output norm.
            norm: Whether the output is normalised, each group of channels by itself. It is gated in either case.
            norm_before_gate: Whether the output is normalised before it is gated.
            conv_bias: Whether the convolution has a bias.
            in_bias: Whether the input projection has a bias.
            out_bias: Whether the output projection has a bias.
            multipliers: Factors of z, x, B, C and dt after the input projection (Falcon-H1); None for no factors.
        """
        inner, of_groups = heads * head_dim, groups * state_dim
        self.heads, self.head_dim, self.state_dim, self.groups = heads, head_dim, state_dim, groups
        self.multipliers = multipliers
        self.in_proj = Linear(hidden_size, (inner, inner + 2 * of_groups, heads), dtype, rngs, bias=in_bias)
        self.conv1d = CausalConv1d(width, inner + 2 * of_groups, dtype, rngs, bias=conv_bias)
        rates = jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1.0, 16.0)
        self.A_log = nnx.Param(jnp.log(rates))
        self.D = nnx.Param(jnp.ones(heads, jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones(heads, jnp.float32))
        self.norm = GatedGroupNorm(inner, groups, epsilon, norm_before_gate=norm_before_gate) if norm else None
        self.out_proj = Linear(inner, hidden_size, dtype, rngs, bias=out_bias)

    def states(self, conv_dtype: str, state_dtype: str) -> tuple[ConvState, RecurrentState]:
        """Describes the window and the recurrent state that a block holds for this layer: see `Mixer`."""
        shape = (self.heads, self.head_dim, self.state_dim)
        return self.conv1d.state(conv_dtype), RecurrentState(shape, state_dtype)

    def ring(self, dtype: str) -> Mamba2Ring:
        """Describes the entries that this layer keeps under policy "deferred": see `Mixer`."""
        return Mamba2Ring(self.heads, self.head_dim, self.groups, self.state_dim, dtype)

    def __call__(self, x: jax.Array, at: LayerStep, *pools: jax.Array) -> tuple[Outputs, *tuple[jax.Array, ...]]:
        """Runs a step's packed tokens: see `Mixer`. The pools are windows, recurrent states, and perhaps a ring."""
        conv, recurrent, *ring = pools
        z, xBC, dt = self.in_proj(x)
        inner, of_groups = z.shape[1], self.groups * self.state_dim
        if self.multipliers is not None:
            of_z, *of_xBC, of_dt = self.multipliers
            factors = np.repeat(of_xBC, (inner, of_groups, of_groups))
            z, xBC, dt = z * of_z, xBC * jnp.asarray(factors, xBC.dtype)[None], dt * of_dt
        A = -jnp.exp(self.A_log[...].astype(jnp.float32))
        same = dict(D=self.D[...], dt_bias=self.dt_bias[...], run=at.run)

        parts = inner, of_groups, of_groups
        heads = lambda y, number: y.reshape(y.shape[0], number, -1)
        operands = lambda x, B, C, dt: (heads(x, self.heads), dt, A, heads(B, self.groups), heads(C, self.groups))

        def decode(rows: Rows, xBC, dt, conv, recurrent, *ring):
            if rows.fold is not None:
                xBC, conv = self.conv1d.decode(at, rows, xBC, conv)
                entries = Mamba2Entries(*ring)
                out, recurrent, entries = selective_state_deferred(xBC, dt, A, recurrent, entries, rows, **same)
                return out, conv, recurrent, *entries.arrays
            (x, B, C), conv = self.conv1d.decode(at, rows, xBC, conv, parts=parts)
            out, recurrent = selective_state_update(*operands(x, B, C, dt), recurrent, rows, **same)
            return out, conv, recurrent, *ring

        def prefill(rows: Rows, xBC, dt, conv, recurrent, *ring):
            (x, B, C), conv = self.conv1d.prefill(at, rows, xBC, conv, parts=parts)
            out, recurrent = ssd(*operands(x, B, C, dt), recurrent, rows, **same)
            return out, conv, recurrent, *ring

        out, conv, recurrent, *ring = at.apply(decode, prefill, (xBC, dt), (conv, recurrent, *ring))
        out = out.reshape(z.shape)
        out = (out * jax.nn.silu(z)) if self.norm is None else self.norm(out, z)
        return self.out_proj.sums(out), conv, recurrent, *ring

    def split(self, cut: Cut) -> None:
        """Keeps one device's heads: see `SplitMixer`."""
        copies = repeats(self.groups, cut.size)
        inner, head = Part(self.heads, self.head_dim), Part(self.heads, 1)
        group = Part(self.groups, self.state_dim, copies)
        cut.out(self.in_proj, inner, (inner, group, group), head)
        cut.put(self.conv1d.weight, 1, (inner, group, group))
        if self.conv1d.bias is not None:
            cut.put(self.conv1d.bias, 0, (inner, group, group))
        for variable in (self.A_log, self.D, self.dt_bias):
            cut.put(variable, 0, [head])
        cut.into(self.out_proj, inner)
        self.heads //= cut.size
        self.groups = self.groups * copies // cut.size
        if self.norm is not None:
            cut.put(self.norm.weight, 0, [inner])
            self.norm.groups = self.groups
            if copies > 1:
                self.norm = SplitGroupNorm(self.norm, self.groups, copies)
