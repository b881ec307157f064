"""A random server for hypothesis, which does anything that a server may do. Each step is repeated on pools of tokens.

It is a rule-based state machine, because its long examples shrink to the few steps that matter, and a failure is
printed as a program. It has one rule, because hypothesis leaves rules out of half of the examples, and a server without
steps tests nothing. Instead, each configuration draws what its examples never do.
"""

import collections
import itertools
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from fakes.any_config import LONGEST, POLICIES, SLOTS, WIDEST, make_spec, run_step
from fakes.host_path import HostPath
from fakes.unusual_host import UnusualHost
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from oracles.tokens import Pool, Row, check_idle, to_numpy

from mamba_align_jax import (
    Additions,
    AlignState,
    BlockTables,
    StepBatch,
    TableUpdates,
)
from mamba_align_jax.cache.state_blocks import StateBlockManager

UPDATES, ROWS = 128, 2 * SLOTS
# A block that no request ever gets. The tables contain it in columns without a block.
STALE = 10_000


@dataclass
class Request:
    """A request. Prefill runs `prompt`. The host knows the results of `known` tokens; `pending` are unread."""

    name: int
    prompt: tuple
    computed: tuple = ()
    known: int = 0
    entered: bool = False
    resumed: bool = False
    # It enters with the state of so many tokens, which the host has put into a block of its own.
    loaded: int = 0
    pending: list = field(default_factory=list)


# How the request of a slot leaves, and the new one that enters: tokens of an older request and some of its own.
TURN = st.tuples(
    st.integers(0, SLOTS - 1),
    st.sampled_from(["finish", "stop", "abort", "preempt", "preempt unannounced"]),
    *(st.integers(0, 5), st.sampled_from(["all", "blocks", "half", "loaded"]), st.integers(0, 20)),
)
# What a slot does in a step if it can: an action, its size, and how many tokens are accepted.
RARE = ["left out", "no tokens", "one token", "another chunk"]
CHOICE = st.tuples(st.sampled_from(["run"] * 7 + RARE), st.integers(0, 4), st.integers(0, 8))


class Machine(UnusualHost, RuleBasedStateMachine):
    """Slots, a block manager whose pool may be too small for all of them, and a pool of tokens for each policy."""

    steps, events = 0, collections.Counter()
    # Of the convolutions. None for any.
    width = None
    # Whether `replay` keeps the boundaries inside chunks.
    keeps_interior = True
    # The configurations of the policies that run every step, and the one to which the others are compared.
    policies, main = POLICIES, "copy_free"
    # Chunks may end anywhere here. One that starts inside a block and ends after it leaves one block more.
    more_blocks = 1

    @initialize(
        mode=st.sampled_from(["align", "align", "align", "none", "all"]),
        block_size=st.integers(1, 9),
        K=st.integers(0, 8),
        width=st.integers(2, 5),
        lag=st.integers(0, 2),
        room=st.sampled_from([SLOTS + 1, SLOTS + 1, SLOTS, SLOTS - 1, 1]),
        never=st.sets(st.sampled_from(RARE)),
        first=st.lists(TURN, min_size=1, max_size=SLOTS),
    )
    def configure(self, mode, block_size, K, width, lag, room, never, first):
        mode = mode if self.keeps_interior or mode != "all" else "align"
        K, width = K if mode == "none" else K % block_size, self.width or width
        self.align = make_spec(
            width=width,
            block_size=block_size,
            num_speculative_tokens=K,
            max_model_len=LONGEST - 7 * (9 - block_size),
            mode=mode,
        )
        self.num_blocks = 1 + room * self.align.blocks_per_request(lag, max_chunk=2 * block_size)
        self.manager = StateBlockManager(self.num_blocks, block_size, K, mode=mode)
        size = self.align.state_block_size
        self.pools = {policy: Pool(self.num_blocks, width, K, size) for policy in POLICIES}
        self.open(lag, never, first)

    def open(self, lag, never, first):
        """Makes the slots, after the configuration, the manager and the pools, and lets the first requests enter."""
        self.size, self.K, self.lag, self.never = (
            self.align.state_block_size,
            self.align.num_speculative_tokens,
            lag,
            never,
        )
        self.states = {policy: AlignState.create(base) for policy, base in self.policies.items()}
        self.known = to_numpy(self.states[self.main])
        self.tables = BlockTables(blocks=jnp.full_like(BlockTables.create(WIDEST).blocks, STALE))
        self.requests, self.cached = [None] * SLOTS, set()
        tables = np.full(self.tables.blocks.shape, STALE, np.int32)
        self.host_path = self.make_host_path(tables)
        # The tokens that were computed, by request, and may be continued.
        self.history = collections.deque([(None, ())], maxlen=6)
        self.names, self.token = itertools.count(), itertools.count()
        self.start()
        for turn in first:
            self.turn_over(*turn)

    def make_host_path(self, tables):
        # Mode "all" reads and writes as "align" does, and keeps more.
        mode = "align" if self.align.mode == "all" else self.align.mode
        return HostPath(replace(self.align, policy="pre_copy", mode=mode), tables, SLOTS)

    def start(self):
        """Does nothing here. A subclass repeats the step elsewhere."""

    def fresh(self, n):
        return tuple(itertools.islice(self.token, n))

    # Requests that enter and leave.

    def turn_over(self, slot, how, past, keep, more):
        """The slot's request leaves, and another one may enter it at once.

        If it finishes, all its results were read, or those up to a stop token. Otherwise its steps may still be in flight,
        and their results are dropped. The new request may continue what another one has computed: a prefix that it hits, or
        the tokens of a preempted request.
        """
        if request := self.requests[slot]:
            if how in ("finish", "stop"):
                self.read(request, 0, stop=how == "stop")
            self.drop(slot, how)
            if more == 0:
                return
        name, past = self.history[past % len(self.history)]
        past = past[: {"blocks": len(past) // self.size * self.size, "half": len(past) // 2}.get(keep, len(past))]
        prompt = past + self.fresh(more if past else 1 + more)
        resumed = name is not None and keep == "all" and all(r is None or r.name != name for r in self.requests)
        name = name if resumed else next(self.names)
        prompt = prompt[: self.align.max_model_len]
        loaded = min(len(past), len(prompt) - 1) if keep == "loaded" else 0
        # In mode "all" a chunk of several columns would leave a state in each.
        loaded = min(loaded, self.size) if self.align.mode == "all" else loaded
        self.requests[slot] = Request(name, prompt, resumed=resumed, loaded=loaded)

    def drop(self, slot, how="finish"):
        request, self.requests[slot] = self.requests[slot], None
        self.history.append((request.name, request.computed[: request.known]))
        self.manager.free(request.name)
        if how == "preempt":
            self.host_path.preempted.append(request.name)
        elif how != "preempt unannounced":
            self.host_path.finished.append(request.name)

    # Steps.

    @rule(
        turn=st.one_of(st.none(), st.none(), TURN),
        choices=st.tuples(*[CHOICE] * SLOTS),
        order=st.permutations(range(SLOTS + 1)),
        unread=st.integers(0, 2),
        back=st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(1, 8)), max_size=2, unique_by=lambda x: x[0]),
    )
    def step(self, turn, choices, order, unread, back):
        """Draws what each slot does, the order of the rows with padding, and how many results stay unread.

        Before that, some slots take back tokens of the last step.
        """
        self.go_back(back)
        if turn:
            self.turn_over(*turn)
        rows, entering, entries = [], [], []
        for slot, choice in enumerate(choices):
            row, request = self.choose_row(slot, *choice), self.requests[slot]
            if row and row.inputs:
                new = self.admit(row)
                if new is None:
                    self.events["pool too small"] += 1
                    continue
                entries += [(slot, *entry) for entry in new]
                if not request.entered:
                    entering.append((slot, request.known))
                    request.entered = True
            if row:
                rows.append(row)
        rows = self.arrange(rows, order)
        self.dispatch(rows, entering, entries)
        for row in rows:
            if row.inputs:
                request = self.requests[row.slot]
                request.computed = row.after
                self.offer(request, row)
                self.release(request, row)
                request.pending.append(row)
                self.read(request, min(unread, self.lag))
                if len(request.computed) + 1 >= self.align.max_model_len:
                    self.drop(row.slot)

    def release(self, request, row):
        """Tells the manager that a row was dispatched."""
        self.manager.release(request.name)

    def arrange(self, rows, order):
        """Draws any order of the rows, with padding rows anywhere."""
        rows = rows + [Row(-1)] * (len(order) - len(rows))
        return [rows[r] for r in order]

    def choose_row(self, slot, action, amount, accepted):
        """Makes the row of a slot, or None to leave it out."""
        request, bs = self.requests[slot], self.align.block_size
        action = "run" if action in self.never else action
        if action == "no tokens":
            # A row without tokens, whether the slot is in use or not, with any number of drafts.
            return Row(slot, drafts=accepted % (2 + self.K) - 1)
        if action == "left out" or request is None:
            return None
        room = self.align.max_model_len - request.known - sum(len(row.inputs) for row in request.pending)
        if room == 0:
            return None
        computed = len(request.computed)
        if computed >= len(request.prompt) and request.entered and action == "another chunk":
            # The next turn of a conversation is a prefill chunk after a verify step.
            request.prompt = request.computed + self.fresh(1 + amount * bs // 2)
        if left := request.prompt[computed:][:room]:
            to_boundary = bs - computed % bs
            end = [len(left), to_boundary, to_boundary + bs, 1, 1 + len(left) // 2][amount]
            return Row(slot, request.computed, left[:end])
        if action == "one token":
            return Row(slot, request.computed, self.fresh(1), -1 if amount else 0)
        drafts = min(room - 1, [self.K, self.K, self.K, self.K // 2, 0][amount])
        return Row(slot, request.computed, self.fresh(1 + drafts), drafts, 1 + accepted % (1 + drafts))

    def admit(self, row):
        """Gives a row its blocks. Returns the new (column, block) entries, or None if the pool has too few blocks."""
        request, q, drafts, hit = self.requests[row.slot], len(row.inputs), max(row.drafts, 0), None
        loaded = []
        if not request.entered:
            if request.loaded:
                loaded = self.load(request)
                if loaded is None:
                    return None
            else:
                hit = self.manager.lookup(request.prompt)
            known = request.loaded or hit.length
            request.computed, request.known = request.prompt[:known], known
            row.before, row.inputs = request.computed, request.prompt[known:][:q]
            q = len(row.inputs)
        low = request.known + sum(len(p.inputs) - max(p.drafts, 0) for p in request.pending)
        high = request.known + sum(len(p.inputs) for p in request.pending)
        assert low <= len(request.computed) <= high
        entries = self.manager.allocate(request.name, low, high, q, drafts, hit=hit)
        if entries is None:
            if loaded:
                self.manager.free(request.name)
            return None
        found = set() if hit is None else {block for _, block in hit.blocks}
        row.held = self.manager.columns(request.name)
        row.given = frozenset(block for _, block in entries) - found
        most = self.manager.blocks_needed(self.lag) + self.more_blocks
        assert len(row.held) <= most or self.align.mode == "all", f"{row} holds {row.held}"
        for pool in self.pools.values():
            for block in found:
                pool.check_boundary(block, request.computed)
            for block in row.given:
                pool.scribble(block)
        self.cached -= row.given
        return loaded + entries

    def read(self, request, unread, stop=False):
        """The host reads what was accepted, except in the newest steps, and publishes boundaries."""
        while len(request.pending) > unread:
            row = request.pending.pop(0)
            if stop and not request.pending:
                # The first token of the last step ends the sequence, but the device continued after it.
                row = replace(row, accepted=1)
            request.known = len(row.after)
            boundary = self.commit(request, row)
            kept = [] if self.align.mode == "none" or row.offered else [row.boundary(self.size)]
            if self.align.mode == "all" and row.drafts < 0 and not row.offered:
                kept = row.inside(self.size)
            kept = self.kept_now(request, row, kept)
            assert boundary == max(kept, default=0)
            self.keep_cached(request, row, filter(None, kept))

    def commit(self, request, row):
        return self.manager.commit(request.name, row.after)

    def kept_now(self, request, row, kept):
        """Of the boundaries that a row keeps, those that are published when its result is read."""
        return kept

    def dispatch(self, rows, entering, entries):
        """Runs the step on the device and replays it on every pool."""
        # A chunk inside a prompt samples nothing, the last chunk one token. Rows without tokens may have any count.
        num_sampled = np.full(ROWS, 7, np.int32)
        for r, row in enumerate(rows):
            if row.inputs:
                num_sampled[r] = row.accepted if row.drafts >= 0 else len(row.after) % 2
            elif row.slot >= 0:
                num_sampled[r] = len(rows) % (2 + max(row.drafts, 0))
        type(self).steps += any(row.inputs for row in rows)
        ends = np.cumsum([0, *(len(row.inputs) for row in rows)]).tolist()
        slots, drafts = [row.slot for row in rows], [row.drafts for row in rows]
        batch = StepBatch.from_host(self.align, ROWS, slots, ends, drafts)
        slots, computed = zip(*entering, strict=True) if entering else ((), ())
        additions = Additions.from_host(self.align, SLOTS, slots, computed)
        mirrored = [(g, *place, (b, self.num_blocks - b)[g]) for *place, b in entries for g in (0, 1)]
        updates = TableUpdates.from_host(self.align, UPDATES, mirrored)
        self.host_path.tables[tuple(np.array(mirrored, np.int32).reshape(-1, 4).T[:3])] = [b for *_, b in mirrored]
        running = {request.name: slot for slot, request in enumerate(self.requests) if request and request.entered}
        places = [r for r, row in enumerate(rows) if row.slot in running.values()]
        host_rows = [rows[r] for r in places]
        names = [self.requests[row.slot].name for row in host_rows]
        resumed = [self.requests[slot].name for slot in slots if self.requests[slot].resumed]
        host_inputs = self.host_path.before(names, host_rows, places, resumed, num_sampled)
        was = self.known
        self.tables, results, fused, interior = self.run(additions, updates, batch, num_sampled, host_inputs)
        self.states = {policy: state for policy, (_, _, state, _) in results.items()}
        holders = collections.Counter(block for name in running for block in self.manager.columns(name).values())
        still = sorted(set(range(SLOTS)) - {*slots, *(row.slot for row in rows if row.inputs)})
        after = to_numpy(self.states)
        self.known = after[self.main]
        for policy, (_, indices, _, plan) in results.items():
            self.pools[policy].start(rows, holders, self.cached)
            self.replay(policy, batch, to_numpy(indices), to_numpy(plan))
            if self.align.mode == "all":
                self.check_mirrored(to_numpy(interior[1]))
                self.pools[policy].keep(to_numpy(interior))
            self.pools[policy].check_finished(after[policy])
            for name in ("num_computed_tokens", "num_accepted_tokens", "running_column"):
                now = getattr(after[policy], name)
                assert (now == getattr(after[self.main], name)).all(), f"{name} depends on the policy"
                assert (now[still] == getattr(was, name)[still]).all(), f"{name} of a slot without tokens has changed"
        if "pre_copy" in results:
            _, indices, _, plan = to_numpy(results["pre_copy"])
            self.host_path.check(indices, plan, fused, after["pre_copy"], running)
        _, indices, _, plan = to_numpy(results[self.main])
        self.count_events(rows, indices, plan, was, after[self.main])
        if self.align.mode == "all":
            inside = [b for row in rows for b in row.inside(self.size) if b < len(row.after)]
            self.events["boundaries inside chunks"] += len(inside)
        self.events["prefix hits"] += sum(count > 0 for count in computed)
        self.events["resumed"] += len(resumed)

    def run(self, *inputs):
        """Runs the step under every policy."""
        return run_step(np.int32(self.size), self.states, self.tables, *inputs)

    def replay(self, policy, batch, indices, plan):
        """Checks the step of one policy: first what needs no pool, then on a pool of tokens."""
        pool = self.pools[policy]
        self.check_mirrored((indices, plan))
        check_idle(indices, plan, pool.rows)
        if self.K == 0 or self.align.mode == "none":
            self.check_moves_nothing(plan)
        pool.copy(indices.migration)
        pool.forward(indices)
        pool.copy(plan)

    def check_mirrored(self, tree):
        """Checks that the ids of the second group are those of the first, mirrored, to notice mixed-up groups."""
        for array in jax.tree.leaves(tree):
            if array.ndim > 1:
                a, b = array
                assert (b[a == STALE] == STALE).all()
                assert (b == np.where((a > 0) & (a != STALE), self.num_blocks - a, a)).all()

    def check_moves_nothing(self, plan):
        """Checks what the product of all settings may leave out."""
        to = plan.destination
        assert (((plan.recurrent_source == to) & (plan.conv_source == to) & (plan.window_row == 0)) | (to == 0)).all()

    def count_events(self, rows, indices, plan, before, after):
        """Returns the special cases of a step, so that a test can check that all of them occur."""
        events = self.events
        for r, row in enumerate(rows):
            if not row.inputs:
                events["no tokens"] += row.slot >= 0
                continue
            old, column, first = before.running_column[row.slot], after.running_column[row.slot], indices.window_row[r]
            events["moves left"] += bool(row.drafts >= 0 and row.before != () and old > column)
            events["crosses after several were accepted"] += bool(old < column and first > 0)
            events["reads several columns back"] += bool(row.before and column > old + 1)
            events["chunk after verify"] += bool(row.drafts < 0 and len(row.inputs) > 1 and first > 0)
            saved = plan.destination[0, r] and plan.window_row[r]
            in_place = plan.conv_source[0, r] == plan.destination[0, r]
            events["boundary saved from the next column"] += bool(saved and not in_place)
            events["boundary saved in place"] += bool(saved and in_place)
            events["two unread steps"] += len(self.requests[row.slot].pending) == 2


def run(machine, examples, steps):
    """Runs at least so many examples and steps; how long an example gets is up to chance."""
    machine.steps, machine.events = 0, collections.Counter()
    changes = dict(deadline=None, suppress_health_check=list(HealthCheck))
    while machine.steps < steps:
        before = machine.steps
        run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=60, **changes))
        assert machine.steps > before
        examples = 25
    return machine.events
