"""The host path refuses wrong batches and names what is wrong, without changing anything.

That it plans what the device does is tested by the state machine of tests/align, which runs it beside the device.
"""

from types import SimpleNamespace

import pytest
from vllm_compat.rows import Scheduled, make_spec, one_row, raises, two_rows

from mamba_align_jax.vllm_compat import mamba_utils
from mamba_align_jax.vllm_compat.mamba_utils import (
    HostCopyPlan,
    cleanup_mamba_state_idx,
    collect_mamba_copy_meta,
    gather_state_indices,
    postprocess_mamba,
    preprocess_mamba,
)
from mamba_align_jax.vllm_compat.staging import (
    postprocess_mamba_align_gpu,
    stage_mamba_state_idx_to_gpu,
    stage_postprocess_metadata_to_gpu,
)
from pallas_kernels import NULL_BLOCK

BAD_BATCHES = {
    "num_computed_tokens must describe 2 rows, got 1": dict(num_computed_tokens=[0]),
    "num_scheduled_tokens must describe 2 rows, got 3": dict(num_scheduled_tokens=[1, 1, 1]),
    "num_draft_tokens must describe 2 rows, got 0": dict(num_draft_tokens=[]),
    "block_rows[1] must describe 2 rows, got 1": dict(block_rows=[[[1], [2]], [[1]]]),
    "block_rows must have 2 groups, got 1": dict(block_rows=[[[1], [2]]]),
    "req_ids must be at most max_num_seqs = 12, got 13": dict(req_ids=range(13)),
    "request 'a': is in the batch twice": dict(req_ids=["a", "a"]),
    "request 'a': must have at most 48 tokens, got -1 computed and 3 scheduled": dict(num_computed_tokens=[-1, 6]),
    "request 'b': must have at most 48 tokens, got 46 computed and 3 scheduled": dict(num_computed_tokens=[0, 46]),
    "request 'a': must have at most 48 tokens, got 0 computed and -3 scheduled": dict(num_scheduled_tokens=[-3, 3]),
    "request 'b': num_draft_tokens must be in [-1, 2], got 3": dict(num_draft_tokens=[-1, 3]),
    "request 'b': a verify row with 1 drafts must have 2 tokens, got 3": dict(num_draft_tokens=[-1, 1]),
}


@pytest.mark.parametrize("message", BAD_BATCHES)
def test_bad_batches_are_refused(message):
    align, bad, state_idx = make_spec(4, 2), two_rows(**BAD_BATCHES[message]), {"b": 1}
    for call in (
        lambda: preprocess_mamba(align, Scheduled(["b"]), bad, state_idx, [1, 1]),
        lambda: gather_state_indices(align, bad, state_idx, [1, 1], 2),
        lambda: postprocess_mamba(align, bad, state_idx, [1, 1]),
    ):
        with raises(message):
            call()
        assert state_idx == {"b": 1}


def test_a_request_may_enter_without_tokens():
    align, state_idx = make_spec(4, 2), {"a": 5}
    plan, accepted = preprocess_mamba(align, Scheduled((), None, ["a"]), one_row(align, 8, 0, -1), state_idx, [3])
    assert plan.is_empty
    assert (accepted.tolist(), state_idx) == ([1], {"a": 1})


def test_preprocess_refuses_wrong_rows():
    align, good = make_spec(4, 2), two_rows()
    no_block = two_rows(block_rows=[[[1, 2, 3, 4]] * 2, [[1, 2, 3, 4], [1, 2]]])
    for other, batch, accepted, message in [
        (align, good, [1], "num_accepted_tokens must describe 2 rows, got 1"),
        (align, good, [1, 0], "request 'b': num_accepted_tokens must be in [1, 3], got 0"),
        (align, good, [1, 4], "request 'b': num_accepted_tokens must be in [1, 3], got 4"),
        (
            align,
            two_rows(req_ids=["b", "a"]),
            [1, 1],
            "request 'a' enters: num_computed_tokens must be a multiple of 4",
        ),
        (align, no_block, [1, 1], "request 'b' must have a block in column 2 of group 1, got none"),
        (make_spec(4, 2, "all"), good, [1, 1], "policy 'pre_copy', got 'all' and 'pre_copy'"),
        (make_spec(4, 2, policy="copy_free"), good, [1, 1], "policy 'pre_copy', got 'align' and 'copy_free'"),
    ]:
        state_idx = {"b": 1, "gone": 3}
        with raises(message):
            preprocess_mamba(other, Scheduled(["gone"]), batch, state_idx, accepted)
        assert state_idx == {"b": 1, "gone": 3}


def test_later_functions_refuse_wrong_rows():
    align, good, state_idx = make_spec(4, 2), two_rows(), {"a": 0, "b": 2}
    with raises("gather_state_indices: bucket must be at least 2 rows, got 1"):
        gather_state_indices(align, good, state_idx, [1, 1], 1)
    with raises("gather_state_indices: request 'b' must have a running column: run preprocess_mamba"):
        gather_state_indices(align, good, {"a": 0}, [1, 1], 2)
    with raises("gather_state_indices: request 'a' must have a block in column 0 of group 0, got none"):
        gather_state_indices(align, two_rows(block_rows=[[[], [1, 2, 3, 4]]] * 2), state_idx, [1, 1], 2)
    for other in ({"a": 0}, {"a": 0, "b": 1}):
        with raises("postprocess_mamba: request 'b' must have a running column: run preprocess_mamba"):
            postprocess_mamba(align, good, other, [1, 1])
    for sampled, message in [
        ([1], "num_sampled must describe 2 rows, got 1"),
        ([2, 1], "request 'a': num_sampled must be in [0, 1], got 2"),
        ([1, 4], "request 'b': num_sampled must be in [0, 3], got 4"),
        ([1, -1], "request 'b': num_sampled must be in [0, 3], got -1"),
    ]:
        with raises(message):
            postprocess_mamba(align, good, state_idx, sampled)
    with raises("stage_mamba_state_idx_to_gpu: request 'b' must have a running column: run preprocess_mamba"):
        stage_mamba_state_idx_to_gpu({"a": 0}, good.req_ids, 2)
    with raises("stage_postprocess_metadata_to_gpu: bucket must be at least 2 rows, got 1"):
        stage_postprocess_metadata_to_gpu(good, 1)
    with raises("postprocess_mamba_align_gpu: mode must be 'none' or 'align', got 'all'"):
        postprocess_mamba_align_gpu(make_spec(4, 2, "all"), None, None, None, None)


def test_a_refused_copy_leaves_the_plan_unchanged():
    align = make_spec(4, 2)
    plan, batch = (
        HostCopyPlan.empty(align),
        two_rows(block_rows=[[[1, 2, 3, 4]] * 2, [[1, 2, 3], [1, 2, 3, NULL_BLOCK]]]),
    )
    for row, name in enumerate("ab"):
        with raises(f"collect_mamba_copy_meta: request '{name}' must have a block in column 3 of group 1, got none"):
            collect_mamba_copy_meta(plan, batch, row, 1, 0, 2)
    assert plan.is_empty
    # A copy that moves nothing needs no block.
    collect_mamba_copy_meta(plan, batch, 0, 7, 7, 0)
    assert plan.is_empty
    collect_mamba_copy_meta(plan, batch, 1, 1, 0, 1)
    assert [x[..., 1].tolist() for x in plan] == [[3, 3], [2, 2], 1, [1, 1]]


def test_cleanup_removes_finished_preempted_and_resumed_requests():
    state_idx = dict.fromkeys("abcde", 1)
    cleanup_mamba_state_idx(Scheduled(["a", "x"], {"b"}, ["c"]), state_idx)
    assert state_idx == {"d": 1, "e": 1}
    cleanup_mamba_state_idx(
        SimpleNamespace(finished_req_ids=["d"], preempted_req_ids=None, resumed_req_ids=[]), state_idx
    )
    assert state_idx == {"e": 1}


def test_null_block_is_the_same_number_as_in_pallas_kernels():
    assert mamba_utils.NULL_BLOCK == NULL_BLOCK
