"""Transfers the host path's arrays to the device and back: plans, the inputs of a step, and the accepted counts.

Each transfer uses a new buffer that is never written again. A step in flight may still read the old one, and on a CPU
`jax.device_put` may borrow NumPy's memory instead of copying it.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax.align.columns import certain_tokens
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.step import CopyPlan, copy_states, plan_saves
from mamba_align_jax.align.tables import BlockTables
from mamba_align_jax.vllm_compat.host_types import HostCopyPlan, InputBatch, SchedulerOutput
from mamba_align_jax.vllm_compat.mamba_utils import cleanup_mamba_state_idx, missing_state_idx
from pallas_kernels import Implementation


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PostprocessInputs:
    """What the host knows of a step's rows before the step's result.

    Attributes:
        state_idx: The running column of the step, or -1 for a padding row. int32 [rows].
        num_scheduled_tokens: Tokens in the step, drafts included. 0 for a padding row. int32 [rows].
        num_computed_tokens: Tokens computed before the step. int32 [rows].
        num_draft_tokens: Draft tokens of a verify row, or -1 for any other row. int32 [rows].
    """

    state_idx: jax.Array
    num_scheduled_tokens: jax.Array
    num_computed_tokens: jax.Array
    num_draft_tokens: jax.Array


def _stage(function: str, values: Sequence[int], bucket: int, fill: int) -> jax.Array:
    if len(values) > bucket:
        raise ValueError(f"{function}: bucket must be at least {len(values)} rows, got {bucket}")
    buffer = np.full(bucket, fill, np.int32)
    buffer[: len(values)] = values
    return jax.device_put(buffer)


def do_mamba_copy_block(
    align: AlignConfig, pool: StatePool, plan: HostCopyPlan, *, implementation: Implementation | None = None
) -> StatePool:
    """Makes the copies of a host's plan in every array of the pool.

    One compiled program serves all batches. If the plan is empty, nothing is launched.

    Args:
        align: The configuration.
        pool: The pool, which is donated unless the plan is empty.
        plan: The plan. The caller may change it right after the call.
        implementation: The implementation of `state_copy`.
    """
    if plan.is_empty:
        return pool
    staged = {name: jax.device_put(array.copy()) for name, array in plan._asdict().items()}
    return _copy(align, pool, CopyPlan(**staged), implementation)


def stage_mamba_state_idx_to_gpu(
    mamba_state_idx: Mapping[Hashable, int], req_ids: Sequence[Hashable], bucket: int
) -> jax.Array:
    """Transfers the running columns of a batch's rows to the device. Call `preprocess_mamba` before it.

    Returns:
        int32 [bucket], -1 for padding.

    Raises:
        ValueError: A request has no running column, or `bucket` is too small.
    """
    name = "stage_mamba_state_idx_to_gpu"
    for req_id in req_ids:
        if req_id not in mamba_state_idx:
            raise missing_state_idx(name, req_id)
    return _stage(name, [mamba_state_idx[req_id] for req_id in req_ids], bucket, -1)


def stage_postprocess_metadata_to_gpu(input_batch: InputBatch, bucket: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Transfers the numbers of scheduled, computed and draft tokens of a batch's rows to the device.

    Returns:
        Three arrays, int32 [bucket] each. Padding is 0, 0 and -1.

    Raises:
        ValueError: `bucket` is too small.
    """
    name = "stage_postprocess_metadata_to_gpu"
    return (
        _stage(name, input_batch.num_scheduled_tokens, bucket, 0),
        _stage(name, input_batch.num_computed_tokens, bucket, 0),
        _stage(name, input_batch.num_draft_tokens, bucket, -1),
    )


def stage_postprocess_inputs_to_gpu(
    input_batch: InputBatch, mamba_state_idx: Mapping[Hashable, int], bucket: int
) -> PostprocessInputs:
    """Transfers what `postprocess_mamba_align_gpu` needs to know of a step's rows. Call `preprocess_mamba` before it.

    Raises:
        ValueError: A request has no running column, or `bucket` is too small.
    """
    state_idx = stage_mamba_state_idx_to_gpu(mamba_state_idx, input_batch.req_ids, bucket)
    scheduled, computed, drafts = stage_postprocess_metadata_to_gpu(input_batch, bucket)
    return PostprocessInputs(
        state_idx=state_idx,
        num_scheduled_tokens=scheduled,
        num_computed_tokens=computed,
        num_draft_tokens=drafts,
    )


def plan_postprocess(
    align: AlignConfig,
    inputs: PostprocessInputs,
    num_sampled: jax.Array,
    tables: BlockTables,
    idx_mapping: jax.Array | None = None,
) -> tuple[CopyPlan, jax.Array]:
    """Does what `postprocess_mamba_align_gpu` does, but returns the copies, for a caller's own jitted step."""
    live = inputs.num_scheduled_tokens > 0
    slot = jnp.arange(live.shape[0], dtype=jnp.int32) if idx_mapping is None else jnp.maximum(idx_mapping, 0)
    drafts = jnp.maximum(inputs.num_draft_tokens, 0)
    certain = certain_tokens(inputs.num_computed_tokens, inputs.num_scheduled_tokens, drafts)
    accepted = jnp.maximum(num_sampled, 1)
    plan, accepted = plan_saves(align, tables, slot, live, inputs.state_idx, certain, accepted)
    return plan, jnp.where(live, accepted, 0)


def postprocess_mamba_align_gpu(
    align: AlignConfig,
    pool: StatePool,
    inputs: PostprocessInputs,
    num_sampled: jax.Array,
    tables: BlockTables,
    idx_mapping: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[StatePool, jax.Array]:
    """Saves the boundaries that rows passed, as `postprocess_mamba` does, without waiting for the sampled tokens.

    Args:
        align: The configuration, with mode "none" or "align".
        pool: The pool, which is donated.
        inputs: What was staged before the step.
        num_sampled: How many tokens each row sampled, or 0 for a chunk inside a prompt. int32 [rows].
        tables: The block tables.
        idx_mapping: The slot of each row, int32 [rows]. None if the slots of `tables` are in batch order.
        implementation: The implementation of `state_copy`.

    Returns:
        The pool, and the accepted counts as `postprocess_mamba` returns them, for `AcceptedTokens.expect`. int32
        [rows].

    Raises:
        ValueError: The mode is "all", which saves no boundaries in the host path.
    """
    if align.mode == "all":
        raise ValueError("postprocess_mamba_align_gpu: mode must be 'none' or 'align', got 'all'")
    return _postprocess(align, pool, inputs, num_sampled, tables, idx_mapping, implementation)


@functools.partial(jax.jit, static_argnames=("align", "implementation"), donate_argnames="pool")
def _copy(align: AlignConfig, pool: StatePool, plan: CopyPlan, implementation: Implementation | None) -> StatePool:
    return copy_states(align, pool, plan, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("align", "implementation"), donate_argnames="pool")
def _postprocess(
    align: AlignConfig,
    pool: StatePool,
    inputs: PostprocessInputs,
    num_sampled: jax.Array,
    tables: BlockTables,
    idx_mapping: jax.Array | None,
    implementation: Implementation | None,
) -> tuple[StatePool, jax.Array]:
    plan, accepted = plan_postprocess(align, inputs, num_sampled, tables, idx_mapping)
    return copy_states(align, pool, plan, implementation=implementation), accepted


class AcceptedTokens:
    """Keeps what each request accepted in its last step, across batches of other orders and other requests."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._coming: tuple[tuple[Hashable, ...], jax.Array | np.ndarray] | None = None

    def expect(self, req_ids: Sequence[Hashable], counts: jax.Array | np.ndarray) -> None:
        """Starts the copy of a step's counts to the host, without waiting for it.

        Args:
            req_ids: The request of each row.
            counts: The accepted counts, int32, at least one per request. Further counts are padding. A count of 0 is
                for a row without tokens, whose request keeps its last count.

        Raises:
            ValueError: There are fewer counts than requests.
        """
        if counts.shape[0] < len(req_ids):
            raise ValueError(f"AcceptedTokens: counts must have at least {len(req_ids)} rows, got {counts.shape[0]}")
        self._settle()
        if isinstance(counts, np.ndarray):
            counts = counts.copy()
        else:
            counts.copy_to_host_async()
        self._coming = tuple(req_ids), counts

    def reorder(self, scheduler_output: SchedulerOutput, req_ids: Sequence[Hashable]) -> np.ndarray:
        """Returns the counts of the next batch's rows, int32 [rows]. Waits for the copy that `expect` started.

        The count of a new or resumed request is 1.
        """
        self._settle()
        cleanup_mamba_state_idx(scheduler_output, self._known)
        return np.array([self._known.get(req_id, 1) for req_id in req_ids], np.int32)

    def _settle(self) -> None:
        if self._coming is not None:
            req_ids, counts = self._coming
            self._coming = None
            arrived = np.asarray(counts)[: len(req_ids)].tolist()
            self._known.update((req_id, n) for req_id, n in zip(req_ids, arrived, strict=True) if n)
