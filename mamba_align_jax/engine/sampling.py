"""From logits to tokens, and which drafts they confirm."""

import jax
import jax.numpy as jnp


def most_likely(logits: jax.Array) -> jax.Array:
    """The greedy token of each row [rows, vocab]. int32 [rows]."""
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
    """One token per row. Rows of temperature 0 are greedy; the others draw from their own stream at their position.

    Args:
        logits: float32 [rows, vocab].
        temperature: float32 [rows].
        top_k: int32 [rows], 0 for all tokens.
        top_p: float32 [rows].
        seed: int32 [rows].
        position: int32 [rows], of the token to sample.
    """
    greedy = most_likely(logits)

    def draw(_):
        scaled = logits / jnp.maximum(temperature, 1e-6)[:, None]
        descending = -jnp.sort(-scaled, axis=-1)
        last = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[1]), logits.shape[1]) - 1
        by_rank = jnp.take_along_axis(descending, last[:, None], axis=1)
        probabilities = jax.nn.softmax(descending, axis=-1)
        # A token stays while the more likely ones do not make up top_p yet: the first always does.
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        by_mass = jnp.min(jnp.where(before < top_p[:, None], descending, jnp.inf), axis=-1, keepdims=True)
        kept = jnp.where(scaled >= jnp.maximum(by_rank, by_mass), scaled, -jnp.inf)
        keys = jax.vmap(lambda s, p: jax.random.fold_in(jax.random.key(s), p))(seed, position)
        drawn = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
        return jnp.where(temperature > 0, drawn, greedy)

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda _: greedy, None)


def count_sampled(sampled: jax.Array, drafts: jax.Array, num_drafts: jax.Array) -> jax.Array:
    """Tokens that verify rows yield: the drafts that stand, and the token sampled behind them. int32 [rows].

    A draft stands if it is what was sampled in its place and all drafts before it stand. For drafts that are certain this is
    rejection sampling (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023): a draft d is
    accepted with the target's probability p(d), and what comes instead follows p without d. So every token has the target's
    distribution; and as its randomness is that of its seed and position, it is the very token that comes without drafts.

    Args:
        sampled: What the target says after each token of the row. int32 [rows, 1 + K].
        drafts: int32 [rows, K], in the places where `sampled` says what they ought to be.
        num_drafts: How many of them there are. int32 [rows].
    """
    known = jnp.arange(drafts.shape[1], dtype=jnp.int32) < num_drafts[:, None]
    stand = jnp.cumprod((known & (sampled[:, :-1] == drafts)).astype(jnp.int32), axis=1)
    return 1 + jnp.sum(stand, axis=1, dtype=jnp.int32)
