"""Root-mean-square norms. They compute in float32 for models of every dtype and return the dtype of their inputs.

Source: Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax import _values as values
from mamba_align_jax.layers.chain import Chain, Inputs, like
from mamba_align_jax.layers.exchange import Exchange, Partial
from pallas_kernels import add_rms_norm
from pallas_kernels.product_chain import GateActivation, GatedNorm, Norm

_ACTIVATIONS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def rms(x: jax.Array, epsilon: float) -> jax.Array:
    """Computes x / sqrt(mean(x^2) + epsilon) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


def spread(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Returns numbers for the last axis of `x` as an array of its shape: JAX can be set to refuse arrays of fewer axes."""
    return jnp.broadcast_to(weight, x.shape)


class RMSNorm(nnx.Module):
    """Computes x / rms(x) * (offset + weight)."""

    def __init__(self, size: int, epsilon: float, *, offset: float = 0.0) -> None:
        """Makes a norm of `size` channels that scales by 1.

        Args:
            size: Number of channels.
            epsilon: Added to the mean square.
            offset: Added to the weights. It is 1 for Qwen's models, whose files hold weights minus 1.
        """
        self.weight = nnx.Param(jnp.full(size, 1.0 - offset, jnp.float32))
        self.epsilon, self.offset = epsilon, offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        return (rms(x, self.epsilon) * spread(self.offset + self.weight[...].astype(jnp.float32), x)).astype(x.dtype)

    def step(self, scale: float = 1.0, dtype: Any = None) -> Norm:
        """Returns the norm as a step of a chain. Its arguments are those of `after`."""
        return Norm(
            self.weight[...], self.epsilon, self.offset, scale, None if dtype is None else str(jnp.dtype(dtype))
        )

    def after(
        self,
        x: jax.Array,
        addend: jax.Array | Partial,
        *,
        scale: float = 1.0,
        dtype: Any = None,
        exchange: Exchange | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Adds `scale` times what a layer computed and normalises, in one pass: see `pallas_kernels.add_rms_norm`.

        The addend is [tokens, channels], partial sums of it [splits, tokens, channels], or a summand, which `exchange`
        adds up over the devices; None leaves that to XLA. `dtype` is that of the normed values; None is that of `x`.

        Returns:
            The sum in the dtype of `x`, and the normed sum, each [tokens, channels].
        """
        options = dict(epsilon=self.epsilon, offset=self.offset, scale=scale, out_dtype=dtype)
        if isinstance(addend, Partial):
            if exchange is not None:
                return exchange.add_rms_norm(x, addend, self.weight[...], **options)
            addend = addend.total()
        addend = addend if addend.ndim == 3 else addend[None]
        return add_rms_norm(x, addend, self.weight[...], **options)


class GatedRMSNorm(nnx.Module):
    """Computes x / rms(x) * weight * activation(gate)."""

    def __init__(self, size: int, epsilon: float, activation: GateActivation = "silu") -> None:
        """Makes a norm of `size` channels that scales by 1.

        Args:
            size: Number of channels.
            epsilon: Added to the mean square.
            activation: What is done to the gate, "silu" or "sigmoid".

        Raises:
            ValueError: `activation` is another name.
        """
        values.choice("GatedRMSNorm: activation", activation, _ACTIVATIONS)
        self.weight = nnx.Param(jnp.ones(size, jnp.float32))
        self.epsilon, self.activation = epsilon, activation

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Normalises the last axis of `x`. `gate` has its shape."""
        scaled = rms(x, self.epsilon) * spread(self.weight[...].astype(jnp.float32), x)
        activated = _ACTIVATIONS[self.activation](gate.astype(jnp.float32))
        return (scaled * activated).astype(x.dtype)

    def step(self, gate: jax.Array) -> GatedNorm:
        """Returns the norm as the first step of a chain, given gates [tokens, channels]."""
        return GatedNorm(gate, self.weight[...], self.epsilon, self.activation)

    def of_heads(self, x: Inputs, heads: jax.Array, gate: jax.Array) -> Inputs:
        """Normalises each of a mixer's `heads` [tokens, heads, dim] by itself, with gates [tokens, heads * dim].

        Returns:
            The normed values [tokens, heads * dim], or a new chain that begins with the norm if the mixer's input `x`
            is one.
        """
        begun = like(x, heads.reshape(gate.shape))
        if isinstance(begun, Chain):
            return begun.add(self.step(gate))
        return self(heads, gate.reshape(heads.shape)).reshape(gate.shape)


class UnitRMSNorm(nnx.Module):
    """Computes x / rms(x), without weights."""

    def __init__(self, epsilon: float) -> None:
        """Makes a norm. `epsilon` is added to the mean square."""
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        return rms(x, self.epsilon).astype(x.dtype)


class GatedGroupNorm(nnx.Module):
    """Normalises groups of channels by their own rms, and gates: Mamba-2's output norm.

    Computes group_rms_norm(x * silu(gate)) * weight, or group_rms_norm(x) * weight * silu(gate) with
    `norm_before_gate`.
    """

    def __init__(self, size: int, groups: int, epsilon: float, *, norm_before_gate: bool = False) -> None:
        """Makes a norm that scales by 1.

        Args:
            size: Number of channels.
            groups: Number of groups of consecutive channels; divides `size`.
            epsilon: Added to the mean squares.
            norm_before_gate: Whether the gate is applied after the norm.
        """
        self.weight = nnx.Param(jnp.ones(size, jnp.float32))
        self.groups, self.epsilon, self.norm_before_gate = groups, epsilon, norm_before_gate

    def normalise(self, parts: jax.Array) -> jax.Array:
        """Divides each group of float32 [tokens, groups, size / groups] by its rms."""
        return rms(parts, self.epsilon)

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Normalises `x` [tokens, size]. `gate` has its shape."""
        y, gate = x.astype(jnp.float32), jax.nn.silu(gate.astype(jnp.float32))
        y = y if self.norm_before_gate else y * gate
        parts = y.reshape(y.shape[0], self.groups, -1)
        y = self.normalise(parts).reshape(y.shape) * spread(self.weight[...].astype(jnp.float32), y)
        return (y * gate if self.norm_before_gate else y).astype(x.dtype)
