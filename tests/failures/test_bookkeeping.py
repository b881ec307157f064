"""Failures of other servers in accepted counts, columns and boundaries, tried on the device's bookkeeping."""

import itertools
import random

import jax
import numpy as np
import pytest
from fakes.slots import BLOCK, STATES, K, Row, Slots, verify

from mamba_align_jax import Additions, AlignConfig, GroupSpec
from mamba_align_jax.align.columns import (
    boundary_save,
    certain_tokens,
    running_column,
    tokens_after,
)

POLICIES = pytest.mark.parametrize("policy", ["copy_free", "pre_copy"])
ACCEPTED = [(drafts, accepted) for drafts in range(1, K + 1) for accepted in range(1, 2 + drafts)]


@POLICIES
def test_acceptance_may_end_anywhere_around_a_boundary(policy):
    """It ends on it, before it, after it, or on the running column's own. The live state and the saved one are kept."""
    for prompt, (drafts, accepted), (again, kept) in itertools.product(range(1, 2 * BLOCK), ACCEPTED, [(K, 1), (K, 4)]):
        slots = Slots(policy)
        slots.prompt(0, prompt)
        slots.step(verify(0, drafts, accepted))
        slots.step(verify(0, again, kept))
        slots.step(verify(0, 0, 1))


@POLICIES
def test_a_step_without_drafts_reads_where_the_accepted_ones_ended(policy):
    """It does not read the first column of the window, which has the state before any draft."""
    for prompt, (drafts, accepted), plain in itertools.product(range(3, 8), ACCEPTED, [-1, 0]):
        slots = Slots(policy)
        slots.prompt(0, prompt)
        slots.step(verify(0, drafts, accepted))
        slots.step(Row(0, 1, plain))


@POLICIES
def test_a_window_that_moves_left_is_still_read(policy):
    """Three drafts reach into the next block and are rejected. Then a step without drafts ends in the block before."""
    slots = Slots(policy)
    slots.prompt(0, 6)
    slots.step(verify(0, 3, 1))
    right = slots.column(0)
    slots.step(verify(0, 0, 1))
    assert slots.column(0) < right
    slots.step(verify(0, 3, 4))


@POLICIES
def test_a_prompt_chunk_may_follow_accepted_drafts(policy):
    for prompt, (drafts, accepted), length in itertools.product(range(3, 8), ACCEPTED, [1, 3, 9]):
        slots = Slots(policy)
        slots.prompt(0, prompt)
        slots.step(verify(0, drafts, accepted))
        slots.step(Row(0, length))
        slots.step(verify(0, 2, 2))


@POLICIES
def test_accepted_counts_follow_their_requests_when_rows_change_places(policy):
    slots = Slots(policy)
    slots.prompt(0, 5)
    slots.prompt(2, 6)
    slots.step(verify(2, 3, 3), verify(0, 3, 4))
    slots.enter(1)
    slots.step(verify(0, 3, 2), Row(1, 4), verify(2, 3, 1))
    slots.step(Row(1, 2), verify(2, 1, 2), verify(0, 0, 1))


@POLICIES
def test_a_slot_forgets_what_its_last_request_accepted(policy):
    slots = Slots(policy)
    slots.prompt(0, 9)
    slots.prompt(1, 7)
    slots.step(verify(1, 3, 3))
    assert slots.accepted(1) == 3
    slots.enter(1)
    slots.step(Row(1, 1))
    slots.step(verify(1, 3, 3))
    slots.enter(1, like=0, computed=8)
    slots.step(Row(1, 2))


@POLICIES
def test_zero_accepted_tokens_count_as_one(policy):
    """Otherwise column -1 and window row -1 would be read."""
    for prompt in range(1, 9):
        none, one = Slots(policy), Slots(policy)
        for slots, accepted in ((none, 0), (one, 1)):
            slots.prompt(0, prompt)
            slots.step(verify(0, 3, accepted))
            slots.step(verify(0, 1, 2))
        jax.tree.map(np.testing.assert_array_equal, none.state, one.state)


@POLICIES
def test_a_one_token_prompt_tail_runs_beside_verify_rows(policy):
    slots = Slots(policy)
    slots.prompt(0, 5)
    slots.prompt(1, 7)
    slots.enter(2)
    slots.step(verify(0, 3, 2), verify(1, 2, 3), Row(2, BLOCK))
    slots.step(verify(0, 3, 4), verify(1, 3, 1), Row(2, 1))
    slots.step(verify(1, 1, 1), verify(2, 3, 4), Row(0, 1))


@POLICIES
def test_a_prompt_as_long_as_a_window_starts_from_a_zero_state(policy):
    """Its row looks like a verify row, but the slot's blocks have the states of another request."""
    for length in range(1, K + 3):
        slots = Slots(policy)
        slots.prompt(0, 7)
        slots.step(verify(0, K, K + 1))
        slots.enter(0)
        slots.step(Row(0, length))
        slots.step(verify(0, K, 2))


@POLICIES
def test_a_request_may_enter_with_a_verify_step(policy):
    """For example after a transfer: its state exists, but it has run no step."""
    for drafts, accepted in ACCEPTED:
        slots = Slots(policy)
        slots.prompt(0, 13)
        slots.enter(1, like=0, computed=12)
        slots.step(verify(1, drafts, accepted), verify(0, 3, 3))
        slots.step(verify(1, 3, 3), verify(0, 0, 1))


@POLICIES
def test_two_requests_on_one_cached_state_do_not_write_it(policy):
    slots = Slots(policy)
    slots.prompt(0, 8)
    before = slots.boundary(0, 8)
    slots.enter(1, like=0, computed=8)
    slots.enter(2, like=0, computed=8)
    slots.step(verify(0, 3, 4), Row(1, 1), Row(2, 3))
    slots.step(verify(0, 3, 4), verify(1, 3, 4), verify(2, 3, 1))
    assert slots.boundary(0, 8) == slots.boundary(1, 8) == slots.boundary(2, 8) == before


@POLICIES
def test_columns_that_do_not_belong_to_a_request_are_never_used(policy):
    """The table may contain any block for columns that were jumped over, released, or not yet reached."""
    draw = random.Random(0)
    for _ in range(40):
        slots = Slots(policy)
        for slot in range(2):
            slots.enter(slot)
            slots.step(Row(slot, draw.choice([1, 3, BLOCK, 3 * BLOCK])))
        while max(map(len, slots.past.values())) < 36:
            drafts = draw.randint(0, K)
            verified = verify(0, drafts, draw.randint(1, 1 + drafts))
            slots.step(verified, Row(1, draw.choice([0, 1, 2, BLOCK, 2 * BLOCK + 1])))


def test_columns_are_counted_in_state_blocks_whatever_the_page_size():
    align = AlignConfig((GroupSpec("layers", 1, STATES),), 2176, 3, 2, max_model_len=131072)
    additions = Additions.from_host(align, 2, [0, 1], [46 * 2176, 2176])
    assert additions.running_column.tolist() == [45, 0]


def test_every_column_that_a_step_may_touch_is_in_the_table():
    """A lookup of one column more would be clamped to the last one."""
    for block, drafts, longest in itertools.product(range(1, 7), range(6), (7, 8, 24, 25)):
        if block <= drafts:
            continue
        align = AlignConfig((GroupSpec("layers", 1, STATES),), block, drafts, 1, max_model_len=longest)
        last = running_column(0, longest, block) + drafts
        assert last == align.num_columns - 1


def test_no_boundary_after_the_accepted_tokens_is_saved():
    """A boundary within the accepted tokens is always saved, from inside the window to its own column."""
    for block in range(1, 7):
        for computed, drafts in itertools.product(range(20), range(block)):
            for accepted in range(1, 2 + drafts):
                certain = certain_tokens(computed, 1 + drafts, drafts)
                after = tokens_after(certain, accepted)
                save = boundary_save(certain, after, block)
                passed = [n for n in range(computed + 1, after + 1) if n % block == 0]
                assert save.passed == bool(passed)
                if passed:
                    assert (save.target + 1) * block == passed[-1] == certain + save.offset
                    assert 0 <= save.offset <= accepted - 1
