"""A pool that holds tokens instead of numbers: a slow, literal replay of what kernels and copies do with a step's indices.

A recurrent block is the tuple of tokens whose state it would be; a conv window is a list of tokens. Tokens are unique, so
a state read from the wrong place can't look right.
"""

from dataclasses import dataclass, field

import jax
import numpy as np

from mamba_align_jax import AlignState, CopyPlan, StepIndices

ZERO, JUNK = -1, -2  # an input before the first token; bytes that nobody promised anything about


def last_inputs(tokens, width):
    """The window that belongs after `tokens`: the last width-1, zeros before the beginning."""
    return [*[ZERO] * (width - 1), *tokens][len(tokens) :]


@dataclass
class Row:
    """One row of a step. `drafts` is -1 for a row that is no verify row; `held` is its slot's column -> block."""

    slot: int
    before: tuple = ()
    inputs: tuple = ()
    drafts: int = -1
    accepted: int = 1
    held: dict = field(default_factory=dict)

    @property
    def after(self):
        rejected = 1 + self.drafts - self.accepted if self.drafts >= 0 else 0
        return self.before + self.inputs[: len(self.inputs) - rejected]

    def boundary(self, block_size):
        """The newest block boundary whose state this step leaves behind, 0 for none."""
        boundary = len(self.after) // block_size * block_size
        # A chunk has a state at its end only; a verify row after each token.
        kept = boundary > len(self.before) if self.drafts >= 0 else boundary == len(self.after)
        return boundary if kept else 0


class Pool:
    """The blocks of one group, and the set of them that are cached, which nobody may write."""

    def __init__(self, num_blocks, width, num_speculative_tokens, block_size):
        self.width, self.block_size = width, block_size
        self.window = width - 1 + num_speculative_tokens
        self.recurrent = [JUNK] * num_blocks
        self.conv = [[JUNK] * self.window for _ in range(num_blocks)]
        self.cached = set()

    def scribble(self, block):
        """What becomes of a block that was let go."""
        self.recurrent[block], self.conv[block] = JUNK, [JUNK] * self.window

    def _check_read(self, block, row):
        assert block in row.held.values(), f"slot {row.slot} reads block {block}, which it does not hold"

    def _check_write(self, block, row):
        assert block != 0, f"slot {row.slot} has no block to write"
        assert block in row.held.values(), f"slot {row.slot} writes block {block}, which it does not hold"
        assert block not in self.cached, f"slot {row.slot} writes block {block}, which is cached"

    def copy(self, plan, rows):
        """`state_copy` of recurrent states, then of windows, whose tails stay as they were."""
        if plan is None:
            return
        for r, row in enumerate(rows):
            destination = plan.destination[0, r]
            if destination == 0:
                continue
            recurrent, conv, first = plan.recurrent_source[0, r], plan.conv_source[0, r], plan.conv_row[r]
            self._check_read(recurrent, row)
            self._check_read(conv, row)
            if recurrent != destination or conv != destination or first:
                self._check_write(destination, row)
            self.recurrent[destination] = self.recurrent[recurrent]
            self.conv[destination] = self.conv[conv][first:] + self.conv[destination][self.window - first :]

    def forward(self, indices, rows):
        """What the kernels of a layer do, and whether each row found its own past."""
        for r, row in enumerate(rows):
            if not row.inputs:
                continue
            where, first = f"slot {row.slot} at {len(row.before)} + {len(row.inputs)}", indices.conv_row[r]
            state, window = (), [ZERO] * (self.width - 1)
            if indices.recurrent_read[0, r]:
                self._check_read(indices.recurrent_read[0, r], row)
                state = self.recurrent[indices.recurrent_read[0, r]]
            if indices.conv_read[0, r]:
                self._check_read(indices.conv_read[0, r], row)
                window = self.conv[indices.conv_read[0, r]][first : first + self.width - 1]
            assert state == row.before, f"{where}: recurrent state"
            assert window == last_inputs(row.before, self.width), f"{where}: conv window"
            assert indices.num_computed_tokens[r] == len(row.before), where
            assert indices.has_initial_state[r] == bool(row.before), where

            verify, write = row.drafts >= 0, indices.write[0, r]
            ends = range(1, len(row.inputs) + 1) if verify else [len(row.inputs)]
            for t, end in enumerate(ends):
                self._check_write(write[t], row)
                self.recurrent[write[t]] = row.before + row.inputs[:end]
            kept = window[1:] + list(row.inputs) if verify else last_inputs(row.before + row.inputs, self.width)
            self.conv[write[0]] = kept + [JUNK] * (self.window - len(kept))

    def check_finished(self, state, rows):
        """The live state and the boundary's are where the next step and other requests will look for them."""
        for row in rows:
            if not row.inputs:
                continue
            where, after = f"slot {row.slot} at {len(row.before)} + {len(row.inputs)}", row.after
            accepted, column = state.num_accepted_tokens[row.slot], state.state_idx[row.slot]
            assert state.num_computed_tokens[row.slot] == len(after), where
            assert self.recurrent[row.held[column + accepted - 1]] == after, f"{where}: live recurrent state"
            live = self.conv[row.held[column]][accepted - 1 : accepted + self.width - 2]
            assert live == last_inputs(after, self.width), f"{where}: live conv window"
            boundary = row.boundary(self.block_size)
            if boundary:
                block = row.held[boundary // self.block_size - 1]
                assert self.recurrent[block] == after[:boundary], f"{where}: recurrent state of the boundary"
                kept = self.conv[block][: self.width - 1]
                assert kept == last_inputs(after[:boundary], self.width), f"{where}: conv window of the boundary"


def check_idle(indices, plan, rows):
    """Rows without tokens and padding rows have NULL_BLOCK everywhere."""
    idle = [r for r, row in enumerate(rows) if not row.inputs] + list(range(len(rows), len(indices.conv_row)))
    for array in (indices.recurrent_read, indices.conv_read, indices.write):
        assert not array[:, idle].any()
    assert not indices.conv_row[idle].any()
    for copies in (indices.migration, plan):
        assert copies is None or not copies.destination[:, idle].any()


def to_numpy(tree: AlignState | StepIndices | CopyPlan | None):
    return jax.tree.map(np.asarray, tree)
