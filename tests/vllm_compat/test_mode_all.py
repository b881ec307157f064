"""In mode "all" the host path copies nothing: each step reads where the last one left the states."""

import functools

import pytest
from fakes.mode_all_server import run_all
from vllm_compat.rows import make_spec, one_row, raises

from mamba_align_jax.vllm_compat.mamba_utils import gather_state_indices, postprocess_mamba, postprocess_mamba_all


@pytest.mark.parametrize(("block_size", "K"), [(1, 0), (2, 1), (3, 2), (4, 1), (4, 3), (5, 0), (8, 3), (9, 8)])
def test_every_step_in_mode_all_reads_its_own_past(block_size, K):
    run_all(block_size, K, 100)


def test_random_schedules_in_mode_all_reach_every_case():
    wanted = {"prefix hits", "preempted", "interior", "chunk after verify", "anchored"}
    events = run_all(4, 3, 200)
    assert {event for event, times in events.items() if times >= 10} == wanted, events


def test_each_step_reads_from_the_running_column_of_the_last_verify_step():
    # Blocks of 4, K = 3: a prompt of 6, then verify steps that accept 2 and 1.
    align, state_idx, accepted = make_spec(4, 3, "all"), {}, 1
    for computed, tokens, drafts, sampled, anchor, read in [
        # Without a running column the accepted count is not used.
        (0, 6, -1, 3, None, None),
        (6, 4, 3, 2, 2, (1, 1, 0)),
        (8, 4, 3, 1, 2, (3, 2, 1)),
        (9, 4, 3, 4, 3, (2, 2, 0)),
        (13, 1, -1, 1, None, (6, 3, 3)),
        (14, 4, 3, 1, 4, (3, 3, 0)),
    ]:
        batch = one_row(align, computed, tokens, drafts)
        before = gather_state_indices(align, batch, state_idx, [accepted], 1)
        found = (before.recurrent_read[0, 0] - 1, before.conv_read[0, 0] - 1, before.window_row[0])
        assert (found if before.has_initial_state[0] else None) == read
        postprocess_mamba_all(align, batch, state_idx)
        assert state_idx.get("a") == anchor
        accepted = sampled


def test_verify_rows_that_would_lose_the_running_column_are_refused():
    align = make_spec(4, 3, "all")
    for batch, published, message in [
        (one_row(align, 6, 3, 2), None, "request 'a': a verify row must have 4 tokens, got 3"),
        (one_row(align, 6, 1, 0), None, "request 'a': a verify row must have 4 tokens, got 1"),
        (one_row(align, 6, 4, 3), [8], "request 'a': a verify row must publish no boundary, got 8"),
        (one_row(align, 6, 4, 3), [], "num_published_tokens must describe 1 rows, got 0"),
    ]:
        for function in (postprocess_mamba_all, functools.partial(postprocess_mamba, num_sampled=[1])):
            state_idx = {"a": 1, "b": 7}
            with raises(message):
                function(align, batch, state_idx, num_published_tokens=published)
            assert state_idx == {"a": 1, "b": 7}
    with raises("postprocess_mamba_all: mode must be 'all', got 'align'"):
        postprocess_mamba_all(make_spec(4, 3), one_row(align, 6, 4, 3), {})
    # A row without tokens keeps its running column. With K = 0 there is none to lose.
    state_idx = {"a": 1}
    postprocess_mamba_all(align, one_row(align, 6, 0, 2), state_idx, [0])
    assert state_idx == {"a": 1}
    plain, state_idx = make_spec(4, 0, "all"), {}
    postprocess_mamba_all(plain, one_row(plain, 7, 1, 0), state_idx, [8])
    assert state_idx == {}
