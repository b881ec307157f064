"""add_rms_norm as a Pallas kernel. A program takes one token."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.rms_norm.config import Config, default_config

_MAX_CHANNELS = 32768  # whose values a program still keeps in registers


def unsupported(x: jax.Array) -> str | None:
    """Returns why the kernel cannot run these arguments, or None if it can."""
    return f"x must have at most {_MAX_CHANNELS} channels, got {x.shape[1]}" if x.shape[1] > _MAX_CHANNELS else None


def _kernel(refs, *, epsilon: float, offset: float, scale: float):
    shares, _, num_channels = refs.addend.shape
    token = pt.program_id(0)
    channel, exists = pt.lanes(0, pt.power_of_two(num_channels), num_channels)
    load = lambda at: pt.load(at, mask=exists, other=0.0).astype(jnp.float32)
    total = load(refs.addend.at[0, token, channel])
    for share in range(1, shares):
        total = total + load(refs.addend.at[share, token, channel])
    weight = offset + load(refs.weight.at[channel])
    total = (load(refs.x.at[token, channel]) + scale * total).astype(refs.x.dtype)
    pt.store(refs.total.at[token, channel], total, mask=exists)
    y = total.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.sum(y * y) / num_channels + epsilon) * weight
    pt.store(refs.normed.at[token, channel], y.astype(refs.normed.dtype), mask=exists)


def add_rms_norm(
    x: jax.Array,
    addend: jax.Array,
    weight: jax.Array,
    *,
    epsilon: float,
    offset: float,
    scale: float,
    out_dtype: jnp.dtype,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See api.py."""
    results = pt.call(
        functools.partial(_kernel, epsilon=epsilon, offset=offset, scale=scale),
        name="add_rms_norm",
        grid=(x.shape[0],),
        inputs=dict(x=x, addend=addend, weight=weight),
        outputs=dict(total=jax.ShapeDtypeStruct(x.shape, x.dtype), normed=jax.ShapeDtypeStruct(x.shape, out_dtype)),
        updates={},
        num_warps=(config or default_config(x.shape[1], addend.shape[0])).num_warps,
        interpret=interpret,
    )
    return results["total"], results["normed"]
