"""What one step runs: one row per request, packed tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax.align.config import AlignConfig

# What `from_host` does with its arrays.
Put = Callable[[np.ndarray], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One entry per batch row.

    Attributes:
        idx_mapping: Slot of each row, -1 for a padding row. int32 [rows].
        query_start_loc: First packed token of each row, then the end of the last; padding repeats it. int32 [rows + 1].
        num_drafts: Draft tokens of a verify row; -1 for a row that is none. int32 [rows].
        is_prefilling: Whether the row runs prompt tokens. bool [rows].
    """

    idx_mapping: jax.Array
    query_start_loc: jax.Array
    num_drafts: jax.Array
    is_prefilling: jax.Array

    @classmethod
    def from_host(
        cls,
        spec: AlignConfig,
        bucket: int,
        idx_mapping: Sequence[int],
        query_start_loc: Sequence[int],
        num_drafts: Sequence[int],
        is_prefilling: Sequence[bool],
        put: Put = jax.device_put,
    ) -> "StepBatch":
        """Checks the rows and pads them to `bucket`; `put` takes arrays to the device, or leaves them to a jitted function.

        Raises:
            ValueError: names the row that can't be.
        """
        rows = len(idx_mapping)
        lengths = {"query_start_loc": len(query_start_loc) - 1, "num_drafts": len(num_drafts)}
        lengths["is_prefilling"] = len(is_prefilling)
        for name, length in lengths.items():
            if length != rows:
                raise ValueError(f"StepBatch: {name} must describe {rows} rows, got {length}")
        if rows > bucket:
            raise ValueError(f"StepBatch: bucket must be at least {rows} rows, got {bucket}")
        if rows and query_start_loc[0] != 0:
            raise ValueError(f"StepBatch: query_start_loc must start at 0, got {query_start_loc[0]}")
        seen: dict[int, int] = {}
        for row, (slot, start, end, drafts, prefilling) in enumerate(
            zip(idx_mapping, query_start_loc[:-1], query_start_loc[1:], num_drafts, is_prefilling, strict=True)
        ):
            problem = None
            if not -1 <= slot < spec.max_num_seqs:
                problem = f"idx_mapping must be in [-1, {spec.max_num_seqs}), got {slot}"
            elif slot >= 0 and slot in seen:
                problem = f"idx_mapping repeats slot {slot} of row {seen[slot]}"
            elif end < start:
                problem = f"query_start_loc must not fall, got {start} then {end}"
            elif slot < 0 and end > start:
                problem = f"a padding row must have no tokens, got {end - start}"
            elif not -1 <= drafts <= spec.num_speculative_tokens:
                problem = f"num_drafts must be in [-1, {spec.num_speculative_tokens}], got {drafts}"
            elif drafts >= 0 and prefilling:
                problem = "a verify row can't be prefilling"
            elif drafts >= 0 and end - start not in (0, 1 + drafts):
                problem = f"a verify row with {drafts} drafts must have {1 + drafts} tokens, got {end - start}"
            elif end - start > spec.max_model_len:
                problem = f"must have at most max_model_len = {spec.max_model_len} tokens, got {end - start}"
            if problem:
                raise ValueError(f"StepBatch: row {row}: {problem}")
            if slot >= 0:
                seen[slot] = row

        def pad(values: Sequence[int], fill: int, dtype: type) -> jax.Array:
            return put(np.concatenate([values, np.full(bucket - rows, fill)]).astype(dtype))

        end = query_start_loc[-1] if len(query_start_loc) else 0
        return cls(
            idx_mapping=pad(idx_mapping, -1, np.int32),
            query_start_loc=pad(query_start_loc, end, np.int32),
            num_drafts=pad(num_drafts, -1, np.int32),
            is_prefilling=pad(is_prefilling, False, np.bool_),
        )

    @property
    def num_tokens(self) -> jax.Array:
        """Tokens of each row, drafts included. int32 [rows]."""
        return jnp.diff(self.query_start_loc)
