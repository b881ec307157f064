"""What the engine needs of a model."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from mamba_align_jax.align.config import GroupSpec
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.kv import KVPages, KVSpec
from mamba_align_jax.metadata.step_inputs import StepInputs


def end_tokens(config: Any) -> tuple[int, ...]:
    """Returns a model's end tokens, of its configuration."""
    tokens = config.eos_token_id
    if tokens is None:
        return ()
    return tuple(tokens) if isinstance(tokens, Sequence) else (tokens,)


class ServedModel(Protocol):
    """A flax.nnx module that runs one step of a batch, as `load_model` returns it.

    Attributes:
        config: Has `vocab_size`, `max_position_embeddings` and `eos_token_id`, which is one end token, a sequence of
            them, or None.
    """

    config: Any

    def state_groups(self, state_dtype: str = "float32") -> tuple[GroupSpec, ...]:
        """Returns the groups of layers whose recurrent states the engine keeps."""
        ...

    def kv_spec(self) -> KVSpec:
        """Returns what the model's attention layers keep of a token."""
        ...

    def __call__(
        self, tokens: jax.Array, step: StepInputs, pool: StatePool, kv: KVPages
    ) -> tuple[jax.Array, StatePool, KVPages]:
        """Runs packed tokens, int32 [tokens], of a step. `pool` and `kv` are donated.

        Returns:
            The hidden states [tokens, hidden], and the pools.
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits, float32 [n, vocab], of hidden states [n, hidden]."""
        ...

    def most_likely(self, hidden: jax.Array) -> jax.Array:
        """Returns the first token with the largest logit, int32 [n], of hidden states [n, hidden]."""
        ...


class DraftingModel(ServedModel, Protocol):
    """A model with a draft head."""

    def draft(
        self, hidden: jax.Array, next_tokens: jax.Array, step: StepInputs, kv: KVPages
    ) -> tuple[jax.Array, KVPages]:
        """Runs the draft head over tokens: see `CausalLM.draft`."""
        ...
