"""Root-mean-square norms, in float32 whatever the model's dtype."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx


def rms(x: jax.Array, epsilon: float) -> jax.Array:
    """float32 x / sqrt(mean(x^2) + epsilon) over the last axis."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, or * (1 + weight) where `offset` is 1: Qwen stores its norms as offsets from one."""

    def __init__(self, size: int, epsilon: float, *, offset: float = 0.0) -> None:
        self.weight = nnx.Param(jnp.full(size, 1.0 - offset, jnp.float32))
        self.epsilon, self.offset = epsilon, offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        return (rms(x, self.epsilon) * (self.offset + self.weight[...].astype(jnp.float32))).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """x / rms(x) * weight * activation(gate): norm first, gate second."""

    def __init__(self, size: int, epsilon: float, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu) -> None:
        self.weight = nnx.Param(jnp.ones(size, jnp.float32))
        self.epsilon, self.activation = epsilon, activation

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Normalises the last axis of `x`; `gate` has its shape."""
        scaled = rms(x, self.epsilon) * self.weight[...].astype(jnp.float32)
        return (scaled * self.activation(gate.astype(jnp.float32))).astype(x.dtype)


class UnitRMSNorm(nnx.Module):
    """x / rms(x), without weights."""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        return rms(x, self.epsilon).astype(x.dtype)


class GatedGroupNorm(nnx.Module):
    """Mamba-2's output norm: each of `groups` equal parts over its own rms, and silu(gate) multiplied before or after."""

    def __init__(self, size: int, groups: int, epsilon: float, *, norm_before_gate: bool = False) -> None:
        self.weight = nnx.Param(jnp.ones(size, jnp.float32))
        self.groups, self.epsilon, self.norm_before_gate = groups, epsilon, norm_before_gate

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Normalises [tokens, size]; `gate` has its shape."""
        y, gate = x.astype(jnp.float32), jax.nn.silu(gate.astype(jnp.float32))
        y = y if self.norm_before_gate else y * gate
        parts = y.reshape(y.shape[0], self.groups, -1)
        y = rms(parts, self.epsilon).reshape(y.shape) * self.weight[...].astype(jnp.float32)
        return (y * gate if self.norm_before_gate else y).astype(x.dtype)
