"""Drafts by the model's own head, inside the step that has just sampled."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mamba_align_jax.engine.drafting.prompt_lookup_device import SampledStep
from mamba_align_jax.kv import KVPages
from mamba_align_jax.metadata.attention import StepInputs, single_token_inputs
from pallas_kernels.rows import token_rows


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


@dataclass(frozen=True)
class MTPDrafter:
    """The model's MTP head: see `draft_with_head`."""

    def draft(self, step: SampledStep, most: int) -> tuple[jax.Array, jax.Array, KVPages]:
        """See `DeviceDrafter`."""
        batch, inputs, sampled = step.batch, step.inputs, step.sampled
        rows = token_rows(batch.query_start_loc, step.hidden.shape[0])
        slot = jnp.maximum(batch.idx_mapping, 0)[rows.row]
        behind = step.history.at[slot, inputs.positions + 1].get(mode="clip")
        # Behind a row's certain tokens lie its drafts, of which all but one of those that it sampled stand.
        certain = batch.query_start_loc[1:] - jnp.maximum(batch.num_drafts, 0)
        alive = sampled.slot < step.history.shape[0]
        drafts, kv = draft_with_head(
            step.model, step.hidden, behind, inputs, step.kv, certain + sampled.counts - 2, alive, most
        )
        return drafts, jnp.full_like(sampled.counts, most), kv
