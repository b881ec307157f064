"""The host path plans what the device path does, whatever requests do, and its arrays outlive the host's buffers."""

import collections
import functools
import itertools
import random
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from align.model import ZERO, Pool, Row, last_inputs, to_numpy

from mamba_align_jax import (
    Additions,
    AlignConfig,
    AlignState,
    BlockTables,
    ConvState,
    CopyPlan,
    GroupSpec,
    RecurrentState,
    StatePool,
    StepBatch,
    add_requests,
    begin_step,
)
from mamba_align_jax.align import columns, host
from mamba_align_jax.align.host import (
    HostCopyPlan,
    cleanup_mamba_state_idx,
    collect_mamba_copy_meta,
    gather_state_indices,
    postprocess_mamba,
    postprocess_mamba_all,
    prefill_checkpoints,
    preprocess_mamba,
)
from mamba_align_jax.align.staging import (
    AcceptedTokens,
    do_mamba_copy_block,
    plan_postprocess,
    postprocess_mamba_align_gpu,
    stage_mamba_state_idx_to_gpu,
    stage_postprocess_inputs_to_gpu,
    stage_postprocess_metadata_to_gpu,
)
from mamba_align_jax.align.step import copy_states, plan_finish
from pallas_kernels import NULL_BLOCK, causal_conv1d_prefill

SLOTS, WIDTH = 12, 4
STATES = ConvState(WIDTH, 1, "float32"), RecurrentState((1, 1))


class Scheduled(NamedTuple):
    """A `SchedulerOutput`."""

    finished_req_ids: Any = ()
    preempted_req_ids: Any = None
    resumed_req_ids: Any = ()


class Batch(NamedTuple):
    """An `InputBatch`."""

    req_ids: Any
    num_computed_tokens: Any
    num_scheduled_tokens: Any
    num_draft_tokens: Any
    block_rows: Any


def make_spec(block_size, K, mode="align", **changes):
    # Two groups: ids of the second mirror those of the first, so that a mixed-up group can't go unseen.
    fields = dict(max_num_reqs=SLOTS, max_model_len=7 * block_size + 20, mode=mode, policy="pre_copy") | changes
    return AlignConfig((GroupSpec("a", 1, STATES), GroupSpec("b", 1, STATES)), block_size, K, **fields)


# Random schedules.


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
        self.pool.cached = self.cached.keys()
        self.running, self.waiting = [], []
        self.tables = np.zeros((2, spec.max_num_reqs, spec.num_columns), np.int32)
        self.tokens, self.ids = itertools.count(), itertools.count()
        self.events = collections.Counter()

    def fresh(self, n):
        return tuple(itertools.islice(self.tokens, n))

    def enter(self, req_id, prompt):
        """Takes the longest cached prefix of the prompt; whatever the slot's row of blocks held before stays in it."""
        slot = min(set(range(self.spec.max_num_reqs)) - {request.slot for request in self.running})
        request = Request(req_id, slot, prompt)
        for block, tokens in self.cached.items():
            if len(request.computed) < len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens:
                request.computed, request.held = tokens, {len(tokens) // self.size - 1: block}
        self.events["prefix hits"] += bool(request.held)
        self.running.append(request)
        self.write_tables(request)
        return request

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
        """Who comes and goes: finished, preempted, resumed ids, and the requests that enter slots."""
        rng, finished, preempted, resumed, entering = self.rng, [], [], [], []
        for request in list(self.running):
            full = len(request.computed) + 1 >= self.spec.max_model_len
            if full or rng.random() < 0.03:
                self.leave(request)
                finished.append(request.req_id)
            elif rng.random() < 0.06:
                self.leave(request)
                again = request.computed + request.prompt[len(request.computed) :]
                # One that is resumed at once may never have been called preempted.
                if rng.random() < 0.5:
                    preempted.append(request.req_id)
                self.waiting.append((request.req_id, again or self.fresh(1)))
                self.events["preempted"] += 1
        rng.shuffle(self.waiting)
        while len(self.running) < self.spec.max_num_reqs and rng.random() < 0.6:
            if self.waiting and rng.random() < 0.5:
                req_id, prompt = self.waiting.pop()
                resumed.append(req_id)
            else:
                shared = rng.choice([(), *self.cached.values()])[: self.spec.max_model_len - 2]
                room = self.spec.max_model_len - 1 - len(shared)
                prompt = shared + self.fresh(rng.randint(1, min(room, 3 * self.bs + 2)))
                req_id = f"r{next(self.ids)}"
            entering.append(self.enter(req_id, prompt))
        return Scheduled(finished, preempted or None, resumed), entering

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
        elif self.spec.mode == "all":
            drafts, inputs = (self.K, self.fresh(1 + self.K)) if room > self.K else (-1, self.fresh(1))
        elif rng.random() < 0.15:
            inputs = self.fresh(1)
        else:
            drafts = min(room - 1, rng.choice([self.K, rng.randint(0, self.K)]))
            inputs = self.fresh(1 + drafts)
        if drafts >= 0:
            accepted = rng.choice([1, 1 + drafts, rng.randint(1, 1 + drafts)])
        return Row(request.slot, request.computed, inputs, drafts, accepted, request.held)

    def allocate(self, row):
        computed, q = len(row.before), len(row.inputs)
        last = (computed + q - 1) // self.size
        if self.spec.mode == "none":
            wanted = range(1 + self.K)
        elif row.drafts >= 0:
            wanted = range(computed // self.size, last + 1 + self.K)
        else:
            wanted = range(computed // self.size if self.spec.mode == "all" else last, last + 1)
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
                if self.spec.mode != "none":
                    # Of the step before this one: until then its state may have been there.
                    self.let_go(request, [c for c in request.held if c < len(row.before) // self.size])
                request.computed = row.after
                self.publish(request, row)
        held = {block for request in self.running for block in request.held.values()}
        for block in self.rng.sample(sorted(self.cached.keys() - held), max(0, len(self.cached.keys() - held) - 6)):
            del self.cached[block]
            self.free.append(block)
            self.pool.scribble(block)

    def publish(self, request, row):
        boundary = row.boundary(self.size)
        if self.spec.mode == "all" and row.drafts >= 0:
            boundary = 0
        block = request.held.get(boundary // self.size - 1)
        if boundary and self.rng.random() < 0.6 and row.after[:boundary] not in self.cached.values():
            self.cached[block] = row.after[:boundary]


def mirrored(tree, num_blocks):
    """The second group's ids are the first one's, mirrored."""
    for array in jax.tree.leaves(tree):
        if array.ndim > 1:
            np.testing.assert_array_equal(array[1], np.where(array[0] > 0, num_blocks - array[0], 0))


def moves(plan, rows):
    """A plan's first rows as arrays, without the copies of states onto themselves."""
    if plan is None:
        return np.zeros((7, rows), np.int32)
    recurrent, conv, first, to = (np.asarray(x) for x in jax.tree.leaves(plan))
    still = (recurrent == to) & (conv == to) & (first == 0)
    masked = lambda x: np.where(still, 0, x)[:, :rows]
    return np.concatenate([masked(recurrent), masked(conv), first[None, :rows], masked(to)])


@functools.partial(jax.jit, static_argnums=0)
def device_step(spec, state, blocks, additions, batch, num_sampled, staged):
    tables = BlockTables(blocks=blocks)
    state = add_requests(state, additions)
    state, indices = begin_step(spec, state, batch, tables)
    state, plan = plan_finish(spec, state, batch, indices, num_sampled, tables)
    return state, indices, plan, plan_postprocess(spec, staged, num_sampled, tables, batch.idx_mapping)


def run_both(block_size, K, mode, steps):
    rng = random.Random(f"{block_size} {K} {mode}")
    spec = make_spec(block_size, K, mode)
    server = Server(spec, 1 + SLOTS * (K + 6) + 40, rng)
    state, state_idx, counts, events = AlignState.create(spec), {}, AcceptedTokens(), server.events
    for step in range(steps):
        scheduled, entering = server.schedule()
        requests, rows = server.step()
        batch = server.batch(requests, rows)
        n, before = len(rows), dict(state_idx)
        # A chunk inside a prompt samples nothing; rows without tokens come with anything.
        sampled = np.array([row.accepted if row.drafts >= 0 else rng.randint(0, 1) for row in rows], np.int32)
        for r, row in enumerate(rows):
            sampled[r] = sampled[r] if row.inputs else rng.randint(0, 1 + K)
        padded = np.concatenate([sampled, np.array([rng.randint(0, 1 + K) for _ in range(SLOTS - n)], np.int32)])

        # On the host.
        entered = counts.reorder(scheduled, batch.req_ids)
        before_plan, accepted = preprocess_mamba(spec, scheduled, batch, state_idx, entered)
        indices = gather_state_indices(spec, batch, state_idx, accepted, SLOTS)
        staged = stage_postprocess_inputs_to_gpu(batch, state_idx, SLOTS)
        after_plan, accepted = postprocess_mamba(spec, batch, state_idx, sampled)

        # On the device.
        ends = np.cumsum([0, *batch.num_scheduled_tokens]).tolist()
        slots = [row.slot for row in rows]
        device_batch = StepBatch.from_host(
            spec, SLOTS, slots, ends, batch.num_draft_tokens, [row.drafts < 0 for row in rows]
        )
        additions = Additions.from_host(
            spec, SLOTS, [r.slot for r in entering], [len(r.computed) for r in entering]
        )
        state, found, saves, (fused, fused_accepted) = device_step(
            spec, state, jnp.array(server.tables), additions, device_batch, jnp.array(padded), staged
        )
        found, saves, known = to_numpy(found), to_numpy(saves), to_numpy(state)

        np.testing.assert_array_equal(moves(before_plan, SLOTS), moves(found.migration, SLOTS))
        for name, value in indices._asdict().items():
            np.testing.assert_array_equal(value, getattr(found, name), err_msg=name)
        np.testing.assert_array_equal(moves(after_plan, SLOTS), moves(saves, SLOTS))
        np.testing.assert_array_equal(moves(after_plan, SLOTS), moves(fused, SLOTS))
        np.testing.assert_array_equal(accepted, fused_accepted[:n])
        assert not fused_accepted[n:].any()
        counts.expect(batch.req_ids, fused_accepted if step % 2 else accepted)
        everyone = [request for request in server.running if request.req_id in state_idx]
        slots = [request.slot for request in everyone]
        ids = [request.req_id for request in everyone]
        np.testing.assert_array_equal([state_idx[i] for i in ids], known.state_idx[slots])
        np.testing.assert_array_equal(counts.reorder(Scheduled(), ids), known.num_accepted_tokens[slots])
        alive = {request.req_id for request in server.running} | {req_id for req_id, _ in server.waiting}
        assert state_idx.keys() <= alive

        # In literal tokens.
        mirrored((before_plan, indices, after_plan), server.num_blocks)
        server.pool.copy(before_plan, rows)
        server.pool.forward(indices, rows)
        server.pool.copy(after_plan, rows)
        server.pool.check_finished(known, rows)
        server.finish(requests, rows)

        events["migrates"] += int((before_plan.destination[0] > 0).sum())
        events["saves"] += int((after_plan.destination[0] > 0).sum())
        for r, (req_id, row) in enumerate(zip(batch.req_ids, rows, strict=True)):
            if row.inputs:
                events["moves left"] += req_id in before and before[req_id] > state_idx[req_id]
                events["chunk after verify"] += row.drafts < 0 and entered[r] > 1
            else:
                events["no tokens"] += 1
                events["resumed without tokens"] += req_id in scheduled.resumed_req_ids
        events["sits out"] += len(everyone) - len(batch.req_ids) > 0
        events["resumed unannounced"] += len(set(scheduled.resumed_req_ids) & before.keys())
    return events


# block_size, K, mode
CONFIGS = [(1, 0, "align"), (2, 1, "align"), (3, 2, "align"), (4, 2, "align"), (9, 4, "align"), (4, 2, "none")]


@pytest.mark.parametrize(("block_size", "K", "mode"), CONFIGS)
def test_the_host_path_is_the_device_path(block_size, K, mode):
    run_both(block_size, K, mode, 100)


def test_the_schedules_go_everywhere():
    wanted = {
        *("prefix hits", "preempted", "migrates", "saves", "moves left", "chunk after verify", "no tokens"),
        *("resumed without tokens", "sits out", "resumed unannounced"),
    }
    events = run_both(4, 3, "align", 200)
    assert {event for event, times in events.items() if times >= 10} == wanted, events
