"""Deferred states in plain jax.numpy: row by row and token by token, with sums over a group in the order of its tokens."""

import jax
import jax.numpy as jnp

from pallas_kernels._deferred_rows import run_rows
from pallas_kernels.gated_delta_rule._arguments import Options, Projections
from pallas_kernels.gated_delta_rule.deferred.entries import DeltaRuleEntries
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON
from pallas_kernels.rows import Rows


def gated_delta_rule_deferred(
    inputs: Projections, pool: jax.Array, ring: DeltaRuleEntries, rows: Rows, *, options: Options
) -> tuple[jax.Array, jax.Array, DeltaRuleEntries]:
    """Advance packed rows. See api.py."""
    # All key channels of a head share a log decay.
    qkv, a, b, A_log, dt_bias = inputs
    A_log, dt_bias, a, layer = A_log[:, None], dt_bias[:, None], a[..., None], rows.layer
    value_heads, value_dim, key_dim = pool.shape[2:]
    key_heads, ring_slots = ring.k.shape[2:4]
    length = ring_slots // 2
    repeats = value_heads // key_heads
    key_channels = key_heads * key_dim
    index = jnp.arange(length, dtype=jnp.int32)  # a token's index in its group

    def per_value_head(x):
        return jnp.repeat(x, repeats, axis=0)

    def entries(rings, slot, first, low, high):
        """Return k, u and g of the positions low .. high - 1 of the group that starts at `first`, and 0 elsewhere."""
        position = first + index
        inside = (position >= low) & (position < high)
        found = (ring[layer, slot][:, first % ring_slots + index].astype(jnp.float32) for ring in rings)
        k, u, g = (jnp.where(inside[:, None], x, 0.0) for x in found)
        return k, u, g

    def decays(g, last):
        """Return the decays from each token of a group to token `last`, and from the group's start to it."""
        later = (index[None, :] > index[:, None]) & (index[None, :] <= last)
        after = jnp.sum(jnp.where(later[..., None], g[:, None], 0.0), axis=2)
        return jnp.exp(after), jnp.exp(jnp.sum(jnp.where((index <= last)[:, None], g, 0.0), axis=1))

    def fold(state, rings, slot, base):
        """Return the state at the end of base's group, rounded to the pool's dtype."""
        first = base // length * length
        k, u, g = entries(rings, slot, first, base, first + length)
        decay, of_state = decays(g, length - 1)
        added = jnp.einsum("hiv,hik->hvk", u, decay * per_value_head(k), precision=jax.lax.Precision.HIGHEST)
        return (of_state[:, None, :] * state + added).astype(pool.dtype).astype(jnp.float32)

    def factor(x):
        """Return the factors [heads] that normalise x [heads, key_dim]."""
        if not options.use_qk_l2norm:
            return jnp.ones(x.shape[0], jnp.float32)
        return jax.lax.rsqrt(jnp.sum(x * x, -1) + L2_EPSILON)

    def advance(token, slot, base, position, state, out, rings):
        """Run one token at `position`, which is in base's group, and store its entry."""
        first = base // length * length
        here, at = position - first, position % ring_slots
        q, raw_k = (x.reshape(-1, key_dim) for x in jnp.split(qkv[token, : 2 * key_channels], 2))
        v = qkv[token, 2 * key_channels :].reshape(value_heads, value_dim).astype(jnp.float32)
        g, beta = options.gates.compute(a[token], b[token][:, None], A_log, dt_bias)
        q, k = q.astype(jnp.float32), raw_k.astype(jnp.float32)
        q_factor, k_factor = factor(q) * options.scale, factor(k)
        rings = (rings[0].at[layer, slot, :, at].set(raw_k), rings[1], rings[2].at[layer, slot, :, at].set(g))
        keys, _, g = entries(rings, slot, first, base, position + 1)
        _, u, _ = entries(rings, slot, first, base, position)
        decay, of_state = decays(g, here)
        decayed = decay * per_value_head(keys)

        def seen(x, x_factor):
            """Return the product of the state at base with x, and the coefficients of the corrections."""
            x, x_factor = per_value_head(x), per_value_head(x_factor)[:, None]
            coefficients = jnp.sum(decayed * x[:, None, :], -1) * x_factor
            return x_factor * jnp.sum(state * (of_state * x)[:, None, :], -1), coefficients[:, :, None]

        known, coefficients = seen(k, k_factor)
        known = known + jnp.sum(coefficients * u, axis=1)
        new = ((beta * per_value_head(k_factor)[:, None]) * (v - known)).astype(ring.u.dtype)
        rings = (rings[0], rings[1].at[layer, slot, :, at].set(new), rings[2])
        u = jnp.where((index == here)[:, None], new.astype(jnp.float32)[:, None, :], u)
        known, coefficients = seen(q, q_factor)
        return out.at[token].set((known + jnp.sum(coefficients * u, axis=1)).astype(out.dtype)), rings

    out = jnp.zeros((qkv.shape[0], value_heads, value_dim), qkv.dtype)
    out, pool, (k, u, g) = run_rows(fold, advance, rows, length, out, pool, (ring.k, ring.u, ring.g[..., None]))
    return out, pool, DeltaRuleEntries(k=k, u=u, g=g[..., 0])
