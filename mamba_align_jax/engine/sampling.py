"""Chooses tokens from logits, and counts the drafts that they confirm."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# The weights that are compared are at most 1, whose bits are below 2^30.
_WEIGHT_BITS = 30
# The bits of the smallest normal float, 2^-126.
_SMALLEST_BITS = 1 << 23
# More bits in a pass are fewer launches, and twice as many sums for every bit more. Few rows wait for launches.
_BITS_PER_PASS, _BITS_OF_FEW_ROWS, _FEW_ROWS = 3, 5, 8


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
    scaled = logits / jnp.maximum(temperature, 1e-6)[:, None]
    weights = jnp.exp(scaled - jnp.max(scaled, axis=1, keepdims=True))
    kept = jnp.where(weights >= least_kept(weights, top_k, top_p)[:, None], scaled, -jnp.inf)
    keys = jax.vmap(lambda s, p: jax.random.fold_in(jax.random.key(s), p))(seed, position)
    drawn = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
    return jnp.where(temperature > 0, drawn, most_likely(logits))


def least_kept(weights: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns the least weight of the tokens that `top_k` and `top_p` keep.

    `top_k` keeps a token if fewer than `top_k` tokens have more weight. Of the tokens that are left, `top_p` keeps one if
    those with more weight have less than `top_p` of their total. So tokens of equal weight are kept or dropped together,
    and the most likely token is always kept. The definitions are vLLM's, but for equal weights.

    Args:
        weights: Probabilities, times a factor per row that makes the largest one 1. float32 [rows, vocab].
        top_k: See `sample`. int32 [rows].
        top_p: See `sample`. float32 [rows].

    Returns:
        float32 [rows]; 0 where all tokens are kept, or all but some of weights below 2^-126.
    """
    ones = jnp.ones((), jnp.int32)
    by_rank = _last_to_reach(weights, ones, jnp.where(top_k > 0, top_k, weights.shape[1] + 1))
    left = jnp.where(weights >= by_rank[:, None], weights, 0)
    by_mass = _last_to_reach(left, left, jnp.where(top_p < 1, top_p * jnp.sum(left, axis=1), jnp.inf))
    return jnp.maximum(by_rank, by_mass)


def _last_to_reach(weights: jax.Array, amounts: jax.Array, enough: jax.Array) -> jax.Array:
    """Returns the largest number for which tokens of at least that weight have `enough`; 0 if all together have not.

    Floats that are not negative are ordered as their bits are. So the number is found from its highest bits to its lowest
    ones. Each pass over the weights finds a few bits: it adds the amounts of the tokens that reach each number that these
    bits can be.

    Args:
        weights: From 0 to 1. float32 [rows, vocab].
        amounts: What each token has; not negative. [rows, vocab], or a scalar.
        enough: Of the dtype of `amounts`. [rows].

    Returns:
        float32 [rows].
    """
    step = _BITS_OF_FEW_ROWS if weights.shape[0] <= _FEW_ROWS else _BITS_PER_PASS
    bits = jnp.zeros(weights.shape[:1], jnp.int32)
    zero = np.zeros((), amounts.dtype)
    for shift in range(_WEIGHT_BITS - step, -1, -step):
        numbers = [_float_of(bits + (value << shift)) for value in range(1, 1 << step)]
        reaching = [jnp.where(weights >= number[:, None], amounts, zero) for number in numbers]
        # A single launch computes the sums of one operation.
        sums = jax.lax.reduce(reaching, [zero] * len(numbers), _add, (1,))
        bits = bits + (sum((sum_ >= enough).astype(jnp.int32) for sum_ in sums) << shift)
    # A CPU takes floats below the smallest normal one for 0.
    return jnp.where(bits < _SMALLEST_BITS, 0.0, _float_of(bits))


def _float_of(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _add(mine: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(mine, others, strict=True)]


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
    valid = jnp.arange(drafts.shape[1], dtype=jnp.int32) < num_drafts[:, None]
    accepted = jnp.cumprod((valid & (sampled[:, :-1] == drafts)).astype(jnp.int32), axis=1)
    return 1 + jnp.sum(accepted, axis=1, dtype=jnp.int32)
