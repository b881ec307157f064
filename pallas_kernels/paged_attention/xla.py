"""paged_attention in plain jax.numpy, a block of keys at a time."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention._arguments import Attention
from pallas_kernels.paged_attention._tiles import padded_indices, tiles
from pallas_kernels.rows import Rows, token_rows

_TILE = 8  # tokens; the same for all kinds of rows, so that a token's result has the same bits in each
_BLOCK = 128  # keys


def paged_attention(inputs: Attention, rows: Rows, *, value_dim: int, scale: float) -> jax.Array:
    """See api.py."""
    q, keys, values, page_table, slots, gates = inputs
    num_tokens, heads, key_dim = q.shape
    page_size, kv_heads = keys.shape[2:4]
    cut = tiles(rows, num_tokens, _TILE, slots)
    lane = jnp.arange(_TILE, dtype=jnp.int32)[None]
    packed = jnp.minimum(cut.start[:, None] + lane, num_tokens - 1)
    token_position = cut.position[:, None] + lane
    end = cut.position + cut.length
    grouped = q[packed].reshape(*packed.shape, kv_heads, heads // kv_heads, key_dim)
    product = functools.partial(
        jnp.einsum,
        precision=jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )

    def advance(carry):
        block, top, total, out = carry
        position = block * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)[None]
        exists = position < end[:, None]
        # A tile that has ended reads the page of its last position again; entries of the table after it are not read.
        nearest = jnp.minimum(position, jnp.maximum(end[:, None] - 1, 0))
        page = page_table.at[cut.table[:, None], nearest // page_size].get(mode="clip")
        take = lambda pool: pool.at[rows.layer, page, nearest % page_size].get(mode="clip").astype(q.dtype)
        k = take(keys)
        v = k[..., :value_dim] if values is None else take(values)
        v = jnp.where(exists[:, :, None, None], v, 0)
        scores = product("xthgd,xlhd->xhgtl", grouped, k) * scale
        seen = exists[:, None, :] & (position[:, None] <= token_position[:, :, None])
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        probabilities = jnp.exp(scores - new_top[..., None])
        decay = jnp.exp(top - new_top)
        total = total * decay + probabilities.sum(axis=-1)
        out = out * decay[..., None] + product("xhgtl,xlhd->xhgtd", probabilities.astype(q.dtype), v)
        return block + 1, new_top, total, out

    shape = (cut.table.shape[0], kv_heads, heads // kv_heads, _TILE)
    # The lowest score is finite, so that a block that a token does not see leaves its sums as they are.
    carry = jnp.int32(0), jnp.full(shape, -1e30), jnp.zeros(shape), jnp.zeros((*shape, value_dim))
    carry = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.float32), carry)
    longest = jnp.max(jnp.where(cut.length > 0, end, 0))
    _, _, total, out = jax.lax.while_loop(lambda carry: carry[0] * _BLOCK < longest, advance, carry)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(-1, heads, value_dim)

    of_token = token_rows(rows.query_start_loc, num_tokens)
    out = out.at[padded_indices(rows, of_token, _TILE)].get(mode="clip")
    if gates is not None:
        out = out * jax.nn.sigmoid(gates[:, :heads, -value_dim:].astype(jnp.float32))
    return jnp.where(of_token.valid[:, None, None], out, 0).astype(q.dtype)
