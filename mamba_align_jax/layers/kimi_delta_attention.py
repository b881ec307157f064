"""Kimi delta attention: a gated delta rule with one decay per key channel, and an output gate through a sigmoid.

Source: Kimi Team, "Kimi Linear" (2025). Ling 3 and GLM 5 have the bounded gate.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.layers.chain import Inputs
from mamba_align_jax.layers.delta_rule import DeltaRuleMixer
from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.linear import ConvTaps, Linear
from mamba_align_jax.layers.norm import GatedRMSNorm
from mamba_align_jax.layers.split import Cut
from mamba_align_jax.metadata.layer_step import LayerStep
from mamba_align_jax.sharding import Part


class KimiDeltaAttention(DeltaRuleMixer):
    """Kimi delta attention: projections, a convolution, the delta rule, a gated norm and an output projection.

    For one head with state S [head_dim, head_dim] and one token, with its query q and key k of unit length, its log
    decay g [head_dim] per key channel and its strength beta::

        S = S * exp(g);  S = S + beta * (v - S k) k^T;  o = S q / sqrt(head_dim)

    g scales the columns of S. From a projection a of the token it is one of::

        g = -exp(A_log) * softplus(a + dt_bias)
        g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))    if `lower_bound` is given
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
        """Makes a layer with random weights.

        Args:
            hidden_size: Channels of the residual stream.
            heads: Number of heads. Each has a state.
            head_dim: Dims of a query, a key and a value.
            width: Number of inputs that an output of the convolution sees.
            epsilon: Added to the mean square in the output norm.
            dtype: Dtype of weights and products. Decay rates and norms are float32.
            rngs: Random numbers for the weights.
            f_rank: Inner size of the decay's projection. With None the projection is one product.
            g_rank: Inner size of the output gate's projection. With None the projection is one product.
            lower_bound: Smallest log decay of the bounded gate, negative. None selects the softplus gate.
        """
        self.heads, self.head_dim, self.lower_bound = heads, head_dim, lower_bound
        channels = heads * head_dim
        self.in_proj_qkvbfg = Linear(
            hidden_size, (3 * channels, heads, f_rank or channels, g_rank or channels), dtype, rngs
        )
        self.f_b_proj = None if f_rank is None else Linear(f_rank, channels, dtype, rngs)
        self.g_b_proj = None if g_rank is None else Linear(g_rank, channels, dtype, rngs)
        self.conv1d = ConvTaps(width, 3 * channels, dtype, rngs)
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1.0, 16.0)))
        self.dt_bias = nnx.Param(jnp.ones(channels, jnp.float32))
        self.o_norm = GatedRMSNorm(head_dim, epsilon, "sigmoid")
        self.o_proj = Linear(channels, hidden_size, dtype, rngs)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[heads, head_dim, head_dim]."""
        return self.heads, self.head_dim, self.head_dim

    def __call__(self, x: Inputs, at: LayerStep, *pools: jax.Array) -> tuple[Outputs, *tuple[jax.Array, ...]]:
        """Runs a step's packed tokens: see `Mixer`. The pools are windows and recurrent states."""
        conv, *others = pools
        (qkv, b, f, g), conv, is_convolved = self.project(self.in_proj_qkvbfg, x, at, conv)
        f = f if self.f_b_proj is None else self.f_b_proj(f)
        a = f.reshape(-1, self.heads, self.head_dim)
        options = dict(is_convolved=is_convolved, lower_bound=self.lower_bound)
        out, *pools_ = self.run_rule(qkv, a, b, at, conv, *others, **options)
        z = g if self.g_b_proj is None else self.g_b_proj(g)
        return self.o_proj.sums(self.o_norm.of_heads(x, out, z)), *pools_

    def split(self, cut: Cut) -> None:
        """Keeps one device's heads: see `SplitMixer`."""
        head, one = Part(self.heads, self.head_dim), Part(self.heads, 1)
        f_size, g_size = self.in_proj_qkvbfg.parts[2:]
        # Every device computes the whole low-rank inputs of a second product.
        f = head if self.f_b_proj is None else Part(1, f_size, cut.size)
        g = head if self.g_b_proj is None else Part(1, g_size, cut.size)
        cut.out(self.in_proj_qkvbfg, (head, head, head), one, f, g)
        cut.put(self.conv1d.weight, 1, (head, head, head))
        for product in (self.f_b_proj, self.g_b_proj):
            if product is not None:
                cut.out(product, head)
        cut.put(self.A_log, 0, [one])
        cut.put(self.dt_bias, 0, [head])
        cut.into(self.o_proj, head)
        self.heads //= cut.size
