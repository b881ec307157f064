"""The host path's arrays on their way to the device and back: plans, a step's inputs, what it accepted.

What is staged is a buffer of its own every time, which nobody writes again: a step in flight may still read it, and on a
CPU `jax.device_put` may only borrow it.
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
from mamba_align_jax.vllm_compat.mamba_utils import (
    HostCopyPlan,
    InputBatch,
    SchedulerOutput,
    cleanup_mamba_state_idx,
    missing_state_idx,
)
from pallas_kernels import Implementation


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PostprocessInputs:
    """What is known of a step's rows before its result: int32 [rows] each.

    Attributes:
        state_idx: Running column of the step; -1 for padding.
        num_scheduled_tokens: Tokens of the step, drafts included; 0 for padding.
        num_computed_tokens: Tokens before it.
        num_draft_tokens: Draft tokens of a verify row; -1 for a row that is none.
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
    spec: AlignConfig, pool: StatePool, plan: HostCopyPlan, *, implementation: Implementation | None = None
) -> StatePool:
    """Runs a host's plan over every array of the pool, in one program for all batches; none where nothing moves.

    Args:
        spec: Static.
        pool: Donated.
        plan: May be written again at once.
        implementation: Of `state_copy`.
    """
    if plan.is_empty:
        return pool
    staged = {name: jax.device_put(array.copy()) for name, array in plan._asdict().items()}
    return _copy(spec, pool, CopyPlan(**staged), implementation)


def stage_mamba_state_idx_to_gpu(
    mamba_state_idx: Mapping[Hashable, int], req_ids: Sequence[Hashable], bucket: int
) -> jax.Array:
    """The running columns of a batch's rows, int32 [bucket], -1 for padding. Run `preprocess_mamba` first.

    Raises:
        ValueError: a request has no running column, named, or `bucket` is too small.
    """
    name = "stage_mamba_state_idx_to_gpu"
    for req_id in req_ids:
        if req_id not in mamba_state_idx:
            raise missing_state_idx(name, req_id)
    return _stage(name, [mamba_state_idx[req_id] for req_id in req_ids], bucket, -1)


def stage_postprocess_metadata_to_gpu(input_batch: InputBatch, bucket: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scheduled, computed and draft tokens of a batch's rows, int32 [bucket] each; 0, 0 and -1 for padding.

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
    """All that `postprocess_mamba_align_gpu` needs to know of a step's rows. Run `preprocess_mamba` first.

    Raises:
        ValueError: a request has no running column, named, or `bucket` is too small.
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
    spec: AlignConfig,
    inputs: PostprocessInputs,
    num_sampled: jax.Array,
    tables: BlockTables,
    idx_mapping: jax.Array | None = None,
) -> tuple[CopyPlan, jax.Array]:
    """`postprocess_mamba_align_gpu` without running the copies, for a caller's own jitted step."""
    live = inputs.num_scheduled_tokens > 0
    slot = jnp.arange(live.shape[0], dtype=jnp.int32) if idx_mapping is None else jnp.maximum(idx_mapping, 0)
    drafts = jnp.maximum(inputs.num_draft_tokens, 0)
    certain = certain_tokens(inputs.num_computed_tokens, inputs.num_scheduled_tokens, drafts)
    accepted = jnp.maximum(num_sampled, 1)
    plan, accepted = plan_saves(spec, tables, slot, live, inputs.state_idx, certain, accepted)
    return plan, jnp.where(live, accepted, 0)


def postprocess_mamba_align_gpu(
    spec: AlignConfig,
    pool: StatePool,
    inputs: PostprocessInputs,
    num_sampled: jax.Array,
    tables: BlockTables,
    idx_mapping: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[StatePool, jax.Array]:
    """`postprocess_mamba` on the device: the host need not know what was sampled, and does not wait for it.

    Args:
        spec: Mode "none" or "align".
        pool: Donated.
        inputs: What was staged before the step.
        num_sampled: Tokens each row sampled; 0 for a chunk inside a prompt. int32 [rows], rows as in `inputs`.
        tables: Blocks of every column, by slot.
        idx_mapping: Slot of each row, int32 [rows]; None: the rows of `tables` are in batch order.
        implementation: Of `state_copy`.

    Returns:
        The pool, and what each row accepted, as `postprocess_mamba` returns it: for `AcceptedTokens.expect`.

    Raises:
        ValueError: mode "all", which saves no boundaries in the host path.
    """
    if spec.mode == "all":
        raise ValueError("postprocess_mamba_align_gpu: mode must be 'none' or 'align', got 'all'")
    return _postprocess(spec, pool, inputs, num_sampled, tables, idx_mapping, implementation)


@functools.partial(jax.jit, static_argnames=("spec", "implementation"), donate_argnames="pool")
def _copy(spec: AlignConfig, pool: StatePool, plan: CopyPlan, implementation: Implementation | None) -> StatePool:
    return copy_states(spec, pool, plan, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("spec", "implementation"), donate_argnames="pool")
def _postprocess(
    spec: AlignConfig,
    pool: StatePool,
    inputs: PostprocessInputs,
    num_sampled: jax.Array,
    tables: BlockTables,
    idx_mapping: jax.Array | None,
    implementation: Implementation | None,
) -> tuple[StatePool, jax.Array]:
    plan, accepted = plan_postprocess(spec, inputs, num_sampled, tables, idx_mapping)
    return copy_states(spec, pool, plan, implementation=implementation), accepted


class AcceptedTokens:
    """What each request accepted in its last step, while batches are re-ordered and requests sit steps out."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._coming: tuple[tuple[Hashable, ...], jax.Array | np.ndarray] | None = None

    def expect(self, req_ids: Sequence[Hashable], counts: jax.Array | np.ndarray) -> None:
        """Takes in a step's counts, int32 [rows or more]: starts their copy to the host and does not wait for it.

        Rows beyond `req_ids` are padding; a count of 0 is a row without tokens, whose request keeps what it had.

        Raises:
            ValueError: there are fewer counts than requests.
        """
        if counts.shape[0] < len(req_ids):
            raise ValueError(f"AcceptedTokens: counts must be of {len(req_ids)} rows or more, got {counts.shape[0]}")
        self._settle()
        if isinstance(counts, np.ndarray):
            counts = counts.copy()
        else:
            counts.copy_to_host_async()
        self._coming = tuple(req_ids), counts

    def reorder(self, scheduler_output: SchedulerOutput, req_ids: Sequence[Hashable]) -> np.ndarray:
        """The counts of the next batch's rows, int32 [rows], once they are there: 1 for requests that are new or resumed."""
        self._settle()
        cleanup_mamba_state_idx(scheduler_output, self._known)
        return np.array([self._known.get(req_id, 1) for req_id in req_ids], np.int32)

    def _settle(self) -> None:
        if self._coming is not None:
            req_ids, counts = self._coming
            self._coming = None
            arrived = np.asarray(counts)[: len(req_ids)].tolist()
            self._known.update((req_id, n) for req_id, n in zip(req_ids, arrived, strict=True) if n)
