"""The multi-token-prediction head of Qwen3-Next and Qwen3.5: one decoder layer that foretells the next token but one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.layers.linear import linear
from mamba_align_jax.metadata.step_inputs import StepInputs
from mamba_align_jax.models.config import ModelConfig


class MTPHead(nnx.Module):
    """x = fc([norm(embedding of the next token), norm(hidden)]), a full-attention decoder layer, and a norm.

    `hidden` is the target's behind its final norm, and for further drafts this head's own output, likewise behind its norm.
    Embedding and logits are the target's. Keys at position p are made of the hidden state at p and the token at p + 1, so
    those at a shared prefix's end may come from another continuation: that costs drafts, never an answer.

    Source: Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction" (2024); DeepSeek-V3's report
    (2024) for a layer on the hidden state; vLLM's `qwen3_5_mtp.py` for which norms and in what order.
    """

    def __init__(self, layer: Any, config: ModelConfig, norm: Callable[[], nnx.Module], rngs: nnx.Rngs) -> None:
        """A head around a full-attention decoder layer of the model's own kind; `config` and `norm` are the model's."""
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(), norm()
        self.fc = linear(2 * config.hidden_size, config.hidden_size, config.dtype, rngs)
        self.layers = nnx.List([layer])
        self.norm = norm()

    def join(self, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
        """What enters the layer [..., hidden]."""
        both = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        return self.fc(jnp.concatenate(both, axis=-1))

    def __call__(self, embedded: jax.Array, hidden: jax.Array, step: StepInputs, carry: Any) -> tuple[jax.Array, Any]:
        """Runs packed tokens over the step's own rows, positions and pages.

        Args:
            embedded: Embedding of the token behind each. [tokens, hidden]
            hidden: Hidden state of each. [tokens, hidden]
            step: The step's inputs.
            carry: As layers take it; the head's keys are in the layer behind those passed.

        Returns:
            Hidden states [tokens, hidden] for the target's `logits`, and what to carry on.
        """
        x, carry = self.layers[0](self.join(embedded, hidden), step, carry)
        return self.norm(x), carry
