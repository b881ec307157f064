"""Drafts of the model's own MTP head, made inside the jitted step."""

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp

from mamba_align_jax.engine.drafting.protocols import SampledStep
from mamba_align_jax.engine.model import DraftingModel
from mamba_align_jax.kv import KVPages
from mamba_align_jax.metadata.step_inputs import StepInputs, single_token_inputs


def draft_with_head(
    model: DraftingModel,
    hidden: jax.Array,
    next_tokens: jax.Array,
    step: StepInputs,
    kv: KVPages,
    last: jax.Array,
    alive: jax.Array,
    max_drafts: int,
) -> tuple[jax.Array, KVPages]:
    """Drafts greedily with the model's head: one pass over all tokens of a step, then one pass per further draft.

    The first pass writes the head's keys and values for all tokens of the step, so that later drafts attend to the
    whole row. The keys of the other passes belong to guesses, and the first pass of the next step overwrites them.

    Args:
        model: A model with a draft head.
        hidden: Hidden states of the step's tokens. [tokens, hidden]
        next_tokens: The token after each of them; any token after a rejected draft. int32 [tokens].
        step: The step's inputs.
        kv: Keys and values, the head's layer included. `kv` is donated.
        last: Index of each row's last accepted token among the step's tokens. int32 [rows].
        alive: The rows that need drafts. The drafts of other rows are meaningless. bool [rows].
        max_drafts: The number of drafts per row (static), at least 1.

    Returns:
        The drafts that follow each row's last next token, int32 [rows, max_drafts], and the pages.
    """
    out, kv = model.draft(hidden, next_tokens, step, kv)
    last = jnp.clip(last, 0, out.shape[0] - 1)
    out, position = out[last], step.pages.positions[last]
    _, num_pages, page_size = kv.keys.shape[:3]
    pages, drafts = step.pages, []
    for n in range(max_drafts):
        if n:
            inputs = single_token_inputs(
                pages.page_tables, position + n, alive, page_size=page_size, num_pages=num_pages, slots=pages.slots
            )
            out, kv = model.draft(out, drafts[-1], inputs, kv)
        drafts.append(model.most_likely(out))
    return jnp.stack(drafts, axis=1), kv


@dataclass(frozen=True)
class MTPDrafter:
    """A `DeviceDrafter` that runs the model's MTP head: see `draft_with_head`."""

    @property
    def num_kv_layers(self) -> int:
        """1, the layer of the head."""
        return 1

    def draft(self, step: SampledStep, max_drafts: int) -> tuple[jax.Array, jax.Array, KVPages]:
        """Proposes tokens after a step: see `DeviceDrafter`. Every row has `max_drafts` valid drafts."""
        batch, inputs, sampled = step.batch, step.inputs, step.sampled
        slot = jnp.maximum(batch.idx_mapping, 0)[step.rows.row]
        next_tokens = step.history.at[slot, inputs.pages.positions + 1].get(mode="clip")
        # A row's tokens are its certain tokens and then its drafts, of which counts - 1 were accepted.
        certain = batch.query_start_loc[1:] - jnp.maximum(batch.num_drafts, 0)
        last = certain + sampled.counts - 2
        alive = sampled.slot < step.history.shape[0]
        model = cast(DraftingModel, step.model)
        drafts, kv = draft_with_head(model, step.hidden, next_tokens, inputs, step.kv, last, alive, max_drafts)
        return drafts, jnp.full_like(sampled.counts, max_drafts), kv
