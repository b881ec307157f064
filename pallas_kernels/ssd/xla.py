"""ssd in plain jax.numpy, chunk by chunk."""

import jax
import jax.numpy as jnp

from pallas_kernels._chunks import chunk_of_token, spans
from pallas_kernels._math import silu, softplus
from pallas_kernels._pool import NULL_BLOCK, per_row, read_blocks, write_blocks


def _advance_chunk(state, x, dt, A, B, C):
    """One chunk of every head, from a state [heads, head_dim, state_dim]: the new state and the outputs.

    x [heads, chunk, head_dim]; dt [heads, chunk]; A [heads]; B, C [heads, chunk, state_dim]. Padding has all but A = 0.
    """
    dot = lambda equation, *operands: jnp.einsum(equation, *operands, precision=jax.lax.Precision.HIGHEST)
    chunk = x.shape[1]
    g = A[:, None] * dt
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    # Decay from token j to token i >= j, each sum on its own: the difference of two long sums would lose a short one.
    after = jnp.where(jnp.tril(lower, -1), g[:, :, None], 0.0)
    between = jnp.where(lower, jnp.exp(jnp.cumsum(after, axis=1)), 0.0)
    from_state = jnp.exp(jnp.cumsum(g, axis=1))

    products = between * dot("hin,hjn->hij", C, B) * dt[:, None, :]
    out = from_state[..., None] * dot("hin,hpn->hip", C, state) + dot("hij,hjp->hip", products, x)
    added = dot("hjp,hjn->hpn", (between[:, -1] * dt)[..., None] * x, B)
    return from_state[:, -1, None, None] * state + added, out


def ssd(
    x,
    dt,
    A,
    B,
    C,
    pool,
    layer,
    query_start_loc,
    chunks,
    read_block,
    write_block,
    checkpoint_offset,
    checkpoint_block,
    D,
    z,
    dt_bias,
    *,
    dt_softplus,
):
    """See api.py. One chunk after another, each of the same shape: that is what makes a split bit-identical."""
    num_tokens, heads, _ = x.shape
    length = jnp.diff(query_start_loc)
    initial = read_blocks(pool, layer, read_block)
    lane = jnp.arange(chunks.chunk_size, dtype=jnp.int32)
    A = A.astype(jnp.float32)

    # The final state is the checkpoint at the row's end.
    offset, block = length[:, None], write_block[:, None]
    if checkpoint_offset is not None:
        offset = jnp.concatenate([checkpoint_offset, offset], axis=1)
        block = jnp.concatenate([checkpoint_block, block], axis=1)

    def advance(carry, chunk):
        state, kept = carry
        token = jnp.minimum(chunk.start + lane, num_tokens - 1)
        live = lane < chunk.length
        take = lambda v: jnp.where(per_row(live, v[token]), v[token].astype(jnp.float32), 0.0).swapaxes(0, 1)
        x_c = take(x)
        B_c, C_c = (jnp.repeat(take(v), heads // v.shape[1], axis=0) for v in (B, C))
        step = take(dt)
        step = step if dt_bias is None else step + dt_bias.astype(jnp.float32)[:, None]
        step = jnp.where(live, softplus(step) if dt_softplus else step, 0.0)
        state = jnp.where(chunk.offset == 0, initial[chunk.row], state)
        state, out = _advance_chunk(state, x_c, step, A, B_c, C_c)
        out = out if D is None else out + D.astype(jnp.float32).reshape(heads, 1, -1) * x_c
        out = out if z is None else out * silu(take(z))
        here = (offset[chunk.row] == chunk.offset + chunk.length) & (chunk.length > 0)
        kept = kept.at[chunk.row].set(jnp.where(per_row(here, kept[chunk.row]), state, kept[chunk.row]))
        return (state, kept), out.swapaxes(0, 1)

    kept = jnp.zeros((*offset.shape, *initial.shape[1:]), jnp.float32)
    (_, kept), out = jax.lax.scan(advance, (jnp.zeros_like(initial[0]), kept), spans(chunks, query_start_loc))

    out = out.at[chunk_of_token(chunks, num_tokens)].get(mode="fill", fill_value=0).astype(x.dtype)
    for n in range(offset.shape[1]):
        pool = write_blocks(pool, layer, jnp.where(length > 0, block[:, n], NULL_BLOCK), kept[:, n])
    return out, pool
