"""What a host may do besides planning steps: publish at the dispatch, load states, and take accepted tokens back."""

from dataclasses import replace

import jax
import numpy as np
from oracles.tokens import Row, last_inputs, to_numpy

from mamba_align_jax import Corrections, correct_counts

correct = jax.jit(correct_counts)


class UnusualHost:
    """A part of `fakes.server.Machine`."""

    def go_back(self, back):
        """The host learns that slots accepted fewer tokens in their last step, whose results it has not read."""
        corrected, refused = [], []
        for slot, count in back:
            request = self.requests[slot]
            if not (request and request.pending):
                continue
            row, accepted = request.pending[-1], int(self.known.num_accepted_tokens[slot])
            if count >= accepted:
                # The state does not exist.
                refused += [(slot, len(request.computed) - count)] if len(request.computed) >= count else []
                continue
            request.pending[-1] = row = replace(row, accepted=row.accepted - count)
            request.computed = row.after
            corrected.append((slot, len(row.after)))
            self.host_path.counts.expect([request.name], np.array([accepted - count]))
        entries = corrected + refused
        slots, computed = zip(*entries, strict=True) if entries else ((), ())
        corrections = Corrections.from_host(self.align, len(self.requests), slots, computed)
        results = {policy: correct(state, corrections) for policy, state in self.states.items()}
        assert all(int(count) == len(refused) for _, count in results.values())
        self.states = {policy: state for policy, (state, _) in results.items()}
        self.known = to_numpy(self.states[self.main])
        self.events["goes back"] += len(corrected)

    def offer(self, request, row):
        """In mode "all", every other request publishes the boundaries of its chunks when they are dispatched."""
        certain = all(step.drafts < 0 for step in [*request.pending, row])
        if self.align.mode == "all" and request.name % 2 and certain:
            self.manager.publish(request.name, row.after)
            row.offered = True
            self.keep_cached(request, row, row.inside(self.size))

    def keep_cached(self, request, row, boundaries):
        columns = self.manager.columns(request.name)
        for boundary in boundaries:
            block = columns[boundary // self.size - 1]
            for pool in self.pools.values():
                pool.check_boundary(block, row.after[:boundary])
            self.cached.add(block)

    def load(self, request):
        """Puts the state of a request's first tokens into a block, and tells the manager of a step that has left it.

        Returns the (column, block) entries, or None if the pool has too few blocks.
        """
        count = request.loaded
        entries = self.manager.allocate(request.name, 0, 0, count)
        if entries is None:
            return None
        self.cached -= {block for _, block in entries}
        tokens = request.prompt[:count]
        self.fill(dict(entries)[(count - 1) // self.size], tokens)
        if self.commit(request, Row(-1, (), tokens)) and self.align.mode != "none":
            self.cached.add(dict(entries)[(count - 1) // self.size])
        self.host_path.enter(request.name, (count - 1) // self.size)
        self.events["enters inside a block"] += count % self.size > 0
        return entries

    def fill(self, block, tokens):
        for pool in self.pools.values():
            pool.scribble(block)
            pool.recurrent[block] = tokens
            pool.conv[block][: pool.width - 1] = last_inputs(tokens, pool.width)
