"""Multi-head latent attention over paged latents: a token's keys and values in all heads are products of one vector.

Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1, in its absorbed form: queries are taken to the latents and attended
values from them, so that no key or value of a head is ever made.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax._deprecated import old_mixer_call
from mamba_align_jax.layers.attention import paged_attention, rotary
from mamba_align_jax.layers.linear import linear, precision
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.split import Cut
from mamba_align_jax.metadata.layer_step import LayerStep
from mamba_align_jax.sharding import Part

_EPSILON = 1e-6  # of the norms inside the layer, whatever the model's


def _rotary_pairs(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates dims (0, 1), (2, 3), .. of [tokens, heads, dim]; first members of the pairs go in front of second ones.

    Queries and keys alike, so that their products don't see the order.
    """
    halves = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
    return rotary(halves, positions, x.shape[-1], theta)


class MultiHeadLatentAttention(nnx.Module):
    """One layer; pages hold [latent | positional key] of each token, kv_lora_rank + rope_dim numbers, as one head.

    `q_lora_rank` is the inner size of the queries' projection, None where it is one product. `rope_theta` None leaves the
    positional dims unrotated. `gated` multiplies each head's output by a sigmoid of the layer's input.
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
        self.heads, self.nope_dim, self.rope_dim, self.value_dim = heads, nope_dim, rope_dim, value_dim
        self.kv_lora_rank, self.rope_theta = kv_lora_rank, rope_theta
        queries = heads * (nope_dim + rope_dim)
        if q_lora_rank is None:
            self.q_proj = linear(hidden_size, queries, dtype, rngs)
        else:
            self.q_a_proj = linear(hidden_size, q_lora_rank, dtype, rngs)
            self.q_a_layernorm = RMSNorm(q_lora_rank, _EPSILON)
            self.q_b_proj = linear(q_lora_rank, queries, dtype, rngs)
        self.kv_a_proj_with_mqa = linear(hidden_size, kv_lora_rank + rope_dim, dtype, rngs)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, _EPSILON)
        self.kv_b_proj = linear(kv_lora_rank, heads * (nope_dim + value_dim), dtype, rngs)
        self.g_proj = linear(hidden_size, heads, dtype, rngs) if gated else None
        self.o_proj = linear(heads * value_dim, hidden_size, dtype, rngs)

    @property
    def kv_dims(self) -> tuple[int, int, int]:
        """Heads, and dims of a key and a value."""
        return 1, self.kv_lora_rank + self.rope_dim, 0

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries [tokens, heads, nope_dim + rope_dim] and what the pages hold [tokens, kv_lora_rank + rope_dim]."""
        q = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(x.shape[0], self.heads, -1)
        latent, k_rope = jnp.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=1)
        if self.rope_theta is not None:
            q_nope, q_rope = jnp.split(q, [self.nope_dim], axis=2)
            q = jnp.concatenate([q_nope, _rotary_pairs(q_rope, positions, self.rope_theta)], axis=2)
            k_rope = _rotary_pairs(k_rope[:, None], positions, self.rope_theta)[:, 0]
        return q, jnp.concatenate([self.kv_a_layernorm(latent), k_rope], axis=1)

    def states(self, conv_dtype: str, state_dtype: str) -> tuple[()]:
        """No states: attention keeps keys and values in pages."""
        del conv_dtype, state_dtype
        return ()

    @old_mixer_call
    def __call__(self, x: jax.Array, at: LayerStep, *pools: jax.Array) -> tuple[jax.Array, ...]:
        """Runs a step's packed tokens: see `Mixer`.

        The pools are the pages of latents [layers, pages, page_size, 1, kv_lora_rank + rope_dim], and pages of values, which
        have no elements and are returned as they are.
        """
        latents, values = pools
        q, latent = self.project(x, at.token_pages.positions)
        latents = at.token_pages.put(latents, at.layer, latent[:, None])
        product = functools.partial(jnp.einsum, precision=precision(x.dtype.name))
        kv_b = self.kv_b_proj.kernel[...].reshape(self.kv_lora_rank, self.heads, -1)
        to_keys, to_values = jnp.split(kv_b, [self.nope_dim], axis=2)
        q_nope, q_rope = jnp.split(q, [self.nope_dim], axis=2)
        q_latent = jnp.concatenate([product("thd,rhd->thr", q_nope, to_keys), q_rope], axis=2)
        # The latents serve as values too. Their positional dims are attended in vain, and dropped.
        attended = paged_attention(q_latent, at, latents, latents, scale=q.shape[2] ** -0.5)
        out = product("thr,rhd->thd", attended[:, :, : self.kv_lora_rank], to_values)
        if self.g_proj is not None:
            out = out * jax.nn.sigmoid(self.g_proj(x).astype(jnp.float32)).astype(x.dtype)[:, :, None]
        return self.o_proj(out.reshape(x.shape[0], -1)), latents, values

    def split(self, cut: Cut) -> None:
        """Keeps one device's heads: see `SplitMixer`."""
        queries = self.q_proj if hasattr(self, "q_proj") else self.q_b_proj
        cut.out(queries, Part(self.heads, self.nope_dim + self.rope_dim))
        cut.out(self.kv_b_proj, Part(self.heads, self.nope_dim + self.value_dim))
        if self.g_proj is not None:
            cut.out(self.g_proj, Part(self.heads, 1))
        cut.into(self.o_proj, Part(self.heads, self.value_dim))
        self.heads //= cut.size
