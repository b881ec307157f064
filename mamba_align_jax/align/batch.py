"""The rows of one step: which slots run how many tokens, and how many of them are drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax import _values as values
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.errors import FieldError

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
                raise FieldError(f"StepBatch: {name}", f"describe {rows} rows", str(length), "must")
        if rows > bucket:
            raise FieldError("StepBatch: bucket", f"at least {rows} rows", str(bucket))
        first = query_start_loc[0] if rows else 0
        values.require(first == 0, "StepBatch: query_start_loc", "start at 0", first, "must")
        arrays = [np.asarray(given, np.int64) for given in (idx_mapping, query_start_loc, num_drafts)]
        if rows:
            _check_rows(align, *arrays)

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


def _check_rows(align: AlignConfig, slots: np.ndarray, starts: np.ndarray, drafts: np.ndarray) -> None:
    """Raises the error of `StepBatch.from_host` for the first row that is wrong.

    It looks at all rows at once, because `from_host` is called in every step.
    """
    lengths, end, most = np.diff(starts), align.max_num_seqs, align.num_speculative_tokens
    is_repeated = np.ones(len(slots), np.bool_)
    is_repeated[np.unique(slots, return_index=True)[1]] = False
    rules = (
        ("idx_mapping must be in [-1, {end}), got {slot}", (slots < -1) | (slots >= end)),
        ("idx_mapping repeats slot {slot} of row {first}", is_repeated & (slots >= 0)),
        ("query_start_loc must not decrease, got {start} then {stop}", lengths < 0),
        ("a padding row must have no tokens, got {length}", (slots < 0) & (lengths > 0)),
        ("num_drafts must be in [-1, {most}], got {drafts}", (drafts < -1) | (drafts > most)),
        (
            "a verify row with {drafts} drafts must have {wanted} tokens, got {length}",
            (drafts >= 0) & (lengths != 0) & (lengths != 1 + drafts),
        ),
        ("must have at most max_model_len = {longest} tokens, got {length}", lengths > align.max_model_len),
    )
    wrong = np.stack([where for _, where in rules])
    if not wrong.any():
        return
    row = int(np.argmax(wrong.any(axis=0)))
    text, _ = rules[int(np.argmax(wrong[:, row]))]
    limits = dict(end=end, most=most, longest=align.max_model_len, wanted=1 + drafts[row])
    found = dict(slot=slots[row], start=starts[row], stop=starts[row + 1], length=lengths[row], drafts=drafts[row])
    problem = text.format(**limits, **found, first=np.argmax(slots == slots[row]))
    raise ValueError(f"StepBatch: row {row}: {problem}")
