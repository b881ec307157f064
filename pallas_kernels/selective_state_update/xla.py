"""selective_state_update in plain jax.numpy, token by token."""

import jax
import jax.numpy as jnp

from pallas_kernels._math import silu
from pallas_kernels._state_space import StateSpace, step_size
from pallas_kernels.blocks import read_blocks, write_blocks
from pallas_kernels.rows import Rows, token_rows


def selective_state_update(
    inputs: StateSpace, pool: jax.Array, rows: Rows, *, dt_softplus: bool
) -> tuple[jax.Array, jax.Array]:
    """Advance all rows in one loop over the tokens. See api.py."""
    x, dt, A, B, C, D, z, dt_bias = inputs
    heads = x.shape[1]
    token_row, token_offset, _ = token_rows(rows.query_start_loc, x.shape[0])

    def per_channel(v):
        """Shape values per head or per channel to [heads, 1] or [heads, head_dim]."""
        return v.astype(jnp.float32).reshape(heads, -1)

    A = A.astype(jnp.float32).reshape(heads, *(A.shape[1:] or (1, 1)))
    bias = None if dt_bias is None else per_channel(dt_bias)

    def advance(token, carry):
        state, out, pool = carry
        row, offset = token_row[token], token_offset[token]
        state = jnp.where(offset == 0, read_blocks(pool, rows.layer, rows.read[row]), state)
        step = step_size(per_channel(dt[token]), bias, dt_softplus)
        x_t = x[token].astype(jnp.float32)
        B_t, C_t = (jnp.repeat(v[token].astype(jnp.float32), heads // v.shape[1], axis=0)[:, None, :] for v in (B, C))
        state = jnp.exp(A * step[..., None]) * state + (step * x_t)[..., None] * B_t
        y = jnp.sum(state * C_t, axis=-1)
        y = y if D is None else y + per_channel(D) * x_t
        y = y if z is None else y * silu(z[token].astype(jnp.float32))
        out = out.at[token].set(y.astype(out.dtype))
        return state, out, write_blocks(pool, rows.layer, rows.write[row, offset], state)

    # Every token runs in the same loop body of one shape, and the loop has one iteration per token. A row's bits
    # therefore depend neither on other rows nor on the amount of padding.
    carry = jnp.zeros(pool.shape[2:], jnp.float32), jnp.zeros_like(x), pool
    _, out, pool = jax.lax.fori_loop(rows.query_start_loc[0], rows.query_start_loc[-1], advance, carry)
    return out, pool
