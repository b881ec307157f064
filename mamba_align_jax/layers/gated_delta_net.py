"""Gated delta net: a recurrent layer that corrects its state towards each value instead of only adding to it.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.align.ring import DeltaRuleRing
from mamba_align_jax.layers.chain import Inputs
from mamba_align_jax.layers.delta_rule import DeltaRuleMixer
from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.linear import ConvTaps, Linear
from mamba_align_jax.layers.norm import GatedRMSNorm
from mamba_align_jax.layers.split import Cut
from mamba_align_jax.metadata.layer_step import LayerStep
from mamba_align_jax.sharding import Part, repeats


class GatedDeltaNet(DeltaRuleMixer):
    """Gated delta net: projections, a convolution, the gated delta rule, a gated norm and an output projection.

    For one value head with state S [value_dim, key_dim] and one token, with its query q and key k of unit length, its
    log decay g and its strength beta::

        S = exp(g) * S;  S = S + beta * (v - S k) k^T;  o = S q / sqrt(key_dim)
    """

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
        """Makes a layer with random weights.

        Args:
            hidden_size: Channels of the residual stream.
            key_heads: Number of query heads and of key heads.
            value_heads: Number of value heads; a multiple of `key_heads`. Each has a state.
            key_dim: Dims of a query and of a key.
            value_dim: Dims of a value.
            width: Number of inputs that an output of the convolution sees.
            epsilon: Added to the mean square in the output norm.
            dtype: Dtype of weights and products. Decay rates and norms are float32.
            rngs: Random numbers for the weights.
            allow_neg_eigval: Whether beta lies in (0, 2) instead of (0, 1).
        """
        self.allow_neg_eigval = allow_neg_eigval
        self.key_heads, self.value_heads = key_heads, value_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        keys, values = key_heads * key_dim, value_heads * value_dim
        self.in_proj_qkvzba = Linear(hidden_size, (2 * keys + values, values, value_heads, value_heads), dtype, rngs)
        self.conv1d = ConvTaps(width, 2 * keys + values, dtype, rngs)
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (value_heads,), jnp.float32, 1.0, 16.0)))
        self.dt_bias = nnx.Param(jnp.ones(value_heads, jnp.float32))
        self.norm = GatedRMSNorm(value_dim, epsilon)
        self.out_proj = Linear(values, hidden_size, dtype, rngs)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[value_heads, value_dim, key_dim]."""
        return self.value_heads, self.value_dim, self.key_dim

    def ring(self, dtype: str) -> DeltaRuleRing:
        """Describes the entries that this layer keeps under policy "deferred": see `Mixer`."""
        return DeltaRuleRing(self.key_heads, self.key_dim, self.value_heads, self.value_dim, dtype)

    def __call__(self, x: Inputs, at: LayerStep, *pools: jax.Array) -> tuple[Outputs, *tuple[jax.Array, ...]]:
        """Runs a step's packed tokens: see `Mixer`. The pools are windows, recurrent states, and perhaps a ring."""
        conv, *others = pools
        (qkv, z, b, a), conv, is_convolved = self.project(self.in_proj_qkvzba, x, at, conv)
        options = dict(is_convolved=is_convolved, allow_neg_eigval=self.allow_neg_eigval)
        out, *pools_ = self.run_rule(qkv, a, b, at, conv, *others, **options)
        return self.out_proj.sums(self.norm.of_heads(x, out, z)), *pools_

    def split(self, cut: Cut) -> None:
        """Keeps one device's heads: see `SplitMixer`."""
        copies = repeats(self.key_heads, cut.size)
        key, value = Part(self.key_heads, self.key_dim, copies), Part(self.value_heads, self.value_dim)
        head = Part(self.value_heads, 1)
        cut.out(self.in_proj_qkvzba, (key, key, value), value, head, head)
        cut.put(self.conv1d.weight, 1, (key, key, value))
        cut.put(self.A_log, 0, [head])
        cut.put(self.dt_bias, 0, [head])
        cut.into(self.out_proj, value)
        self.key_heads = self.key_heads * copies // cut.size
        self.value_heads //= cut.size
