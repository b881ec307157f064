"""Root-mean-square norms, in float32 whatever the model's dtype."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx


def _rms(x: jax.Array, epsilon: float) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


class RMSNorm(nnx.Module):
    """x / rms(x) * (1 + weight): Qwen stores its norms as offsets from one."""

    def __init__(self, size: int, epsilon: float, dtype: str) -> None:
        self.weight = nnx.Param(jnp.zeros(size, dtype))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        scaled = _rms(x, self.epsilon) * (1.0 + self.weight[...].astype(jnp.float32))
        return scaled.astype(x.dtype)


class PlainRMSNorm(nnx.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, epsilon: float, dtype: str) -> None:
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        return (_rms(x, self.epsilon) * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """x / rms(x) * weight * activation(gate): norm first, gate second, and the plain weight."""

    def __init__(
        self, size: int, epsilon: float, dtype: str, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
    ) -> None:
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.epsilon, self.activation = epsilon, activation

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Normalises the last axis of `x`; `gate` has its shape."""
        scaled = _rms(x, self.epsilon) * self.weight[...].astype(jnp.float32)
        return (scaled * self.activation(gate.astype(jnp.float32))).astype(x.dtype)
