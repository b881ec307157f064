"""Multi-head latent attention: pages hold one latent vector per token instead of the keys and values of all heads.

Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1. The layer runs the absorbed form: it projects queries to the
latent space and attended latents to values, so it never computes the keys and values of the heads.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.layers.attention import paged_attention
from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.linear import Linear, precision
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.rotation import make_rotation
from mamba_align_jax.layers.split import Cut
from mamba_align_jax.metadata.layer_step import LayerStep
from mamba_align_jax.sharding import Part
from pallas_kernels import rotate
from pallas_kernels.quantized import dequantized

# Epsilon of the norms inside the layer. It does not depend on the model.
_EPSILON = 1e-6


def _rotary_pairs(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates the pairs of dims (0, 1), (2, 3), .. of [tokens, heads, dim] by each token's position.

    The result has the first dims of all pairs before the second ones. Queries and keys get the same order, so their
    products do not depend on it.
    """
    halves = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
    return rotate(halves, *make_rotation(x.shape[-1], theta).angles(positions))


class MultiHeadLatentAttention(nnx.Module):
    """Multi-head latent attention: o_proj(softmax(q k^T / sqrt(nope_dim + rope_dim)) v).

    A head's key is [W_k latent | positional key] and its value is W_v latent, where all heads share a token's latent
    and positional key.

    The layer keeps no states. Its pools are pages of [latent | positional key],
    [layers, pages, page_size, 1, kv_lora_rank + rope_dim], and pages of values, which have no elements.
    """

    kind = "attention"

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        kv_lora_rank: int,
        dtype: str,
        rngs: nnx.Rngs,
        *,
        q_lora_rank: int | None = None,
        rope_theta: float | None = None,
        gated: bool = False,
    ) -> None:
        """Makes a layer with random weights.

        Args:
            hidden_size: Channels of the residual stream.
            heads: Number of heads.
            nope_dim: Dims of a query and of a key without position.
            rope_dim: Dims of a query and of a key that carry the position.
            value_dim: Dims of a value.
            kv_lora_rank: Dims of a latent.
            dtype: Dtype of weights and products.
            rngs: Random numbers for the weights.
            q_lora_rank: Inner size of the queries' projection. With None the projection is one product.
            rope_theta: Base of the rotation's wavelengths. With None the positional dims are not rotated.
            gated: Whether each head's output is multiplied by a sigmoid of a projection of the layer's input.
        """
        self.heads, self.nope_dim, self.rope_dim, self.value_dim = heads, nope_dim, rope_dim, value_dim
        self.kv_lora_rank, self.rope_theta = kv_lora_rank, rope_theta
        queries = heads * (nope_dim + rope_dim)
        if q_lora_rank is None:
            self.q_proj = Linear(hidden_size, queries, dtype, rngs)
        else:
            self.q_a_proj = Linear(hidden_size, q_lora_rank, dtype, rngs)
            self.q_a_layernorm = RMSNorm(q_lora_rank, _EPSILON)
            self.q_b_proj = Linear(q_lora_rank, queries, dtype, rngs)
        self.kv_a_proj_with_mqa = Linear(hidden_size, kv_lora_rank + rope_dim, dtype, rngs)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, _EPSILON)
        self.kv_b_proj = Linear(kv_lora_rank, heads * (nope_dim + value_dim), dtype, rngs)
        self.g_proj = Linear(hidden_size, heads, dtype, rngs) if gated else None
        self.o_proj = Linear(heads * value_dim, hidden_size, dtype, rngs)

    @property
    def kv_dims(self) -> tuple[int, int, int]:
        """One key head, the dims of what pages hold, and 0 dims of a value, because values are part of the keys."""
        return 1, self.kv_lora_rank + self.rope_dim, 0

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Projects the inputs [tokens, hidden] at `positions`, int32 [tokens].

        Returns:
            The queries [tokens, heads, nope_dim + rope_dim], and what the pages hold,
            [tokens, kv_lora_rank + rope_dim].
        """
        q = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(x.shape[0], self.heads, -1)
        latent, k_rope = jnp.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=1)
        if self.rope_theta is not None:
            q_nope, q_rope = jnp.split(q, [self.nope_dim], axis=2)
            q = jnp.concatenate([q_nope, _rotary_pairs(q_rope, positions, self.rope_theta)], axis=2)
            k_rope = _rotary_pairs(k_rope[:, None], positions, self.rope_theta)[:, 0]
        return q, jnp.concatenate([self.kv_a_layernorm(latent), k_rope], axis=1)

    def states(self, conv_dtype: str, state_dtype: str) -> tuple[()]:
        """Returns (), because attention keeps keys and values in pages instead of states in blocks."""
        return ()

    def __call__(self, x: jax.Array, at: LayerStep, *pools: jax.Array) -> tuple[Outputs, *tuple[jax.Array, ...]]:
        """Runs a step's packed tokens: see `Mixer`.

        The pools are the pages of latents, and the pages of values, which are returned as they are.
        """
        latents, values = pools
        q, latent = self.project(x, at.token_pages.positions)
        latents = at.token_pages.put(latents, at.layer, latent[:, None])
        product = functools.partial(jnp.einsum, precision=precision(x.dtype.name))
        kv_b = dequantized(self.kv_b_proj.weight[...]).reshape(self.heads, -1, self.kv_lora_rank)
        to_keys, to_values = jnp.split(kv_b, [self.nope_dim], axis=1)
        q_nope, q_rope = jnp.split(q, [self.nope_dim], axis=2)
        q_latent = jnp.concatenate([product("thd,hdr->thr", q_nope, to_keys), q_rope], axis=2)
        # A value is the latent without the positional dims.
        attended = paged_attention(q_latent, at, latents, None, q.shape[2] ** -0.5, value_dim=self.kv_lora_rank)
        out = product("thr,hdr->thd", attended, to_values)
        if self.g_proj is not None:
            out = out * jax.nn.sigmoid(self.g_proj(x).astype(jnp.float32)).astype(x.dtype)[:, :, None]
        return self.o_proj.sums(out.reshape(x.shape[0], -1)), latents, values

    def split(self, cut: Cut) -> None:
        """Keeps one device's heads: see `SplitMixer`."""
        queries = self.q_proj if hasattr(self, "q_proj") else self.q_b_proj
        cut.out(queries, Part(self.heads, self.nope_dim + self.rope_dim))
        cut.out(self.kv_b_proj, Part(self.heads, self.nope_dim + self.value_dim))
        if self.g_proj is not None:
            cut.out(self.g_proj, Part(self.heads, 1))
        cut.into(self.o_proj, Part(self.heads, self.value_dim))
        self.heads //= cut.size
