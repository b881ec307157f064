"""Full attention over paged keys and values, with the norms, the rotation and the output gate that a model has.

Sources: Vaswani et al., "Attention Is All You Need" (2017); Ainslie et al., "GQA" (2023) for key heads that query heads
share; Su et al., "RoFormer" (2021) for the rotation by position.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

import pallas_kernels as ops
from mamba_align_jax.layers.chain import Inputs, like
from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.rotation import make_rotation
from mamba_align_jax.layers.split import Cut, SplitRMSNorm
from mamba_align_jax.metadata.layer_step import LayerStep
from mamba_align_jax.sharding import Part, repeats


def paged_attention(
    queries: jax.Array,
    at: LayerStep,
    keys: jax.Array,
    values: jax.Array | None,
    scale: float | None = None,
    *,
    value_dim: int | None = None,
    gates: jax.Array | None = None,
) -> jax.Array:
    """Computes causal attention of a step's packed tokens over their rows' pages.

    Args:
        queries: [tokens, heads, dim]
        at: The step, with its pages, and the layer's index.
        keys: Pages that already hold the step's own keys. [layers, pages, page_size, kv_heads, dim]
        values: The same for values, [layers, pages, page_size, kv_heads, value_dim]. None in latent attention.
        scale: Factor of the scores; dim ** -0.5 if None.
        value_dim: In latent attention, the number of a key's first dims that are its value.
        gates: See `pallas_kernels.paged_attention`.

    Returns:
        [tokens, heads, value_dim], 0 for padding tokens.
    """
    num_decode_rows, pages = at.rows.decode.num_rows, at.token_pages
    if gates is not None and values is not None and at.has_decode_rows and at.rows.prefill.num_rows:
        gates = gates[..., -values.shape[4] :]  # Decode and prompt tokens are cut apart, which copies what they have.

    def attend_rows(rows: ops.Rows, tokens: tuple[jax.Array, ...], slots: jax.Array) -> tuple[jax.Array]:
        queries, *of_queries = tokens
        out = ops.paged_attention(
            queries,
            keys,
            values,
            rows,
            pages.page_tables,
            slots=slots,
            gates=of_queries[0] if of_queries else None,
            value_dim=value_dim,
            scale=scale,
            run=at.run,
        )
        return (out,)

    def decode(rows: ops.Rows, *tokens: jax.Array) -> tuple[jax.Array]:
        return attend_rows(rows, tokens, pages.slots[:num_decode_rows])

    def prefill(rows: ops.Rows, *tokens: jax.Array) -> tuple[jax.Array]:
        return attend_rows(rows, tokens, pages.slots[num_decode_rows:])

    return at.apply(decode, prefill, (queries,) if gates is None else (queries, gates), ())[0]


class Attention(nnx.Module):
    """Causal attention with grouped key heads: o_proj(softmax(scale * q k^T) v).

    Options add a norm and a rotation of queries and keys, and a gate: the outputs are then multiplied by sigmoid(gate)
    before `o_proj`. The query projection yields [query | gate] for each head in that case.

    The layer keeps no states. Its pools are pages of keys and of values,
    [layers, pages, page_size, kv_heads, head_dim].
    """

    kind = "attention"
    takes_chains = True

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
        rope_scaling: Mapping[str, Any] | None = None,
        gated: bool = False,
        norm: Callable[[int], Any] | None = None,
        norm_whole: bool = False,
        bias: bool = False,
        scale: float | None = None,
        out_size: int | None = None,
    ) -> None:
        """Makes a layer with random weights.

        Args:
            hidden_size: Channels of the residual stream.
            heads: Number of query heads.
            kv_heads: Number of key heads and of value heads; divides `heads`.
            head_dim: Dims of a query, a key and a value.
            dtype: Dtype of weights and products.
            rngs: Random numbers for the weights.
            rotary_dim: Number of leading dims that are rotated by position; 0 rotates none.
            rope_theta: Base of the rotation's wavelengths.
            rope_scaling: How the rotation is stretched: see `make_rotation`.
            gated: Whether outputs are multiplied by the sigmoid of a gate.
            norm: Makes an `RMSNorm` from its number of channels, for queries and for keys; None leaves them as they are.
            norm_whole: Whether a norm takes all heads of a token together instead of each head by itself.
            bias: Whether the projections have biases.
            scale: Factor of the scores; head_dim ** -0.5 if None.
            out_size: Channels of the outputs; hidden_size if None.
        """
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rotary_dim = rotary_dim
        self.rotation = make_rotation(rotary_dim, rope_theta, rope_scaling) if rotary_dim else None
        self.gated, self.norm_whole, self.scale = gated, norm_whole, scale
        sizes = ((1 + gated) * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.qkv_proj = Linear(hidden_size, sizes, dtype, rngs, bias=bias)
        self.o_proj = Linear(heads * head_dim, out_size or hidden_size, dtype, rngs, bias=bias)
        sizes = (heads * head_dim, kv_heads * head_dim) if norm_whole else (head_dim, head_dim)
        self.q_norm: Any
        self.k_norm: Any
        self.q_norm, self.k_norm = map(norm, sizes) if norm else (None, None)

    @property
    def kv_dims(self) -> tuple[int, int, int]:
        """The key heads, the dims of a key and the dims of a value."""
        return self.kv_heads, self.head_dim, self.head_dim

    def projections(self, x: Inputs, *, is_wide: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Projects the inputs [tokens, hidden] to queries with their gates, keys and values, each [tokens, channels].

        With `is_wide`, the queries may have the channels of keys and values after their own.
        """
        q, k, v = self.qkv_proj.with_wide_first(x, is_wide=is_wide)
        return q, k, v

    def _angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
        return self.rotation.angles(positions) if self.rotation else (None, None)

    def _inputs(self, x: Inputs, *, is_wide: bool = False) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Projects the inputs [tokens, hidden], and norms queries and keys if the norm takes all heads together.

        Returns:
            Queries [tokens, heads, head_dim], or [query | gate] of twice as many dims, keys and values [tokens,
            kv_heads, head_dim], and the queries' [query | gate] as they were projected, None without gates. With
            `is_wide`, queries and gates may have further heads, which mean nothing.
        """
        heads = lambda y, dim=self.head_dim: y.reshape(y.shape[0], -1, dim)
        flat = lambda y: y.reshape(y.shape[0], -1)
        is_normed = self.norm_whole and self.q_norm is not None
        q, k, v = self.projections(x, is_wide=is_wide and not is_normed)
        q = heads(q, (1 + self.gated) * self.head_dim)
        gates = q if self.gated else None
        if is_normed:
            q, k = heads(self.q_norm(flat(q[..., : self.head_dim]))), self.k_norm(k)
        return q, heads(k), heads(v), gates

    def _head_norms(self) -> ops.HeadNorms:
        """Returns the norms that take each head by itself."""
        q, k = self.q_norm, self.k_norm
        if self.norm_whole or q is None:
            return ops.HeadNorms()
        return ops.HeadNorms(q_weight=q.weight[...], k_weight=k.weight[...], epsilon=q.epsilon, offset=q.offset)

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Projects, norms and rotates the inputs [tokens, hidden] at `positions`, int32 [tokens], without pages.

        Training uses it; it can be differentiated.

        Returns:
            Queries, keys and values, [tokens, heads, head_dim] with their own number of heads, and the gates
            [tokens, heads * head_dim], None without gates.
        """
        q, k, v, gates = self._inputs(x)
        gate = None if gates is None else gates[..., self.head_dim :].reshape(x.shape[0], -1)
        angles = self._angles(positions)
        norms = self._head_norms()
        options = dict(epsilon=norms.epsilon, offset=norms.offset)
        q = ops.rotate(q[..., : self.head_dim], *angles, norms.q_weight, **options)
        return q, ops.rotate(k, *angles, norms.k_weight, **options), v, gate

    def output(self, attended: jax.Array, gate: jax.Array | None) -> Outputs:
        """Multiplies attended values [tokens, heads, head_dim] by their gates and projects them.

        Returns:
            Sums [splits, tokens, hidden]: see `Linear.sums`.
        """
        attended = attended.reshape(attended.shape[0], -1)
        return self.o_proj.sums(attended if gate is None else attended * jax.nn.sigmoid(gate))

    def states(self, conv_dtype: str, state_dtype: str) -> tuple[()]:
        """Returns (), because attention keeps keys and values in pages instead of states in blocks."""
        return ()

    def __call__(self, x: Inputs, at: LayerStep, *pools: jax.Array) -> tuple[Outputs, *tuple[jax.Array, ...]]:
        """Runs a step's packed tokens: see `Mixer`. The pools are the pages of keys and of values."""
        keys, values = pools
        pages = at.token_pages
        q, k, v, gates = self._inputs(x, is_wide=not at.has_decode_rows)
        angles = self._angles(pages.positions)
        where = pages.indices(at.layer), self._head_norms()
        q, keys, values = ops.rotate_and_store(q, k, v, *angles, keys, values, *where, heads=self.heads, run=at.run)
        attended = paged_attention(q, at, keys, values, self.scale, gates=gates)
        return self.o_proj.sums(like(x, attended.reshape(attended.shape[0], -1))), keys, values

    def split(self, cut: Cut) -> None:
        """Keeps one device's heads: see `SplitMixer`."""
        copies = repeats(self.kv_heads, cut.size)
        q, kv = Part(self.heads, self.head_dim), Part(self.kv_heads, self.head_dim, copies)
        cut.out(self.qkv_proj, Part(self.heads, (1 + self.gated) * self.head_dim), kv, kv)
        cut.into(self.o_proj, q)
        if self.norm_whole and self.q_norm is not None:
            cut.put(self.q_norm.weight, 0, [q])
            cut.put(self.k_norm.weight, 0, [kv])
            self.q_norm, self.k_norm = SplitRMSNorm(self.q_norm), SplitRMSNorm(self.k_norm)
        self.heads //= cut.size
        self.kv_heads = self.kv_heads * copies // cut.size
