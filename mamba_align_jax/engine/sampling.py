"""From logits to tokens."""

import jax
import jax.numpy as jnp


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
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

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
