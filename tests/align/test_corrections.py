"""`correct_counts` takes back accepted tokens of a slot's last step, and nothing else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_align_jax import (
    Additions,
    AlignConfig,
    AlignState,
    BlockTables,
    ConvState,
    Corrections,
    GroupSpec,
    RecurrentState,
    StepBatch,
    add_requests,
    begin_step,
    correct_counts,
)
from mamba_align_jax.align.step import plan_finish

SPEC = AlignConfig((GroupSpec("layers", 1, (ConvState(4, 1), RecurrentState((1, 1)))),), 4, 3, 4, max_model_len=40)


@jax.jit
def run(state, batch, num_sampled, tables):
    state, indices = begin_step(SPEC, state, batch, tables)
    return plan_finish(SPEC, state, batch, indices, num_sampled, tables)[0], indices


def step(state, rows):
    """Runs rows of (slot, drafts, accepted). Block c + 1 is in column c of every slot."""
    slots, drafts, accepted = zip(*rows, strict=True)
    ends = np.cumsum([0, *(1 + max(n, 0) for n in drafts)]).tolist()
    blocks = np.broadcast_to(np.arange(1, SPEC.num_columns + 1, dtype=np.int32), (1, 4, SPEC.num_columns))
    batch = StepBatch.from_host(SPEC, len(rows), slots, ends, drafts)
    return run(state, batch, np.array(accepted, np.int32), BlockTables(blocks=jnp.asarray(blocks)))


def verified():
    """Slot 0 accepted 4 of 4 tokens after 5, slot 1 accepted 4 of 4 after 4, slot 2 has run one token after 9."""
    state = add_requests(AlignState.create(SPEC), Additions.from_host(SPEC, 3, [0, 1, 2], [5, 4, 9]))
    state, _ = step(state, [(0, 3, 4), (1, 3, 4), (2, -1, 1)])
    assert state.num_computed_tokens.tolist() == [9, 8, 10, 0]
    # The boundary 8 was saved onto the running column of slot 1, over its window.
    assert state.num_accepted_tokens.tolist() == [4, 1, 1, 1]
    return state


def correct(state, slots, computed):
    corrected, refused = correct_counts(state, Corrections.from_host(SPEC, 4, slots, computed))
    return corrected, int(refused)


@pytest.mark.parametrize("computed", [6, 7, 8, 9])
def test_a_slot_reads_the_state_of_any_count_inside_its_window(computed):
    state, refused = correct(verified(), [0], [computed])
    assert refused == 0
    assert (state.num_computed_tokens[0], state.num_accepted_tokens[0]) == (computed, computed - 5)
    # The window began in column 2, where the state after 6 tokens is.
    _, indices = step(state, [(0, 0, 1)])
    assert indices.recurrent_read[0, 0] - 1 == 2 + computed - 6
    assert (indices.conv_read[0, 0] - 1, indices.window_row[0]) == (2, computed - 6)


@pytest.mark.parametrize(("slot", "computed"), [(0, 5), (0, 10), (0, 0), (1, 7), (1, 9), (2, 9), (2, 11), (3, 1)])
def test_a_count_without_a_state_changes_nothing_and_is_counted(slot, computed):
    before = verified()
    state, refused = correct(before, [slot], [computed])
    assert refused == 1
    for name in ("num_computed_tokens", "num_accepted_tokens", "running_column"):
        np.testing.assert_array_equal(getattr(state, name), getattr(before, name))


def test_padding_and_counts_that_are_right_already_change_nothing():
    before = verified()
    for slots, computed in (([], []), ([0, 1, 2, 3], [9, 8, 10, 0])):
        state, refused = correct(before, slots, computed)
        assert refused == 0
        np.testing.assert_array_equal(state.num_computed_tokens, before.num_computed_tokens)
        np.testing.assert_array_equal(state.num_accepted_tokens, before.num_accepted_tokens)


@pytest.mark.parametrize(
    ("message", "slots", "computed"),
    [
        ("must have the same length, at most 2, got 1 and 2", [0], [1, 2]),
        ("must have the same length, at most 2, got 3 and 3", [0, 1, 2], [1, 2, 3]),
        ("slots must be distinct, got [1, 1]", [1, 1], [2, 2]),
        ("slot of entry 1 must be in [0, 4), got 4", [0, 4], [1, 1]),
        ("num_computed_tokens of entry 0 must be in [0, 41), got 41", [0], [41]),
    ],
)
def test_bad_corrections_are_refused(message, slots, computed):
    with pytest.raises(ValueError, match=re.escape(message)):
        Corrections.from_host(SPEC, 2, slots, computed)
