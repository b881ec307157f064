"""add_rms_norm in plain jax.numpy."""

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm.config import Norm


def sum_over_splits(addend: jax.Array) -> jax.Array:
    """Add up [splits, tokens, channels] in the order of the splits; returns float32 [tokens, channels]."""
    return functools.reduce(operator.add, [addend[split].astype(jnp.float32) for split in range(addend.shape[0])])


def add_rms_norm(x: jax.Array, addend: jax.Array, weight: jax.Array, *, norm: Norm) -> tuple[jax.Array, jax.Array]:
    """See api.py."""
    total = (x.astype(jnp.float32) + norm.scale * sum_over_splits(addend)).astype(x.dtype)
    y = total.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + norm.epsilon)
    return total, (y * (norm.offset + weight.astype(jnp.float32))[None]).astype(norm.out_dtype)
