"""examples/align_reference.py, which explains the scheme, is the scheme: its steps are those of the device."""

import collections
import random
import runpy
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from fakes.any_config import POLICIES, SLOTS, WIDEST, AnyConfig
from oracles.tokens import to_numpy

from mamba_align_jax import (
    Additions,
    AlignState,
    BlockTables,
    StepBatch,
    TableUpdates,
    add_requests,
    begin_step,
    update_block_tables,
)
from mamba_align_jax.align.step import plan_finish

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "align_reference.py")
ROWS, UPDATES, STALE = SLOTS + 2, 128, 10_000


@jax.jit
def on_device(size, states, tables, updates, additions, batch, sampled):
    """The step under both policies."""
    tables, results = update_block_tables(tables, updates), {}
    for policy, base in POLICIES.items():
        align = AnyConfig(base, size)
        state, indices = begin_step(align, add_requests(states[policy], additions), batch, tables)
        results[policy] = indices, *plan_finish(align, state, batch, indices, sampled, tables)
    return tables, results


class Servers:
    """A server of the example for each policy, and the device's side of both. All servers do the same."""

    def __init__(self, seed, events):
        self.draw, self.events, own = random.Random(seed), events, runpy.run_path(EXAMPLE)
        self.size = self.draw.randint(1, 9)
        self.drafts = self.draw.randrange(self.size)
        config = lambda policy: own["Config"](self.size, self.drafts, self.draw.randint(2, 5), policy)
        held = SLOTS * WIDEST.blocks_per_request()
        self.servers = {policy: own["Server"](config(policy), 1 + held + 4) for policy in POLICIES}
        self.states = {policy: AlignState.create(base) for policy, base in POLICIES.items()}
        self.tables = BlockTables(blocks=jnp.full_like(BlockTables.create(WIDEST).blocks, STALE))
        self.slots, self.history = [None] * SLOTS, collections.deque([""], maxlen=6)

    def letters(self, count):
        return "".join(self.draw.choices("ab", k=count))

    def enter(self, slot):
        """A new request enters the slot: it continues the first tokens of an older one."""
        if self.slots[slot]:
            requests, _ = self.slots[slot]
            self.history.append(requests["copy_free"].tokens)
            for policy, server in self.servers.items():
                server.leave(requests[policy])
        old = self.draw.choice(self.history)
        prompt = old[: self.draw.randint(0, len(old))] + self.letters(1 + self.draw.randrange(2 * self.size))
        self.slots[slot] = {policy: server.enter(prompt) for policy, server in self.servers.items()}, prompt

    def row(self, slot):
        """Draws the tokens, the drafts and the accepted count of a slot's next row."""
        requests, prompt = self.slots[slot]
        done = requests["copy_free"].computed
        if done < len(prompt):
            return prompt[done : done + self.draw.randint(1, len(prompt) - done)], -1, self.draw.randint(0, 1)
        if self.draw.random() < 0.1:
            return self.letters(self.draw.randint(1, 2 * self.size)), -1, 0
        drafts = self.draw.randint(0, self.drafts)
        return self.letters(1 + drafts), drafts, self.draw.randint(1, 1 + drafts)

    def step(self):
        """Runs one step of some slots, in any order, and compares where the rows read and write."""
        rows, entries, entering, steps = [], [], ([], []), []
        for slot in self.draw.sample(range(SLOTS), self.draw.randint(1, SLOTS)):
            full = self.slots[slot] and self.slots[slot][0]["copy_free"].computed > 10 * self.size
            if full or self.slots[slot] is None or self.draw.random() < 0.05:
                self.enter(slot)
                entering[0].append(slot)
                entering[1].append(self.slots[slot][0]["copy_free"].computed)
            requests, _ = self.slots[slot]
            tokens, drafts, sampled = self.row(slot)
            before = {} if slot in entering[0] else dict(requests["copy_free"].table)
            held = dict(requests["copy_free"].table)
            ran = {
                policy: server.run(requests[policy], tokens, drafts, sampled) for policy, server in self.servers.items()
            }
            held |= requests["copy_free"].table
            entries += [(slot, column, block) for column, block in held.items() if before.get(column) != block]
            rows.append((slot, len(tokens), drafts, sampled))
            steps.append(ran)
        pad = self.draw.randint(0, ROWS - len(rows))
        rows, steps = [(-1, 0, -1, 7)] * pad + rows, [None] * pad + steps
        slots, lengths, drafts, sampled = zip(*rows, strict=True)
        self.tables, results = on_device(
            np.int32(self.size),
            self.states,
            self.tables,
            TableUpdates.from_host(WIDEST, UPDATES, [(group, *entry) for entry in entries for group in (0, 1)]),
            # The column that a request enters depends on the block size.
            Additions.from_host(replace(WIDEST, block_size=self.size, num_speculative_tokens=0), SLOTS, *entering),
            StepBatch.from_host(WIDEST, ROWS, slots, np.cumsum([0, *lengths]).tolist(), drafts),
            np.array([*sampled, *[7] * (ROWS - len(rows))], np.int32),
        )
        self.states = {policy: state for policy, (_, state, _) in results.items()}
        for policy, (indices, state, save) in to_numpy(results).items():
            for r, (slot, length, drafts, _) in enumerate(rows):
                if slot >= 0:
                    self.compare(policy, steps[r][policy], indices, save, r, drafts, length)
                    request = self.slots[slot][0][policy]
                    counts = state.num_computed_tokens, state.num_accepted_tokens, state.running_column
                    wanted = request.computed, request.accepted, request.running
                    assert tuple(int(count[slot]) for count in counts) == wanted

    def compare(self, policy, step, indices, save, r, drafts, length):
        assert (indices.num_computed_tokens[r], indices.window_row[r]) == (step.start, step.row)
        assert (indices.recurrent_read[:, r] == step.state).all()
        assert (indices.conv_read[:, r] == step.window).all()
        written = length if drafts >= 0 else 1
        assert 0 not in step.writes[:written]
        assert (indices.write[:, r, :written] == step.writes[:written]).all()
        for copy, plan in ((step.before, indices.migration), (step.after, save)):
            if copy is None:
                assert plan is None or not plan.destination[:, r].any()
                continue
            found = plan.recurrent_source[:, r], plan.conv_source[:, r], plan.window_row[r], plan.destination[:, r]
            assert all((of_groups == wanted).all() for of_groups, wanted in zip(found, copy, strict=True))
        self.events["hit"] += step.start > 0 and step.state in self.servers[policy].cached.values() and drafts < 0
        self.events["moved first"] += step.before is not None
        self.events["saved from another column"] += step.after is not None and step.after.state != step.after.to
        self.events["saved in place"] += step.after is not None and step.after.window == step.after.to


def test_the_explained_scheme_reads_and_writes_where_the_device_does():
    events = collections.Counter()
    for seed in range(12):
        servers = Servers(seed, events)
        for _ in range(40):
            servers.step()
    assert len(events) == 4
    assert min(events.values()) > 30, events


def test_the_explanation_prints_what_it_says(capsys):
    runpy.run_path(EXAMPLE, run_name="__main__")
    out = capsys.readouterr().out
    assert out.count(" and saves a boundary") == 1
    assert "{2: 'the state at', 3: 'the state a', 4: 'the state at', 5: 'the state at '}" in out
    assert "starts after 'the state at'" in out
