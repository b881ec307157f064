"""Gated full attention over paged keys and values (Qwen3.5): query/key norms, partial rotary, sigmoid output gate."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import Precision

from mamba_align_jax.layers.linear import linear
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.metadata.attention import StepInputs
from mamba_align_jax.metadata.rows import Rows
from pallas_kernels._chunks import Span, chunk_of_token, spans
from pallas_kernels._rows import token_rows

# Gathered keys, values and scores of the chunks that run at once: 256 MiB of float32.
_ELEMENTS = 1 << 26


def rotary(x: jax.Array, positions: jax.Array, rotary_dim: int, theta: float) -> jax.Array:
    """Rotates the first `rotary_dim` dims of [tokens, heads, dim], in halves, by each token's position."""
    half = rotary_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, None, None] * frequency
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second, rest = jnp.split(x.astype(jnp.float32), [half, rotary_dim], axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return rotated.astype(x.dtype)


def attend(
    queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, scale: float | None = None
) -> jax.Array:
    """Queries [n, heads, dim] over keys and values [places, kv_heads, dim] where `mask` [n, places]; softmax in float32.

    `scale` is dim ** -0.5 if None.
    """
    n, heads, dim = queries.shape
    exact = queries.dtype == jnp.float32
    product = functools.partial(
        jnp.einsum,
        precision=Precision.HIGHEST if exact else Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    grouped = queries.reshape(n, keys.shape[1], -1, dim)
    scores = product("nhgd,lhd->hgnl", grouped, keys) * (dim**-0.5 if scale is None else scale)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1)
    out = product("hgnl,lhd->nhgd", weights.astype(values.dtype), values)
    return out.reshape(n, heads, dim).astype(queries.dtype)


def _attend_chunks(
    queries: jax.Array,
    rows: Rows,
    chunks: Span,
    place: tuple[jax.Array, jax.Array],
    chunk_size: int,
    page_table: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    scale: float | None,
) -> jax.Array:
    """Attention of packed tokens, cut into `chunks` of one row each; `place` is each token's chunk and lane."""
    num_tokens, heads, dim = queries.shape
    lane = jnp.arange(chunk_size, dtype=jnp.int32)

    def run(chunk: Span) -> jax.Array:
        take = lambda pool: pool[layer, page_table[chunk.row]].reshape(-1, *pool.shape[3:])
        k, v = take(keys), take(values)
        position = jnp.arange(k.shape[0], dtype=jnp.int32)
        first = rows.num_computed_tokens[chunk.row] + chunk.offset
        # Pages hold anything behind the row's end, and 0 * NaN is NaN.
        filled = (position < first + chunk.length)[:, None, None]
        k, v = jnp.where(filled, k, 0), jnp.where(filled, v, 0)
        token = jnp.minimum(chunk.start + lane, num_tokens - 1)
        return attend(queries[token], k, v, position <= first + lane[:, None], scale)

    length = page_table.shape[1] * keys.shape[2]
    each = length * (2 * keys.shape[3] * dim + heads * chunk_size)
    batch = max(1, _ELEMENTS // each)
    number = chunks.row.shape[0]
    out = jax.vmap(run)(chunks) if number <= batch else jax.lax.map(run, chunks, batch_size=batch)
    valid = jnp.arange(num_tokens, dtype=jnp.int32) < rows.query_start_loc[-1]
    return jnp.where(valid[:, None, None], out.at[place].get(mode="clip"), 0)


def paged_attention(
    queries: jax.Array,
    step: StepInputs,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    scale: float | None = None,
) -> jax.Array:
    """Causal attention of packed tokens [tokens, heads, dim] over their rows' pages, a chunk of one row at a time.

    `scale` is dim ** -0.5 if None.

    Plain XLA: full attention is here so that hybrid models run, not to be fast.
    """
    num_decode_rows = step.split.decode.num_rows

    def decode(rows: Rows, queries: jax.Array) -> tuple[jax.Array]:
        # A decode row has one token, a verify row a few: a row is a chunk.
        loc, tokens = rows.query_start_loc, token_rows(rows.query_start_loc, queries.shape[0])
        row = jnp.arange(rows.num_rows, dtype=jnp.int32)
        chunks = Span(row=row, start=loc[:-1], length=jnp.diff(loc), offset=jnp.zeros_like(row))
        place, window = (tokens.row, tokens.offset), rows.write.shape[2]
        table = step.page_table[:num_decode_rows]
        return (_attend_chunks(queries, rows, chunks, place, window, table, keys, values, layer, scale),)

    def prefill(rows: Rows, queries: jax.Array) -> tuple[jax.Array]:
        chunks = step.chunks
        assert chunks is not None
        place = chunk_of_token(chunks, queries.shape[0])
        table = step.page_table[num_decode_rows:]
        cut = spans(chunks, rows.query_start_loc)
        return (_attend_chunks(queries, rows, cut, place, chunks.chunk_size, table, keys, values, layer, scale),)

    return step.split.apply(decode, prefill, (queries,), (), step.num_decode_tokens)[0]


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
        dtype: str,
        rngs: nnx.Rngs,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rotary_dim, self.rope_theta = rotary_dim, rope_theta
        self.q_proj = linear(hidden_size, 2 * heads * head_dim, dtype, rngs)
        self.k_proj = linear(hidden_size, kv_heads * head_dim, dtype, rngs)
        self.v_proj = linear(hidden_size, kv_heads * head_dim, dtype, rngs)
        self.o_proj = linear(heads * head_dim, hidden_size, dtype, rngs)
        self.q_norm = RMSNorm(head_dim, epsilon, dtype)
        self.k_norm = RMSNorm(head_dim, epsilon, dtype)

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Queries, keys, values [tokens, heads, head_dim], normed and rotated, and the gates [tokens, heads * dim]."""
        tokens = x.shape[0]
        rotate = functools.partial(rotary, positions=positions, rotary_dim=self.rotary_dim, theta=self.rope_theta)
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
        return self.output(paged_attention(q, step, keys, values, layer), gate), keys, values
