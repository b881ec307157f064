"""Which kernels run a row: those of decode and verify rows, a token at a time, or those of prompt chunks."""

import enum
from typing import Any, NamedTuple

import numpy as np

from mamba_align_jax.align.columns import choose


class RowKind(enum.IntEnum):
    """Rows of a batch go in this order. A decode row is a verify row without drafts: both have one kernel."""

    DECODE = 0
    VERIFY = 1
    PREFILL = 2


def row_kinds(num_tokens: Any, num_computed_tokens: Any, num_drafts: Any, is_prefilling: Any) -> Any:
    """The `RowKind` of each row, element by element: integers [rows] of NumPy or JAX, `is_prefilling` bool.

    A row behind its prompt is a decode row or, with drafts, a verify row. So is a prompt's tail that looks like one: one
    token, or padded to a verify row's length with placeholder drafts, which are never accepted. But a sequence's first
    tokens are a chunk, be it a single token. A row without tokens counts as a decode row; no kernel touches it. Source:
    vLLM's `_compute_common_metadata`.

    For servers that build a `StepBatch` from what a scheduler like vLLM's hands out: on the host by `sort_rows`, or here.

    Args:
        num_tokens: Tokens of each row, drafts included.
        num_computed_tokens: Tokens computed before them.
        num_drafts: Draft tokens among them, placeholders included; 0 or -1 for none.
        is_prefilling: Whether the row runs tokens of a prompt, or of a preempted request's replay.
    """
    one_piece = (num_tokens == 1) | (num_tokens == num_drafts + 1)
    steps = (num_tokens == 0) | one_piece & (~is_prefilling | (num_computed_tokens > 0))
    decodes = choose(num_tokens > 1, int(RowKind.VERIFY), int(RowKind.DECODE))
    return choose(steps, decodes, int(RowKind.PREFILL))


class RowOrder(NamedTuple):
    """A batch's rows in the order of their kinds: row i of the sorted batch was row `order[i]`. NumPy, [rows] each.

    Attributes:
        order: Rows of a kind keep their order.
        num_decode_rows: How many of the sorted rows come before the first prefill row: what `split_rows` takes.
        num_drafts: Of the sorted rows, as `StepBatch` takes them: 0 for a decode row, -1 for a prefill row.
        is_prefilling: Of the sorted rows: which are prefill rows.
    """

    order: np.ndarray
    num_decode_rows: int
    num_drafts: np.ndarray
    is_prefilling: np.ndarray


def sort_rows(
    num_tokens: np.ndarray, num_computed_tokens: np.ndarray, num_drafts: np.ndarray, is_prefilling: np.ndarray
) -> RowOrder:
    """Sorts a scheduler's rows by `row_kinds`, on the host: `split_rows` wants decode and verify rows to lead.

    Raises:
        ValueError: names a row with drafts that is neither a verify row nor runs a prompt.
    """
    kinds = row_kinds(num_tokens, num_computed_tokens, num_drafts, is_prefilling)
    for row in np.flatnonzero((kinds == RowKind.PREFILL) & ~is_prefilling & (num_drafts > 0)):
        raise ValueError(
            f"sort_rows: row {row} with {num_drafts[row]} drafts must have {1 + num_drafts[row]} tokens, "
            f"got {num_tokens[row]}"
        )
    order = np.argsort(kinds, kind="stable").astype(np.int32)
    is_chunk = (kinds == RowKind.PREFILL)[order]
    drafts = np.where(is_chunk, -1, num_tokens[order] - 1).astype(np.int32)
    return RowOrder(order, int(np.sum(~is_chunk)), drafts, is_chunk)
