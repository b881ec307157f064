"""Chooses the tokens of a step from the model's hidden states, as its rows ask for it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.engine.model import ServedModel
from mamba_align_jax.engine.sampling.adjust import AdjustOptions, SamplerState, adjust, allow, drop_unlikely
from mamba_align_jax.engine.sampling.draw import DrawOptions, sample
from mamba_align_jax.engine.sampling.logprobs import Scores, score

# Stands for no token where tokens are indices. Indices that are out of range are dropped.
_NO_TOKEN = np.iinfo(np.int32).max


class SamplingInputs(NamedTuple):
    """What the host sends for the choice of tokens. The level of a program says which of these there are.

    Attributes:
        draw: How rows draw tokens; None in a program whose rows take their most likely token.
        adjust: How rows' logits are changed; None in a program that changes none.
        masks: The tokens that may be chosen in each place, one bit each: see `GrammarState.allow`. The places are those
            of the decode rows, 1 + K each, then one for each prefill row. None in a program that allows all tokens.
            int32 [places, words].
        following: The token after each token of a prompt; None in a program that scores no prompt. int32 [tokens].
    """

    draw: DrawOptions | None = None
    adjust: AdjustOptions | None = None
    masks: jax.Array | None = None
    following: jax.Array | None = None


class ChosenTokens(NamedTuple):
    """The tokens that a step has chosen.

    Attributes:
        verified: The tokens of the decode rows, one after each of their tokens. int32 [decode rows, 1 + K].
        last: The tokens after the prefill rows. int32 [prefill rows].
        scores: How likely the tokens are, [rows, 1 + K] in each place of a decode row and in all places of a prefill
            row; None in a program that doesn't say.
    """

    verified: jax.Array
    last: jax.Array
    scores: Scores | None


def choose_tokens(
    model: ServedModel,
    hidden: jax.Array,
    positions: jax.Array,
    batch: StepBatch,
    sampling: SamplingInputs,
    verify: jax.Array,
    drafts: jax.Array,
    sampler: SamplerState | None,
) -> ChosenTokens:
    """Chooses a token after every token of the decode rows and after the last token of each prefill row.

    Args:
        model: The model.
        hidden: Hidden states of the step's tokens. [tokens, hidden]
        positions: Their positions. int32 [tokens].
        batch: The step's rows.
        sampling: What the host sent.
        verify: Where the decode rows' tokens are packed. int32 [decode rows, 1 + K].
        drafts: The decode rows' drafts. int32 [decode rows, K].
        sampler: What is known of the requests whose logits are changed; None in a program that changes none.
    """
    num_decode_rows, window = verify.shape
    num_rows = batch.idx_mapping.shape[0]
    last = jnp.maximum(batch.query_start_loc[1 + num_decode_rows :] - 1, 0)
    place = jnp.concatenate([verify.reshape(-1), last])
    decode_rows, other_rows = np.split(np.arange(num_rows, dtype=np.int32), [num_decode_rows])
    row = np.concatenate([decode_rows.repeat(window), other_rows])
    scores = None
    if sampling.draw is None:
        chosen = model.most_likely(hidden[place])
    else:
        own = logits = model.logits(hidden[place])
        if sampling.masks is not None:
            logits = allow(logits, sampling.masks)
        if sampling.adjust is not None and sampler is not None:
            options = AdjustOptions(*(option[row] for option in sampling.adjust))
            logits = adjust(logits, sampler, options, _drafts_before(drafts, num_rows), positions[place] + 1)
            logits = drop_unlikely(logits, sampling.draw.temperature[row], options.min_p)
        chosen = sample(logits, *(option[row] for option in sampling.draw), positions[place] + 1)
        if sampling.adjust is not None:
            scores = jax.tree.map(lambda each: _by_row(each, num_decode_rows, window), score(own, chosen))
    verified, rest = jnp.split(chosen, [verify.size])
    return ChosenTokens(verified.reshape(verify.shape), rest, scores)


def _drafts_before(drafts: jax.Array, num_rows: int) -> jax.Array:
    """Returns the drafts before each place where a token is chosen, `_NO_TOKEN` where there is none.

    Args:
        drafts: int32 [decode rows, K].
        num_rows: Number of all rows. Each decode row has 1 + K places, each other row has one.

    Returns:
        int32 [places, K].
    """
    num_decode_rows, K = drafts.shape
    earlier = np.arange(K) < np.arange(1 + K)[:, None]  # [places, drafts]
    before = jnp.where(earlier, drafts[:, None], _NO_TOKEN).reshape(num_decode_rows * (1 + K), K)
    return jnp.pad(before, ((0, num_rows - num_decode_rows), (0, 0)), constant_values=_NO_TOKEN)


def _by_row(values: jax.Array, num_decode_rows: int, window: int) -> jax.Array:
    """Returns values [places, ...] of the places where tokens are chosen as [rows, window, ...]."""
    decode, prefill = jnp.split(values, [num_decode_rows * window])
    decode = decode.reshape(num_decode_rows, window, *values.shape[1:])
    return jnp.concatenate([decode, jnp.repeat(prefill[:, None], window, axis=1)])
