"""The random server under policy "deferred": other blocks, fold groups of any length, and folds at the end of requests."""

from types import SimpleNamespace

import jax
import numpy as np
from fakes.any_config import DEFERRED, LONGEST, SLOTS, AnyConfig, make_spec, run_deferred_step
from fakes.server import RARE, TURN, Machine
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from oracles.deferred_tokens import DeferredPool
from oracles.tokens import to_numpy

from mamba_align_jax.align.deferred import plan_slots
from mamba_align_jax.cache.state_blocks import StateBlockManager


@jax.jit
def plan_fold(block_size, fold_length, state, tables, slots):
    return plan_slots(AnyConfig(DEFERRED["deferred"], block_size, fold_length), state, tables, slots)


class NoHostPath:
    """Stands for the host path, which runs under policy "pre_copy" only."""

    def __init__(self, tables):
        self.tables, self.finished, self.preempted, self.counts = tables, [], [], self

    def expect(self, *arguments):
        pass

    enter = before = expect


class DeferredMachine(Machine):
    """Slots under policy "deferred". All steps of known tokens are published at their dispatch."""

    policies, main = DEFERRED, "deferred"
    # The lengths of fold groups. None for any.
    lengths = None

    @initialize(
        mode=st.sampled_from(["align", "align", "align", "none", "all"]),
        L=st.integers(1, 9),
        groups=st.integers(1, 3),
        K=st.integers(0, 4),
        width=st.integers(2, 5),
        lag=st.integers(0, 2),
        room=st.sampled_from([SLOTS + 1, SLOTS + 1, SLOTS, SLOTS - 1, 1]),
        never=st.sets(st.sampled_from(RARE)),
        first=st.lists(TURN, min_size=1, max_size=SLOTS),
    )
    def configure(self, mode, L, groups, K, width, lag, room, never, first):
        L, width = self.lengths[L % len(self.lengths)] if self.lengths else L, self.width or width
        mode = mode if self.keeps_interior or mode != "all" else "align"
        K, block_size = min(K, (L - 1) // 2), L * groups
        self.align = make_spec(
            width=width,
            block_size=block_size,
            num_speculative_tokens=K,
            max_model_len=LONGEST - 7 * max(9 - block_size, 0),
            mode=mode,
            policy="deferred",
            fold_length=L,
        )
        # A chunk after a verify row is not published at its dispatch, and its first column is held a step longer.
        held = self.align.blocks_per_request(lag, max_chunk=2 * block_size) + (mode != "none")
        self.num_blocks = 1 + room * held
        self.manager = StateBlockManager(self.num_blocks, block_size, K, mode=mode, fold_length=L)
        pool = DeferredPool(self.num_blocks, width, K, self.align.state_block_size, fold_length=L, slots=SLOTS)
        self.pools, self.unfolded = {"deferred": pool}, {}
        self.open(lag, never, first)

    # Chunks may end anywhere, and one after a verify row is not published at its dispatch.
    more_blocks = 2

    def make_host_path(self, tables):
        return NoHostPath(tables)

    def run(self, *inputs):
        *inputs, _ = inputs
        return run_deferred_step(
            np.int32(self.size), np.int32(self.align.fold_length), self.states, self.tables, *inputs
        )

    def dispatch(self, rows, entering, entries):
        for slot, _ in entering:
            self.pools["deferred"].enter(slot)
        super().dispatch(rows, entering, entries)

    def offer(self, request, row):
        """Decode rows of known tokens leave their state to the next step. Nothing is published for them yet."""
        if self.align.mode == "none" or any(step.drafts > 0 for step in [*request.pending, row]):
            return
        columns, is_chunk = self.manager.columns(request.name), row.drafts < 0
        boundary = self.manager.publish(request.name, row.after, is_prefill_row=is_chunk)
        if not is_chunk:
            assert boundary == 0
            self.events["a decode row of a known token is published"] += 1
        else:
            self.check_folded(row, columns, self.unfolded.pop(request.name, 0))
            row.offered = True
            inside = row.inside(self.size) if self.align.mode == "all" else [row.boundary(self.size)]
            self.keep_cached(request, row, filter(None, inside))

    def release(self, request, row):
        """The boundary that the last results have passed is published, because this row folds it."""
        columns = self.manager.columns(request.name)
        boundary = self.manager.release(request.name)
        assert boundary == self.unfolded.pop(request.name, 0)
        self.check_folded(row, columns, boundary)

    def check_folded(self, row, columns, boundary):
        """Checks the state of a boundary that a row has folded, unless it is 0."""
        if boundary:
            # The row may be the last one that needs the block.
            self.pools["deferred"].check_boundary(columns[boundary // self.size - 1], row.after[:boundary])
            self.cached.add(columns[boundary // self.size - 1])
            self.events["published by the next step"] += 1

    def kept_now(self, request, row, kept):
        boundary = max(kept, default=0)
        if boundary == 0 or len(row.inputs) > 1 + max(row.drafts, 0):
            return kept
        if request.pending:
            self.events["published by a step in flight"] += 1
            return [boundary]
        self.unfolded[request.name] = boundary
        return []

    def drop(self, slot, how="finish"):
        request = self.requests[slot]
        boundary = self.manager.unfolded(request.name)
        assert boundary == self.unfolded.pop(request.name, 0)
        if boundary and how in ("finish", "stop", "preempt"):
            slots = np.array([slot, -1], np.int32)
            sizes = np.int32(self.size), np.int32(self.align.fold_length)
            state, folds = plan_fold(*sizes, self.states["deferred"], self.tables, slots)
            before, after = to_numpy(self.states["deferred"]), to_numpy(state)
            self.before_fold, self.states["deferred"], self.known = self.states["deferred"], state, after
            folds, pool = to_numpy(folds), self.pools["deferred"]
            self.check_mirrored((folds.read, folds.block, folds.windows))
            # The device may have accepted more tokens than the host counts.
            columns = self.manager.columns(request.name)
            block = pool.fold_only(slot, request.computed, folds, columns, after)
            # A chunk of one token that ended on the boundary has written its state itself.
            assert block == (0 if folds.base[0] == boundary else columns[boundary // self.size - 1])
            assert after.state_pos[slot] == boundary
            others = lambda state: jax.tree.map(lambda counts: np.delete(counts, slot).tolist(), state)
            assert others(before) == others(after)
            assert self.manager.folded(request.name) == boundary
            self.folded(slots)
            pool.check_boundary(columns[boundary // self.size - 1], request.computed[:boundary])
            self.cached.add(columns[boundary // self.size - 1])
            self.events["folds at its end"] += 1
            self.events["a window is kept at its end"] += bool(folds.windows.block[0, 0])
        super().drop(slot, how)

    def folded(self, slots):
        """Does nothing here. A subclass repeats the fold, before which the state was `before_fold`, elsewhere."""

    def commit(self, request, row):
        if row.slot < 0 and self.align.mode != "none":
            # A state that was loaded is in its block already.
            self.manager.publish(request.name, row.after, is_prefill_row=True)
            found = len(row.after) % self.size == 0
            self.manager.commit(request.name, row.after)
            return len(row.after) if found else 0
        return super().commit(request, row)

    def check_moves_nothing(self, plan):
        """Nothing is copied in any configuration: `count_events` checks windows."""

    def count_events(self, rows, indices, plan, before, after):
        assert plan is None
        windows = indices.folds.windows
        if self.K == 0 or self.align.mode == "none":
            assert not windows.block.any()
        no_copies = SimpleNamespace(destination=windows.block, conv_source=windows.read, window_row=windows.first_row)
        super().count_events(rows, indices, no_copies, before, after)
        for r, row in enumerate(rows):
            if row.inputs and row.drafts >= 0:
                self.events["folds"] += bool(indices.folds.block[0, r])
                self.events["crosses without a fold"] += (
                    not indices.folds.block[0, r]
                    and len(row.before) + len(row.inputs)
                    > -(-(len(row.before) + 1) // self.align.fold_length) * self.align.fold_length
                )
            self.events["settles"] += bool(indices.folds.unsettled[r])
            self.events["settles after a fold"] += bool(indices.folds.unsettled[r] and indices.folds.block[0, r])
            self.events["settles and keeps a window"] += bool(indices.folds.unsettled[r] and windows.block[0, r])
