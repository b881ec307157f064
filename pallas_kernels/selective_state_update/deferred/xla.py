"""Deferred states of Mamba-2 in plain jax.numpy: row by row and token by token, sums in the order of a group's tokens."""

import jax
import jax.numpy as jnp

from pallas_kernels._deferred_rows import run_rows
from pallas_kernels._state_space import step_size
from pallas_kernels.rows import Rows
from pallas_kernels.selective_state_update.deferred.entries import Inputs, Mamba2Entries


def selective_state_deferred(
    inputs: Inputs, pool: jax.Array, ring: Mamba2Entries, rows: Rows, *, dt_softplus: bool
) -> tuple[jax.Array, jax.Array, Mamba2Entries]:
    """Advance packed rows. See api.py."""
    xBC, dt, A, D, dt_bias = inputs
    heads, head_dim, state_dim = pool.shape[2:]
    groups, ring_slots = ring.B.shape[2:4]
    length = ring_slots // 2
    inner, of_groups = heads * head_dim, groups * state_dim
    index = jnp.arange(length, dtype=jnp.int32)  # a token's index in its group
    A = A.astype(jnp.float32)

    def per_head(x):
        return jnp.repeat(x, heads // groups, axis=0)

    def entries(rings, slot, first, low, high):
        """Return x, B, dt and g of the positions low .. high - 1 of the group that starts at `first`, and 0 elsewhere."""
        position = first + index
        inside = (position >= low) & (position < high)
        x, B, dt, g = (ring[rows.layer, slot][:, first % ring_slots + index].astype(jnp.float32) for ring in rings)
        x, B = (jnp.where(inside[:, None], v, 0.0) for v in (x, B))
        return x, B, *(jnp.where(inside, v, 0.0) for v in (dt, g))

    def decays(g, last):
        """Return the decays from each token of a group to token `last`, and from the group's start to it."""
        later = (index[None, :] > index[:, None]) & (index[None, :] <= last)
        after = jnp.sum(jnp.where(later, g[:, None, :], 0.0), axis=-1)
        return jnp.exp(after), jnp.exp(jnp.sum(jnp.where(index <= last, g, 0.0), axis=-1))

    def fold(state, rings, slot, base):
        first = base // length * length
        x, B, dt, g = entries(rings, slot, first, base, first + length)
        decay, of_state = decays(g, length - 1)
        decayed = (decay * dt)[:, :, None] * x
        added = jnp.einsum("hip,hin->hpn", decayed, per_head(B), precision=jax.lax.Precision.HIGHEST)
        return (of_state[:, None, None] * state + added).astype(pool.dtype).astype(jnp.float32)

    def advance(token, slot, base, position, state, out, rings):
        first = base // length * length
        here, at = position - first, position % ring_slots
        x, B, C = jnp.split(xBC[token], [inner, inner + of_groups])
        x, B, C = x.reshape(heads, head_dim), B.reshape(groups, state_dim), C.reshape(groups, state_dim)
        step = step_size(dt[token].astype(jnp.float32), dt_bias, dt_softplus)
        entry = x, B, step, A * step
        rings = tuple(ring.at[rows.layer, slot, :, at].set(v) for ring, v in zip(rings, entry, strict=True))
        xs, Bs, steps, g = entries(rings, slot, first, base, position + 1)
        decay, of_state = decays(g, here)
        C = C.astype(jnp.float32)
        attention = decay * steps * per_head(jnp.sum(Bs * C[:, None, :], axis=-1))
        y = of_state[:, None] * jnp.sum(state * per_head(C)[:, None, :], axis=-1)
        y = y + jnp.sum(attention[:, :, None] * xs, axis=1)
        y = y if D is None else y + D.astype(jnp.float32)[:, None] * x.astype(jnp.float32)
        return out.at[token].set(y.astype(out.dtype)), rings

    out = jnp.zeros((xBC.shape[0], heads, head_dim), xBC.dtype)
    out, pool, rings = run_rows(fold, advance, rows, length, out, pool, (ring.x, ring.B, ring.dt, ring.g))
    return out, pool, Mamba2Entries(*rings)
