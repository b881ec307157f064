"""Drafts by the model's own head, inside the step that has just sampled."""

from typing import Any

import jax
import jax.numpy as jnp

from mamba_align_jax.kv import KVPages
from mamba_align_jax.metadata.attention import StepInputs, single_token_inputs


def draft_with_head(
    model: Any,
    hidden: jax.Array,
    next_tokens: jax.Array,
    step: StepInputs,
    kv: KVPages,
    last: jax.Array,
    alive: jax.Array,
    most: int,
) -> tuple[jax.Array, KVPages]:
    """Runs the head over all tokens of a step, and greedily on from each row's last one, a draft and a pass at a time.

    The first pass fills the head's keys as the step fills the model's own, so that a row's later drafts see all its tokens.
    Keys of the passes that follow are guesses: the next step's first pass writes over them.

    Args:
        model: One with a head.
        hidden: Of the step's tokens. [tokens, hidden]
        next_tokens: The token behind each; behind rejected drafts any. int32 [tokens].
        step: The step's inputs.
        kv: Keys and values, the head's layer included. Donate them.
        last: Where each row's last accepted token is among the step's. int32 [rows].
        alive: Rows that want drafts; the others' mean nothing. bool [rows].
        most: Drafts per row (static), at least 1.

    Returns:
        Drafts [rows, most] of the tokens behind each row's last next token, int32, and the pages.
    """
    out, kv = model.draft(hidden, next_tokens, step, kv)
    last = jnp.clip(last, 0, out.shape[0] - 1)
    out, position = out[last], step.positions[last]
    _, num_pages, page_size = kv.keys.shape[:3]
    drafts = []
    for n in range(most):
        if n:
            inputs = single_token_inputs(step.page_table, position + n, alive, page_size=page_size, num_pages=num_pages)
            out, kv = model.draft(out, drafts[-1], inputs, kv)
        drafts.append(jnp.argmax(model.logits(out), axis=-1).astype(jnp.int32))
    return jnp.stack(drafts, axis=1), kv
