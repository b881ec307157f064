"""Random servers: whatever requests do, each step reads exactly its past, and leaves states where the next step looks."""

import collections
import functools
import itertools
import random
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from align.model import Pool, Row, check_idle, to_numpy

from mamba_align_jax import (
    Additions,
    AlignConfig,
    AlignState,
    BlockTables,
    ConvState,
    GroupSpec,
    RecurrentState,
    StepBatch,
    TableUpdates,
    add_requests,
    begin_step,
    update_block_tables,
)
from mamba_align_jax.align.step import plan_finish

POLICIES = ("copy_free", "pre_copy")
# Every slot is a trace of its own: 64 of them per configuration and policy.
SLOTS, BUCKET, STEPS = 64, 72, 40
# block_size, K, width, mode
CONFIGS = [
    *((1, 0, 2, "align"), (2, 0, 3, "align"), (2, 1, 4, "align"), (3, 0, 4, "align"), (3, 1, 5, "align")),
    *((3, 2, 2, "align"), (4, 0, 4, "align"), (4, 2, 4, "align"), (4, 3, 3, "align"), (5, 1, 2, "align")),
    *((5, 3, 4, "align"), (5, 4, 5, "align"), (6, 5, 2, "align"), (7, 2, 3, "align"), (7, 6, 4, "align")),
    *((8, 0, 5, "align"), (8, 3, 4, "align"), (8, 7, 3, "align"), (9, 1, 4, "align"), (9, 4, 2, "align")),
    *((9, 8, 5, "align"), (4, 0, 4, "none"), (4, 2, 3, "none"), (1, 3, 4, "none")),
]


def make_spec(block_size, K, width, mode, policy):
    # Two groups: ids of the second mirror those of the first, so that a mixed-up group can't go unseen.
    states = ConvState(width, 1), RecurrentState((1, 1))
    groups = GroupSpec("a", 1, states), GroupSpec("b", 1, states)
    return AlignConfig(groups, block_size, K, SLOTS, max_model_len=7 * block_size + 20, mode=mode, policy=policy)


@dataclass
class Request:
    """`prompt` is what prefill runs up to. The host has read results up to `known` tokens; `pending` are the others."""

    prompt: tuple
    computed: tuple
    known: int
    held: dict
    pending: list = field(default_factory=list)


class Host:
    """A naive scheduler and block manager that keeps the block tables' contract, and no more than that."""

    def __init__(self, spec, num_blocks, pools, rng):
        self.spec, self.pools, self.rng = spec, pools, rng
        self.size, self.K = spec.state_block_size, spec.num_speculative_tokens
        self.free = list(range(1, num_blocks))
        self.cached = {}
        self.requests = [None] * SLOTS
        self.token = itertools.count()
        for pool in pools.values():
            pool.cached = self.cached.keys()

    def fresh(self, n):
        return tuple(itertools.islice(self.token, n))

    def enter(self):
        """A request, that may continue a cached prefix."""
        prefix, held = (), {}
        hits = [block for block, tokens in self.cached.items() if len(tokens) < self.spec.max_model_len]
        if hits and self.rng.random() < 0.5:
            block = self.rng.choice(hits)
            prefix = self.cached[block]
            held = {len(prefix) // self.size - 1: block}
        left = self.spec.max_model_len - len(prefix)
        prompt = prefix + self.fresh(self.rng.randint(1, min(left, 3 * self.spec.block_size + 2)))
        return Request(prompt, prefix, len(prefix), held)

    def row(self, slot):
        """What a slot's request does in this step; None to leave it out."""
        rng, request = self.rng, self.requests[slot]
        if rng.random() < 0.1:
            # No tokens, whether the slot is taken or not, and whatever the drafts would have been.
            return rng.choice([None, Row(slot, drafts=rng.randint(-1, self.K))])
        if request is None:
            return None
        most = request.known + sum(len(row.inputs) for row in request.pending)
        room = self.spec.max_model_len - most
        if len(request.computed) >= len(request.prompt) and room and rng.random() < 0.15:
            # The conversation goes on: a chunk that follows a verify step.
            request.prompt = request.computed + self.fresh(rng.randint(1, min(room, 2 * self.spec.block_size)))
        inputs, drafts, accepted = request.prompt[len(request.computed) :], -1, 1
        if inputs:
            bs, start = self.spec.block_size, len(request.computed)
            to_boundary = rng.randint(1, 3) * bs - start % bs
            inputs = inputs[: min(room, rng.choice([to_boundary, rng.randint(1, 2 * bs)]))]
        elif room and rng.random() < 0.2:
            inputs = self.fresh(1)
        elif room:
            drafts = min(room - 1, rng.choice([self.K, rng.randint(0, self.K)]))
            inputs = self.fresh(1 + drafts)
            accepted = rng.choice([1, 1 + drafts, rng.randint(1, 1 + drafts)])
        if not inputs:
            return None
        return Row(slot, request.computed, inputs, drafts, accepted, request.held)

    def allocate(self, row):
        """New (column, block) entries: all that the step may write, for every count that the host can't exclude."""
        request, q, drafts = self.requests[row.slot], len(row.inputs), max(row.drafts, 0)
        low = request.known + sum(len(p.inputs) - max(p.drafts, 0) for p in request.pending)
        high = request.known + sum(len(p.inputs) for p in request.pending)
        assert low <= len(request.computed) <= high
        columns = range(1 + self.K)
        if self.spec.mode == "align":
            first = low // self.size if drafts else (low + q - 1) // self.size
            columns = range(first, (high + q - 1) // self.size + 1 + (self.K if drafts else 0))
        new = [(column, self.free.pop()) for column in columns if column not in request.held]
        request.held.update(new)
        return new

    def plan(self):
        """The rows of a step with the slots that requests enter, [(slot, computed)], and the new table entries."""
        rows, entering, entries = [], [], []
        for slot in range(SLOTS):
            if self.requests[slot] is None and self.rng.random() < 0.5:
                self.requests[slot] = request = self.enter()
                entering.append((slot, request.known))
                entries += [(slot, *entry) for entry in request.held.items()]
        rows = [row for slot in range(SLOTS) if (row := self.row(slot))] + [Row(-1)] * self.rng.randint(0, 4)
        self.rng.shuffle(rows)
        for row in rows:
            if row.inputs:
                entries += [(row.slot, *entry) for entry in self.allocate(row)]
        return rows, entering, entries

    def finish(self, rows):
        """After the step: lets go of columns, reads results (or leaves the newest unread), publishes, ends requests."""
        for row in rows:
            if not row.inputs:
                continue
            request = self.requests[row.slot]
            if self.spec.mode == "align":
                self.release(request, [column for column in request.held if column < request.known // self.size])
            request.computed = row.after
            request.pending.append(row)
            unread = self.rng.random() < 0.3
            while len(request.pending) > unread:
                read = request.pending.pop(0)
                request.known, boundary = len(read.after), read.boundary(self.size)
                if boundary and self.rng.random() < 0.6:
                    self.cached[request.held[boundary // self.size - 1]] = read.after[:boundary]
        for slot, request in enumerate(self.requests):
            full = request is not None and len(request.computed) + 1 >= self.spec.max_model_len
            if request is not None and (full or self.rng.random() < 0.05):
                self.release(request, list(request.held))
                self.requests[slot] = None
        held = {block for request in self.requests if request for block in request.held.values()}
        evictable = sorted(self.cached.keys() - held)
        for block in self.rng.sample(evictable, max(0, len(evictable) - 16)):
            del self.cached[block]
            self.let_go(block)

    def release(self, request, columns):
        for column in columns:
            block = request.held.pop(column)
            if block not in self.cached:
                self.let_go(block)

    def let_go(self, block):
        """Last in, first out: the next row that needs a block gets this one."""
        self.free.append(block)
        for pool in self.pools.values():
            pool.scribble(block)


@functools.partial(jax.jit, static_argnums=0)
def run_step(spec, state, tables, additions, updates, batch, num_sampled):
    tables = update_block_tables(tables, updates)
    state = add_requests(state, additions)
    state, indices = begin_step(spec, state, batch, tables)
    state, plan = plan_finish(spec, state, batch, indices, num_sampled, tables)
    return state, tables, indices, plan


def check_mirrored(tree, num_blocks):
    """The second group's ids are the first one's, mirrored."""
    for array in jax.tree.leaves(tree):
        if array.ndim > 1:
            np.testing.assert_array_equal(array[1], np.where(array[0] > 0, num_blocks - array[0], 0))


def count_events(events, rows, indices, plan, before, after):
    """What happened in a step, so that a test can ask whether the traces go everywhere."""
    for r, row in enumerate(rows):
        if row.inputs:
            old, column, first = before.state_idx[row.slot], after.state_idx[row.slot], indices.conv_row[r]
            saved = plan is not None and plan.destination[0, r] and plan.conv_row[r]
            events["moves left"] += row.drafts >= 0 and row.before != () and old > column
            events["crosses after several were accepted"] += old < column and first > 0
            events["reads several columns back"] += old >= 0 and column > old + 1
            events["chunk after verify"] += row.drafts < 0 and len(row.inputs) > 1 and first > 0
            events["boundary saved from the next column"] += bool(
                saved and plan.conv_source[0, r] != plan.destination[0, r]
            )
            events["boundary saved in place"] += bool(saved and plan.conv_source[0, r] == plan.destination[0, r])


def run_traces(config, steps=STEPS):
    rng = random.Random(str(config))
    _, K, width, _ = config
    specs = {policy: make_spec(*config, policy) for policy in POLICIES}
    spec = specs["copy_free"]
    num_blocks = 1 + SLOTS * (K + 6) + 32
    pools = {policy: Pool(num_blocks, width, K, spec.state_block_size) for policy in POLICIES}
    host = Host(spec, num_blocks, pools, rng)
    states = {policy: AlignState.create(spec) for policy in POLICIES}
    tables, events = BlockTables.create(spec), collections.Counter()
    for _ in range(steps):
        rows, entering, entries = host.plan()
        ends = np.cumsum([0, *(len(row.inputs) for row in rows)])
        fields = zip(*((row.slot, row.drafts, row.drafts < 0) for row in rows), strict=True)
        slots, drafts, prefilling = fields
        batch = StepBatch.from_host(spec, BUCKET, slots, ends.tolist(), drafts, prefilling)
        additions = Additions.from_host(spec, SLOTS, *zip(*entering, strict=True)) if entering else None
        additions = additions or Additions.from_host(spec, SLOTS, [], [])
        both = [(g, slot, column, (b, num_blocks - b)[g]) for slot, column, b in entries for g in (0, 1)]
        updates = TableUpdates.from_host(spec, 2 * num_blocks, both)
        # A chunk inside a prompt samples nothing; rows without tokens come with anything.
        sampled = np.array([rng.randint(0, 1 + K) for _ in range(BUCKET)], np.int32)
        for r, row in enumerate(rows):
            if row.inputs:
                sampled[r] = row.accepted if row.drafts >= 0 else rng.randint(0, 1)
        was = to_numpy(states["copy_free"])
        for policy in POLICIES:
            state, new_tables, indices, plan = run_step(
                specs[policy], states[policy], tables, additions, updates, batch, jnp.asarray(sampled)
            )
            states[policy] = state
            state, indices, plan = to_numpy(state), to_numpy(indices), to_numpy(plan)
            check_mirrored((indices, plan), num_blocks)
            check_idle(indices, plan, rows)
            pools[policy].copy(indices.migration, rows)
            pools[policy].forward(indices, rows)
            pools[policy].copy(plan, rows)
            pools[policy].check_finished(state, rows)
            moved = [row.slot for row in rows if row.inputs] + [slot for slot, _ in entering]
            jax.tree.map(lambda a, b, m=moved: np.testing.assert_array_equal(*np.delete([a, b], m, axis=1)), was, state)
            if policy == "copy_free":
                count_events(events, rows, indices, plan, was, state)
        tables = new_tables
        jax.tree.map(np.testing.assert_array_equal, *map(to_numpy, states.values()))
        events["prefix hits"] += sum(computed > 0 for _, computed in entering)
        host.finish(rows)
    return events


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"block{c[0]}-K{c[1]}-width{c[2]}-{c[3]}")
def test_every_step_reads_its_own_past(config):
    run_traces(config)


def test_the_traces_go_everywhere():
    wanted = {
        *("moves left", "crosses after several were accepted", "reads several columns back", "chunk after verify"),
        *("boundary saved from the next column", "boundary saved in place", "prefix hits"),
    }
    events = run_traces((4, 3, 4, "align"))
    assert {event for event, times in events.items() if times >= 20} == wanted, events
