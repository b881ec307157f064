"""The rows of one step: which slots run how many tokens, and how many of them are drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax import _values as values
from mamba_align_jax.align.config import AlignConfig

# Takes an array to the device, or leaves it on the host for a jitted function to transfer.
Put = Callable[[np.ndarray], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The rows of one step, at most one per request. The tokens of all rows are packed one after the other.

    Attributes:
        idx_mapping: The slot of each row, or -1 for a padding row. int32 [rows].
        query_start_loc: The position of each row's first token among the packed tokens, followed by the number of
            packed tokens, which padding rows repeat. int32 [rows + 1].
        num_drafts: The number of draft tokens of a verify row, 0 of a decode row, or -1 for any other row. Under the
            policies other than "deferred" a decode row may have -1, too. int32 [rows].
    """

    idx_mapping: jax.Array
    query_start_loc: jax.Array
    num_drafts: jax.Array

    @classmethod
    def from_host(
        cls,
        align: AlignConfig,
        bucket: int,
        idx_mapping: Sequence[int],
        query_start_loc: Sequence[int],
        num_drafts: Sequence[int],
        put: Put = jax.device_put,
    ) -> "StepBatch":
        """Checks the rows and pads them to `bucket`.

        Args:
            align: The configuration.
            bucket: Rows of the result.
            idx_mapping: The slot of each row, or -1 for a padding row.
            query_start_loc: See the attribute. One entry more than there are rows.
            num_drafts: See the attribute.
            put: Takes each NumPy array to the device, or leaves it on the host for a jitted function to transfer.

        Raises:
            ValueError: A row is wrong. The text names the row, what was wanted and what came.
        """
        values.instance("StepBatch: align", align, AlignConfig)
        bucket = values.integer("StepBatch: bucket", bucket, 0)
        idx_mapping = values.integers("StepBatch: idx_mapping", idx_mapping, -values.INT32_MAX)
        query_start_loc = values.integers("StepBatch: query_start_loc", query_start_loc, -values.INT32_MAX)
        num_drafts = values.integers("StepBatch: num_drafts", num_drafts, -values.INT32_MAX)
        rows = len(idx_mapping)
        lengths = {"query_start_loc": len(query_start_loc) - 1, "num_drafts": len(num_drafts)}
        for name, length in lengths.items():
            if length != rows:
                raise ValueError(f"StepBatch: {name} must describe {rows} rows, got {length}")
        if rows > bucket:
            raise ValueError(f"StepBatch: bucket must be at least {rows} rows, got {bucket}")
        if rows and query_start_loc[0] != 0:
            raise ValueError(f"StepBatch: query_start_loc must start at 0, got {query_start_loc[0]}")
        arrays = [np.asarray(given, np.int64) for given in (idx_mapping, query_start_loc, num_drafts)]
        if rows and not _is_right(align, *arrays):
            _raise_for_row(align, idx_mapping, query_start_loc, num_drafts)

        def pad(given: np.ndarray, length: int, fill: int) -> jax.Array:
            padded = np.full(length, fill, np.int32)
            padded[: len(given)] = given
            return put(padded)

        end = query_start_loc[-1] if len(query_start_loc) else 0
        return cls(
            idx_mapping=pad(arrays[0], bucket, -1),
            query_start_loc=pad(arrays[1], bucket + 1, end),
            num_drafts=pad(arrays[2], bucket, -1),
        )

    @property
    def num_tokens(self) -> jax.Array:
        """The number of tokens in each row, drafts included. int32 [rows]."""
        return jnp.diff(self.query_start_loc)


def _is_right(align: AlignConfig, slots: np.ndarray, starts: np.ndarray, num_drafts: np.ndarray) -> bool:
    """Whether all rows are right. It takes all rows at once, because `from_host` is called in every step."""
    lengths, used = np.diff(starts), slots[slots >= 0]
    return bool(
        np.all((slots >= -1) & (slots < align.max_num_seqs))
        and np.max(np.bincount(used), initial=0) <= 1
        and np.all((lengths >= 0) & (lengths <= align.max_model_len))
        and np.all((slots >= 0) | (lengths == 0))
        and np.all((num_drafts >= -1) & (num_drafts <= align.num_speculative_tokens))
        and np.all((num_drafts < 0) | (lengths == 0) | (lengths == 1 + num_drafts))
    )


def _raise_for_row(
    align: AlignConfig, idx_mapping: Sequence[int], query_start_loc: Sequence[int], num_drafts: Sequence[int]
) -> None:
    """Raises the error of `StepBatch.from_host` for the first row that is wrong."""
    seen: dict[int, int] = {}
    for row, (slot, start, end, drafts) in enumerate(
        zip(idx_mapping, query_start_loc[:-1], query_start_loc[1:], num_drafts, strict=True)
    ):
        problem = None
        if not -1 <= slot < align.max_num_seqs:
            problem = f"idx_mapping must be in [-1, {align.max_num_seqs}), got {slot}"
        elif slot >= 0 and slot in seen:
            problem = f"idx_mapping repeats slot {slot} of row {seen[slot]}"
        elif end < start:
            problem = f"query_start_loc must not decrease, got {start} then {end}"
        elif slot < 0 and end > start:
            problem = f"a padding row must have no tokens, got {end - start}"
        elif not -1 <= drafts <= align.num_speculative_tokens:
            problem = f"num_drafts must be in [-1, {align.num_speculative_tokens}], got {drafts}"
        elif drafts >= 0 and end - start not in (0, 1 + drafts):
            problem = f"a verify row with {drafts} drafts must have {1 + drafts} tokens, got {end - start}"
        elif end - start > align.max_model_len:
            problem = f"must have at most max_model_len = {align.max_model_len} tokens, got {end - start}"
        if problem:
            raise ValueError(f"StepBatch: row {row}: {problem}")
        if slot >= 0:
            seen[slot] = row
