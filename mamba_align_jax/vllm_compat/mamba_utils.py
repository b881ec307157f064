"""The bookkeeping of a step in plain Python, under policy "pre_copy", for hosts that know every count before the step.

It does what vLLM's first model runner does (`vllm.v1.worker.mamba_utils`), with vLLM's function names and the formulas
of the device path. Where vLLM passes pointers, these functions return plans of the blocks to copy, which `staging`
carries out. Nothing here imports JAX. A step consists of:

    accepted = counts.reorder(scheduler_output, batch.req_ids)
    plan, accepted = preprocess_mamba(align, scheduler_output, batch, state_idx, accepted)
    pool = do_mamba_copy_block(align, pool, plan)
    indices = gather_state_indices(align, batch, state_idx, accepted, bucket)   # for the model
    plan, accepted = postprocess_mamba(align, batch, state_idx, num_sampled)
    pool = do_mamba_copy_block(align, pool, plan)
    counts.expect(batch.req_ids, accepted)

To avoid waiting for the sampled tokens, call `staging.postprocess_mamba_align_gpu` in place of the two lines before the
last. `state_idx` is the caller's dict of the running column of each request, empty at first. These functions change it,
but not when they raise. The block tables must keep the same contract as on the device (design section 5).
"""

from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import numpy as np

from mamba_align_jax.align import columns
from mamba_align_jax.align.columns import NULL_BLOCK
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.policy import copy_free, pre_copy
from mamba_align_jax.vllm_compat.host_types import HostCopyPlan, HostIndices, InputBatch, SchedulerOutput


class _RequestRow(NamedTuple):
    """One row of a step. `drafts` is -1 for a row that is no verify row."""

    index: int
    req_id: Hashable
    computed: int
    scheduled: int
    drafts: int

    @property
    def certain(self) -> int:
        return columns.certain_tokens(self.computed, self.scheduled, max(self.drafts, 0))

    def running_column(self, align: AlignConfig) -> int:
        return columns.running_column(self.computed, self.scheduled, align.state_block_size)


def _rows(function: str, align: AlignConfig, batch: InputBatch) -> list[_RequestRow]:
    """Checks the batch and returns its rows."""
    count = len(batch.req_ids)
    if count > align.max_num_seqs:
        raise ValueError(f"{function}: req_ids must be at most max_num_seqs = {align.max_num_seqs}, got {count}")
    lengths = {
        name: len(getattr(batch, name)) for name in ("num_computed_tokens", "num_scheduled_tokens", "num_draft_tokens")
    }
    lengths |= {f"block_rows[{group}]": len(rows) for group, rows in enumerate(batch.block_rows)}
    for name, length in lengths.items():
        if length != count:
            raise ValueError(f"{function}: {name} must describe {count} rows, got {length}")
    if len(batch.block_rows) != len(align.groups):
        raise ValueError(f"{function}: block_rows must have {len(align.groups)} groups, got {len(batch.block_rows)}")
    rows, seen = [], set()
    counts = zip(batch.num_computed_tokens, batch.num_scheduled_tokens, batch.num_draft_tokens, strict=True)
    for index, (req_id, row) in enumerate(zip(batch.req_ids, counts, strict=True)):
        computed, scheduled, drafts = map(int, row)
        problem = None
        if req_id in seen:
            problem = "is in the batch twice"
        elif computed < 0 or scheduled < 0 or computed + scheduled > align.max_model_len:
            problem = (
                f"must have at most {align.max_model_len} tokens, got {computed} computed and {scheduled} scheduled"
            )
        elif not -1 <= drafts <= align.num_speculative_tokens:
            problem = f"num_draft_tokens must be in [-1, {align.num_speculative_tokens}], got {drafts}"
        elif drafts >= 0 and scheduled not in (0, 1 + drafts):
            problem = f"a verify row with {drafts} drafts must have {1 + drafts} tokens, got {scheduled}"
        if problem:
            raise _wrong_row(function, req_id, problem)
        seen.add(req_id)
        rows.append(_RequestRow(index, req_id, computed, scheduled, drafts))
    return rows


def _wrong_row(function: str, req_id: Hashable, problem: str) -> ValueError:
    """Returns the error for a row of the batch."""
    return ValueError(f"{function}: request {req_id!r}: {problem}")


def _counts(function: str, name: str, values: Sequence[int] | np.ndarray, rows: list[_RequestRow]) -> np.ndarray:
    """Returns a copy of counts that may be padded, int32 [rows]."""
    counts = np.array(values[: len(rows)], np.int32)
    if len(counts) != len(rows):
        raise ValueError(f"{function}: {name} must describe {len(rows)} rows, got {len(counts)}")
    return counts


def _block(batch: InputBatch, group: int, row: int, column: int) -> int:
    """Returns the block of a column, or NULL_BLOCK if the row has none."""
    blocks = batch.block_rows[group][row]
    return int(blocks[column]) if 0 <= column < len(blocks) else NULL_BLOCK


def _held_block(function: str, batch: InputBatch, group: int, row: int, column: int) -> int:
    block = _block(batch, group, row, column)
    if block == NULL_BLOCK:
        raise ValueError(
            f"{function}: request {batch.req_ids[row]!r} must have a block in column {column} of group {group}, "
            "got none"
        )
    return block


def missing_state_idx(function: str, req_id: Hashable) -> ValueError:
    """Returns the error for a request that has no running column."""
    return ValueError(
        f"{function}: request {req_id!r} must have a running column: run preprocess_mamba on this batch first"
    )


def cleanup_mamba_state_idx(scheduler_output: SchedulerOutput, mamba_state_idx: MutableMapping[Hashable, int]) -> None:
    """Removes the running columns of finished, preempted and resumed requests.

    A resumed request must be removed too, because a forced preemption is not reported, and the old column may lie
    beyond the end of the request's new row of blocks.
    """
    gone = scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or (), scheduler_output.resumed_req_ids
    for req_ids in gone:
        for req_id in req_ids:
            mamba_state_idx.pop(req_id, None)


def collect_mamba_copy_meta(
    plan: HostCopyPlan, batch: InputBatch, row: int, source: int, destination: int, offset: int
) -> None:
    """Adds one row's copy to `plan`.

    The copy takes the recurrent state of column `source + offset`, and the conv window of column `source` from row
    `offset` on.

    Args:
        plan: The plan, which is changed.
        batch: The step's rows.
        row: The number of the row.
        source: The first column of the window that contains the state.
        destination: The column to copy to.
        offset: Tokens from the start of the window to the state, 0 to K. If it is 0 and the columns are equal, nothing
            is added, because nothing would move.

    Raises:
        ValueError: A column has no block. The text names the request, and `plan` is unchanged.
    """
    if source == destination and offset == 0:
        return
    held = lambda column: [
        _held_block("collect_mamba_copy_meta", batch, group, row, column) for group in range(len(batch.block_rows))
    ]
    blocks = held(source + offset), held(source), held(destination)
    plan.recurrent_source[:, row], plan.conv_source[:, row], plan.destination[:, row] = blocks
    plan.window_row[row] = offset


def preprocess_mamba(
    align: AlignConfig,
    scheduler_output: SchedulerOutput,
    input_batch: InputBatch,
    mamba_state_idx: MutableMapping[Hashable, int],
    num_accepted_tokens: Sequence[int] | np.ndarray,
) -> tuple[HostCopyPlan, np.ndarray]:
    """Advances the running columns and plans the copies of states to them. Call it before the model runs.

    A request without a running column enters, with the tokens of its prefix hit, as if it had accepted one token.

    Args:
        align: The configuration, with mode "none" or "align" and policy "pre_copy".
        scheduler_output: The requests whose states were lost.
        input_batch: The step's rows.
        mamba_state_idx: The running columns. The lost requests are removed, and each row of the batch gets its new
            column.
        num_accepted_tokens: What each row accepted in its last step, the bonus token included, so at least 1. int32
            [rows].

    Returns:
        The plan, and the accepted counts after it was carried out, int32 [rows]. They are 1 for rows whose state moves.

    Raises:
        ValueError: An argument or a row is wrong. The text names it, and nothing is changed.
    """
    name = "preprocess_mamba"
    if align.mode == "all" or align.policy != "pre_copy":
        raise ValueError(
            f"{name}: align must have mode 'none' or 'align' and policy 'pre_copy', "
            f"got {align.mode!r} and {align.policy!r}"
        )
    rows = _rows(name, align, input_batch)
    accepted = _counts(name, "num_accepted_tokens", num_accepted_tokens, rows)
    state_idx = dict(mamba_state_idx)
    cleanup_mamba_state_idx(scheduler_output, state_idx)
    plan = HostCopyPlan.empty(align)
    for row in rows:
        if row.req_id not in state_idx:
            if row.computed % align.state_block_size:
                raise ValueError(
                    f"{name}: request {row.req_id!r} enters: num_computed_tokens must be a multiple of "
                    f"{align.state_block_size}, got {row.computed}"
                )
            state_idx[row.req_id] = columns.column_of(row.computed, align.state_block_size)
            accepted[row.index] = 1
        if not 1 <= accepted[row.index] <= align.window:
            problem = f"num_accepted_tokens must be in [1, {align.window}], got {accepted[row.index]}"
            raise _wrong_row(name, row.req_id, problem)
        if row.scheduled == 0:
            continue
        current = row.running_column(align)
        places = pre_copy(state_idx[row.req_id], int(accepted[row.index]), current)
        moves = places.migration
        if moves is not None and moves.needed:
            collect_mamba_copy_meta(
                plan, input_batch, row.index, moves.conv_source, moves.destination, moves.window_row
            )
        accepted[row.index] = places.window_row + 1
        state_idx[row.req_id] = current
    mamba_state_idx.clear()
    mamba_state_idx.update(state_idx)
    return plan, accepted


def gather_state_indices(
    align: AlignConfig,
    input_batch: InputBatch,
    mamba_state_idx: Mapping[Hashable, int],
    num_accepted_tokens: Sequence[int] | np.ndarray,
    bucket: int,
) -> HostIndices:
    """Returns the blocks that the model reads and writes.

    Call it after `preprocess_mamba`. In mode "all", which has no `preprocess_mamba`, call it before the model runs. In
    that mode a request has a running column only if its last step was a verify step. Otherwise its state is in the
    column of the last computed token, where a prefill chunk left it.

    Args:
        align: The configuration, with any mode.
        input_batch: The step's rows.
        mamba_state_idx: The running columns.
        num_accepted_tokens: What `preprocess_mamba` returned. In mode "all", what the last step accepted. int32 [rows].
        bucket: Rows of the result, padding included.

    Raises:
        ValueError: An argument is wrong, a request has no running column, or a column has no block. The text names it.
    """
    name = "gather_state_indices"
    rows = _rows(name, align, input_batch)
    if bucket < len(rows):
        raise ValueError(f"{name}: bucket must be at least {len(rows)} rows, got {bucket}")
    all_accepted = _counts(name, "num_accepted_tokens", num_accepted_tokens, rows)
    groups = range(len(align.groups))
    zeros = lambda *shape: np.zeros(shape, np.int32)
    reads = zeros(len(groups), bucket), zeros(len(groups), bucket), zeros(bucket)
    found = HostIndices(*reads, zeros(len(groups), bucket, align.window), zeros(bucket), np.zeros(bucket, np.bool_))
    for row in rows:
        if row.scheduled == 0:
            continue
        old, accepted = mamba_state_idx.get(row.req_id), int(all_accepted[row.index])
        if old is None and align.mode == "all":
            old, accepted = columns.column_of(row.computed, align.state_block_size), 1
        if old is None:
            raise missing_state_idx(name, row.req_id)
        current = row.running_column(align)
        # All copies were made before, so each state is read where it is, as under policy "copy_free".
        places = copy_free(old, accepted, current)
        for group in groups:
            held = lambda column, row=row.index, group=group: _held_block(name, input_batch, group, row, column)
            if row.computed > 0:
                found.recurrent_read[group, row.index] = held(places.recurrent_column)
                found.conv_read[group, row.index] = held(places.conv_column)
            for t in range(align.window):
                needed = t <= max(row.drafts, 0)
                column = current + t
                block = held(column) if needed else _block(input_batch, group, row.index, column)
                found.write[group, row.index, t] = block
        found.num_computed_tokens[row.index] = row.computed
        found.has_initial_state[row.index] = row.computed > 0
        found.window_row[row.index] = places.window_row if row.computed > 0 else 0
    return found


def postprocess_mamba(
    align: AlignConfig,
    input_batch: InputBatch,
    mamba_state_idx: MutableMapping[Hashable, int],
    num_sampled: Sequence[int] | np.ndarray,
    num_published_tokens: Sequence[int] | None = None,
) -> tuple[HostCopyPlan, np.ndarray]:
    """Plans the copies that save the boundaries which rows passed. Call it when the sampled tokens are on the host.

    Args:
        align: The configuration, with any mode. Mode "all" copies nothing and calls `postprocess_mamba_all`.
        input_batch: The step's rows, as before the step.
        mamba_state_idx: The running columns of the step. They are changed in mode "all" only.
        num_sampled: How many tokens each row sampled: its accepted drafts and the bonus token, or 0 for a chunk inside
            a prompt. int32 [rows].
        num_published_tokens: See `postprocess_mamba_all`. Ignored in the other modes.

    Returns:
        The plan, and the accepted counts for the next step, int32 [rows]. A count is at least 1. It is 1 where the
        state was saved onto the running column, so it does not say how many tokens were sampled. It is 0 for a row
        without tokens, whose request keeps its last count.

    Raises:
        ValueError: An argument or a row is wrong, or a column has no block. The text names it, and nothing is changed.
    """
    name = "postprocess_mamba"
    rows = _rows(name, align, input_batch)
    sampled = _counts(name, "num_sampled", num_sampled, rows)
    plan, accepted = HostCopyPlan.empty(align), np.zeros(len(rows), np.int32)
    for row in rows:
        if row.scheduled == 0:
            continue
        max_sampled = 1 + max(row.drafts, 0)
        if not 0 <= sampled[row.index] <= max_sampled:
            problem = f"num_sampled must be in [0, {max_sampled}], got {sampled[row.index]}"
            raise _wrong_row(name, row.req_id, problem)
        count = accepted[row.index] = max(int(sampled[row.index]), 1)
        if align.mode == "all":
            continue
        column = row.running_column(align)
        if mamba_state_idx.get(row.req_id) != column:
            raise missing_state_idx(name, row.req_id)
        save = columns.boundary_save(row.certain, columns.tokens_after(row.certain, count), align.state_block_size)
        if save.passed:
            collect_mamba_copy_meta(plan, input_batch, row.index, column, save.target, save.offset)
        accepted[row.index] = columns.accepted_after_save(count, save.passed, save.target, column)
    if align.mode == "all":
        postprocess_mamba_all(align, input_batch, mamba_state_idx, num_published_tokens)
    return plan, accepted


def postprocess_mamba_all(
    align: AlignConfig,
    input_batch: InputBatch,
    mamba_state_idx: MutableMapping[Hashable, int],
    num_published_tokens: Sequence[int] | None = None,
) -> None:
    """Records the running columns of verify rows in mode "all". The next step reads from there.

    No boundary is saved in this mode: drafts move the window on, so that after a verify step the column of a boundary
    may contain any state. Therefore each verify row must have 1 + K tokens, and must publish no boundary. The cache may
    contain only the boundaries of prefill chunks. If K is 0, nothing is recorded.

    Args:
        align: The configuration, with mode "all".
        input_batch: The step's rows, as before the step.
        mamba_state_idx: The running columns. Verify rows get theirs. Other rows with tokens lose theirs.
        num_published_tokens: The longest boundary of each row that this step publishes to the prefix cache, in tokens,
            or 0 for none. None if no row publishes one.

    Raises:
        ValueError: A verify row has another number of tokens or publishes a boundary. The text names the request, and
            nothing is changed.
    """
    name = "postprocess_mamba_all"
    if align.mode != "all":
        raise ValueError(f"{name}: mode must be 'all', got {align.mode!r}")
    rows = _rows(name, align, input_batch)
    published = [0] * len(rows) if num_published_tokens is None else num_published_tokens
    if len(published) != len(rows):
        raise ValueError(f"{name}: num_published_tokens must describe {len(rows)} rows, got {len(published)}")
    if align.num_speculative_tokens == 0:
        return
    live = [row for row in rows if row.scheduled > 0]
    for row in live:
        if row.drafts >= 0 and row.scheduled != align.window:
            problem = f"a verify row must have {align.window} tokens, got {row.scheduled}"
            raise _wrong_row(name, row.req_id, problem)
        if row.drafts >= 0 and published[row.index]:
            problem = f"a verify row must publish no boundary, got {published[row.index]}"
            raise _wrong_row(name, row.req_id, problem)
    for row in live:
        if row.drafts >= 0:
            mamba_state_idx[row.req_id] = row.running_column(align)
        else:
            mamba_state_idx.pop(row.req_id, None)
