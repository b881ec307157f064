"""Elementwise functions that the XLA implementations and the kernels share: what lowers in both."""

import jax
import jax.numpy as jnp


def softplus(x: jax.Array) -> jax.Array:
    """Log of 1 + exp(x), and x itself where that is the same float32."""
    return jnp.where(x > 20.0, x, jnp.log1p(jnp.exp(jnp.minimum(x, 20.0))))


def silu(x: jax.Array) -> jax.Array:
    """The sigmoid linear unit, x * sigmoid(x)."""
    return x * jax.nn.sigmoid(x)
