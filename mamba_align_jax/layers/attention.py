"""Full attention over paged keys and values, with the norms, rotation and output gate that a model has."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import Precision

from mamba_align_jax._deprecated import old_mixer_call
from mamba_align_jax.layers.linear import linear
from mamba_align_jax.layers.split import Cut, SplitRMSNorm
from mamba_align_jax.metadata.layer_step import LayerStep
from mamba_align_jax.metadata.rows import Rows
from mamba_align_jax.sharding import Part, repeats
from pallas_kernels.chunks import Span, chunk_of_token, spans
from pallas_kernels.rows import token_rows

# Gathered keys, values and scores of the chunks that run at once: 1 GiB of float32.
_ELEMENTS = 1 << 28


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

    `scale` is dim ** -0.5 if None. Values may have another dim.
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
    return out.reshape(n, heads, -1).astype(queries.dtype)


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
    each = length * (keys.shape[3] * (dim + values.shape[4]) + heads * chunk_size)
    batch = max(1, _ELEMENTS // each)
    number = chunks.row.shape[0]
    out = jax.vmap(run)(chunks) if number <= batch else jax.lax.map(run, chunks, batch_size=batch)
    valid = jnp.arange(num_tokens, dtype=jnp.int32) < rows.query_start_loc[-1]
    return jnp.where(valid[:, None, None], out.at[place].get(mode="clip"), 0)


def paged_attention(
    queries: jax.Array,
    at: LayerStep,
    keys: jax.Array,
    values: jax.Array,
    scale: float | None = None,
) -> jax.Array:
    """Causal attention of packed tokens [tokens, heads, dim] over their rows' pages, a chunk of one row at a time.

    `scale` is dim ** -0.5 if None.

    Plain XLA: full attention is here so that hybrid models run, not to be fast.
    """
    num_decode_rows, page_table, layer = at.rows.decode.num_rows, at.token_pages.page_table, at.layer

    def decode(rows: Rows, queries: jax.Array) -> tuple[jax.Array]:
        # A decode row has one token, a verify row a few: a row is a chunk.
        loc, tokens = rows.query_start_loc, token_rows(rows.query_start_loc, queries.shape[0])
        row = jnp.arange(rows.num_rows, dtype=jnp.int32)
        chunks = Span(row=row, start=loc[:-1], length=jnp.diff(loc), offset=jnp.zeros_like(row))
        place, window = (tokens.row, tokens.offset), rows.write.shape[2]
        table = page_table[:num_decode_rows]
        return (_attend_chunks(queries, rows, chunks, place, window, table, keys, values, layer, scale),)

    def prefill(rows: Rows, queries: jax.Array) -> tuple[jax.Array]:
        chunks = at.chunks
        assert chunks is not None, "a step with prefill rows has chunks"
        place = chunk_of_token(chunks, queries.shape[0])
        table = page_table[num_decode_rows:]
        cut = spans(chunks, rows.query_start_loc)
        return (_attend_chunks(queries, rows, cut, place, chunks.chunk_size, table, keys, values, layer, scale),)

    return at.rows.apply(decode, prefill, (queries,), ())[0]


class Attention(nnx.Module):
    """One layer. Where it is gated, the query projection carries each head's gate behind its query."""

    kind = "attention"

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        rngs: nnx.Rngs,
        *,
        rotary_dim: int = 0,
        rope_theta: float = 1e4,
        gated: bool = False,
        norm: Callable[[int], Any] | None = None,
        norm_whole: bool = False,
        bias: bool = False,
        scale: float | None = None,
    ) -> None:
        """A layer's parameters.

        Args:
            hidden_size: Of the model.
            heads: Of queries.
            kv_heads: Of keys and values; divides `heads`.
            head_dim: Of each.
            dtype: Of the products.
            rngs: For the initial weights.
            rotary_dim: Leading dims that are rotated by position; 0 for none.
            rope_theta: Base of the rotation's wavelengths.
            gated: Whether outputs are multiplied by the sigmoid of a gate.
            norm: Makes the norms of queries and keys from their size; None for none.
            norm_whole: Whether these take all heads together, before they are cut apart.
            bias: Of the projections.
            scale: Of the scores; head_dim ** -0.5 if None.
        """
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rotary_dim, self.rope_theta = rotary_dim, rope_theta
        self.gated, self.norm_whole, self.scale = gated, norm_whole, scale
        self.q_proj = linear(hidden_size, (1 + gated) * heads * head_dim, dtype, rngs, bias=bias)
        self.k_proj = linear(hidden_size, kv_heads * head_dim, dtype, rngs, bias=bias)
        self.v_proj = linear(hidden_size, kv_heads * head_dim, dtype, rngs, bias=bias)
        self.o_proj = linear(heads * head_dim, hidden_size, dtype, rngs, bias=bias)
        sizes = (heads * head_dim, kv_heads * head_dim) if norm_whole else (head_dim, head_dim)
        self.q_norm: Any
        self.k_norm: Any
        self.q_norm, self.k_norm = map(norm, sizes) if norm else (None, None)

    @property
    def kv_dims(self) -> tuple[int, int, int]:
        """Heads, and dims of a key and a value."""
        return self.kv_heads, self.head_dim, self.head_dim

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Queries, keys, values [tokens, heads, head_dim], normed and rotated, and the gates [tokens, heads * dim]."""
        tokens = x.shape[0]
        heads = lambda y, number: y.reshape(tokens, number, -1)
        q, gate = self.q_proj(x), None
        if self.gated:
            q, gate = (y.reshape(tokens, -1) for y in jnp.split(heads(q, self.heads), 2, axis=-1))

        def finish(y: jax.Array, number: int, norm: Any) -> jax.Array:
            if norm is not None and self.norm_whole:
                y = norm(y)
            y = heads(y, number)
            if norm is not None and not self.norm_whole:
                y = norm(y)
            return rotary(y, positions, self.rotary_dim, self.rope_theta) if self.rotary_dim else y

        k, v = finish(self.k_proj(x), self.kv_heads, self.k_norm), heads(self.v_proj(x), self.kv_heads)
        return finish(q, self.heads, self.q_norm), k, v, gate

    def output(self, attended: jax.Array, gate: jax.Array | None) -> jax.Array:
        """Gates and projects [tokens, heads, head_dim] back to [tokens, hidden]."""
        attended = attended.reshape(attended.shape[0], -1)
        return self.o_proj(attended if gate is None else attended * jax.nn.sigmoid(gate))

    def states(self, conv_dtype: str, state_dtype: str) -> tuple[()]:
        """No states: attention keeps keys and values in pages."""
        del conv_dtype, state_dtype
        return ()

    @old_mixer_call
    def __call__(self, x: jax.Array, at: LayerStep, *pools: jax.Array) -> tuple[jax.Array, ...]:
        """Runs a step's packed tokens: see `Mixer`. The pools are the pages of keys and of values, of all layers."""
        keys, values = pools
        pages = at.token_pages
        q, k, v, gate = self.project(x, pages.positions)
        keys, values = pages.put(keys, at.layer, k), pages.put(values, at.layer, v)
        return self.output(paged_attention(q, at, keys, values, self.scale), gate), keys, values

    def split(self, cut: Cut) -> None:
        """Keeps one device's heads: see `SplitMixer`."""
        copies = repeats(self.kv_heads, cut.size)
        q, kv = Part(self.heads, self.head_dim), Part(self.kv_heads, self.head_dim, copies)
        cut.out(self.q_proj, Part(self.heads, (1 + self.gated) * self.head_dim))
        cut.out(self.k_proj, kv)
        cut.out(self.v_proj, kv)
        cut.into(self.o_proj, q)
        if self.norm_whole and self.q_norm is not None:
            cut.put(self.q_norm.weight, 0, [q])
            cut.put(self.k_norm.weight, 0, [kv])
            self.q_norm, self.k_norm = SplitRMSNorm(self.q_norm), SplitRMSNorm(self.k_norm)
        self.heads //= cut.size
        self.kv_heads = self.kv_heads * copies // cut.size
