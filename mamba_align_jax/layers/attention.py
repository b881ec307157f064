"""Gated full attention over paged keys and values (Qwen3.5): query/key norms, partial rotary, sigmoid output gate."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.layers.linear import linear
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.metadata.attention import StepInputs
from pallas_kernels._rows import chunk_of_token, chunk_rows, token_rows

_CHUNK = 64


def rotary(x: jax.Array, positions: jax.Array, rotary_dim: int, theta: float) -> jax.Array:
    """Rotates the first `rotary_dim` dims of [tokens, heads, dim], in halves, by each token's position."""
    half = rotary_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, None, None] * frequency
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second, rest = jnp.split(x.astype(jnp.float32), [half, rotary_dim], axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return rotated.astype(x.dtype)


def _attend(
    queries: jax.Array, positions: jax.Array, pages: jax.Array, keys: jax.Array, values: jax.Array, layer: jax.Array
) -> jax.Array:
    """Queries [n, heads, dim] of one row at `positions` [n] (-1: padding) over that row's `pages`."""
    take = lambda pool: pool[layer, pages].reshape(-1, *pool.shape[3:])
    k, v = take(keys), take(values)
    place = jnp.arange(k.shape[0], dtype=jnp.int32)
    # Pages hold anything behind the row's end, and 0 * NaN is NaN.
    filled = (place <= jnp.max(positions))[:, None, None]
    k, v = jnp.where(filled, k, 0), jnp.where(filled, v, 0)
    mask = place[None, :] <= jnp.maximum(positions, 0)[:, None]
    return jax.nn.dot_product_attention(queries[None], k[None], v[None], mask=mask[None, None])[0]


def paged_attention(
    queries: jax.Array, step: StepInputs, keys: jax.Array, values: jax.Array, layer: jax.Array
) -> jax.Array:
    """Causal attention of packed tokens [tokens, heads, dim] over their rows' pages, a chunk of one row at a time.

    Plain XLA: full attention is here so that hybrid models run, not to be fast.
    """

    def run(page_table, loc, computed, queries, chunk_size, batch_size):
        num_tokens = queries.shape[0]
        chunks = chunk_rows(loc, computed, chunk_size, num_tokens)

        def one(chunk):
            lane = jnp.arange(chunk_size, dtype=jnp.int32)
            token = jnp.minimum(chunk.start + lane, num_tokens - 1)
            position = jnp.where(lane < chunk.length, computed[chunk.row] + chunk.offset + lane, -1)
            return _attend(queries[token], position, page_table[chunk.row], keys, values, layer)

        out = jax.lax.map(one, chunks, batch_size=batch_size)
        rows = token_rows(loc, num_tokens)
        out = out.at[chunk_of_token(rows, loc, computed, chunk_size)].get(mode="clip")
        return jnp.where(rows.valid[:, None, None], out, 0)

    split, decode_rows = step.split, step.split.decode.num_rows

    def decode(rows, queries):
        # A decode row has one token, a verify row a few: as many chunks as tokens, all at once.
        return (run(step.page_table[:decode_rows], rows.query_start_loc, rows.num_computed_tokens, queries, 1, 64),)

    def prefill(rows, queries):
        table = step.page_table[decode_rows:]
        return (run(table, rows.query_start_loc, rows.num_computed_tokens, queries, _CHUNK, 1),)

    return split.apply(decode, prefill, (queries,), (), step.num_decode_tokens)[0]


class GatedAttention(nnx.Module):
    """One layer. The query projection carries each head's output gate behind its query."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        rope_theta: float,
        epsilon: float,
        dtype: object,
        rngs: nnx.Rngs,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rotary_dim, self.rope_theta = rotary_dim, rope_theta
        self.exact = jnp.dtype(dtype) == jnp.float32
        self.q_proj = linear(hidden_size, 2 * heads * head_dim, dtype, rngs)
        self.k_proj = linear(hidden_size, kv_heads * head_dim, dtype, rngs)
        self.v_proj = linear(hidden_size, kv_heads * head_dim, dtype, rngs)
        self.o_proj = linear(heads * head_dim, hidden_size, dtype, rngs)
        self.q_norm = RMSNorm(head_dim, epsilon, dtype)
        self.k_norm = RMSNorm(head_dim, epsilon, dtype)

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Queries, keys, values [tokens, heads, head_dim], normed and rotated, and the gates [tokens, heads * dim]."""
        tokens = x.shape[0]
        rotate = functools.partial(
            rotary, positions=positions, rotary_dim=self.rotary_dim, theta=self.rope_theta
        )
        q, gate = jnp.split(self.q_proj(x).reshape(tokens, self.heads, 2 * self.head_dim), 2, axis=-1)
        k = self.k_proj(x).reshape(tokens, self.kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(tokens, self.kv_heads, self.head_dim)
        return rotate(self.q_norm(q)), rotate(self.k_norm(k)), v, gate.reshape(tokens, -1)

    def output(self, attended: jax.Array, gate: jax.Array) -> jax.Array:
        """Gates and projects [tokens, heads, head_dim] back to [tokens, hidden]."""
        return self.o_proj(attended.reshape(gate.shape) * jax.nn.sigmoid(gate))

    def __call__(
        self, x: jax.Array, step: StepInputs, keys: jax.Array, values: jax.Array, layer: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs packed tokens [tokens, hidden].

        Args:
            x: Decode and verify rows first.
            step: The step's inputs.
            keys: Pages of keys, all layers. Donate them.
            values: Pages of values, likewise.
            layer: This layer's place in the pages.

        Returns:
            [tokens, hidden] and the pages.
        """
        q, k, v, gate = self.project(x, step.positions)
        put = lambda pool, new: pool.at[layer, step.kv_page, step.kv_offset].set(new.astype(pool.dtype), mode="drop")
        keys, values = put(keys, k), put(values, v)
        with jax.default_matmul_precision("highest" if self.exact else "default"):
            attended = paged_attention(q, step, keys, values, layer)
        return self.output(attended, gate), keys, values
