"""The multi-token-prediction head of Qwen3-Next and Qwen3.5: one decoder layer that foretells the next token but one."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.layers.linear import linear
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.metadata.attention import StepInputs


class MTPHead(nnx.Module):
    """x = fc([norm(embedding of the next token), norm(hidden)]), a full-attention decoder layer, and a norm.

    `hidden` is the target's behind its final norm, and for further drafts this head's own output, likewise behind its norm.
    Embedding and logits are the target's. Keys at position p are made of the hidden state at p and the token at p + 1, so
    those at a shared prefix's end may come from another continuation: that costs drafts, never an answer.

    Source: Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction" (2024); DeepSeek-V3's report
    (2024) for the layer on the last one's hidden state; vLLM's `qwen3_5_mtp.py` for which norms and in what order.
    """

    def __init__(self, layer: Any, config: Any, rngs: nnx.Rngs) -> None:
        """A head around a full-attention decoder layer of the model's own kind; `config` is the model's."""
        size, epsilon, dtype = config.hidden_size, config.rms_norm_eps, config.dtype
        self.pre_fc_norm_embedding = RMSNorm(size, epsilon, dtype)
        self.pre_fc_norm_hidden = RMSNorm(size, epsilon, dtype)
        self.fc = linear(2 * size, size, dtype, rngs)
        self.layers = nnx.List([layer])
        self.norm = RMSNorm(size, epsilon, dtype)

    def join(self, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
        """What enters the layer [..., hidden]."""
        both = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        return self.fc(jnp.concatenate(both, axis=-1))

    def __call__(
        self,
        embedded: jax.Array,
        hidden: jax.Array,
        step: StepInputs,
        keys: jax.Array,
        values: jax.Array,
        layer: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs packed tokens over the step's own rows, positions and pages.

        Args:
            embedded: Embedding of the token behind each. [tokens, hidden]
            hidden: Hidden state of each. [tokens, hidden]
            step: The step's inputs.
            keys: Pages of keys, all layers. Donate them.
            values: Pages of values, likewise.
            layer: The head's place in the pages.

        Returns:
            Hidden states [tokens, hidden] for the target's `logits`, and the pages.
        """
        decoder = self.layers[0]
        x = self.join(embedded, hidden)
        out, keys, values = decoder.self_attn(decoder.input_layernorm(x), step, keys, values, layer)
        x = x + out
        x = x + decoder.mlp(decoder.post_attention_layernorm(x))
        return self.norm(x), keys, values
