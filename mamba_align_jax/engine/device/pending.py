"""Tokens that the device knows before the host does: each slot's last sampled token, its drafts, and its history."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.slots import set_slots
from mamba_align_jax.engine.drafting.protocols import UNKNOWN, Sampled
from pallas_kernels.rows import TokenRows

# Tokens of one call of `store_tokens`.
_TOKENS_PER_CALL = 2048


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pending:
    """The tokens that each slot's next step runs, so that the host can dispatch it before it has read the last step.

    Attributes:
        tokens: The token that was sampled last, then the drafts. Places without a draft hold some token.
            int32 [slots, 1 + K].
        num_drafts: How many of the drafts are valid. int32 [slots].
        history: The tokens of the slot's request that have run or were cached, for drafters; of length 0 if no drafter
            runs on the device. int32 [slots, length].
    """

    tokens: jax.Array
    num_drafts: jax.Array
    history: jax.Array

    @classmethod
    def create(cls, slots: int, window: int, length: int) -> "Pending":
        """Makes arrays of zeros for `slots` slots, `window` = 1 + K pending tokens and histories of `length` tokens."""
        zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
        return cls(tokens=zeros(slots, window), num_drafts=zeros(slots), history=zeros(slots, length))


@functools.partial(jax.jit, donate_argnums=0)
def _store_tokens(history: jax.Array, slot: jax.Array, begin: jax.Array, tokens: jax.Array) -> jax.Array:
    place = begin + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return history.at[slot, jnp.where(tokens != UNKNOWN, place, history.shape[1])].set(tokens, mode="drop")


def store_tokens(pending: Pending, slot: int, tokens: Sequence[int]) -> Pending:
    """Stores the first tokens of a slot's history, in calls of one size, ahead of the step in which a request enters.

    These are the tokens of a prefix hit, which no step runs. `pending` is donated.
    """
    history = pending.history
    for begin in range(0, max(len(tokens), 1), _TOKENS_PER_CALL):
        part = np.full(_TOKENS_PER_CALL, UNKNOWN, np.int32)
        held = tokens[begin : begin + _TOKENS_PER_CALL]
        part[: len(held)] = held
        history = _store_tokens(history, np.int32(slot), np.int32(begin), part)
    return replace(pending, history=history)


def record_prompts(
    pending: Pending, batch: StepBatch, rows: TokenRows, positions: jax.Array, tokens: jax.Array, following: jax.Array
) -> Pending:
    """Stores the tokens that a step's prefill rows run. `pending` is donated.

    Args:
        pending: The tokens of all slots.
        batch: The step's rows, of which the last are prefill rows.
        rows: The row and the offset of each packed token.
        positions: The position of each packed token. int32 [tokens].
        tokens: The packed tokens. int32 [tokens].
        following: The token after each prefill row, which drafters with keys need; `UNKNOWN` if the row's last token is
            the last one that is known. int32 [prefill rows].
    """
    num_slots = pending.history.shape[0]
    num_decode_rows = batch.idx_mapping.shape[0] - following.shape[0]
    slot = jnp.where(rows.valid & (rows.row >= num_decode_rows), batch.idx_mapping[rows.row], num_slots)
    history = pending.history.at[slot, positions].set(tokens, mode="drop")
    last = jnp.maximum(batch.query_start_loc[1 + num_decode_rows :] - 1, 0)
    slot = jnp.where(following != UNKNOWN, batch.idx_mapping[num_decode_rows:], num_slots)
    return replace(pending, history=history.at[slot, positions[last] + 1].set(following, mode="drop"))


def decode_places(batch: StepBatch, num_decode_rows: int, window: int) -> jax.Array:
    """Returns where the tokens of each decode row are packed, int32 [num_decode_rows, window].

    A row with fewer than `window` tokens repeats the place of its last one.
    """
    first, end = batch.query_start_loc[:num_decode_rows], batch.query_start_loc[1 : num_decode_rows + 1]
    place = first[:, None] + jnp.arange(window, dtype=jnp.int32)[None]
    return jnp.minimum(place, jnp.maximum(end - 1, 0)[:, None])


def resolve(
    pending: Pending, batch: StepBatch, tokens: jax.Array, place: jax.Array, rows: TokenRows
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Replaces the tokens of a step that the host didn't know.

    Args:
        pending: The tokens that earlier steps left.
        batch: The step's rows. If the host doesn't know a row's drafts, the row has room for as many as the device may
            have.
        tokens: The packed tokens, `UNKNOWN` where the host doesn't know them. int32 [tokens].
        place: Where the decode rows' tokens are packed: see `decode_places`. int32 [decode rows, 1 + K].
        rows: The row and the offset of each packed token.

    Returns:
        The packed tokens; the drafts of the decode rows, int32 [decode rows, K]; and how many of each row's drafts are
        valid, int32 [decode rows]. The step runs the other drafts too, but nothing of them counts.
    """
    slot = jnp.maximum(batch.idx_mapping, 0)
    max_drafts = pending.tokens.shape[1] - 1
    held = pending.tokens[slot[rows.row], jnp.clip(rows.offset, 0, max_drafts)]
    known = jnp.where(tokens == UNKNOWN, held, tokens)
    num_rows = place.shape[0]
    count = jnp.maximum(batch.num_drafts[:num_rows], 0)
    if max_drafts:
        guessed = jnp.minimum(count, pending.num_drafts[slot[:num_rows]])
        count = jnp.where(tokens[place[:, 1:2]].ravel() == UNKNOWN, guessed, count)
    return known, known[place[:, 1:]], count


def record_sampled(pending: Pending, sampled: Sampled) -> Pending:
    """Stores the tokens that a step sampled. The drafts of the step before are valid no more. `pending` is donated."""
    row = jnp.arange(sampled.counts.shape[0], dtype=jnp.int32)
    last = sampled.tokens[row, jnp.maximum(sampled.counts - 1, 0)]
    window, length = sampled.tokens.shape[1], pending.history.shape[1]
    place = jnp.arange(window, dtype=jnp.int32)[None]
    new = jnp.where(place < sampled.counts[:, None], sampled.known[:, None] + place, length)
    history = pending.history.at[sampled.slot[:, None], new].set(sampled.tokens, mode="drop")
    return Pending(
        tokens=set_slots(pending.tokens, sampled.slot, last[:, None]),
        num_drafts=set_slots(pending.num_drafts, sampled.slot, 0),
        history=history,
    )


def propose(pending: Pending, slot: jax.Array, drafts: jax.Array, count: jax.Array) -> Pending:
    """Stores drafts after the last token of each slot. `pending` is donated.

    Args:
        pending: The tokens of all slots.
        slot: The slot of each row. Rows whose slot is out of range are skipped. int32 [rows].
        drafts: int32 [rows, K].
        count: How many of each row's drafts are valid. int32 [rows].
    """
    return replace(
        pending,
        tokens=pending.tokens.at[slot, 1:].set(drafts, mode="drop"),
        num_drafts=set_slots(pending.num_drafts, slot, count),
    )
