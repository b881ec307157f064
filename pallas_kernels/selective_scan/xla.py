"""selective_scan in plain jax.numpy, token by token."""

import jax
import jax.numpy as jnp

from pallas_kernels._math import silu
from pallas_kernels._state_space import StateSpace, step_size
from pallas_kernels.blocks import per_row, read_blocks, write_kept
from pallas_kernels.rows import Rows, kept_states, token_rows


def _in_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def selective_scan(
    inputs: StateSpace, pool: jax.Array, rows: Rows, *, dt_softplus: bool
) -> tuple[jax.Array, jax.Array]:
    """Run all rows in one scan over the tokens. See api.py."""
    x, dt, A, B, C, D, z, dt_bias = inputs
    num_tokens, heads = x.shape[:2]
    # The loop has at least 2 iterations, because XLA would inline a loop over one token, and its bits could then differ
    # from the bits of a loop over several.
    of_token = token_rows(rows.query_start_loc, max(num_tokens, 2))
    initial = read_blocks(pool, rows.layer, rows.read)
    offset, block = kept_states(rows)

    def advance(carry, token):
        state, kept = carry
        row, nth, valid = (v[token] for v in of_token)

        def take(v):
            # Padding tokens are undefined, so they are replaced by 0.
            return jnp.where(valid, _in_float32(v[jnp.minimum(token, num_tokens - 1)]), 0.0)

        x_t, step = take(x), step_size(take(dt), dt_bias, dt_softplus)
        B_t, C_t = (jnp.repeat(take(v), heads // v.shape[1], axis=0)[:, None, :] for v in (B, C))
        state = jnp.where(nth == 0, initial[row], state)
        state = jnp.exp(_in_float32(A) * step[..., None]) * state + (step * x_t)[..., None] * B_t
        y = jnp.sum(state * C_t, axis=-1)
        y = y if D is None else y + _in_float32(D) * x_t
        y = y if z is None else y * silu(take(z))
        here = offset[row] == nth + 1
        kept = kept.at[row].set(jnp.where(per_row(here, kept[row]), state, kept[row]))
        return (state, kept), jnp.where(valid, y, 0.0).astype(x.dtype)

    kept = jnp.broadcast_to(initial[:, None], (*offset.shape, *initial.shape[1:]))
    tokens = jnp.arange(of_token.row.shape[0], dtype=jnp.int32)
    (_, kept), out = jax.lax.scan(advance, (jnp.zeros_like(initial[0]), kept), tokens)
    return out[:num_tokens], write_kept(pool, rows.layer, block, kept)
