"""Sequences of steps worked out by hand, with block_size 4, K = 2 and width 4. They name columns, not block ids."""

from types import SimpleNamespace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.tokens import to_numpy

from mamba_align_jax import (
    Additions,
    AlignConfig,
    AlignState,
    BlockTables,
    ConvState,
    GroupSpec,
    RecurrentState,
    StepBatch,
    add_requests,
    begin_step,
)
from mamba_align_jax.align.step import plan_finish
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.vllm_compat.mamba_utils import gather_state_indices, postprocess_mamba, preprocess_mamba

GROUP = GroupSpec("layers", 1, (ConvState(4, 1), RecurrentState((1, 1))))
# The block of column c is FIRST + c, so that an id shows its column.
FIRST = 10


class Copy(NamedTuple):
    """A copy: the columns of the recurrent and conv sources, the first window row, and the destination column."""

    recurrent: int
    conv: int
    row: int
    to: int


class Read(NamedTuple):
    """A read: the columns of the recurrent state and the conv window, and the first window row."""

    recurrent: int
    conv: int
    row: int


class Step(NamedTuple):
    """One step. `accepted` is 0 for a prefill chunk. `read` is where copy_free reads, `before` what pre_copy copies."""

    nc: int
    q: int
    accepted: int
    column: int
    read: Read | None
    before: Copy | None = None
    after: Copy | None = None
    # The accepted count that the slot keeps, or 0 for `accepted`. It is 1 if a state was saved onto its own column.
    left: int = 0


class Enter(NamedTuple):
    """A request enters the slot with `nc` computed tokens. `column` is then its running column."""

    nc: int
    column: int


PROMPT_6 = (
    Enter(0, -1),
    Step(0, 4, 0, 0, None),
    Step(4, 2, 0, 1, Read(0, 0, 0), Copy(0, 0, 0, 1)),
)

EXAMPLES = {
    "a: fresh prompt of 7, its first decode step ends on a boundary": (
        Enter(0, -1),
        Step(0, 4, 0, 0, None),
        Step(4, 3, 0, 1, Read(0, 0, 0), Copy(0, 0, 0, 1)),
        Step(7, 3, 1, 2, Read(1, 1, 0), Copy(1, 1, 0, 2), Copy(2, 2, 0, 1)),
        Step(8, 3, 2, 2, Read(2, 2, 0)),
        Step(10, 3, 1, 3, Read(3, 2, 1), Copy(3, 2, 1, 3)),
    ),
    "b: a prompt of exactly two blocks": (
        Enter(0, -1),
        Step(0, 4, 0, 0, None),
        Step(4, 4, 0, 1, Read(0, 0, 0), Copy(0, 0, 0, 1)),
        Step(8, 3, 1, 2, Read(1, 1, 0), Copy(1, 1, 0, 2)),
    ),
    "c: chunks of two blocks skip columns": (
        Enter(0, -1),
        Step(0, 8, 0, 1, None),
        Step(8, 8, 0, 3, Read(1, 1, 0), Copy(1, 1, 0, 3)),
        Step(16, 2, 0, 4, Read(3, 3, 0), Copy(3, 3, 0, 4)),
        Step(18, 3, 1, 5, Read(4, 4, 0), Copy(4, 4, 0, 5)),
    ),
    "e, g: the second accepted token ends on a boundary of the column before": (
        *PROMPT_6,
        Step(6, 3, 2, 2, Read(1, 1, 0), Copy(1, 1, 0, 2), Copy(3, 2, 1, 1)),
        # The next step does not read the block of the boundary.
        Step(8, 3, 2, 2, Read(3, 2, 1)),
        # The window moves, but no recurrent state.
        Step(10, 3, 1, 3, Read(3, 2, 1), Copy(3, 2, 1, 3)),
        Step(11, 3, 3, 3, Read(3, 3, 0), None, Copy(3, 3, 0, 2)),
        Step(14, 3, 1, 4, Read(5, 3, 2), Copy(5, 3, 2, 4)),
    ),
    "f: the last accepted token ends on the running column's own boundary": (
        Enter(0, -1),
        Step(0, 4, 0, 0, None),
        Step(4, 1, 0, 1, Read(0, 0, 0), Copy(0, 0, 0, 1)),
        Step(5, 3, 3, 1, Read(1, 1, 0), None, Copy(3, 1, 2, 1), left=1),
        Step(8, 3, 1, 2, Read(1, 1, 0), Copy(1, 1, 0, 2)),
    ),
    "h: everything is accepted, again and again": (
        Enter(0, -1),
        Step(0, 4, 0, 0, None),
        Step(4, 3, 0, 1, Read(0, 0, 0), Copy(0, 0, 0, 1)),
        Step(7, 3, 3, 2, Read(1, 1, 0), Copy(1, 1, 0, 2), Copy(2, 2, 0, 1)),
        Step(10, 3, 3, 3, Read(4, 2, 2), Copy(4, 2, 2, 3), Copy(4, 3, 1, 2)),
        Step(13, 3, 3, 3, Read(5, 3, 2), None, Copy(5, 3, 2, 3), left=1),
        Step(16, 3, 1, 4, Read(3, 3, 0), Copy(3, 3, 0, 4)),
    ),
    "i: a prompt of 11 of which 8 tokens are cached": (
        Enter(8, 1),
        Step(8, 3, 0, 2, Read(1, 1, 0), Copy(1, 1, 0, 2)),
        Step(11, 3, 1, 3, Read(2, 2, 0), Copy(2, 2, 0, 3), Copy(3, 3, 0, 2)),
    ),
    "j: preempted after 10 tokens, resumed from 4, and once more from none": (
        *PROMPT_6,
        Step(6, 3, 2, 2, Read(1, 1, 0), Copy(1, 1, 0, 2), Copy(3, 2, 1, 1)),
        Step(8, 3, 2, 2, Read(3, 2, 1)),
        Enter(4, 0),
        Step(4, 4, 0, 1, Read(0, 0, 0), Copy(0, 0, 0, 1)),
        Step(8, 3, 0, 2, Read(1, 1, 0), Copy(1, 1, 0, 2)),
        Step(11, 3, 2, 3, Read(2, 2, 0), Copy(2, 2, 0, 3), Copy(3, 3, 0, 2)),
        Enter(0, -1),
        Step(0, 4, 0, 0, None),
    ),
}
# d: with K = 0 nothing is ever saved. A boundary's column is not written any more when the next column is running.
PLAIN_DECODE = (
    Enter(0, -1),
    Step(0, 4, 0, 0, None),
    Step(4, 1, 0, 1, Read(0, 0, 0), Copy(0, 0, 0, 1)),
    Step(5, 1, 1, 1, Read(1, 1, 0)),
    Step(6, 1, 1, 1, Read(1, 1, 0)),
    Step(7, 1, 1, 1, Read(1, 1, 0)),
    Step(8, 1, 1, 2, Read(1, 1, 0), Copy(1, 1, 0, 2)),
)


def the_copy(plan):
    """Returns the plan's only row as columns, or None if it moves nothing."""
    if plan is None or plan.destination[0, 0] == 0:
        return None
    recurrent, conv, to = (int(x[0, 0]) - FIRST for x in (plan.recurrent_source, plan.conv_source, plan.destination))
    row = int(plan.window_row[0])
    return None if recurrent == conv == to and row == 0 else Copy(recurrent, conv, row, to)


def slot_of(state, slot):
    return tuple(int(x[slot]) for x in (state.num_computed_tokens, state.num_accepted_tokens, state.running_column))


def walk(policy, K, steps):
    align = AlignConfig((GROUP,), 4, K, max_num_seqs=2, max_model_len=40, policy=policy)
    state = AlignState.create(align)
    columns = jnp.arange(FIRST, FIRST + align.num_columns, dtype=jnp.int32)
    tables = BlockTables(blocks=jnp.broadcast_to(columns, (1, 2, align.num_columns)))
    for number, step in enumerate(steps):
        where = f"step {number}"
        if isinstance(step, Enter):
            state = add_requests(state, Additions.from_host(align, 2, [1], [step.nc]))
            assert slot_of(state, 1) == (step.nc, 1, step.column), where
            continue
        drafts = -1 if step.accepted == 0 else step.q - 1
        batch = StepBatch.from_host(align, 1, [1], [0, step.q], [drafts])
        state, indices = begin_step(align, state, batch, tables)
        state, plan = plan_finish(align, state, batch, indices, jnp.array([step.accepted]), tables)
        at, plan = to_numpy(indices), to_numpy(plan)

        assert at.num_computed_tokens[0] == step.nc, where
        assert at.running_column[0] == step.column, where
        np.testing.assert_array_equal(at.write[0, 0] - FIRST, step.column + np.arange(1 + K), err_msg=where)
        assert the_copy(at.migration) == (step.before if policy == "pre_copy" else None), where
        read = Read(int(at.recurrent_read[0, 0]) - FIRST, int(at.conv_read[0, 0]) - FIRST, int(at.window_row[0]))
        if step.read is None:
            assert not at.has_initial_state[0], where
            assert at.recurrent_read[0, 0] == at.conv_read[0, 0] == at.window_row[0] == 0, where
        else:
            moved = policy == "pre_copy" and step.before is not None
            assert read == (Read(step.column, step.column, 0) if moved else step.read), where
        assert the_copy(plan) == step.after, where
        assert state.num_accepted_tokens[1] == (step.left or max(step.accepted, 1)), where
    assert slot_of(state, 0) == (0, 1, -1)


@pytest.mark.parametrize("policy", ["copy_free", "pre_copy"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example, policy):
    walk(policy, 2, EXAMPLES[example])


@pytest.mark.parametrize("policy", ["copy_free", "pre_copy"])
def test_example_d_plain_decode(policy):
    walk(policy, 0, PLAIN_DECODE)


def walk_on_the_host(K, steps):
    align = AlignConfig((GROUP,), 4, K, max_num_seqs=1, max_model_len=40, policy="pre_copy")
    columns, running_columns, accepted, resumed = range(FIRST, FIRST + align.num_columns), {}, [1], ()
    for number, step in enumerate(steps):
        where = f"step {number}"
        if isinstance(step, Enter):
            resumed = ["r"]
            continue
        batch = SimpleNamespace(
            req_ids=["r"],
            num_computed_tokens=[step.nc],
            num_scheduled_tokens=[step.q],
            num_draft_tokens=[-1 if step.accepted == 0 else step.q - 1],
            block_rows=[[columns]],
        )
        scheduled = SimpleNamespace(finished_req_ids=(), preempted_req_ids=None, resumed_req_ids=resumed)
        plan, accepted = preprocess_mamba(align, scheduled, batch, running_columns, accepted)
        assert the_copy(plan) == step.before, where
        assert running_columns == {"r": step.column}, where
        at = gather_state_indices(align, batch, running_columns, accepted, 1)
        if step.read is None:
            assert not at.has_initial_state[0], where
        else:
            read = Read(int(at.recurrent_read[0, 0]) - FIRST, int(at.conv_read[0, 0]) - FIRST, int(at.window_row[0]))
            assert read == (step.read if step.before is None else Read(step.column, step.column, 0)), where
        np.testing.assert_array_equal(at.write[0, 0] - FIRST, step.column + np.arange(1 + K), err_msg=where)
        plan, accepted = postprocess_mamba(align, batch, running_columns, [step.accepted])
        assert the_copy(plan) == step.after, where
        assert accepted[0] == (step.left or max(step.accepted, 1)), where
        resumed = ()


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_on_the_host(example):
    walk_on_the_host(2, EXAMPLES[example])


def test_example_d_on_the_host():
    walk_on_the_host(0, PLAIN_DECODE)


# k: the prompt of 6 again, with drafts from 6 on. Each entry has the smallest and the largest number of tokens that may
# have been computed, as far as the host knows; the tokens and the drafts of the step; the columns held after its
# dispatch; and the tokens computed after it. Columns are released when a step's result was read and another step was
# dispatched.
AT_ONCE = [
    (0, 0, 4, 0, {0}, 4),
    (4, 4, 2, 0, {1}, 6),
    (6, 6, 3, 2, {1, 2, 3, 4}, 8),
    (8, 8, 3, 2, {2, 3, 4}, 10),
    (10, 10, 3, 2, {2, 3, 4, 5}, 11),
    (11, 11, 3, 2, {2, 3, 4, 5}, 14),
    (14, 14, 3, 2, {3, 4, 5, 6}, 15),
]
ONE_UNREAD_STEP = [
    (0, 0, 4, 0, {0}, 4),
    (4, 4, 2, 0, {0, 1}, 6),
    (6, 6, 3, 2, {1, 2, 3, 4}, 8),
    (7, 9, 3, 2, {1, 2, 3, 4}, 10),
    (9, 11, 3, 2, {2, 3, 4, 5}, 11),
    (11, 13, 3, 2, {2, 3, 4, 5}, 14),
    (12, 14, 3, 2, {2, 3, 4, 5, 6}, 15),
]


@pytest.mark.parametrize("num_unread", [0, 1])
def test_example_k_columns_are_released_a_step_later_if_the_host_lags(num_unread):
    manager, unread = StateBlockManager(9, 4, 2), []
    for low, high, q, drafts, held, after in ONE_UNREAD_STEP if num_unread else AT_ONCE:
        assert manager.allocate("r", low, high, q, drafts) is not None
        manager.release("r")
        assert manager.columns("r").keys() == held
        unread.append(after)
        if len(unread) > num_unread:
            manager.commit("r", range(unread.pop(0)))
