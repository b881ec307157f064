"""Log-probabilities of tokens: of those that a step samples, and of those of a prompt.

They are those of the model's own logits, before temperature, penalties and other changes, as vLLM's are by default:
https://docs.vllm.ai/en/v0.22.1/api/vllm/v1/sample/sampler/.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mamba_align_jax.engine.config import MAX_LOGPROBS
from mamba_align_jax.engine.model import ServedModel
from mamba_align_jax.engine.scheduling.request import TokenLogprobs

# The number of tokens whose logits exist at once while a prompt is scored.
_TOKENS_AT_ONCE = 128
# The number of tokens of the vocabulary that are sorted together.
_BLOCK = 1024


class Scores(NamedTuple):
    """How likely some tokens are, and the tokens that are most likely in their places.

    Attributes:
        logprob: The logarithm of each token's probability. float32 [...].
        top: The most likely tokens, the most likely first: 20, or all of a smaller vocabulary. int32 [..., top].
        top_logprob: Their log-probabilities. float32 [..., top].
    """

    logprob: jax.Array
    top: jax.Array
    top_logprob: jax.Array

    def read(self, place: Any, token: int, num_top: int) -> TokenLogprobs:
        """Returns one token's log-probability and the `num_top` most likely tokens. The arrays must be NumPy's."""
        top = zip(self.top[place][:num_top].tolist(), self.top_logprob[place][:num_top].tolist(), strict=True)
        return TokenLogprobs(token, float(self.logprob[place]), tuple(top))


def score(logits: jax.Array, tokens: jax.Array) -> Scores:
    """Scores one token per row of logits.

    Args:
        logits: float32 [n, vocab].
        tokens: int32 [n].
    """
    whole = jax.nn.logsumexp(logits, axis=-1)
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    top_logits, top = _largest(logits, min(MAX_LOGPROBS, logits.shape[1]))
    return Scores(own - whole, top, top_logits - whole[:, None])


def _largest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the largest logits of each row and their tokens, in falling order.

    If logits are equal, the one of the token with the smaller number comes first.

    On a GPU XLA sorts a whole vocabulary for more than 16 of its largest logits. This function sorts blocks first, and then
    the largest logits of all blocks.

    Args:
        logits: float32 [n, vocab].
        count: How many; at most `vocab`.

    Returns:
        float32 [n, count] and int32 [n, count].
    """
    n, vocab = logits.shape
    if vocab <= _BLOCK * 2:
        return jax.lax.top_k(logits, count)
    blocks = jnp.pad(logits, ((0, 0), (0, -vocab % _BLOCK)), constant_values=-jnp.inf).reshape(n, -1, _BLOCK)
    largest, places = jax.lax.top_k(blocks, count)
    tokens = places + _BLOCK * jnp.arange(blocks.shape[1], dtype=jnp.int32)[None, :, None]
    largest, places = jax.lax.top_k(largest.reshape(n, -1), count)
    return largest, jnp.take_along_axis(tokens.reshape(n, -1), places, axis=1)


def score_prompt(model: ServedModel, hidden: jax.Array, following: jax.Array) -> Scores:
    """Scores the token that follows each of a step's tokens. The logits of few tokens exist at a time.

    Args:
        model: The model.
        hidden: Hidden states of the step's tokens. [tokens, hidden]
        following: The token after each of them; any token where none is known. int32 [tokens].
    """
    num_tokens = hidden.shape[0]
    at_once = min(_TOKENS_AT_ONCE, num_tokens)
    padding = -num_tokens % at_once
    parts = (
        jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, at_once, hidden.shape[1]),
        jnp.pad(following, (0, padding)).reshape(-1, at_once),
    )
    scores = jax.lax.map(lambda part: score(model.logits(part[0]), part[1]), parts)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], scores)
