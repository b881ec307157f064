"""A pool that holds tokens instead of numbers, and repeats on them what kernels and copies do with a step's indices.

A recurrent block is the tuple of tokens whose state it would contain. A conv window is a list of tokens. Tokens are
unique, so a state that is read from a wrong place is noticed. For each step call `start`, `copy` for the migration,
`forward`, `copy` for the boundary saves, and `check_finished`.
"""

from dataclasses import dataclass, field

import jax
import numpy as np

ZERO, JUNK = -1, -2  # an input before the first token; bytes that may have any value


def last_inputs(tokens, width):
    """Returns the window after `tokens`: the last width - 1 of them, with zeros before the first."""
    return [*[ZERO] * (width - 1), *tokens][len(tokens) :]


@dataclass
class Row:
    """One row of a step.

    `drafts` is -1 for a row that is no verify row. `held` maps the slot's columns to blocks, `given` are the new
    blocks. `offered` is true if its boundaries were published when it was dispatched.
    """

    slot: int
    before: tuple = ()
    inputs: tuple = ()
    drafts: int = -1
    accepted: int = 1
    held: dict = field(default_factory=dict)
    given: frozenset = frozenset()
    offered: bool = False

    @property
    def after(self):
        rejected = 1 + self.drafts - self.accepted if self.drafts >= 0 else 0
        return self.before + self.inputs[: len(self.inputs) - rejected]

    def boundary(self, block_size):
        """The newest block boundary whose state this step saves, or 0 for none."""
        boundary = len(self.after) // block_size * block_size
        # A chunk leaves one state at its end, a verify row one after each token.
        kept = boundary > len(self.before) if self.drafts >= 0 else boundary == len(self.after)
        return boundary if kept else 0

    def inside(self, block_size):
        """The boundaries inside a chunk and at its end, in mode "all"."""
        ends = range(len(self.before) + 1, len(self.after) + 1) if self.drafts < 0 else ()
        return [end for end in ends if end % block_size == 0]

    def __str__(self):
        return f"slot {self.slot} at {len(self.before)} + {len(self.inputs)}"


class Pool:
    """The blocks of one group, and what each row may do with them in the current step."""

    def __init__(self, num_blocks, width, num_speculative_tokens, block_size):
        self.width, self.block_size = width, block_size
        self.window = width - 1 + num_speculative_tokens
        self.recurrent = [JUNK] * num_blocks
        self.conv = [[JUNK] * self.window for _ in range(num_blocks)]

    def scribble(self, block):
        """Overwrites a block, because its next holder must not rely on what the last one left."""
        self.recurrent[block], self.conv[block] = JUNK, [JUNK] * self.window

    def start(self, rows, holders, cached):
        """Begins a step. `holders` counts the requests that hold each block. Others may find the `cached` blocks."""
        self.rows, self.holders, self.cached = rows, holders, cached
        self.reads, self.writes = [set() for _ in rows], [set() for _ in rows]

    def _check_read(self, block, r):
        assert block in self.rows[r].held.values(), f"{self.rows[r]} reads block {block}, which it does not hold"
        self.reads[r].add(block)

    def check_write(self, block, r):
        row = self.rows[r]
        assert block != 0, f"{row} has no block to write"
        assert block in row.held.values(), f"{row} writes block {block}, which it does not hold"
        assert self.holders[block] == 1, f"{row} writes block {block}, which another request holds too"
        assert block not in self.cached, f"{row} writes block {block}, which is cached"
        self.writes[r].add(block)

    def copy(self, plan):
        """Does what `state_copy` does. The last rows of a copied window have no meaning."""
        if plan is None:
            return
        recurrent_source, conv_source, destinations = (
            x[0].tolist() for x in (plan.recurrent_source, plan.conv_source, plan.destination)
        )
        for r, destination in enumerate(destinations[: len(self.rows)]):
            if destination == 0:
                continue
            recurrent, conv, first = recurrent_source[r], conv_source[r], int(plan.window_row[r])
            self._check_read(recurrent, r)
            self._check_read(conv, r)
            if recurrent != destination or conv != destination or first:
                self.check_write(destination, r)
            self.recurrent[destination] = self.recurrent[recurrent]
            self.conv[destination] = self.conv[conv][first:] + [JUNK] * first

    def forward(self, indices):
        """Does what the kernels of a layer do, and checks that each row reads its own past."""
        for r, row in enumerate(self.rows):
            if not row.inputs:
                continue
            first, write = int(indices.window_row[r]), indices.write[0, r].tolist()
            recurrent_read, conv_read = int(indices.recurrent_read[0, r]), int(indices.conv_read[0, r])
            state, window = (), [ZERO] * (self.width - 1)
            if recurrent_read:
                self._check_read(recurrent_read, r)
                state = self.recurrent[recurrent_read]
            if conv_read:
                self._check_read(conv_read, r)
                window = self.conv[conv_read][first : first + self.width - 1]
            assert state == row.before, f"{row}: recurrent state"
            assert window == last_inputs(row.before, self.width), f"{row}: conv window"
            assert indices.num_computed_tokens[r] == len(row.before), row
            assert indices.has_initial_state[r] == bool(row.before), row

            verify = row.drafts >= 0
            ends = range(1, len(row.inputs) + 1) if verify else [len(row.inputs)]
            for t, end in enumerate(ends):
                self.check_write(write[t], r)
                self.recurrent[write[t]] = row.before + row.inputs[:end]
            kept = window[1:] + list(row.inputs) if verify else last_inputs(row.before + row.inputs, self.width)
            self.conv[write[0]] = kept + [JUNK] * (self.window - len(kept))

    def keep(self, interior):
        """Does what prefill ops do with the checkpoints of a step in mode "all": offsets and blocks of each row."""
        offsets, blocks = interior
        for r, row in enumerate(self.rows):
            if not row.inputs or row.drafts >= 0:
                continue
            kept = [(int(n), int(block)) for n, block in zip(offsets[r], blocks[0, r], strict=True) if block]
            inside = [len(row.before) + n for n, _ in kept]
            assert inside == [b for b in row.inside(self.block_size) if b < len(row.after)], row
            for n, block in kept:
                assert block == row.held[(len(row.before) + n) // self.block_size - 1], f"{row}: column of {n}"
                self.check_write(block, r)
                tokens = row.before + row.inputs[:n]
                self.recurrent[block] = tokens
                self.conv[block] = last_inputs(tokens, self.width) + [JUNK] * (self.window - self.width + 1)

    def check_finished(self, state):
        """Checks that the live state and the boundary's are where the next step and other requests will read them."""
        for row in self.rows:
            if not row.inputs:
                continue
            after, boundary = row.after, row.boundary(self.block_size)
            accepted, column = int(state.num_accepted_tokens[row.slot]), int(state.running_column[row.slot])
            assert state.num_computed_tokens[row.slot] == len(after), row
            assert self.recurrent[row.held[column + accepted - 1]] == after, f"{row}: live recurrent state"
            live = self.conv[row.held[column]][accepted - 1 : accepted + self.width - 2]
            assert live == last_inputs(after, self.width), f"{row}: live conv window"
            if boundary:
                self.check_boundary(row.held[boundary // self.block_size - 1], after[:boundary])
        self._check_rows_are_apart()

    def check_boundary(self, block, tokens):
        """Checks that the block of a boundary holds exactly its tokens."""
        assert self.recurrent[block] == tokens, f"recurrent state of the boundary at {len(tokens)}"
        window = self.conv[block][: self.width - 1]
        assert window == last_inputs(tokens, self.width), f"conv window of the boundary at {len(tokens)}"

    def _check_rows_are_apart(self):
        """Checks that no row gets or writes a block that another row reads, because kernels run in any order."""
        for r, row in enumerate(self.rows):
            for other, reads in enumerate(self.reads):
                taken = reads & (row.given | self.writes[r])
                assert other == r or not taken, f"{self.rows[other]} reads blocks {taken}, handed to {row}"


def check_idle(indices, plan, rows):
    """Checks that rows without tokens and padding rows have NULL_BLOCK everywhere."""
    idle = [r for r, row in enumerate(rows) if not row.inputs] + list(range(len(rows), len(indices.window_row)))
    for array in (indices.recurrent_read, indices.conv_read, indices.write):
        assert not array[:, idle].any()
    assert not indices.window_row[idle].any()
    for copies in (indices.migration, plan):
        assert copies is None or not copies.destination[:, idle].any()


def to_numpy(tree):
    return jax.tree.map(np.asarray, tree)
