"""Policy "deferred": the step that folds a boundary writes its window, and nothing is copied. With real ops."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from fakes.deferred_layers import BLOCK, CHANNELS, GROUP, STATES, WIDTH, Server, inputs_of, make_spec

from mamba_align_jax import (
    AlignState,
    BlockTables,
    ConvState,
    Corrections,
    GroupSpec,
    StatePool,
    StepBatch,
    begin_step,
    correct_counts,
    finish_step,
    split_rows,
)

SPECS = {
    layout: make_spec(
        groups=(GroupSpec("gdn", 2, (ConvState(WIDTH, CHANNELS, "float32", layout), STATES[1]), GROUP.ring),)
    )
    for layout in ("SD", "DS")
}
# How a slot passes the boundary at 16: the tokens of its first chunk, then verify rows (tokens, accepted), and corrections
# (count,) to a smaller number of tokens.
PATHS = {
    "a row ends on the boundary": (12, (4, 4)),
    "a row ends on the boundary after rejected drafts": (13, (4, 3)),
    "no draft is accepted": (15, (4, 1)),
    "a row jumps over the boundary": (13, (4, 4)),
    "a row ends far after the boundary": (15, (4, 4)),
    "rejected back before the boundary": (14, (4, 1), (4, 2)),
    "rejected twice": (13, (4, 1), (4, 1), (3, 3)),
    "corrected back before the boundary": (13, (4, 4), (15,), (4, 4)),
    "corrected back from the boundary": (12, (4, 4), (14,), (4, 4)),
    "corrected back to the boundary": (13, (4, 4), (16,)),
    "a decode row ends on the boundary": (12, (4, 3), (1, 1)),
}
# What comes next and folds the boundary.
NEXT = ["verify", "decode", "chunk", "fold"]


def walk(server, slot, sequence, path):
    """Runs a path and returns the computed tokens after it."""
    server.enter(slot, sequence)
    assert server.step([], chunk=(slot, path[0])) == 0
    for step in path[1:]:
        if len(step) == 1:
            corrections = Corrections.from_host(server.align, 1, [slot], step)
            server.state, refused = correct_counts(server.state, corrections)
            assert refused == 0
        else:
            assert server.step([(slot, *step)]) == 0
    return int(server.state.num_computed_tokens[slot])


def window(sequence, end):
    return np.stack([sequence[end - WIDTH + 1 : end, :CHANNELS]] * 2)


@functools.cache
def whole(seed):
    """The outputs of a sequence that ran as two chunks."""
    server = Server()
    server.enter(0, inputs_of(seed))
    server.step([], chunk=(0, 33))
    server.step([], chunk=(0, 33))
    return server.outputs[0]


@pytest.mark.parametrize("layout", SPECS)
@pytest.mark.parametrize("following", NEXT)
@pytest.mark.parametrize("path", PATHS)
def test_a_boundary_has_its_window_once_it_is_folded(path, following, layout):
    server, sequence, slot = Server(1, SPECS[layout]), inputs_of(10), 1
    computed = walk(server, slot, sequence, PATHS[path])
    assert BLOCK <= computed < BLOCK + 4
    # The base is a boundary of a fold group, or the end of the first chunk.
    assert server.state.state_pos[slot] < BLOCK
    if following == "fold":
        server.fold(slot)
    elif following == "chunk":
        assert server.step([], chunk=(slot, 5), migrates=True) == 0
    else:
        assert server.step([(slot, 4, 2) if following == "verify" else (slot, 1, 1)]) == 0
    kept, state = server.boundary(slot, BLOCK)
    np.testing.assert_array_equal(kept, window(sequence, BLOCK))
    assert np.isfinite(state).all()
    # The request goes on from its own window, and another one from the boundary.
    server.enter(2, sequence, computed=BLOCK, like=slot)
    for step in ((4, 1), (4, 4), (2, 2)):
        assert server.step([(n, *step) for n in (slot, 2)]) == 0
    for outputs in (server.outputs[n] for n in server.sequences):
        for at, output in outputs.items():
            np.testing.assert_allclose(output, whole(10)[at], rtol=0, atol=1e-5, err_msg=f"position {at}")


def test_a_preempted_request_resumes_from_the_boundary_that_it_folded_at_its_end():
    """Its slot and its other blocks go to another request before it returns."""
    server, sequence = Server(2), inputs_of(11)
    walk(server, 0, sequence, PATHS["a row ends on the boundary"])
    server.fold(0)
    boundary = server.boundary(0, BLOCK)
    kept_block = server.blocks[0, 0]
    server.blocks[0, 0] = 60
    walk(server, 0, inputs_of(12), PATHS["a row jumps over the boundary"])
    server.blocks[1, 0] = kept_block
    server.enter(1, sequence, computed=BLOCK, like=1)
    for _ in range(3):
        assert server.step([(1, 4, 3), (0, 4, 1)]) == 0
    for mine, before in zip(server.boundary(1, BLOCK), boundary, strict=True):
        np.testing.assert_array_equal(mine, before)
    for at, output in server.outputs[1].items():
        np.testing.assert_allclose(output, whole(11)[at], rtol=0, atol=1e-5)


def test_a_chunk_keeps_its_own_boundary_and_not_that_of_a_verify_row_beside_it():
    """Both rows read their windows in the boundary's block. That of the verify row must not move before it is read."""
    server = Server(5)
    for slot in (0, 1):
        walk(server, slot, inputs_of(16 + slot), PATHS["a row ends on the boundary"])
    assert server.step([(0, 4, 4)], chunk=(1, 5), migrates=True) == 0
    for slot in (0, 1):
        np.testing.assert_array_equal(server.boundary(slot, BLOCK)[0], window(inputs_of(16 + slot), BLOCK))
        for at, output in server.outputs[slot].items():
            np.testing.assert_allclose(output, whole(16 + slot)[at], rtol=0, atol=1e-5)


def test_a_fold_of_other_slots_moves_no_window():
    """Slot 0 is on the boundary, but only slot 1 is folded; padding must not move the window of slot 0."""
    server = Server(3)
    for slot, path in enumerate(("a row ends on the boundary", "a row jumps over the boundary")):
        walk(server, slot, inputs_of(13 + slot), PATHS[path])
    before = server.state
    server.fold(1)
    assert server.state.num_accepted_tokens.tolist() == before.num_accepted_tokens.tolist()
    assert server.state.num_accepted_tokens[0] == 4
    server.fold(0)
    assert server.state.num_accepted_tokens[0] == 1
    for slot in (0, 1):
        np.testing.assert_array_equal(server.boundary(slot, BLOCK)[0], window(inputs_of(13 + slot), BLOCK))


@pytest.mark.parametrize("policy", ["copy_free", "pre_copy", "deferred"])
@pytest.mark.parametrize(("mode", "K"), [("align", 3), ("align", 0), ("none", 3)])
def test_only_deferred_steps_with_drafts_keep_windows(mode, K, policy):
    align = make_spec(mode=mode, num_speculative_tokens=K, policy=policy)
    batch = StepBatch.from_host(align, 2, [0, 2], [0, 1, 2], [0, 0])
    state, tables = AlignState.create(align), BlockTables.create(align)
    _, indices = begin_step(align, state, batch, tables)
    keeps = policy == "deferred" and mode == "align" and K > 0
    assert (split_rows(batch, indices, 2).decode.boundary is not None) == keeps


@pytest.mark.parametrize("num_sampled", [None, 1, jnp.array([3, 4])], ids=["None", "int", "array"])
def test_finish_step_returns_the_pool_that_it_is_given(num_sampled):
    align = make_spec()
    batch = StepBatch.from_host(align, 2, [0, 2], [0, 4, 8], [3, 3])
    state, tables, pool = AlignState.create(align), BlockTables.create(align), StatePool.create(align, 8)
    state, indices = begin_step(align, state, batch, tables)
    _, after = finish_step(align, state, pool, batch, indices, num_sampled, tables)
    assert after is pool


def test_no_slot_goes_back_before_a_boundary_that_was_folded():
    """Its state is at the boundary, and the entries before it are not read any more."""
    server = Server(4)
    assert walk(server, 0, inputs_of(15), PATHS["a row jumps over the boundary"]) == BLOCK + 1
    server.fold(0)
    for count, refusals in ((BLOCK - 1, 1), (BLOCK, 0)):
        corrections = Corrections.from_host(server.align, 1, [0], [count])
        server.state, refused = correct_counts(server.state, corrections)
        assert refused == refusals
    assert server.state.num_computed_tokens[0] == BLOCK
    assert server.step([(0, 4, 4)]) == 0
    for at in range(BLOCK, BLOCK + 4):
        np.testing.assert_allclose(server.outputs[0][at], whole(15)[at], rtol=0, atol=1e-5)
