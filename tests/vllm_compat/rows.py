"""Schedules and batches as vLLM's host path takes them, and the configuration that its tests share."""

import re
from typing import Any, NamedTuple

import numpy as np
import pytest

from mamba_align_jax import AlignConfig, ConvState, GroupSpec, RecurrentState

SLOTS, WIDTH = 12, 4
STATES = ConvState(WIDTH, 1, "float32"), RecurrentState((1, 1))


class Scheduled(NamedTuple):
    """The fields of `SchedulerOutput`."""

    finished_req_ids: Any = ()
    preempted_req_ids: Any = None
    resumed_req_ids: Any = ()


class Batch(NamedTuple):
    """The fields of `InputBatch`."""

    req_ids: Any
    num_computed_tokens: Any
    num_scheduled_tokens: Any
    num_draft_tokens: Any
    block_rows: Any


def make_spec(block_size, K, mode="align", **changes):
    # Two groups. The ids of the second mirror those of the first, so that mixed-up groups are seen.
    fields = dict(max_num_seqs=SLOTS, max_model_len=7 * block_size + 20, mode=mode, policy="pre_copy") | changes
    return AlignConfig((GroupSpec("a", 1, STATES), GroupSpec("b", 1, STATES)), block_size, K, **fields)


def one_row(align, computed, scheduled, drafts, req_id="a", **changes):
    """A batch of one row, in which column c has block c + 1."""
    rows = np.broadcast_to(np.arange(1, align.num_columns + 1), (len(align.groups), 1, align.num_columns))
    return Batch([req_id], [computed], [scheduled], [drafts], rows)._replace(**changes)


def two_rows(**changes):
    rows = [[[1, 2, 3, 4]] * 2] * 2
    return Batch(["a", "b"], [0, 6], [3, 3], [-1, 2], rows)._replace(**changes)


def raises(message):
    return pytest.raises(ValueError, match=re.escape(message))
