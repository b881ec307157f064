"""gated_delta_rule as a Pallas kernel: one program per (row, value head, tile of value rows).

Programs of a row share its keys but own disjoint rows of the state, so each may overwrite what it has read.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._pool import NULL_BLOCK
from pallas_kernels.gated_delta_rule.config import Config, default_config
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON


def _softplus(x):
    return jnp.where(x > 20.0, x, jnp.log1p(jnp.exp(jnp.minimum(x, 20.0))))


def _update_kernel(
    qkv_ref,
    a_ref,
    b_ref,
    A_log_ref,
    dt_bias_ref,
    layer_ref,
    query_start_loc_ref,
    read_block_ref,
    write_blocks_ref,
    _,
    out_ref,
    pool_ref,
    *,
    block_value,
    scale,
    use_qk_l2norm,
):
    tokens, channels = qkv_ref.shape
    rows = read_block_ref.shape[0]
    _, _, value_heads, value_dim, key_dim = pool_ref.shape
    key_channels = (channels - value_heads * value_dim) // 2
    row, head = pt.program_id(0), pt.program_id(1)
    value, value_inside = pt.lanes(pt.program_id(2), block_value, value_dim)
    key, key_inside = pt.lanes(0, pt.power_of_two(key_dim), key_dim)
    inside = value_inside[:, None] & key_inside[None, :]

    # Tokens behind the last row have no program of their own.
    @pt.when((row < tokens) & (row >= query_start_loc_ref[rows]))
    def _():
        zeros = jnp.zeros((block_value,), out_ref.dtype)
        pt.store(out_ref.at[row, head, value], zeros, mask=value_inside)

    @pt.when(row < rows)
    def _():
        start, end = query_start_loc_ref[row], query_start_loc_ref[row + 1]
        layer, read = layer_ref[...], read_block_ref[row]
        key_base = head // (value_heads // (key_channels // key_dim)) * key_dim
        decay_rate = -jnp.exp(A_log_ref[head].astype(jnp.float32))
        dt_bias = dt_bias_ref[head].astype(jnp.float32)
        at = lambda block: pool_ref.at[layer, block, head, value[:, None], key[None, :]]
        take = lambda token, channel, mask: pt.load(qkv_ref.at[token, channel], mask=mask, other=0.0).astype(
            jnp.float32
        )

        def normalise(x):
            return x * jax.lax.rsqrt(jnp.sum(x * x) + L2_EPSILON) if use_qk_l2norm else x

        def advance(token, state):
            q = normalise(take(token, key_base + key, key_inside)) * scale
            k = normalise(take(token, key_channels + key_base + key, key_inside))
            v = take(token, 2 * key_channels + head * value_dim + value, value_inside)
            g = decay_rate * _softplus(a_ref[token, head].astype(jnp.float32) + dt_bias)
            beta = 1.0 / (1.0 + jnp.exp(-b_ref[token, head].astype(jnp.float32)))
            state = state * jnp.exp(g)
            correction = beta * (v - jnp.sum(state * k[None, :], axis=1))
            state = state + correction[:, None] * k[None, :]
            out = jnp.sum(state * q[None, :], axis=1)
            pt.store(out_ref.at[token, head, value], out.astype(out_ref.dtype), mask=value_inside)
            write = write_blocks_ref[row, token - start]
            pt.store(at(write), state.astype(pool_ref.dtype), mask=inside & (write != NULL_BLOCK))
            return state

        # An empty row's loop runs no turn, but its load would still cost bandwidth.
        readable = inside & (read != NULL_BLOCK) & (end > start)
        state = pt.load(at(read), mask=readable, other=0.0).astype(jnp.float32)
        jax.lax.fori_loop(start, end, advance, state)


def gated_delta_rule_update(
    qkv,
    a,
    b,
    A_log,
    dt_bias,
    pool,
    layer,
    query_start_loc,
    read_block,
    write_blocks,
    *,
    scale: float,
    use_qk_l2norm: bool,
    config: Config | None = None,
    interpret: bool = False,
):
    """See api.py."""
    _, _, value_heads, value_dim, key_dim = pool.shape
    config = config or default_config(value_dim, key_dim)
    kernel = functools.partial(_update_kernel, block_value=config.block_value, scale=scale, use_qk_l2norm=use_qk_l2norm)
    out = jax.ShapeDtypeStruct((qkv.shape[0], value_heads, value_dim), qkv.dtype)
    return tuple(
        pt.call(
            kernel,
            (qkv, a, b, A_log, dt_bias, layer, query_start_loc, read_block, write_blocks, pool),
            name="gated_delta_rule_update",
            grid=(max(qkv.shape[0], read_block.shape[0]), value_heads, -(-value_dim // config.block_value)),
            out_shape=[out, jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
            aliases={9: 1},
            num_warps=config.num_warps,
            interpret=interpret,
        )
    )
