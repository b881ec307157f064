"""The draft head of Qwen3-Next and Qwen3.5: a decoder layer that predicts the token after the next one.

Sources: Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction" (2024); DeepSeek-AI,
"DeepSeek-V3" (2024) for a layer on the hidden state; vLLM's `qwen3_5_mtp.py` for the norms and their order.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.layers.exchange import Exchange
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.residual import Residual
from mamba_align_jax.metadata.step_inputs import StepInputs
from mamba_align_jax.models.config import ModelConfig


class MTPHead(nnx.Module):
    """Computes norm(layer(fc([norm(embedding of the next token), norm(hidden)]))): multi-token prediction.

    `layer` is a full-attention decoder layer.

    For the first draft, `hidden` is the model's output after its final norm. For further drafts it is this head's own
    output. The head uses the embeddings and the logits of the model.

    The key at position p depends on the hidden state at p and on the token at p + 1. At the end of a shared prefix it
    may therefore belong to another continuation. Drafts may be worse for it, but answers do not change, because the
    model verifies every draft.
    """

    def __init__(self, layer: Any, config: ModelConfig, norm: Callable[[], nnx.Module], rngs: nnx.Rngs) -> None:
        """Makes a head with random weights around `layer`. `norm` makes a norm as the model has it."""
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(), norm()
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, config.dtype, rngs)
        self.layers = nnx.List([layer])
        self.norm = norm()

    def join(self, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
        """Computes the layer's inputs [..., hidden] from embeddings [..., hidden] and hidden states [..., hidden]."""
        both = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        return self.fc(jnp.concatenate(both, axis=-1))

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, step: StepInputs, carry: Any, exchange: Exchange | None = None
    ) -> tuple[jax.Array, Any]:
        """Runs a step's packed tokens: the embedding of the token after each, and its hidden state, [tokens, hidden].

        `carry` is the `Carry` after the model's last attention layer: the head's keys are in the next layer of the
        pages. `exchange` adds up what the devices of a split model have; None leaves that to XLA.

        Returns:
            Hidden states [tokens, hidden] for the model's `logits`, and the carry after the head.
        """
        stream = Residual(self.join(embedded, hidden), exchange=exchange)
        stream, carry = self.layers[0](stream, step, carry)
        normed, _ = stream.normed(self.norm)
        return normed, carry
