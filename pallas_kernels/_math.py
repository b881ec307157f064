"""Elementwise functions that lower both in XLA and in Triton, for both implementations of an op."""

import jax
import jax.numpy as jnp


def softplus(x: jax.Array) -> jax.Array:
    """Return log(1 + exp(x)). For x > 20 that is x itself in float32."""
    return jnp.where(x > 20.0, x, jnp.log1p(jnp.exp(jnp.minimum(x, 20.0))))


def silu(x: jax.Array) -> jax.Array:
    """Return the sigmoid linear unit, x * sigmoid(x)."""
    return x * jax.nn.sigmoid(x)
