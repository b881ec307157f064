"""The bookkeeping of a step in plain Python, under policy "pre_copy": for hosts that know every count before a step.

It is what vLLM's first model runner does (`vllm.v1.worker.mamba_utils`), by its functions' names, with the formulas of the
device path. There are no pointers: plans say which blocks move, and `staging` runs them. Nothing here imports JAX. A step:

    accepted = counts.reorder(scheduler_output, batch.req_ids)
    plan, accepted = preprocess_mamba(spec, scheduler_output, batch, state_idx, accepted)
    pool = do_mamba_copy_block(spec, pool, plan)
    indices = gather_state_indices(spec, batch, state_idx, accepted, bucket)   # for the model
    plan, accepted = postprocess_mamba(spec, batch, state_idx, num_sampled)
    pool = do_mamba_copy_block(spec, pool, plan)
    counts.expect(batch.req_ids, accepted)

or, without waiting for what was sampled, with `postprocess_mamba_align_gpu` in place of the two lines before the last.
`state_idx` is a dict of the caller's, empty at first: the running column of every request that has one. These functions
change it, and change nothing when they raise. Block tables keep the same contract as on the device.
"""

from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mamba_align_jax._deprecated import renamed_fields
from mamba_align_jax.align.columns import (
    NULL_BLOCK,
    accepted_after_save,
    boundary_save,
    certain_tokens,
    column_of,
    running_column,
    tokens_after,
)
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.policy import copy_free, pre_copy


class SchedulerOutput(Protocol):
    """Requests whose states are gone since the last step. Resumed ones may or may not have been called preempted."""

    @property
    def finished_req_ids(self) -> Iterable[Hashable]:
        """Finished or aborted."""
        ...

    @property
    def preempted_req_ids(self) -> Iterable[Hashable] | None:
        """Their blocks were taken."""
        ...

    @property
    def resumed_req_ids(self) -> Iterable[Hashable]:
        """In the batch again, with the computed tokens of a new prefix hit."""
        ...


class InputBatch(Protocol):
    """The rows of a step, in batch order: one entry per row in every sequence. A request may sit a step out."""

    @property
    def req_ids(self) -> Sequence[Hashable]:
        """Distinct; at most `max_num_seqs`."""
        ...

    @property
    def num_computed_tokens(self) -> Sequence[int]:
        """Tokens whose states exist before the step, exactly: rejected drafts are not counted."""
        ...

    @property
    def num_scheduled_tokens(self) -> Sequence[int]:
        """Tokens of the step, drafts included; 0 for a row that takes no part."""
        ...

    @property
    def num_draft_tokens(self) -> Sequence[int]:
        """Draft tokens of a verify row, which has one token more; -1 for a row that is none."""
        ...

    @property
    def block_rows(self) -> Sequence[Sequence[Sequence[int]]]:
        """Per group and row, the block of each column. NULL_BLOCK, stale or missing where the step needs none."""
        ...


@renamed_fields(conv_row="window_row")
class HostCopyPlan(NamedTuple):
    """A `CopyPlan` in NumPy, with `max_num_seqs` rows whatever the batch: int32 [groups, rows], but `window_row` [rows].

    Destination NULL_BLOCK is no copy. Unlike the device's plans it has no copies of a state onto itself.
    """

    recurrent_source: np.ndarray
    conv_source: np.ndarray
    window_row: np.ndarray
    destination: np.ndarray

    @classmethod
    def empty(cls, spec: AlignConfig) -> "HostCopyPlan":
        """A plan without copies."""
        blocks = lambda: np.full((len(spec.groups), spec.max_num_seqs), NULL_BLOCK, np.int32)
        return cls(blocks(), blocks(), np.zeros(spec.max_num_seqs, np.int32), blocks())

    @property
    def is_empty(self) -> bool:
        """Whether nothing moves."""
        return not self.destination.any()


@renamed_fields(conv_row="window_row")
class HostIndices(NamedTuple):
    """Where a step's rows read and write: NumPy arrays of the same names and meaning as in `StepIndices`."""

    recurrent_read: np.ndarray
    conv_read: np.ndarray
    window_row: np.ndarray
    write: np.ndarray
    num_computed_tokens: np.ndarray
    has_initial_state: np.ndarray


class _Row(NamedTuple):
    """`drafts` is -1 for a row that is no verify row."""

    index: int
    req_id: Hashable
    computed: int
    scheduled: int
    drafts: int

    @property
    def certain(self) -> int:
        return certain_tokens(self.computed, self.scheduled, max(self.drafts, 0))

    def running_column(self, spec: AlignConfig) -> int:
        return running_column(self.computed, self.scheduled, spec.state_block_size)


def _rows(function: str, spec: AlignConfig, batch: InputBatch) -> list[_Row]:
    """The batch's rows, checked."""
    count = len(batch.req_ids)
    if count > spec.max_num_seqs:
        raise ValueError(f"{function}: req_ids must be at most max_num_seqs = {spec.max_num_seqs}, got {count}")
    lengths = {
        name: len(getattr(batch, name)) for name in ("num_computed_tokens", "num_scheduled_tokens", "num_draft_tokens")
    }
    lengths |= {f"block_rows[{group}]": len(rows) for group, rows in enumerate(batch.block_rows)}
    for name, length in lengths.items():
        if length != count:
            raise ValueError(f"{function}: {name} must describe {count} rows, got {length}")
    if len(batch.block_rows) != len(spec.groups):
        raise ValueError(f"{function}: block_rows must have {len(spec.groups)} groups, got {len(batch.block_rows)}")
    rows, seen = [], set()
    counts = zip(batch.num_computed_tokens, batch.num_scheduled_tokens, batch.num_draft_tokens, strict=True)
    for index, (req_id, row) in enumerate(zip(batch.req_ids, counts, strict=True)):
        computed, scheduled, drafts = map(int, row)
        problem = None
        if req_id in seen:
            problem = "is in the batch twice"
        elif computed < 0 or scheduled < 0 or computed + scheduled > spec.max_model_len:
            problem = (
                f"must have at most {spec.max_model_len} tokens, got {computed} computed and {scheduled} scheduled"
            )
        elif not -1 <= drafts <= spec.num_speculative_tokens:
            problem = f"num_draft_tokens must be in [-1, {spec.num_speculative_tokens}], got {drafts}"
        elif drafts >= 0 and scheduled not in (0, 1 + drafts):
            problem = f"a verify row with {drafts} drafts must have {1 + drafts} tokens, got {scheduled}"
        if problem:
            raise ValueError(f"{function}: request {req_id!r}: {problem}")
        seen.add(req_id)
        rows.append(_Row(index, req_id, computed, scheduled, drafts))
    return rows


def _counts(function: str, name: str, values: Sequence[int] | np.ndarray, rows: list[_Row]) -> np.ndarray:
    """A copy, int32 [rows], of counts that may be padded."""
    counts = np.array(values[: len(rows)], np.int32)
    if len(counts) != len(rows):
        raise ValueError(f"{function}: {name} must describe {len(rows)} rows, got {len(counts)}")
    return counts


def _block(batch: InputBatch, group: int, row: int, column: int) -> int:
    """NULL_BLOCK where the row has none."""
    blocks = batch.block_rows[group][row]
    return int(blocks[column]) if 0 <= column < len(blocks) else NULL_BLOCK


def _held_block(function: str, batch: InputBatch, group: int, row: int, column: int) -> int:
    block = _block(batch, group, row, column)
    if block == NULL_BLOCK:
        raise ValueError(
            f"{function}: request {batch.req_ids[row]!r} must have a block in column {column} of group {group}, got none"
        )
    return block


def missing_state_idx(function: str, req_id: Hashable) -> ValueError:
    """What to raise where a request has no running column."""
    return ValueError(
        f"{function}: request {req_id!r} must have a running column: run preprocess_mamba on this batch first"
    )


def cleanup_mamba_state_idx(scheduler_output: SchedulerOutput, mamba_state_idx: MutableMapping[Hashable, int]) -> None:
    """Forgets the running columns of finished, preempted and resumed requests.

    Resumed ones too: a forced preemption tells nobody, and the old column may lie behind the new, shorter row of blocks.
    """
    gone = scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or (), scheduler_output.resumed_req_ids
    for req_ids in gone:
        for req_id in req_ids:
            mamba_state_idx.pop(req_id, None)


def collect_mamba_copy_meta(
    plan: HostCopyPlan, batch: InputBatch, row: int, source: int, destination: int, offset: int
) -> None:
    """Adds one row's copy to `plan`: the state `offset` tokens into the window that begins at column `source`.

    That is the recurrent state of column `source + offset`, and the conv window of column `source` from row `offset` on.

    Args:
        plan: Changed.
        batch: The step's rows.
        row: Which of them.
        source: Column.
        destination: Column.
        offset: Tokens, 0 to K. With 0 and the same column nothing is added: nothing would move.

    Raises:
        ValueError: a column has no block; the request is named, and `plan` is as it was.
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
    spec: AlignConfig,
    scheduler_output: SchedulerOutput,
    input_batch: InputBatch,
    mamba_state_idx: MutableMapping[Hashable, int],
    num_accepted_tokens: Sequence[int] | np.ndarray,
) -> tuple[HostCopyPlan, np.ndarray]:
    """Before the model runs: advances the running columns, and plans the copies of states that must follow.

    Requests without a running column enter, new or resumed, with the tokens of a prefix hit: as if they had accepted 1.

    Args:
        spec: Mode "none" or "align", policy "pre_copy".
        scheduler_output: Whose states are gone.
        input_batch: The step's rows.
        mamba_state_idx: Changed: without those that are gone, and with the column of every row of the batch.
        num_accepted_tokens: Of each row's last step, the bonus token included: at least 1. Not changed.

    Returns:
        The plan, and the accepted counts that hold once it has run, int32 [rows]: 1 for rows whose state has moved.

    Raises:
        ValueError: names the argument, or the request that can't be. Nothing is changed.
    """
    name = "preprocess_mamba"
    if spec.mode == "all" or spec.policy != "pre_copy":
        raise ValueError(
            f"{name}: wants mode 'none' or 'align' and policy 'pre_copy', got {spec.mode!r}, {spec.policy!r}"
        )
    rows = _rows(name, spec, input_batch)
    accepted = _counts(name, "num_accepted_tokens", num_accepted_tokens, rows)
    state_idx = dict(mamba_state_idx)
    cleanup_mamba_state_idx(scheduler_output, state_idx)
    plan = HostCopyPlan.empty(spec)
    for row in rows:
        if row.req_id not in state_idx:
            if row.computed % spec.state_block_size:
                raise ValueError(
                    f"{name}: request {row.req_id!r} enters: num_computed_tokens must be a multiple of "
                    f"{spec.state_block_size}, got {row.computed}"
                )
            state_idx[row.req_id] = column_of(row.computed, spec.state_block_size)
            accepted[row.index] = 1
        if not 1 <= accepted[row.index] <= spec.window:
            raise ValueError(
                f"{name}: request {row.req_id!r}: num_accepted_tokens must be in [1, {spec.window}], "
                f"got {accepted[row.index]}"
            )
        if row.scheduled == 0:
            continue
        current = row.running_column(spec)
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
    spec: AlignConfig,
    input_batch: InputBatch,
    mamba_state_idx: Mapping[Hashable, int],
    num_accepted_tokens: Sequence[int] | np.ndarray,
    bucket: int,
) -> HostIndices:
    """The blocks that the model reads and writes: after `preprocess_mamba`, or in mode "all" before `postprocess_mamba`.

    In mode "all" the running column is that of the last step, if it was a verify step: the anchor. Otherwise the state is
    where a prefill chunk left it, in the column of its last token.

    Args:
        spec: Any mode.
        input_batch: The step's rows.
        mamba_state_idx: Running columns.
        num_accepted_tokens: What `preprocess_mamba` returned; in mode "all", what the last step accepted.
        bucket: Rows of the result, padding included.

    Raises:
        ValueError: names the argument, the request without a running column, or the column without a block.
    """
    name = "gather_state_indices"
    rows = _rows(name, spec, input_batch)
    if bucket < len(rows):
        raise ValueError(f"{name}: bucket must be at least {len(rows)} rows, got {bucket}")
    all_accepted = _counts(name, "num_accepted_tokens", num_accepted_tokens, rows)
    groups = range(len(spec.groups))
    zeros = lambda *shape: np.zeros(shape, np.int32)
    reads = zeros(len(groups), bucket), zeros(len(groups), bucket), zeros(bucket)
    found = HostIndices(*reads, zeros(len(groups), bucket, spec.window), zeros(bucket), np.zeros(bucket, np.bool_))
    for row in rows:
        if row.scheduled == 0:
            continue
        old, accepted = mamba_state_idx.get(row.req_id), int(all_accepted[row.index])
        if old is None and spec.mode == "all":
            old, accepted = column_of(row.computed, spec.state_block_size), 1
        if old is None:
            raise missing_state_idx(name, row.req_id)
        current = row.running_column(spec)
        # Where nothing moves, or all that must has moved, states are read where they are.
        places = copy_free(old, accepted, current)
        for group in groups:
            held = lambda column, row=row.index, group=group: _held_block(name, input_batch, group, row, column)
            if row.computed > 0:
                found.recurrent_read[group, row.index] = held(places.recurrent_column)
                found.conv_read[group, row.index] = held(places.conv_column)
            for t in range(spec.window):
                needed = t <= max(row.drafts, 0)
                column = current + t
                block = held(column) if needed else _block(input_batch, group, row.index, column)
                found.write[group, row.index, t] = block
        found.num_computed_tokens[row.index] = row.computed
        found.has_initial_state[row.index] = row.computed > 0
        found.window_row[row.index] = places.window_row if row.computed > 0 else 0
    return found


def postprocess_mamba(
    spec: AlignConfig,
    input_batch: InputBatch,
    mamba_state_idx: MutableMapping[Hashable, int],
    num_sampled: Sequence[int] | np.ndarray,
    num_published_tokens: Sequence[int] | None = None,
) -> tuple[HostCopyPlan, np.ndarray]:
    """After the model ran, once the sampled tokens are on the host: plans the copies of boundaries that were passed.

    Args:
        spec: Any mode. "all" copies nothing, and goes to `postprocess_mamba_all`.
        input_batch: The step's rows, as before it.
        mamba_state_idx: Running columns of the step. Changed in mode "all" only.
        num_sampled: Tokens each row sampled, accepted drafts and the bonus token; 0 for a chunk inside a prompt.
        num_published_tokens: See `postprocess_mamba_all`; for other modes it means nothing.

    Returns:
        The plan, and what each row accepted, int32 [rows]: at least 1, and 1 where the state was saved onto the running
        column itself; 0 for rows without tokens, which keep what they had. It does not count tokens: `num_sampled` does.

    Raises:
        ValueError: names the argument, the request that can't be, or the column without a block. Nothing is changed.
    """
    name = "postprocess_mamba"
    rows = _rows(name, spec, input_batch)
    sampled = _counts(name, "num_sampled", num_sampled, rows)
    plan, accepted = HostCopyPlan.empty(spec), np.zeros(len(rows), np.int32)
    for row in rows:
        if row.scheduled == 0:
            continue
        most = 1 + max(row.drafts, 0)
        if not 0 <= sampled[row.index] <= most:
            raise ValueError(
                f"{name}: request {row.req_id!r}: num_sampled must be in [0, {most}], got {sampled[row.index]}"
            )
        count = accepted[row.index] = max(int(sampled[row.index]), 1)
        if spec.mode == "all":
            continue
        column = row.running_column(spec)
        if mamba_state_idx.get(row.req_id) != column:
            raise missing_state_idx(name, row.req_id)
        save = boundary_save(row.certain, tokens_after(row.certain, count), spec.state_block_size)
        if save.passed:
            collect_mamba_copy_meta(plan, input_batch, row.index, column, save.target, save.offset)
        accepted[row.index] = accepted_after_save(count, save.passed, save.target, column)
    if spec.mode == "all":
        postprocess_mamba_all(spec, input_batch, mamba_state_idx, num_published_tokens)
    return plan, accepted


def postprocess_mamba_all(
    spec: AlignConfig,
    input_batch: InputBatch,
    mamba_state_idx: MutableMapping[Hashable, int],
    num_published_tokens: Sequence[int] | None = None,
) -> None:
    """After a step in mode "all": remembers the running column of verify rows, from which the next step reads.

    No boundary is saved: drafts push the window on, so that after a verify step a boundary's column may hold anything. Hence
    the precondition: every verify row has 1 + K tokens, or its anchor would be lost, and what others may find in the cache
    are the boundaries of prefill chunks. Without drafts (K = 0) there is nothing to remember.

    Args:
        spec: Mode "all".
        input_batch: The step's rows, as before it.
        mamba_state_idx: Changed: the running column of verify rows; other rows with tokens lose theirs.
        num_published_tokens: Longest boundary of each row that this step publishes to the prefix cache, in tokens; 0 for
            none. None: no row publishes any.

    Raises:
        ValueError: names the request that breaks the precondition. Nothing is changed.
    """
    name = "postprocess_mamba_all"
    if spec.mode != "all":
        raise ValueError(f"{name}: mode must be 'all', got {spec.mode!r}")
    rows = _rows(name, spec, input_batch)
    published = [0] * len(rows) if num_published_tokens is None else num_published_tokens
    if len(published) != len(rows):
        raise ValueError(f"{name}: num_published_tokens must describe {len(rows)} rows, got {len(published)}")
    if spec.num_speculative_tokens == 0:
        return
    live = [row for row in rows if row.scheduled > 0]
    for row in live:
        if row.drafts >= 0 and row.scheduled != spec.window:
            raise ValueError(
                f"{name}: request {row.req_id!r}: a verify row must have {spec.window} tokens, got {row.scheduled}"
            )
        if row.drafts >= 0 and published[row.index]:
            raise ValueError(
                f"{name}: request {row.req_id!r}: a verify row must publish no boundary, got {published[row.index]}"
            )
    for row in live:
        if row.drafts >= 0:
            mamba_state_idx[row.req_id] = row.running_column(spec)
        else:
            mamba_state_idx.pop(row.req_id, None)
