"""gated_delta_rule in plain jax.numpy: token by token for decode and verify rows, chunk by chunk for prefill."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import StateLayout, read_blocks, state_dims, write_blocks, write_kept
from pallas_kernels.chunks import scan_chunks
from pallas_kernels.gated_delta_rule._arguments import Options, Projections, Tokens
from pallas_kernels.rows import Rows, kept_states, token_rows

_HIGHEST = jax.lax.Precision.HIGHEST
L2_EPSILON = 1e-6


def _prepare_qk(q: jax.Array, k: jax.Array, options: Options) -> tuple[jax.Array, jax.Array]:
    """Return queries and keys in float32, normalised if asked for, with the queries scaled."""
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if options.use_qk_l2norm:
        q = q * jax.lax.rsqrt(jnp.sum(q * q, -1, keepdims=True) + L2_EPSILON)
        k = k * jax.lax.rsqrt(jnp.sum(k * k, -1, keepdims=True) + L2_EPSILON)
    return q * options.scale, k


def _in_layout(states: jax.Array, layout: StateLayout) -> jax.Array:
    """Return states [..., value_dim, key_dim] as blocks of a pool, or blocks as states."""
    return states if layout == "VK" else states.swapaxes(-1, -2)


def _advance_rows(
    take: Callable[[jax.Array], tuple[jax.Array, ...]],
    out: jax.Array,
    pool: jax.Array,
    rows: Rows,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """Advance packed rows token by token. take(token) returns the token's q, k, v, g and beta. `out` is zeros."""
    (value_heads, value_dim, key_dim), layout = state_dims(pool, options.layout), options.layout
    of_token = token_rows(rows.query_start_loc, out.shape[0])

    def advance(token, carry):
        state, out, pool = carry
        row, offset = of_token.row[token], of_token.offset[token]
        state = jnp.where(offset == 0, _in_layout(read_blocks(pool, rows.layer, rows.read[row]), layout), state)
        q, k, v, g, beta = take(token)
        q, k = (jnp.repeat(x, value_heads // k.shape[0], axis=0) for x in _prepare_qk(q, k, options))
        # There is one decay per head, or one per head and key channel.
        state = jnp.exp(g).reshape(value_heads, 1, -1) * state
        correction = beta[:, None] * (v.astype(jnp.float32) - jnp.sum(state * k[:, None, :], axis=-1))
        state = state + correction[:, :, None] * k[:, None, :]
        out = out.at[token].set(jnp.sum(state * q[:, None, :], axis=-1).astype(out.dtype))
        return state, out, write_blocks(pool, rows.layer, rows.write[row, offset], _in_layout(state, layout))

    # Every token runs in the same loop body of one shape, gates included, and the loop has one iteration per token.
    # A row's bits therefore depend neither on other rows nor on the amount of padding.
    state = jnp.zeros((value_heads, value_dim, key_dim), jnp.float32)
    first, end = rows.query_start_loc[0], rows.query_start_loc[-1]
    _, out, pool = jax.lax.fori_loop(first, end, advance, (state, out, pool))
    return out, pool


def gated_delta_rule_recurrent(
    inputs: Tokens, pool: jax.Array, rows: Rows, *, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Advance rows from separate inputs and computed gates. See api.py."""
    take = lambda token: tuple(x[token] for x in inputs)
    return _advance_rows(take, jnp.zeros_like(inputs.v), pool, rows, options)


def gated_delta_rule_update(
    inputs: Projections, pool: jax.Array, rows: Rows, *, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Advance rows from the convolution's outputs and raw gates. See api.py."""
    qkv, a, b, A_log, dt_bias = inputs
    value_heads, value_dim, key_dim = state_dims(pool, options.layout)
    key_channels = (qkv.shape[1] - value_heads * value_dim) // 2
    A_log = A_log.reshape(-1, *(1,) * (a.ndim - 2))

    def take(token):
        q, k = (x.reshape(-1, key_dim) for x in jnp.split(qkv[token, : 2 * key_channels], 2))
        v = qkv[token, 2 * key_channels :].reshape(value_heads, value_dim)
        return q, k, v, *options.gates.compute(a[token], b[token], A_log, dt_bias)

    out = jnp.zeros((qkv.shape[0], value_heads, value_dim), qkv.dtype)
    return _advance_rows(take, out, pool, rows, options)


def _advance_chunk(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Advance the states of all value heads by one chunk.

    Args:
        state: The states before the chunk, [heads, value_dim, key_dim].
        q: Queries, normalised and scaled, [heads, chunk, key_dim].
        k: Keys, normalised, [heads, chunk, key_dim]. 0 for padding.
        v: Values, [heads, chunk, value_dim]. 0 for padding.
        g: Log decays, [heads, chunk, key_dim], or [heads, chunk, 1] if all keys share one. 0 for padding.
        beta: Correction strengths, [heads, chunk]. 0 for padding.

    Returns:
        The new states and the outputs [heads, chunk, value_dim].
    """
    dot = functools.partial(jnp.einsum, precision=_HIGHEST)
    chunk = q.shape[1]
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    # The decay from token j to a later token i. Each sum is computed on its own, because the difference of two long
    # sums would lose the digits of a short one.
    after = jnp.where(jnp.tril(lower, -1)[..., None], g[:, :, None, :], 0.0)
    between = jnp.where(lower[..., None], jnp.exp(jnp.cumsum(after, axis=1)), 0.0)

    def products(x):
        """Return the decayed products of each token's x with the keys up to that token, [heads, chunk, chunk]."""
        if g.shape[-1] == 1:
            return between[..., 0] * dot("hik,hjk->hij", x, k)
        return jnp.sum(between * x[:, :, None, :] * k[:, None, :, :], axis=-1)

    from_state = jnp.exp(jnp.cumsum(g, axis=1))
    system = (
        jnp.where(jnp.tril(lower, -1), products(k), 0.0) * beta[..., None] + jnp.eye(chunk, dtype=jnp.float32)[None]
    )
    target = beta[..., None] * (v - dot("hik,hvk->hiv", from_state * k, state))
    correction = jax.scipy.linalg.solve_triangular(system, target, lower=True, unit_diagonal=True)
    out = dot("hik,hvk->hiv", from_state * q, state) + dot("hij,hjv->hiv", products(q), correction)
    state = from_state[:, -1, None, :] * state + dot("hiv,hik->hvk", correction, between[:, -1] * k)
    return state, out


def gated_delta_rule_prefill(
    inputs: Tokens, pool: jax.Array, rows: Rows, *, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Run rows of any length, chunk by chunk. See api.py."""
    q, k, v, g, beta = inputs
    num_tokens, repeats = v.shape[0], v.shape[1] // k.shape[1]
    offset, block = kept_states(rows)
    g = g.reshape(*g.shape[:2], -1)

    def advance(state, take, _):
        q_c, k_c = _prepare_qk(take(q), take(k), options)
        q_c, k_c = (jnp.repeat(x, repeats, axis=1).swapaxes(0, 1) for x in (q_c, k_c))
        v_c = take(v).astype(jnp.float32).swapaxes(0, 1)
        state, out = _advance_chunk(state, q_c, k_c, v_c, take(g).swapaxes(0, 1), take(beta).T)
        return state, out.swapaxes(0, 1)

    initial = _in_layout(read_blocks(pool, rows.layer, rows.read), options.layout)
    out, kept = scan_chunks(advance, initial, rows.chunks, rows.query_start_loc, offset, num_tokens)
    return out.astype(v.dtype), write_kept(pool, rows.layer, block, _in_layout(kept, options.layout))
