"""A pool of tokens for policy "deferred": states at bases in blocks, and a ring of (position, token) for each slot."""

from oracles.tokens import JUNK, ZERO, Pool, last_inputs


class DeferredPool(Pool):
    """Does what the op for deferred states does, and checks that no entry and no state is lost."""

    def __init__(self, *sizes, fold_length, slots):
        super().__init__(*sizes)
        self.L, self.rings = fold_length, [{} for _ in range(slots)]

    def enter(self, slot):
        """Forgets the ring, because its next request must not rely on what the last one left."""
        self.rings[slot].clear()

    def end(self, base):
        return (base // self.L + 1) * self.L

    def read(self, slot, tokens, base, position, block, r=None):
        """Checks that the state of a slot that has computed `tokens` is where it should be; returns whether it folds."""
        assert base <= position == len(tokens)
        assert (self.recurrent[block] if block else ()) == tokens[:base], f"slot {slot}: state at the base {base}"
        if r is not None and block:
            self._check_read(block, r)
        for at in range(base, position):
            assert self.rings[slot].get(at % (2 * self.L)) == (at, tokens[at]), f"slot {slot}: entry of position {at}"
        assert position < self.end(base) + self.L, "two folds are due"
        return position >= self.end(base)

    def keep_window(self, end, tokens, windows, r, held, check_write):
        """Does what a fold that ends at `end` does with the window of a boundary, and checks what it keeps."""
        read, first, block = int(windows.read[0, r]), int(windows.first_row[r]), int(windows.block[0, r])
        if end % self.block_size:
            assert block == 0, f"a window is kept at {end}, which is no boundary"
            return
        own = held[end // self.block_size - 1]
        if block:
            assert block == own, f"the window of the boundary at {end} goes to another column"
            check_write(block)
            assert first or read != block, f"the window of the boundary at {end} is in place"
            self.conv[block] = self.conv[read][first : first + self.width - 1] + [JUNK] * (self.window - self.width + 1)
        assert bool(windows.moves[r]) == (block == read != 0)
        window = self.conv[own][: self.width - 1]
        assert window == last_inputs(tokens[:end], self.width), f"conv window of the boundary at {end}"

    def settle(self, indices):
        """Does what `migrate` does: writes the states of chunks after verify rows."""
        folds = indices.folds
        for r, row in enumerate(self.rows):
            assert folds.unsettled[r] == bool(row.inputs and row.drafts < 0 and folds.base[r] < len(row.before)), row
            if not folds.unsettled[r]:
                assert not folds.rest[:, r].any()
                continue
            base, (block, rest) = int(folds.base[r]), (int(x[0, r]) for x in (folds.block, folds.rest))
            if self.read(row.slot, row.before, base, len(row.before), int(folds.read[0, r]), r):
                self.check_write(block, r)
                self.recurrent[block] = row.before[: self.end(base)]
                self._check_read(int(folds.windows.read[0, r]), r)
                write = lambda block, r=r: self.check_write(block, r)
                self.keep_window(self.end(base), row.before, folds.windows, r, row.held, write)
            else:
                assert block == folds.windows.block[0, r] == 0
            self.check_write(rest, r)
            self.recurrent[rest] = row.before

    def fold_only(self, slot, tokens, folds, held, state):
        """Does what `fold_slots` does for one slot, which then has the counts of `state`."""
        base, block = int(folds.base[0]), int(folds.block[0, 0])
        assert folds.slot[0] == slot
        if self.read(slot, tokens, base, int(folds.position[0]), int(folds.read[0, 0])):
            self.recurrent[block] = tokens[: self.end(base)]
            write = lambda block: self._check_own(block, held)
            self.keep_window(self.end(base), tokens, folds.windows, 0, held, write)
        else:
            assert block == folds.windows.block[0, 0] == 0
        column, first = int(state.running_column[slot]), int(state.num_accepted_tokens[slot]) - 1
        live = self.conv[held[column]][first : first + self.width - 1]
        assert live == last_inputs(tokens, self.width), f"slot {slot}: live conv window after a fold"
        return block

    def _check_own(self, block, held):
        assert block in held.values(), f"block {block} is written, which is not held"
        assert block not in self.cached, f"block {block} is written, which is cached"

    def forward(self, indices):
        self.settle(indices)
        for r, row in enumerate(self.rows):
            if row.inputs:
                # All windows are read before one is written.
                window = self.window_of(row, r, indices)
                run = self.verify if row.drafts >= 0 else self.chunk
                run(row, r, indices)
                kept = window[1:] + list(row.inputs) if row.drafts >= 0 else None
                kept = kept or last_inputs(row.before + row.inputs, self.width)
                write = int(indices.write[0, r, 0])
                self.check_write(write, r)
                assert not indices.write[:, r, 1:].any()
                self.conv[write] = kept + [-2] * (self.window - len(kept))

    def window_of(self, row, r, indices):
        first, block, window = int(indices.window_row[r]), int(indices.conv_read[0, r]), [ZERO] * (self.width - 1)
        if block:
            self._check_read(block, r)
            window = self.conv[block][first : first + self.width - 1]
        assert window == last_inputs(row.before, self.width), f"{row}: conv window"
        assert indices.num_computed_tokens[r] == len(row.before), row
        assert indices.has_initial_state[r] == bool(row.before), row
        return window

    def chunk(self, row, r, indices):
        block = int(indices.recurrent_read[0, r])
        if block:
            self._check_read(block, r)
        assert (self.recurrent[block] if block else ()) == row.before, f"{row}: recurrent state"
        self.check_write(int(indices.write[0, r, 0]), r)
        self.recurrent[int(indices.write[0, r, 0])] = row.before + row.inputs

    def verify(self, row, r, indices):
        folds, position = indices.folds, len(row.before)
        base, block, ring = int(folds.base[r]), int(folds.block[0, r]), self.rings[row.slot]
        assert folds.slot[r] == row.slot
        assert indices.recurrent_read[0, r] == folds.read[0, r]
        reads = {at % (2 * self.L) for at in range(base, position)}
        if self.read(row.slot, row.before, base, position, int(folds.read[0, r]), r):
            base = self.end(base)
            self.check_write(block, r)
            self.recurrent[block] = row.before[:base]
            self._check_read(int(folds.windows.read[0, r]), r)
            self.keep_window(base, row.before, folds.windows, r, row.held, lambda block: self.check_write(block, r))
        else:
            assert block == folds.windows.block[0, r] == 0, f"{row} folds a group that is not complete"
        assert position + len(row.inputs) - 1 < self.end(base) + self.L, f"{row} reaches a third group"
        for at, token in enumerate(row.inputs, position):
            assert at % (2 * self.L) not in reads, f"{row} writes an entry that it reads"
            ring[at % (2 * self.L)] = at, token

    def check_finished(self, state):
        for row in self.rows:
            if not row.inputs:
                continue
            after, base = row.after, int(state.state_pos[row.slot])
            accepted, column = int(state.num_accepted_tokens[row.slot]), int(state.running_column[row.slot])
            assert state.num_computed_tokens[row.slot] == len(after), row
            self.read(row.slot, after, base, len(after), row.held[(base - 1) // self.block_size] if base else 0)
            live = self.conv[row.held[column]][accepted - 1 : accepted + self.width - 2]
            assert live == last_inputs(after, self.width), f"{row}: live conv window"
        self._check_rows_are_apart()
