"""The arguments and results of the host path: what a scheduler hands out, and plans and indices in NumPy.

Nothing here imports JAX.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mamba_align_jax.align.columns import NULL_BLOCK
from mamba_align_jax.align.config import AlignConfig


class SchedulerOutput(Protocol):
    """The requests whose states were lost since the last step. A resumed request need not be listed as preempted."""

    @property
    def finished_req_ids(self) -> Iterable[Hashable]:
        """Requests that finished or were aborted."""

    @property
    def preempted_req_ids(self) -> Iterable[Hashable] | None:
        """Requests whose blocks were taken away."""

    @property
    def resumed_req_ids(self) -> Iterable[Hashable]:
        """Requests that are in the batch again, with the computed tokens of a new prefix hit."""


class InputBatch(Protocol):
    """The rows of a step, in batch order. Each sequence has one entry per row. A request may be absent from a step."""

    @property
    def req_ids(self) -> Sequence[Hashable]:
        """The requests' names, all distinct, at most `max_num_seqs` of them."""

    @property
    def num_computed_tokens(self) -> Sequence[int]:
        """The exact number of tokens whose states exist before the step. Rejected drafts are not counted."""

    @property
    def num_scheduled_tokens(self) -> Sequence[int]:
        """The number of tokens in the step, drafts included. 0 for a row that takes no part."""

    @property
    def num_draft_tokens(self) -> Sequence[int]:
        """The number of draft tokens of a verify row, which has one token more. -1 for any other row."""

    @property
    def block_rows(self) -> Sequence[Sequence[Sequence[int]]]:
        """The block of each column, per group and row. Entries that the step does not need may be stale or missing."""


class HostCopyPlan(NamedTuple):
    """A `CopyPlan` of NumPy arrays, with its names, shapes and meanings.

    It always has `max_num_seqs` rows, so that one compiled program runs all plans. Unlike a plan of the device path, it
    contains no copy of a state onto itself.
    """

    recurrent_source: np.ndarray
    conv_source: np.ndarray
    window_row: np.ndarray
    destination: np.ndarray

    @classmethod
    def empty(cls, align: AlignConfig) -> "HostCopyPlan":
        """Creates a plan without copies."""
        blocks = lambda: np.full((len(align.groups), align.max_num_seqs), NULL_BLOCK, np.int32)
        return cls(blocks(), blocks(), np.zeros(align.max_num_seqs, np.int32), blocks())

    @property
    def is_empty(self) -> bool:
        """True if the plan contains no copy."""
        return not self.destination.any()


class HostIndices(NamedTuple):
    """Where each row reads and writes: NumPy arrays with names, shapes and meanings as in `StepIndices`."""

    recurrent_read: np.ndarray
    conv_read: np.ndarray
    window_row: np.ndarray
    write: np.ndarray
    num_computed_tokens: np.ndarray
    has_initial_state: np.ndarray
