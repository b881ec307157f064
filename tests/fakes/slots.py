"""Slots whose blocks hold tokens instead of numbers, run step by step through the device's bookkeeping.

Each column has its own block, so only the arithmetic can be wrong. The table contains that block from the step that may
write it until the column may be released. Before and after, the table contains a block of another request.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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

BLOCK, K, WIDTH, SLOTS = 4, 3, 4, 3
STATES = ConvState(WIDTH, 1, "float32"), RecurrentState((1, 1))
STALE = "stale"


def make_spec(policy):
    return AlignConfig((GroupSpec("layers", 1, STATES),), BLOCK, K, SLOTS, max_model_len=48, policy=policy)


class Row(NamedTuple):
    """What a slot runs. A chunk has `drafts` -1 and samples `accepted` tokens. A verify row accepts that many."""

    slot: int
    tokens: int
    drafts: int = -1
    accepted: int = 1


def verify(slot, drafts, accepted):
    return Row(slot, 1 + drafts, drafts, accepted)


@functools.partial(jax.jit, static_argnums=0)
def _plan(align, state, tables, additions, batch, num_sampled):
    state = add_requests(state, additions)
    state, indices = begin_step(align, state, batch, tables)
    return *plan_finish(align, state, batch, indices, num_sampled, tables), indices


class Slots:
    def __init__(self, policy):
        self.align = align = make_spec(policy)
        self.state = AlignState.create(align)
        self.blocks = 1 + np.arange(SLOTS * align.num_columns, dtype=np.int32).reshape(SLOTS, -1)
        self.others = int(self.blocks.max()) + 1
        self.rows = np.full_like(self.blocks, self.others)
        self.recurrent = {0: ()}
        self.windows = {0: [None] * (WIDTH - 1)}
        self.past, self._entering, self._count = {}, {}, 0

    def enter(self, slot, like=None, computed=0):
        """Enters a request in a slot. It continues the boundary that slot `like` has left after `computed` tokens."""
        self.past[slot] = self.past[like][:computed] if computed else ()
        self._entering[slot] = computed
        self.rows[slot] = self.others
        if computed:
            self._grant(slot, [computed // BLOCK - 1])
            ours, theirs = (self.blocks[s, computed // BLOCK - 1] for s in (slot, like))
            self.recurrent[ours], self.windows[ours] = self.recurrent[theirs], list(self.windows[theirs])

    def _grant(self, slot, columns):
        self.rows[slot, columns] = self.blocks[slot, columns]

    def prompt(self, slot, tokens):
        """Enters a prompt and runs it in chunks that end on boundaries."""
        self.enter(slot)
        while (left := tokens - len(self.past[slot])) > 0:
            self.step(Row(slot, left if left <= BLOCK else left // BLOCK * BLOCK))

    def column(self, slot):
        return int(self.state.running_column[slot])

    def accepted(self, slot):
        return int(self.state.num_accepted_tokens[slot])

    def boundary(self, slot, tokens):
        """Returns the tokens whose recurrent state and window are in the block of a boundary."""
        block = self.blocks[slot, tokens // BLOCK - 1]
        return self.recurrent.get(block), self.windows.get(block, [])[: WIDTH - 1]

    def expected(self, slot, tokens):
        past = self.past[slot][:tokens]
        return past, [*[None] * (WIDTH - 1), *past][len(past) :]

    def step(self, *rows):
        """Runs one step. Checks that each row reads its own past and saves the boundary that it passed."""
        slots, lengths, drafts, accepted = zip(*rows, strict=True)
        batch = StepBatch.from_host(self.align, SLOTS, slots, np.cumsum([0, *lengths]).tolist(), drafts)
        additions = Additions.from_host(self.align, SLOTS, list(self._entering), list(self._entering.values()))
        self._entering = {}
        sampled = jnp.asarray(np.array([*accepted, *[9] * (SLOTS - len(rows))], np.int32))
        before = {row.slot: len(self.past[row.slot]) for row in rows if row.tokens}
        for row in rows:
            if row.tokens:
                current = -(-(before[row.slot] + row.tokens) // BLOCK) - 1
                first, last = (before[row.slot] // BLOCK, current + K) if row.drafts > 0 else (current, current)
                self._grant(row.slot, list(range(first, last + 1)))
        tables = BlockTables(blocks=jnp.asarray(self.rows[None]))
        self.state, saves, at = jax.tree.map(
            np.asarray, _plan(self.align, self.state, tables, additions, batch, sampled)
        )
        self._copy(at.migration)
        for r, row in enumerate(rows):
            if row.tokens:
                self._run(row, r, at)
        self._copy(saves)
        for row in rows:
            if row.tokens:
                self._check_boundary(row)
        for slot, count in before.items():
            self.rows[slot, : count // BLOCK] = self.others

    def _run(self, row, r, at):
        past, first = self.past[row.slot], at.window_row[r]
        state = self.recurrent.get(at.recurrent_read[0, r], STALE)
        window = self.windows.get(at.conv_read[0, r], [])[first : first + WIDTH - 1]
        assert (state, window) == self.expected(row.slot, len(past)), f"{row} after {len(past)} tokens"
        new = past + tuple(range(self._count, self._count + row.tokens))
        self._count += row.tokens
        is_verify, write = row.drafts >= 0, at.write[0, r]
        assert self.others not in write[: row.tokens if is_verify else 1], f"{row}: writes another request's block"
        for t in range(row.tokens) if is_verify else [row.tokens - 1]:
            self.recurrent[write[t if is_verify else 0]] = new[: len(past) + t + 1]
        kept = window[1:] + list(new[len(past) :]) if is_verify else (window + list(new[len(past) :]))[1 - WIDTH :]
        self.windows[write[0]] = kept + [STALE] * (WIDTH - 1 + K - len(kept))
        self.past[row.slot] = new[: len(new) - max(row.drafts + 1 - max(row.accepted, 1), 0)] if is_verify else new

    def _copy(self, plan):
        if plan is None:
            return
        for r, to in enumerate(plan.destination[0]):
            if to:
                assert to != self.others, f"row {r}: copies to another request's block"
                first = plan.window_row[r]
                self.recurrent[to] = self.recurrent[plan.recurrent_source[0, r]]
                self.windows[to] = self.windows[plan.conv_source[0, r]][first:] + [STALE] * first

    def _check_boundary(self, row):
        past = self.past[row.slot]
        boundary, before = len(past) // BLOCK * BLOCK, len(past) - max(row.accepted, 1)
        if boundary > before if row.drafts >= 0 else boundary == len(past):
            assert self.boundary(row.slot, boundary) == self.expected(row.slot, boundary), (
                f"{row}: the boundary's state"
            )
