"""Decides which kernels run a row, as vLLM does: those of decode and verify rows, or those of prompt chunks."""

import enum
from typing import Any, NamedTuple

import numpy as np

from mamba_align_jax.align.columns import choose


class RowKind(enum.IntEnum):
    """The kinds of rows, in the order in which they stand in a batch.

    A decode row is run as a verify row without drafts, by the same kernels.
    """

    DECODE = 0
    VERIFY = 1
    PREFILL = 2


def row_kinds(num_tokens: Any, num_computed_tokens: Any, num_drafts: Any, is_prefilling: Any) -> Any:
    """Returns the `RowKind` of each row as an integer. Takes NumPy or JAX arrays.

    A row after its prompt is a decode row or, with drafts, a verify row. The tail of a prompt is one too if it looks
    like one: if it is a single token, or was padded to the length of a verify row with placeholder drafts, which are
    never accepted. The first tokens of a sequence are always a prefill row, even a single token.

    The rule is that of vLLM's `_compute_common_metadata`, except for two kinds of rows that vLLM's scheduler never
    makes:

    - A row without tokens is a decode row here. vLLM keeps it a prefill row if `is_prefilling` is set. No kernel
      touches such a row, and here it does not bring the prefill kernels into a step that has no other prefill row.
    - A row after its prompt with 2 to K + 1 tokens, but not exactly one more than its drafts, is a prefill row here.
      vLLM looks only at the length and runs it by the decode kernels. Here a row of those kernels is a verify row,
      whose tokens after the first may be rejected, but these tokens are not drafts.

    Use it in servers that make a `StepBatch` from the rows of a scheduler like vLLM's, or call `sort_rows` on the host.

    Args:
        num_tokens: Tokens in each row, drafts included. int32 [rows].
        num_computed_tokens: Tokens computed before the row. int32 [rows].
        num_drafts: Draft tokens in the row, placeholders included. 0 or -1 for none. int32 [rows].
        is_prefilling: True if the row runs tokens of a prompt, or repeats the tokens of a preempted request. bool
            [rows].
    """
    looks_like_decode = (num_tokens == 1) | (num_tokens == num_drafts + 1)
    is_decode = (num_tokens == 0) | looks_like_decode & (~is_prefilling | (num_computed_tokens > 0))
    decode_kind = choose(num_tokens > 1, int(RowKind.VERIFY), int(RowKind.DECODE))
    return choose(is_decode, decode_kind, int(RowKind.PREFILL))


class RowOrder(NamedTuple):
    """The rows of a batch, sorted by kind. Rows of one kind keep their order.

    Attributes:
        order: The former number of each sorted row. int32 [rows].
        num_decode_rows: How many rows come before the first prefill row. `split_rows` takes it.
        num_drafts: The drafts of each sorted row, as `StepBatch` takes them: 0 for a decode row, -1 for a prefill row or
            one without tokens. int32 [rows].
        is_prefilling: True for the prefill rows among the sorted rows. bool [rows].
    """

    order: np.ndarray
    num_decode_rows: int
    num_drafts: np.ndarray
    is_prefilling: np.ndarray


def sort_rows(
    num_tokens: np.ndarray, num_computed_tokens: np.ndarray, num_drafts: np.ndarray, is_prefilling: np.ndarray
) -> RowOrder:
    """Sorts a scheduler's rows by their `row_kinds`, on the host. `split_rows` needs the prefill rows at the end.

    The arguments are those of `row_kinds`, as NumPy arrays.

    Raises:
        ValueError: A row after its prompt has drafts, but not exactly one token more than drafts. The text names the
            row.
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
