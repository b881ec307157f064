"""Deferred states of Mamba-1 in plain jax.numpy, row by row. Each token's state follows from the entries since the base."""

import jax
import jax.numpy as jnp

from pallas_kernels._deferred_rows import run_rows
from pallas_kernels._math import silu, softplus


def selective_scan_deferred(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    pool: jax.Array,
    ring_x: jax.Array,
    ring_B: jax.Array,
    ring_dt: jax.Array,
    layer: jax.Array,
    query_start_loc: jax.Array,
    slot: jax.Array,
    base: jax.Array,
    position: jax.Array,
    read_block: jax.Array,
    fold_block: jax.Array,
    D: jax.Array | None,
    z: jax.Array | None,
    dt_bias: jax.Array | None,
    *,
    dt_softplus: bool,
) -> tuple[jax.Array, ...]:
    """Advances packed rows. See api.py."""
    repeats, places = pool.shape[2] // ring_B.shape[2], ring_x.shape[3]
    length = places // 2
    A = A.astype(jnp.float32)

    def per_head(v):
        return jnp.repeat(v.astype(jnp.float32), repeats, axis=0)[:, None, :]

    def replay(state, rings, slot, base, end):
        """Returns the state at position `end`, given the state at `base`."""

        def step(position, state):
            x, B, dt = (ring[layer, slot, :, position % places].astype(jnp.float32) for ring in rings)
            dt = dt if dt_bias is None else dt + dt_bias.astype(jnp.float32)
            dt = softplus(dt) if dt_softplus else dt
            return jnp.exp(A * dt[..., None]) * state + (dt * x)[..., None] * per_head(B)

        return jax.lax.fori_loop(base, end, step, state)

    def fold(state, rings, slot, base):
        return replay(state, rings, slot, base, (base // length + 1) * length).astype(pool.dtype).astype(jnp.float32)

    def advance(token, slot, base, position, state, out, rings):
        entry = x[token], B[token], dt[token]
        rings = tuple(ring.at[layer, slot, :, position % places].set(v) for ring, v in zip(rings, entry, strict=True))
        state = replay(state, rings, slot, base, position + 1)
        y = jnp.sum(state * per_head(C[token]), axis=-1)
        y = y if D is None else y + D.astype(jnp.float32) * x[token].astype(jnp.float32)
        y = y if z is None else y * silu(z[token].astype(jnp.float32))
        return out.at[token].set(y.astype(out.dtype)), rings

    where = query_start_loc, slot, base, position, read_block, fold_block
    rings = ring_x, ring_B, ring_dt
    out, pool, rings = run_rows(fold, advance, layer, where, length, jnp.zeros_like(x), pool, rings)
    return out, pool, *rings
