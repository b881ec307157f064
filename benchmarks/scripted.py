"""A model whose next token is known, around a model of any weights, and a drafter that is right as often as a script says.

Random weights have logits that are nearly equal, so a verify step chooses other tokens than a decode step, and no drafter
could be right. `ScriptedModel` does all the work of its model and then makes one token by far the most likely: a function of
the token before it. `ScriptedDrafter` knows that function.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.align.config import GroupSpec
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.engine.drafting.prompt_lookup_device import HistoryDrafter
from mamba_align_jax.kv import KVPages, KVSpec
from mamba_align_jax.layers.mixer import Mixer
from mamba_align_jax.metadata.step_inputs import StepInputs

_BASE, _DIGITS = 256, 3  # A token's digits are exact in bfloat16.


def following(token: jax.Array, vocab_size: int) -> jax.Array:
    """The token after each token."""
    return (token * 5 + 17) % vocab_size


def num_right(length: jax.Array, last: jax.Array, max_drafts: int) -> jax.Array:
    """How many drafts are right after `length` tokens that end in `last`: each number up to `max_drafts`, equally often."""
    scrambled = (length.astype(jnp.uint32) * 31 + last.astype(jnp.uint32)) * jnp.uint32(2654435761)
    return ((scrambled >> 16) % jnp.uint32(max_drafts + 1)).astype(jnp.int32)


class ScriptedModel(nnx.Module):
    """A `ServedModel` that computes what `model` computes, and then chooses `following(token)` after every token."""

    def __init__(self, model: Any) -> None:
        """Wraps a model, whose parameters it shares."""
        self.model, self.config = model, model.config

    def state_groups(self, state_dtype: str = "float32") -> tuple[GroupSpec, ...]:
        """Those of the model."""
        return self.model.state_groups(state_dtype)

    def kv_spec(self) -> KVSpec:
        """That of the model."""
        return self.model.kv_spec()

    def without_interior(self) -> list[str]:
        """Those of the model."""
        return self.model.without_interior()

    def mixers(self) -> dict[str, list[Mixer]]:
        """Those of the model."""
        return self.model.mixers()

    def __call__(
        self, tokens: jax.Array, step: StepInputs, pool: StatePool, kv: KVPages
    ) -> tuple[jax.Array, StatePool, KVPages]:
        """Runs the model. Its hidden states get the digits of their tokens as further channels."""
        hidden, pool, kv = self.model(tokens, step, pool, kv)
        digits = jnp.stack([tokens // _BASE**n % _BASE for n in range(_DIGITS)], axis=1)
        return jnp.concatenate([hidden, digits.astype(hidden.dtype)], axis=1), pool, kv

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The model's logits, with the scripted token far above the others."""
        logits = self.model.logits(hidden[:, :-_DIGITS])
        place = jnp.arange(logits.shape[1], dtype=jnp.int32)
        return jnp.where(place == self._scripted(hidden)[:, None], 1e9, logits)

    def most_likely(self, hidden: jax.Array) -> jax.Array:
        """The scripted token. The model's own is computed as well, and no token is negative."""
        own = self.model.most_likely(hidden[:, :-_DIGITS])
        return jnp.where(own < 0, own, self._scripted(hidden))

    def _scripted(self, hidden: jax.Array) -> jax.Array:
        digits = hidden[:, -_DIGITS:].astype(jnp.int32)
        token = sum(digits[:, n] * _BASE**n for n in range(1, _DIGITS)) + digits[:, 0]
        return following(token, self.config.vocab_size)


@dataclass(frozen=True)
class ScriptedDrafter(HistoryDrafter):
    """A `DeviceDrafter` for `ScriptedModel`. Of its drafts, as many are right as `num_right` says, and the others wrong."""

    vocab_size: int

    @property
    def max_places(self) -> int:
        """Of a row's tokens only the last one matters: see `HistoryDrafter`."""
        return 1

    def propose(self, history: jax.Array, length: jax.Array, max_drafts: int) -> tuple[jax.Array, jax.Array]:
        """Proposes tokens: see `HistoryDrafter`."""
        last = jnp.take_along_axis(history, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
        token, drafts = last, []
        for _ in range(max_drafts):
            token = following(token, self.vocab_size)
            drafts.append(token)
        right = jnp.arange(max_drafts, dtype=jnp.int32) < num_right(length, last, max_drafts)[:, None]
        found = jnp.stack(drafts, axis=1)
        return jnp.where(right, found, (found + 1) % self.vocab_size), jnp.full_like(length, max_drafts)
