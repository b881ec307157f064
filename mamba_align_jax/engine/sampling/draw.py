"""Chooses tokens from logits, and counts the drafts that they confirm."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import least_kept


class DrawOptions(NamedTuple):
    """How each row draws its tokens: see `SamplingParams`.

    Attributes:
        temperature: float32 [rows].
        top_k: int32 [rows].
        top_p: float32 [rows].
        seed: int32 [rows].
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array


def most_likely(logits: jax.Array) -> jax.Array:
    """Returns the most likely token of each row, int32 [rows], of logits [rows, vocab]."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@jax.jit
def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
) -> jax.Array:
    """Chooses one token per row.

    Rows of temperature 0 take the most likely token. The others draw from their own random stream at their position.

    Args:
        logits: float32 [rows, vocab].
        temperature: float32 [rows].
        top_k: Draws from the k most likely tokens; 0 for all tokens. int32 [rows].
        top_p: Of these, draws from the most likely ones up to this share of their probability. float32 [rows].
        seed: int32 [rows].
        position: Position of the token to choose. int32 [rows].

    Returns:
        The tokens, int32 [rows].
    """
    # Devices take the reciprocal of larger temperatures for 0. Only what is forbidden may become infinite: a difference of
    # infinite numbers is none.
    largest = jnp.finfo(jnp.float32).max
    scaled = jnp.clip(logits / jnp.clip(temperature, 1e-6, 1e30)[:, None], -largest, largest)
    scaled = jnp.where(logits == -jnp.inf, logits, scaled)
    weights = jnp.exp(scaled - jnp.max(scaled, axis=1, keepdims=True))
    kept = jnp.where(weights >= least_kept(weights, top_k, top_p)[:, None], scaled, -jnp.inf)
    # JAX's default generator is a setting, and under vmap some generators draw for all rows together.
    keys = jax.vmap(lambda s, p: jax.random.fold_in(jax.random.key(s, impl="threefry2x32"), p))(seed, position)
    drawn = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
    return jnp.where(temperature > 0, drawn, most_likely(logits))


def count_sampled(sampled: jax.Array, drafts: jax.Array, num_drafts: jax.Array) -> jax.Array:
    """Counts the tokens that each verify row adds to its request: its accepted drafts and the one sampled after them.

    A draft is accepted if it equals the token that was sampled in its place and all drafts before it are accepted.
    Drafts are not drawn at random, so this is rejection sampling (Leviathan et al., "Fast Inference from Transformers
    via Speculative Decoding", 2023): a draft d is accepted with the model's probability p(d), and a token that replaces
    it follows p without d. Every token therefore has the model's distribution. Its randomness depends only on seed and
    position, so the tokens are exactly those that are generated without drafts.

    Args:
        sampled: The token that was sampled after each token of the row. int32 [rows, 1 + K].
        drafts: `drafts[r, t]` is compared with `sampled[r, t]`. int32 [rows, K].
        num_drafts: How many of each row's drafts are valid. int32 [rows].

    Returns:
        The counts, int32 [rows], from 1 to 1 + K.
    """
    valid = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None] < num_drafts[:, None]
    accepted = jnp.cumprod(valid & (sampled[:, :-1] == drafts), axis=1, dtype=jnp.int32)
    return 1 + jnp.sum(accepted, axis=1, dtype=jnp.int32)
