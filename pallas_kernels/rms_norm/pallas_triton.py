"""add_rms_norm as a Pallas kernel. A program takes one token."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.dispatch import Run
from pallas_kernels.rms_norm.config import Norm, default_config

_MAX_CHANNELS = 32768  # that a program still keeps in registers


def unsupported(num_channels: int) -> str | None:
    """Return why the kernel cannot run tokens of `num_channels` channels, or None if it can."""
    if num_channels <= _MAX_CHANNELS:
        return None
    return f"x must have at most {_MAX_CHANNELS} channels, got {num_channels}"


def sum_over_splits(refs: pt.Refs, token: jax.Array, channel: jax.Array, exists: jax.Array) -> jax.Array:
    """Add up the partial sums of a token in `refs.addend`; returns float32 [channels]."""
    load = lambda split: pt.load(refs.addend.at[split, token, channel], mask=exists, other=0.0).astype(jnp.float32)
    total = load(0)
    for split in range(1, refs.addend.shape[0]):
        total = total + load(split)
    return total


def store_normed(
    refs: pt.Refs, token: jax.Array, channel: jax.Array, exists: jax.Array, addend: jax.Array, norm: Norm
) -> None:
    """Add `addend`, float32 [channels], to a token of `refs.x`, and store the total and its norm."""
    load = lambda at: pt.load(at, mask=exists, other=0.0).astype(jnp.float32)
    weight = norm.offset + load(refs.weight.at[channel])
    total = (load(refs.x.at[token, channel]) + norm.scale * addend).astype(refs.x.dtype)
    pt.store(refs.total.at[token, channel], total, mask=exists)
    y = total.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.sum(y * y) / refs.x.shape[1] + norm.epsilon) * weight
    pt.store(refs.normed.at[token, channel], y.astype(refs.normed.dtype), mask=exists)


def _kernel(refs: pt.Refs, *, norm: Norm) -> None:
    token, num_channels = pt.program_id(0), refs.x.shape[1]
    channel, exists = pt.lanes(0, pt.power_of_two(num_channels), num_channels)
    total = sum_over_splits(refs, token, channel, exists)
    store_normed(refs, token, channel, exists, total, norm)


def add_rms_norm(
    x: jax.Array, addend: jax.Array, weight: jax.Array, *, norm: Norm, run: Run
) -> tuple[jax.Array, jax.Array]:
    """See api.py."""
    results = pt.call(
        functools.partial(_kernel, norm=norm),
        name="add_rms_norm",
        grid=(x.shape[0],),
        inputs=dict(x=x, addend=addend, weight=weight),
        outputs=dict(
            total=jax.ShapeDtypeStruct(x.shape, x.dtype), normed=jax.ShapeDtypeStruct(x.shape, norm.out_dtype)
        ),
        num_warps=(run.config or default_config(x.shape[1], addend.shape[0])).num_warps,
        interpret=run.interpret,
    )
    return results["total"], results["normed"]
