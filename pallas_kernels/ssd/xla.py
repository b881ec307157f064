"""ssd in plain jax.numpy, chunk by chunk."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._math import silu
from pallas_kernels._state_space import StateSpace, step_size
from pallas_kernels.blocks import read_blocks, write_kept
from pallas_kernels.chunks import scan_chunks
from pallas_kernels.rows import Rows, kept_states


def _advance_chunk(
    state: jax.Array, x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Advance the states of all heads by one chunk.

    Args:
        state: The states before the chunk, [heads, head_dim, state_dim].
        x: Inputs, [heads, chunk, head_dim]. 0 for padding.
        dt: Step sizes, [heads, chunk]. 0 for padding.
        A: -exp(A_log), [heads].
        B: Input projections, [heads, chunk, state_dim]. 0 for padding.
        C: Output projections, [heads, chunk, state_dim]. 0 for padding.

    Returns:
        The new states and the outputs [heads, chunk, head_dim].
    """
    dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    chunk = x.shape[1]
    g = A[:, None] * dt
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    # The decay from token j to a later token i. Each sum is computed on its own, because the difference of two long
    # sums would lose the digits of a short one.
    after = jnp.where(jnp.tril(lower, -1), g[:, :, None], 0.0)
    between = jnp.where(lower, jnp.exp(jnp.cumsum(after, axis=1)), 0.0)
    from_state = jnp.exp(jnp.cumsum(g, axis=1))

    products = between * dot("hin,hjn->hij", C, B) * dt[:, None, :]
    out = from_state[..., None] * dot("hin,hpn->hip", C, state) + dot("hij,hjp->hip", products, x)
    added = dot("hjp,hjn->hpn", (between[:, -1] * dt)[..., None] * x, B)
    return from_state[:, -1, None, None] * state + added, out


def ssd(inputs: StateSpace, pool: jax.Array, rows: Rows, *, dt_softplus: bool) -> tuple[jax.Array, jax.Array]:
    """Run all rows in one scan over the chunks. See api.py."""
    x, dt, A, B, C, D, z, dt_bias = inputs
    num_tokens, heads, _ = x.shape
    offset, block = kept_states(rows)
    A = A.astype(jnp.float32)

    def advance(state, take, live):
        def of_heads(v):
            return take(v).astype(jnp.float32).swapaxes(0, 1)

        x_c = of_heads(x)
        B_c, C_c = (jnp.repeat(of_heads(v), heads // v.shape[1], axis=0) for v in (B, C))
        step = step_size(of_heads(dt), None if dt_bias is None else dt_bias[:, None], dt_softplus)
        step = jnp.where(live, step, 0.0)
        state, out = _advance_chunk(state, x_c, step, A, B_c, C_c)
        out = out if D is None else out + D.astype(jnp.float32).reshape(heads, 1, -1) * x_c
        out = out if z is None else out * silu(of_heads(z))
        return state, out.swapaxes(0, 1)

    initial = read_blocks(pool, rows.layer, rows.read)
    out, kept = scan_chunks(advance, initial, rows.chunks, rows.query_start_loc, offset, num_tokens)
    return out.astype(x.dtype), write_kept(pool, rows.layer, block, kept)
