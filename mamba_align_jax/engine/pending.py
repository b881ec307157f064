"""What the device knows of each slot's tokens before the host does: the last sampled one, drafts, and all before them."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.engine.drafting.prompt_lookup import UNKNOWN
from pallas_kernels.rows import token_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pending:
    """Per slot, what its next step runs, so that the host can dispatch that step without having read the last one.

    Attributes:
        tokens: The token sampled last, then drafts; places without a draft hold some token. int32 [slots, 1 + K].
        num_drafts: How many of the drafts count. int32 [slots].
        history: All tokens of the request, for drafting; of length 0 where nobody drafts here. int32 [slots, length].
    """

    tokens: jax.Array
    num_drafts: jax.Array
    history: jax.Array

    @classmethod
    def create(cls, slots: int, window: int, length: int) -> "Pending":
        """Nothing pending."""
        zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
        return cls(tokens=zeros(slots, window), num_drafts=zeros(slots), history=zeros(slots, length))


class Sampled(NamedTuple):
    """What the rows of a step sampled, int32: `tokens[r, :counts[r]]` follow the `known[r]` tokens before them.

    `slot` is out of range for rows that sample nothing.
    """

    slot: jax.Array
    tokens: jax.Array
    counts: jax.Array
    known: jax.Array


def enter(pending: Pending, slot: jax.Array, tokens: jax.Array) -> Pending:
    """Requests enter with `tokens` [additions, length]; `slot` is -1 for padding. Donate `pending`."""
    slot = jnp.where(slot >= 0, slot, pending.history.shape[0])
    history = pending.history.at[slot].set(tokens, mode="drop")
    return replace(pending, history=history)


def decode_places(batch: StepBatch, num_decode_rows: int, window: int) -> jax.Array:
    """Where each decode row's tokens are packed, [rows, window]; a place behind the row's end repeats its last token."""
    first, end = batch.query_start_loc[:num_decode_rows], batch.query_start_loc[1 : num_decode_rows + 1]
    place = first[:, None] + jnp.arange(window, dtype=jnp.int32)
    return jnp.minimum(place, jnp.maximum(end - 1, 0)[:, None])


def resolve(
    pending: Pending, batch: StepBatch, tokens: jax.Array, place: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Fills in what the host didn't know of a step's packed tokens.

    Args:
        pending: What the last steps left.
        batch: The step's rows. A row whose drafts the host doesn't know has as many as it has room for.
        tokens: `UNKNOWN` where the host doesn't know. int32 [tokens].
        place: Of the decode rows, which are the first ones, as `decode_places` says.

    Returns:
        The tokens; and of the decode rows the drafts [rows, K] and how many of them count [rows]. The rest were only run.
    """
    at = token_rows(batch.query_start_loc, tokens.shape[0])
    slot = jnp.maximum(batch.idx_mapping, 0)
    most = pending.tokens.shape[1] - 1
    held = pending.tokens[slot[at.row], jnp.clip(at.offset, 0, most)]
    known = jnp.where(tokens == UNKNOWN, held, tokens)
    rows = place.shape[0]
    count = jnp.maximum(batch.num_drafts[:rows], 0)
    guessed = pending.num_drafts[slot[:rows]]
    count = jnp.where(tokens[place[:, 1:2]].ravel() == UNKNOWN, jnp.minimum(count, guessed), count) if most else count
    return known, known[place[:, 1:]], count


def advance(pending: Pending, sampled: Sampled) -> Pending:
    """Takes in what a step sampled; drafts of the step before count no more. Donate `pending`."""
    row = jnp.arange(sampled.counts.shape[0])
    last = sampled.tokens[row, jnp.maximum(sampled.counts - 1, 0)]
    window, length = sampled.tokens.shape[1], pending.history.shape[1]
    place = jnp.arange(window, dtype=jnp.int32)
    behind = jnp.where(place < sampled.counts[:, None], sampled.known[:, None] + place, length)
    history = pending.history.at[sampled.slot[:, None], behind].set(sampled.tokens, mode="drop")
    put = lambda array, values: array.at[sampled.slot].set(values, mode="drop")
    return Pending(
        tokens=put(pending.tokens, jnp.broadcast_to(last[:, None], sampled.tokens.shape)),
        num_drafts=put(pending.num_drafts, 0),
        history=history,
    )


def propose(pending: Pending, slot: jax.Array, drafts: jax.Array, count: jax.Array) -> Pending:
    """Puts `count[r]` of the drafts [rows, K] behind the last token of each slot that is in range. Donate `pending`."""
    return replace(
        pending,
        tokens=pending.tokens.at[slot, 1:].set(drafts, mode="drop"),
        num_drafts=pending.num_drafts.at[slot].set(count, mode="drop"),
    )
