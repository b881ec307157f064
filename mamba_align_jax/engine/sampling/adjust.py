"""Changes logits before a token is chosen: grammars, biases, forbidden end tokens, penalties, and a smallest probability.

The definitions and their order are vLLM's: https://docs.vllm.ai/en/v0.22.1/api/vllm/v1/sample/sampler/. What a grammar
forbids comes first, then biases and forbidden end tokens, then the penalties for repetition, frequency and presence, then
temperature, `min_p`, `top_k` and `top_p`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax.engine.config import MAX_FORBIDDEN_STOPS, MAX_LOGIT_BIASES, SamplingParams
from mamba_align_jax.sharding import Layout

_INT32_MAX = np.iinfo(np.int32).max


class AdjustOptions(NamedTuple):
    """How each row's logits are changed: see `SamplingParams`.

    Attributes:
        slot: The row's slot in the `SamplerState`; out of range for a row whose logits are not changed. int32 [rows].
        min_p: float32 [rows].
        repetition: Divides positive logits and multiplies negative ones of tokens in prompt or output. float32 [rows].
        presence: float32 [rows].
        frequency: float32 [rows].
    """

    slot: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """What the device knows of the requests whose logits are changed, by slot.

    Attributes:
        seen: Twice the number of times that the request generated a token, and one more if the token is in its prompt.
            int32 [slots, vocab].
        bias_token: The tokens that have a bias. int32 [slots, biases].
        bias: What is added to their logits. float32 [slots, biases].
        bias_until: The positions before which it is added. int32 [slots, biases].
    """

    seen: jax.Array
    bias_token: jax.Array
    bias: jax.Array
    bias_until: jax.Array

    @classmethod
    def create(cls, slots: int, vocab: int, num_end_tokens: int, layout: Layout | None = None) -> "SamplerState":
        """Makes a state for `slots` slots. `num_end_tokens` is the number of the model's own end tokens."""
        biases = MAX_LOGIT_BIASES + MAX_FORBIDDEN_STOPS + num_end_tokens

        def create() -> "SamplerState":
            ints = lambda length: jnp.zeros((slots, length), jnp.int32)
            bias = jnp.zeros((slots, biases), jnp.float32)
            return cls(seen=ints(vocab), bias_token=ints(biases), bias=bias, bias_until=ints(biases))

        if layout is None:
            return create()
        every = jax.sharding.PartitionSpec()
        return jax.jit(layout.run(create, (), every))()

    def with_request(
        self, slot: int, prompt: Sequence[int], generated: Sequence[int], params: SamplingParams, ends: Sequence[int]
    ) -> "SamplerState":
        """Writes a slot's rows for the request that enters it. This state is donated.

        Args:
            slot: The slot.
            prompt: The request's prompt.
            generated: The tokens that the request has generated, for instance before it was preempted.
            params: How the request is sampled.
            ends: The model's end tokens.
        """
        seen = 2 * np.bincount(np.array(generated, np.int64), minlength=self.seen.shape[1]).astype(np.int32)
        seen[list(prompt)] += 1
        token, bias, until = (
            np.zeros(held.shape[1], held.dtype) for held in (self.bias_token, self.bias, self.bias_until)
        )
        entries = [(each, value, _INT32_MAX) for each, value in params.logit_bias]
        if params.min_tokens:
            first = len(prompt) + params.min_tokens
            entries += [(each, -np.inf, first) for each in {*ends, *params.stop_token_ids}]
        for place, entry in enumerate(entries):
            token[place], bias[place], until[place] = entry
        return _store(self, np.int32(slot), (seen, token, bias, until))

    def counting(self, slot: jax.Array, tokens: jax.Array, counts: jax.Array) -> "SamplerState":
        """Counts the tokens that a step sampled. This state is donated.

        Args:
            slot: The slot of each row; rows whose slot is out of range are skipped. int32 [rows].
            tokens: Row r sampled `tokens[r, :counts[r]]`. int32 [rows, 1 + K].
            counts: int32 [rows].
        """
        new = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < counts[:, None]
        seen = self.seen.at[slot[:, None], tokens].add(2 * new.astype(jnp.int32), mode="drop")
        return SamplerState(seen=seen, bias_token=self.bias_token, bias=self.bias, bias_until=self.bias_until)


@functools.partial(jax.jit, donate_argnums=0)
def _store(state: SamplerState, slot: jax.Array, rows: tuple[jax.Array, ...]) -> SamplerState:
    held, definition = jax.tree.flatten(state)
    return jax.tree.unflatten(
        definition, [all_rows.at[slot].set(row) for all_rows, row in zip(held, rows, strict=True)]
    )


def adjust(
    logits: jax.Array, state: SamplerState, options: AdjustOptions, before: jax.Array, position: jax.Array
) -> jax.Array:
    """Applies biases, forbidden end tokens and penalties.

    Args:
        logits: float32 [n, vocab].
        state: What is known of the requests.
        options: How each of the n logits is changed.
        before: Drafts before the token to choose, which count as generated; out of range where there is none.
            int32 [n, K].
        position: Position of the token to choose. int32 [n].

    Returns:
        The changed logits, float32 [n, vocab]. Logits of rows whose slot is out of range are unchanged.
    """
    number = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    of_row = lambda held: held.at[options.slot].get(mode="fill", fill_value=0)
    bias = jnp.where(position[:, None] < of_row(state.bias_until), of_row(state.bias), 0)
    logits = logits.at[number, of_row(state.bias_token)].add(bias)
    seen = of_row(state.seen).at[number, before].add(2, mode="drop")
    count = (seen >> 1).astype(jnp.float32)
    repetition = options.repetition[:, None]
    largest = jnp.finfo(jnp.float32).max
    penalized = jnp.clip(jnp.where(logits > 0, logits / repetition, logits * repetition), -largest, largest)
    penalized = jnp.where(jnp.isfinite(logits), penalized, logits)  # what is forbidden stays so
    logits = jnp.where(seen > 0, penalized, logits)
    logits = logits - options.frequency[:, None] * count
    return logits - options.presence[:, None] * (count > 0).astype(jnp.float32)


def allow(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Forbids the tokens that a mask leaves out.

    Args:
        logits: float32 [n, vocab].
        masks: Bit `t % 32` of word `t // 32` says whether token t is allowed. int32 [n, words].

    Returns:
        The logits, float32 [n, vocab], -inf where a token is forbidden.
    """
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
    return jnp.where(bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def drop_unlikely(logits: jax.Array, temperature: jax.Array, min_p: jax.Array) -> jax.Array:
    """Forbids the tokens whose probability is less than `min_p` times that of the most likely token.

    Args:
        logits: float32 [n, vocab].
        temperature: The logits are divided by it afterwards. float32 [n].
        min_p: float32 [n]. 0 keeps all tokens.

    Returns:
        The logits, float32 [n, vocab], -inf where a token is forbidden.
    """
    largest = jnp.max(logits, axis=-1, keepdims=True)
    # Probabilities are compared by their logarithms, which the softmax shifts by one number.
    least = largest + (temperature * jnp.log(jnp.maximum(min_p, 2.0**-126)))[:, None]
    return jnp.where((min_p[:, None] > 0) & (logits < least), -jnp.inf, logits)
