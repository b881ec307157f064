"""The host path on its own: mode "all", what it refuses, its copies, and that its arrays outlive the host's buffers."""

import collections
import functools
import itertools
import random
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from align.model import Pool, Row, last_inputs
from hypothesis import given
from hypothesis import strategies as st
from vllm_compat.host_path import Batch, Scheduled

from mamba_align_jax import (
    AlignConfig,
    BlockTables,
    ConvState,
    GroupSpec,
    RecurrentState,
    StatePool,
)
from mamba_align_jax.align import columns
from mamba_align_jax.align.interior import prefill_checkpoints
from mamba_align_jax.vllm_compat import mamba_utils as host
from mamba_align_jax.vllm_compat.mamba_utils import (
    HostCopyPlan,
    cleanup_mamba_state_idx,
    collect_mamba_copy_meta,
    gather_state_indices,
    postprocess_mamba,
    postprocess_mamba_all,
    preprocess_mamba,
)
from mamba_align_jax.vllm_compat.staging import (
    AcceptedTokens,
    do_mamba_copy_block,
    postprocess_mamba_align_gpu,
    stage_mamba_state_idx_to_gpu,
    stage_postprocess_inputs_to_gpu,
    stage_postprocess_metadata_to_gpu,
)
from pallas_kernels import NULL_BLOCK, causal_conv1d_prefill

SLOTS, WIDTH = 12, 4
STATES = ConvState(WIDTH, 1, "float32"), RecurrentState((1, 1))


def make_spec(block_size, K, mode="align", **changes):
    # Two groups: ids of the second mirror those of the first, so that a mixed-up group can't go unseen.
    fields = dict(max_num_seqs=SLOTS, max_model_len=7 * block_size + 20, mode=mode, policy="pre_copy") | changes
    return AlignConfig((GroupSpec("a", 1, STATES), GroupSpec("b", 1, STATES)), block_size, K, **fields)


# Random schedules in mode "all"; the state machine drives the others.


@dataclass(eq=False)
class Request:
    """`prompt` is what prefill runs up to."""

    req_id: str
    slot: int
    prompt: tuple
    computed: tuple = ()
    held: dict = field(default_factory=dict)


class Server:
    """A naive scheduler over one pool of literal tokens. It reads every result before the next step."""

    def __init__(self, spec, num_blocks, rng):
        self.spec, self.rng, self.size, self.num_blocks = spec, rng, spec.state_block_size, num_blocks
        self.K, self.bs = spec.num_speculative_tokens, spec.block_size
        self.pool = Pool(num_blocks, WIDTH, self.K, self.size)
        self.free = list(range(1, num_blocks))
        self.cached = {}
        self.running, self.waiting = [], []
        self.tables = np.zeros((2, spec.max_num_seqs, spec.num_columns), np.int32)
        self.tokens, self.ids = itertools.count(), itertools.count()
        self.events = collections.Counter()

    def fresh(self, n):
        return tuple(itertools.islice(self.tokens, n))

    def enter(self, req_id, prompt):
        """Takes the longest cached prefix of the prompt; whatever the slot's row of blocks held before stays in it."""
        slot = min(set(range(self.spec.max_num_seqs)) - {request.slot for request in self.running})
        request = Request(req_id, slot, prompt)
        for block, tokens in self.cached.items():
            if len(request.computed) < len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens:
                request.computed, request.held = tokens, {len(tokens) // self.size - 1: block}
        self.events["prefix hits"] += bool(request.held)
        self.running.append(request)
        self.write_tables(request)

    def write_tables(self, request):
        for column, block in request.held.items():
            self.tables[:, request.slot, column] = block, self.num_blocks - block

    def let_go(self, request, columns):
        for column in columns:
            block = request.held.pop(column)
            if block not in self.cached and not any(block in other.held.values() for other in self.running):
                self.free.append(block)
                self.pool.scribble(block)

    def leave(self, request):
        self.let_go(request, list(request.held))
        self.running.remove(request)

    def schedule(self):
        """Who comes and goes."""
        rng, finished, preempted, resumed = self.rng, [], [], []
        for request in list(self.running):
            full = len(request.computed) + 1 >= self.spec.max_model_len
            if full or rng.random() < 0.03:
                self.leave(request)
                finished.append(request.req_id)
            elif rng.random() < 0.06:
                self.leave(request)
                again = request.computed + request.prompt[len(request.computed) :]
                # One that is resumed may never have been called preempted.
                if rng.random() < 0.5:
                    preempted.append(request.req_id)
                self.waiting.append((request.req_id, again or self.fresh(1)))
                self.events["preempted"] += 1
        rng.shuffle(self.waiting)
        while len(self.running) < self.spec.max_num_seqs and rng.random() < 0.6:
            if self.waiting and rng.random() < 0.5:
                req_id, prompt = self.waiting.pop()
                resumed.append(req_id)
            else:
                shared = rng.choice([(), *self.cached.values()])[: self.spec.max_model_len - 2]
                room = self.spec.max_model_len - 1 - len(shared)
                prompt = shared + self.fresh(rng.randint(1, min(room, 3 * self.bs + 2)))
                req_id = f"r{next(self.ids)}"
            self.enter(req_id, prompt)
        return Scheduled(finished, preempted or None, resumed)

    def row(self, request):
        """What a request does in this step."""
        rng, start = self.rng, len(request.computed)
        room = self.spec.max_model_len - start
        if rng.random() < 0.15 or room == 0:
            return Row(request.slot, request.computed, (), rng.randint(-1, self.K), held=request.held)
        if start >= len(request.prompt) and rng.random() < 0.1:
            # The conversation goes on: a chunk that follows a verify step.
            request.prompt = request.computed + self.fresh(rng.randint(1, min(room, 2 * self.bs)))
        inputs, drafts, accepted = request.prompt[start:], -1, 1
        if inputs:
            to_boundary = rng.randint(1, 3) * self.bs - start % self.bs
            inputs = inputs[: min(room, rng.choice([to_boundary, rng.randint(1, 2 * self.bs)]))]
        else:
            drafts, inputs = (self.K, self.fresh(1 + self.K)) if room > self.K else (-1, self.fresh(1))
        if drafts >= 0:
            accepted = rng.choice([1, 1 + drafts, rng.randint(1, 1 + drafts)])
        return Row(request.slot, request.computed, inputs, drafts, accepted, request.held)

    def allocate(self, row):
        computed, q = len(row.before), len(row.inputs)
        last = (computed + q - 1) // self.size + (self.K if row.drafts >= 0 else 0)
        wanted = range(computed // self.size, last + 1)
        new = {column: self.free.pop() for column in wanted if column not in row.held}
        row.held.update(new)

    def step(self):
        """The requests of the batch with their rows."""
        requests = [request for request in self.running if self.rng.random() < 0.9]
        self.rng.shuffle(requests)
        rows = [self.row(request) for request in requests]
        for request, row in zip(requests, rows, strict=True):
            if row.inputs:
                self.allocate(row)
                self.write_tables(request)
        return requests, rows

    def batch(self, requests, rows):
        return Batch(
            [request.req_id for request in requests],
            [len(row.before) for row in rows],
            [len(row.inputs) for row in rows],
            [row.drafts for row in rows],
            self.tables[:, [row.slot for row in rows]].copy(),
        )

    def finish(self, requests, rows):
        for request, row in zip(requests, rows, strict=True):
            if row.inputs:
                # Of the step before this one: until then its state may have been there.
                self.let_go(request, [c for c in request.held if c < len(row.before) // self.size])
                request.computed = row.after
                self.publish(request, row)
        held = {block for request in self.running for block in request.held.values()}
        for block in self.rng.sample(sorted(self.cached.keys() - held), max(0, len(self.cached.keys() - held) - 6)):
            del self.cached[block]
            self.free.append(block)
            self.pool.scribble(block)

    def boundaries(self, row):
        """Where the row leaves a state that others may continue."""
        return [b for b in range(len(row.before) + 1, len(row.after) + 1) if b % self.size == 0 and row.drafts < 0]

    def publish(self, request, row):
        for boundary in self.boundaries(row):
            prefix = row.after[:boundary]
            if self.rng.random() < 0.6 and prefix not in self.cached.values():
                self.cached[request.held[boundary // self.size - 1]] = prefix


def mirrored(tree, num_blocks):
    """The second group's ids are the first one's, mirrored."""
    for array in jax.tree.leaves(tree):
        if array.ndim > 1:
            np.testing.assert_array_equal(array[1], np.where(array[0] > 0, num_blocks - array[0], 0))


def run_all(block_size, K, steps):
    rng = random.Random(f"{block_size} {K} all")
    spec = make_spec(block_size, K, "all")
    server = Server(spec, 1 + SLOTS * (K + 9) + 60, rng)
    state_idx, counts, events, pool = {}, AcceptedTokens(), server.events, server.pool
    for _ in range(steps):
        scheduled = server.schedule()
        requests, rows = server.step()
        batch = server.batch(requests, rows)
        cleanup_mamba_state_idx(scheduled, state_idx)
        accepted = counts.reorder(scheduled, batch.req_ids)
        indices = gather_state_indices(spec, batch, state_idx, accepted, SLOTS)
        mirrored(indices, server.num_blocks)
        holders = collections.Counter(block for request in server.running for block in request.held.values())
        pool.start(rows, holders, server.cached)
        pool.forward(indices)
        for r, row in enumerate(rows):
            if row.drafts < 0:
                kept = prefill_checkpoints(len(row.before), len(row.inputs), block_size, batch.block_rows[0][r])
                for offset, block in zip(*kept, strict=True):
                    pool.check_write(block, r)
                    tokens = row.before + row.inputs[:offset]
                    pool.recurrent[block] = tokens
                    pool.conv[block] = last_inputs(tokens, WIDTH) + pool.conv[block][WIDTH - 1 :]
                events["interior"] += len(kept[0])
                events["chunk after verify"] += bool(row.inputs) and accepted[r] > 1
            else:
                events["anchored"] += requests[r].req_id in state_idx and accepted[r] > 1
        published = [max(server.boundaries(row), default=0) for row in rows]
        plan, accepted = postprocess_mamba(spec, batch, state_idx, [row.accepted for row in rows], published)
        assert plan.is_empty
        counts.expect(batch.req_ids, accepted)
        server.finish(requests, rows)
    return events


@pytest.mark.parametrize(("block_size", "K"), [(1, 0), (2, 1), (3, 2), (4, 1), (4, 3), (5, 0), (8, 3), (9, 8)])
def test_every_step_in_mode_all_reads_its_own_past(block_size, K):
    run_all(block_size, K, 100)


def test_the_schedules_in_mode_all_go_everywhere():
    wanted = {"prefix hits", "preempted", "interior", "chunk after verify", "anchored"}
    events = run_all(4, 3, 200)
    assert {event for event, times in events.items() if times >= 10} == wanted, events


def test_the_anchor_by_hand():
    # Blocks of 4, K = 3: a prompt of 6, then verify steps that accept 2 and 1.
    spec, state_idx, accepted = make_spec(4, 3, "all"), {}, 1
    for computed, tokens, drafts, sampled, anchor, read in [
        # Where there is no anchor, a count means nothing.
        (0, 6, -1, 3, None, None),
        (6, 4, 3, 2, 2, (1, 1, 0)),
        (8, 4, 3, 1, 2, (3, 2, 1)),
        (9, 4, 3, 4, 3, (2, 2, 0)),
        (13, 1, -1, 1, None, (6, 3, 3)),
        (14, 4, 3, 1, 4, (3, 3, 0)),
    ]:
        batch = one_row(spec, computed, tokens, drafts)
        before = gather_state_indices(spec, batch, state_idx, [accepted], 1)
        found = (before.recurrent_read[0, 0] - 1, before.conv_read[0, 0] - 1, before.window_row[0])
        assert (found if before.has_initial_state[0] else None) == read
        postprocess_mamba_all(spec, batch, state_idx)
        assert state_idx.get("a") == anchor
        accepted = sampled


def test_mode_all_refuses_what_would_lose_an_anchor():
    spec = make_spec(4, 3, "all")
    for batch, published, message in [
        (one_row(spec, 6, 3, 2), None, "request 'a': a verify row must have 4 tokens, got 3"),
        (one_row(spec, 6, 1, 0), None, "request 'a': a verify row must have 4 tokens, got 1"),
        (one_row(spec, 6, 4, 3), [8], "request 'a': a verify row must publish no boundary, got 8"),
        (one_row(spec, 6, 4, 3), [], "num_published_tokens must describe 1 rows, got 0"),
    ]:
        for function in (postprocess_mamba_all, functools.partial(postprocess_mamba, num_sampled=[1])):
            state_idx = {"a": 1, "b": 7}
            with raises(message):
                function(spec, batch, state_idx, num_published_tokens=published)
            assert state_idx == {"a": 1, "b": 7}
    with raises("postprocess_mamba_all: mode must be 'all', got 'align'"):
        postprocess_mamba_all(make_spec(4, 3), one_row(spec, 6, 4, 3), {})
    # Rows without tokens keep their anchor, and without drafts there is none to lose.
    state_idx = {"a": 1}
    postprocess_mamba_all(spec, one_row(spec, 6, 0, 2), state_idx, [0])
    assert state_idx == {"a": 1}
    plain, state_idx = make_spec(4, 0, "all"), {}
    postprocess_mamba_all(plain, one_row(plain, 7, 1, 0), state_idx, [8])
    assert state_idx == {}


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9), st.integers(0, 12))
def test_checkpoints_are_the_boundaries_inside_a_row(computed, tokens, block_size, columns):
    row = [100 + column for column in range(columns)]
    inside = [b for b in range(computed + 1, computed + tokens) if b % block_size == 0]
    offsets, blocks = prefill_checkpoints(computed, tokens, block_size, row)
    assert [computed + offset for offset in offsets] == inside
    assert blocks == [100 + b // block_size - 1 if b <= columns * block_size else NULL_BLOCK for b in inside]


def test_prefill_ops_take_the_checkpoints():
    x = jnp.arange(1.0, 11.0)[:, None]
    pool = jnp.full((1, 8, WIDTH - 1, 1), jnp.nan)
    # 10 tokens from position 3 on, in blocks of 4: boundaries 4, 8 and 12.
    offset, block = (jnp.array([kept], jnp.int32) for kept in prefill_checkpoints(3, 10, 4, [3, 4, 5, 6]))
    rows = [jnp.array(v, jnp.int32) for v in ([0, 10], [NULL_BLOCK], [0], [6])]
    _, pool = causal_conv1d_prefill(x, pool, 0, jnp.ones((WIDTH, 1)), None, *rows, offset, block)
    np.testing.assert_array_equal(pool[0, 3:7, :, 0], [[0, 0, 1], [3, 4, 5], [7, 8, 9], [8, 9, 10]])
    assert jnp.isnan(pool[0, [0, 1, 2, 7]]).all()


# What is refused.


def raises(message):
    return pytest.raises(ValueError, match=re.escape(message))


def one_row(spec, computed, scheduled, drafts, req_id="a", **changes):
    """The block of column c is c + 1."""
    rows = np.broadcast_to(np.arange(1, spec.num_columns + 1), (len(spec.groups), 1, spec.num_columns))
    return Batch([req_id], [computed], [scheduled], [drafts], rows)._replace(**changes)


def two_rows(**changes):
    rows = [[[1, 2, 3, 4]] * 2] * 2
    return Batch(["a", "b"], [0, 6], [3, 3], [-1, 2], rows)._replace(**changes)


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
    spec, bad, state_idx = make_spec(4, 2), two_rows(**BAD_BATCHES[message]), {"b": 1}
    for call in (
        lambda: preprocess_mamba(spec, Scheduled(["b"]), bad, state_idx, [1, 1]),
        lambda: gather_state_indices(spec, bad, state_idx, [1, 1], 2),
        lambda: postprocess_mamba(spec, bad, state_idx, [1, 1]),
    ):
        with raises(message):
            call()
        assert state_idx == {"b": 1}


def test_a_request_may_enter_without_tokens():
    spec, state_idx = make_spec(4, 2), {"a": 5}
    plan, accepted = preprocess_mamba(spec, Scheduled((), None, ["a"]), one_row(spec, 8, 0, -1), state_idx, [3])
    assert plan.is_empty
    assert (accepted.tolist(), state_idx) == ([1], {"a": 1})


def test_what_preprocess_refuses():
    spec, good = make_spec(4, 2), two_rows()
    no_block = two_rows(block_rows=[[[1, 2, 3, 4]] * 2, [[1, 2, 3, 4], [1, 2]]])
    for other, batch, accepted, message in [
        (spec, good, [1], "num_accepted_tokens must describe 2 rows, got 1"),
        (spec, good, [1, 0], "request 'b': num_accepted_tokens must be in [1, 3], got 0"),
        (spec, good, [1, 4], "request 'b': num_accepted_tokens must be in [1, 3], got 4"),
        (spec, two_rows(req_ids=["b", "a"]), [1, 1], "request 'a' enters: num_computed_tokens must be a multiple of 4"),
        (spec, no_block, [1, 1], "request 'b' must have a block in column 2 of group 1, got none"),
        (make_spec(4, 2, "all"), good, [1, 1], "policy 'pre_copy', got 'all' and 'pre_copy'"),
        (make_spec(4, 2, policy="copy_free"), good, [1, 1], "policy 'pre_copy', got 'align' and 'copy_free'"),
    ]:
        state_idx = {"b": 1, "gone": 3}
        with raises(message):
            preprocess_mamba(other, Scheduled(["gone"]), batch, state_idx, accepted)
        assert state_idx == {"b": 1, "gone": 3}


def test_what_comes_after_preprocess_refuses():
    spec, good, state_idx = make_spec(4, 2), two_rows(), {"a": 0, "b": 2}
    with raises("gather_state_indices: bucket must be at least 2 rows, got 1"):
        gather_state_indices(spec, good, state_idx, [1, 1], 1)
    with raises("gather_state_indices: request 'b' must have a running column: run preprocess_mamba"):
        gather_state_indices(spec, good, {"a": 0}, [1, 1], 2)
    with raises("gather_state_indices: request 'a' must have a block in column 0 of group 0, got none"):
        gather_state_indices(spec, two_rows(block_rows=[[[], [1, 2, 3, 4]]] * 2), state_idx, [1, 1], 2)
    for other in ({"a": 0}, {"a": 0, "b": 1}):
        with raises("postprocess_mamba: request 'b' must have a running column: run preprocess_mamba"):
            postprocess_mamba(spec, good, other, [1, 1])
    for sampled, message in [
        ([1], "num_sampled must describe 2 rows, got 1"),
        ([2, 1], "request 'a': num_sampled must be in [0, 1], got 2"),
        ([1, 4], "request 'b': num_sampled must be in [0, 3], got 4"),
        ([1, -1], "request 'b': num_sampled must be in [0, 3], got -1"),
    ]:
        with raises(message):
            postprocess_mamba(spec, good, state_idx, sampled)
    with raises("stage_mamba_state_idx_to_gpu: request 'b' must have a running column: run preprocess_mamba"):
        stage_mamba_state_idx_to_gpu({"a": 0}, good.req_ids, 2)
    with raises("stage_postprocess_metadata_to_gpu: bucket must be at least 2 rows, got 1"):
        stage_postprocess_metadata_to_gpu(good, 1)
    with raises("postprocess_mamba_align_gpu: mode must be 'none' or 'align', got 'all'"):
        postprocess_mamba_align_gpu(make_spec(4, 2, "all"), None, None, None, None)


def test_a_copy_without_blocks_leaves_the_plan_as_it_was():
    spec = make_spec(4, 2)
    plan, batch = (
        HostCopyPlan.empty(spec),
        two_rows(block_rows=[[[1, 2, 3, 4]] * 2, [[1, 2, 3], [1, 2, 3, NULL_BLOCK]]]),
    )
    for row, name in enumerate("ab"):
        with raises(f"collect_mamba_copy_meta: request '{name}' must have a block in column 3 of group 1, got none"):
            collect_mamba_copy_meta(plan, batch, row, 1, 0, 2)
    assert plan.is_empty
    # Nothing would move, so no block is asked for.
    collect_mamba_copy_meta(plan, batch, 0, 7, 7, 0)
    assert plan.is_empty
    collect_mamba_copy_meta(plan, batch, 1, 1, 0, 1)
    assert [x[..., 1].tolist() for x in plan] == [[3, 3], [2, 2], 1, [1, 1]]


def test_the_null_block_is_the_kernels():
    assert host.NULL_BLOCK == NULL_BLOCK


# The formulas, on whatever they are given.


@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 8), st.integers(1, 9), st.integers(1, 9))
def test_formulas_are_the_same_for_every_kind_of_integer(computed, tokens, drafts, accepted, block_size):
    def outcome(computed, tokens, drafts, accepted):
        column = columns.running_column(computed, tokens, block_size)
        certain = columns.certain_tokens(computed, tokens, drafts)
        save = columns.boundary_save(certain, columns.tokens_after(certain, accepted), block_size)
        return column, *save, columns.accepted_after_save(accepted, save.passed, save.target, column)

    numbers = computed, tokens, drafts, accepted
    wanted = outcome(*numbers)
    assert all(type(x) in (int, bool) for x in wanted)
    for kind in (np.int32, lambda n: np.array([n], np.int32)):
        assert [int(np.squeeze(x)) for x in outcome(*map(kind, numbers))] == list(wanted)


# Plans and staging on the device.


def random_pool(spec, blocks):
    rng = np.random.default_rng(0)
    # Copied: what JAX borrows from NumPy can't be donated.
    return jax.tree.map(
        lambda x: jnp.array(rng.normal(size=x.shape), x.dtype, copy=True), StatePool.create(spec, blocks)
    )


def as_numpy(pool):
    return [np.array(x) for x in jax.tree.leaves(pool)]


def a_step(spec):
    """Two rows that both save a boundary: the second column of 'a', and the running one of 'b' in place."""
    rows = np.arange(1, 1 + 2 * spec.num_columns, dtype=np.int32).reshape(1, 2, -1)
    batch = Batch(["a", "b"], [6, 5], [3, 3], [2, 2], np.concatenate([rows, 60 - rows]))
    return batch, {"a": 2, "b": 1}, np.array([2, 3], np.int32)


def test_a_plan_moves_what_it_says():
    spec = make_spec(4, 2)
    batch, state_idx, sampled = a_step(spec)
    pool = random_pool(spec, 64)
    before = as_numpy(pool)
    assert do_mamba_copy_block(spec, pool, HostCopyPlan.empty(spec)) is pool
    plan, accepted = postprocess_mamba(spec, batch, state_idx, sampled)
    np.testing.assert_array_equal(accepted, [2, 1])
    moved = do_mamba_copy_block(spec, pool, plan)
    # 'a': one token into the window at column 2, to column 1. 'b': two into the one at column 1, to itself.
    for g, (conv, recurrent) in enumerate(zip(before[::2], before[1::2], strict=True)):
        for r, (source, target, offset) in enumerate([(2, 1, 1), (1, 1, 2)]):
            row = batch.block_rows[g, r]
            recurrent[:, row[target]] = recurrent[:, row[source + offset]]
            window = conv[:, row[source], offset:].copy()
            conv[:, row[target], : window.shape[1]] = window
    for wanted, got in zip(before, as_numpy(moved), strict=True):
        np.testing.assert_array_equal(wanted, got)

    # The same, decided on the device; slots in another order than the batch.
    tables = BlockTables(blocks=jnp.array(batch.block_rows[:, ::-1]))
    inputs = stage_postprocess_inputs_to_gpu(batch, state_idx, 4)
    num_sampled = jnp.array([2, 3, 9, 9], jnp.int32)
    slots = jnp.array([1, 0, -1, -1], jnp.int32)
    pool, counts = postprocess_mamba_align_gpu(spec, random_pool(spec, 64), inputs, num_sampled, tables, slots)
    assert jax.tree.all(jax.tree.map(np.array_equal, pool, moved))
    np.testing.assert_array_equal(counts, [2, 1, 0, 0])


def aligned(values):
    """A NumPy array that `jax.device_put` borrows on a CPU."""
    values = np.asarray(values, np.int32)
    raw = np.zeros(values.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + values.nbytes].view(np.int32).reshape(values.shape)
    array[...] = values
    return array


def test_borrowed_memory_would_be_seen():
    values = aligned(np.arange(64))
    borrowed = jax.device_put(values)
    values[:] = -1
    assert jax.default_backend() != "cpu" or (np.asarray(borrowed) == -1).all()


def test_what_is_staged_outlives_the_hosts_buffers():
    spec, n = make_spec(4, 2, max_num_seqs=64), 64
    ids, computed = [f"r{i}" for i in range(n)], np.arange(n) % 5 + 3
    counts = [aligned(x) for x in (computed, np.full(n, 3), np.full(n, 2))]
    batch = Batch(ids, *counts, np.ones((2, n, spec.num_columns), np.int32))
    state_idx = {req_id: i for i, req_id in enumerate(ids)}
    first = stage_postprocess_inputs_to_gpu(batch, state_idx, n)
    wanted = [list(range(n)), *(x.tolist() for x in (counts[1], counts[0], counts[2]))]
    # The next step is prepared in the same buffers, right after this one was dispatched.
    for array in counts:
        array[:] = 7
    state_idx.update(dict.fromkeys(ids, 9))
    later = [stage_postprocess_inputs_to_gpu(batch, state_idx, n) for _ in range(16)]
    got = [first.state_idx, first.num_scheduled_tokens, first.num_computed_tokens, first.num_draft_tokens]
    assert [x.tolist() for x in got] == wanted
    assert all((later[-1].state_idx == 9).tolist())


@jax.jit
def late(tree):
    """The same arrays, about a tenth of a second later."""
    busy = jax.lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ x), jnp.full((256, 256), 0.1))
    return jax.tree.map(lambda x: x + 0 * busy[0, 0], tree)


def test_a_plan_may_be_written_again_once_it_is_dispatched():
    spec = make_spec(4, 2)
    batch, state_idx, sampled = a_step(spec)
    plan, _ = postprocess_mamba(spec, batch, state_idx, sampled)
    wanted = as_numpy(do_mamba_copy_block(spec, late(random_pool(spec, 64)), plan))
    plan = HostCopyPlan(*map(aligned, plan))
    # The copies wait for the step that makes the pool.
    moved = do_mamba_copy_block(spec, late(random_pool(spec, 64)), plan)
    for array in plan:
        array[...] = 1
    assert all(map(np.array_equal, wanted, as_numpy(moved)))


def test_accepted_counts_come_back_by_themselves_and_follow_their_requests():
    class Arriving:
        """A device's array: nobody may wait for it before it is needed."""

        shape = (4,)
        asked = waited = False

        def copy_to_host_async(self):
            self.asked = True

        def __array__(self, dtype=None, copy=None):
            self.waited = True
            return np.array([2, 3, 0, 9], np.int32)

    counts, arriving = AcceptedTokens(), Arriving()
    counts.expect(["a", "b", "c"], np.array([4, 4, 4]))
    counts.expect(["a", "b", "c"], arriving)
    assert (arriving.asked, arriving.waited) == (True, False)
    # 'c' had no tokens, 'd' is new; then 'a' sits out, 'b' is resumed, 'c' finished, and their ids come again.
    assert counts.reorder(Scheduled(), ["c", "d", "a", "b"]).tolist() == [4, 1, 2, 3]
    assert counts.reorder(Scheduled(["c"], None, ["b"]), ["b", "c"]).tolist() == [1, 1]
    assert counts.reorder(Scheduled(), ["a", "b"]).tolist() == [2, 1]
    buffer = np.array([2, 2])
    counts.expect(["a", "b"], buffer)
    buffer[:] = 3
    assert counts.reorder(Scheduled(), ["b", "a"]).tolist() == [2, 2]
    with raises("AcceptedTokens: counts must have at least 3 rows, got 2"):
        counts.expect(["a", "b", "c"], buffer)


def test_cleanup_forgets_whoever_is_gone():
    state_idx = dict.fromkeys("abcde", 1)
    cleanup_mamba_state_idx(Scheduled(["a", "x"], {"b"}, ["c"]), state_idx)
    assert state_idx == {"d": 1, "e": 1}
    cleanup_mamba_state_idx(
        SimpleNamespace(finished_req_ids=["d"], preempted_req_ids=None, resumed_req_ids=[]), state_idx
    )
    assert state_idx == {"e": 1}
