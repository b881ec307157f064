"""Runs the host path beside the device path, and checks that both find the same under policy "pre_copy"."""

import jax
import numpy as np
from vllm_compat.rows import Batch, Scheduled

from mamba_align_jax.vllm_compat.mamba_utils import gather_state_indices, postprocess_mamba, preprocess_mamba
from mamba_align_jax.vllm_compat.staging import AcceptedTokens, stage_postprocess_inputs_to_gpu


def moves(plan, rows):
    """Returns what a plan copies in `rows`, without the copies of a state onto itself."""
    recurrent, conv, first, to = plan.recurrent_source, plan.conv_source, plan.window_row, plan.destination
    still = (recurrent == to) & (conv == to) & (first == 0) | (to == 0)
    return [np.where(still, 0, x)[:, rows] for x in (recurrent, conv, np.broadcast_to(first, to.shape), to)]


def same(ours, theirs):
    return all((a == b).all() for a, b in zip(ours, theirs, strict=True))


class HostPath:
    """The state of the host path: running columns and accepted counts by request."""

    def __init__(self, align, tables, bucket):
        self.align, self.tables, self.bucket = align, tables, bucket
        self.state_idx, self.counts, self.steps = {}, AcceptedTokens(), 0
        self.finished, self.preempted = [], []

    def enter(self, name, column):
        """Names the running column of a request that enters inside a block, where the host path refuses to guess it."""
        self.state_idx[name] = column

    def before(self, names, rows, places, resumed, num_sampled):
        """Prepares the step of `rows`, which stand at `places` in the device's batch.

        Returns the staged inputs, and the sampled counts and slots of the rows.
        """
        self.names, self.rows, self.places = names, rows, places
        self.batch = Batch(
            names,
            [len(row.before) for row in rows],
            [len(row.inputs) for row in rows],
            [row.drafts for row in rows],
            self.tables[:, [row.slot for row in rows]],
        )
        scheduled = Scheduled(self.finished, self.preempted or None, resumed)
        self.finished, self.preempted = [], []
        accepted = self.counts.reorder(scheduled, names)
        self.migration, accepted = preprocess_mamba(self.align, scheduled, self.batch, self.state_idx, accepted)
        self.indices = gather_state_indices(self.align, self.batch, self.state_idx, accepted, self.bucket)
        staged = stage_postprocess_inputs_to_gpu(self.batch, self.state_idx, self.bucket)
        self.sampled = num_sampled[places]
        pad = lambda values, fill: np.append(values, [fill] * (self.bucket - len(rows))).astype(np.int32)
        return staged, pad(self.sampled, 7), pad([row.slot for row in rows], -1)

    def check(self, indices, plan, fused, state, slots):
        """Compares with what the device found in the same step. `slots` are the slots of all running requests."""
        n, window = len(self.rows), self.align.window
        ours, theirs = range(n), self.places
        assert same(moves(self.migration, ours), moves(indices.migration, theirs))
        for name, value in self.indices._asdict().items():
            found = getattr(indices, name)
            found = found[..., :window] if name == "write" else found
            axis = 1 if name in ("recurrent_read", "conv_read", "write") else 0
            assert (value.take(ours, axis) == found.take(theirs, axis)).all(), name
        saves, accepted = postprocess_mamba(self.align, self.batch, self.state_idx, self.sampled)
        fused_plan, fused_accepted = fused
        assert same(moves(saves, ours), moves(plan, theirs))
        assert same(moves(saves, ours), moves(jax.tree.map(np.asarray, fused_plan), ours))
        assert np.asarray(fused_accepted).tolist() == accepted.tolist() + [0] * (self.bucket - n)
        # The counts come from the device and from the host in turn.
        self.steps += 1
        self.counts.expect(self.names, fused_accepted if self.steps % 2 else accepted)
        names, slots = list(slots), list(slots.values())
        assert [self.state_idx[name] for name in names] == state.running_column[slots].tolist()
        assert (self.counts.reorder(Scheduled(), names) == state.num_accepted_tokens[slots]).all()
