"""Packs the rows of a plan into the arrays of a step, padded to the sizes of one of few compiled programs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.state import Additions
from mamba_align_jax.align.tables import TableUpdates
from mamba_align_jax.engine.page_tables import Entry, PageUpdates
from mamba_align_jax.engine.program import Inputs
from mamba_align_jax.engine.scheduler import Plan, Row

# The smallest sizes that a program is compiled for.
_MIN_PREFILL_TOKENS = 128
_MIN_DECODE_ROWS = 4
# Pages that a prefill row may bring to a step beside those of its chunk: a hit of 2048 tokens in pages of 16.
_PAGES_PER_PREFILL_ROW = 128


class Bucket(NamedTuple):
    """The sizes of one compiled program.

    Attributes:
        decode_rows: Number of decode and verify rows.
        prefill_rows: Number of prefill rows.
        prefill_tokens: Number of tokens of the prefill rows.
        draws: Whether rows may draw tokens at random. A program in which no row draws decides nothing on the device:
            the host would wait for such a decision, and could not dispatch a step ahead.
    """

    decode_rows: int
    prefill_rows: int
    prefill_tokens: int
    draws: bool = True

    @property
    def num_rows(self) -> int:
        """The number of all rows."""
        return self.decode_rows + self.prefill_rows

    def holds(self, plan: Plan) -> bool:
        """Whether the program can run a plan."""
        return (
            len(plan.decode) <= self.decode_rows
            and len(plan.prefill) <= self.prefill_rows
            and sum(row.num_tokens for row in plan.prefill) <= self.prefill_tokens
            and (self.draws or all(row.request.params.temperature == 0 for row in plan.rows))
        )

    def places(self, plan: Plan) -> list[Row | None]:
        """Returns the row in each place of the program, decode rows first; None is padding."""
        decode = [*plan.decode, *[None] * (self.decode_rows - len(plan.decode))]
        return [*decode, *plan.prefill, *[None] * (self.prefill_rows - len(plan.prefill))]


def all_buckets(max_num_seqs: int, max_prefill_rows: int, max_num_batched_tokens: int) -> list[Bucket]:
    """Returns every bucket that a plan can need.

    Args:
        max_num_seqs: Number of requests that run at once.
        max_prefill_rows: Number of prefill rows of a step.
        max_num_batched_tokens: Number of tokens of these rows.
    """
    # A step with prefill rows always has room for every request: one program instead of one for each number of decode
    # rows.
    prefill = [
        Bucket(rows, max_prefill_rows, tokens)
        for tokens in _sizes(max_num_batched_tokens, _MIN_PREFILL_TOKENS)
        for rows in (0, max_num_seqs)
    ]
    decode = [Bucket(rows, 0, 0, draws) for rows in _sizes(max_num_seqs, _MIN_DECODE_ROWS) for draws in (False, True)]
    return prefill + decode


def _sizes(largest: int, smallest: int) -> list[int]:
    """Returns falling sizes, each a quarter of the one before: few programs to compile, and little padding."""
    sizes = [largest]
    while sizes[-1] // 4 >= smallest:
        sizes.append(sizes[-1] // 4)
    return sizes


def _keep_on_host(array: np.ndarray) -> Any:
    """Keeps an array in host memory.

    The jitted step transfers all its host arguments at once, which is much faster than one `device_put` per array.
    """
    return array


class Packer:
    """Packs rows into `Inputs` in host memory."""

    def __init__(self, spec: AlignConfig, page_size: int, history: int) -> None:
        """Makes a packer.

        Args:
            spec: How states are kept.
            page_size: Number of tokens of a KV page.
            history: Number of tokens that the device keeps per slot for a drafter; 0 without a drafter on the device.
        """
        self._spec, self._page_size, self._history = spec, page_size, history

    def pack(self, bucket: Bucket, places: Sequence[Row | None], early: Sequence[Row] = ()) -> Inputs:
        """Packs the row of each place, None being padding, without the pages of `early_rows`, which are stored already."""
        rows = [row for row in places if row is not None]
        entering = [row for row in rows if row.enters]
        return Inputs(
            tokens=_keep_on_host(self._tokens(bucket, rows)),
            entering=_keep_on_host(self._entering_tokens(bucket, entering)),
            batch=self._batch(places),
            updates=self._table_updates(places, rows),
            additions=Additions.from_host(
                self._spec,
                len(places),
                [row.request.slot for row in entering],
                [row.start for row in entering],
                _keep_on_host,
            ),
            pages=self._page_updates(bucket, [row for row in rows if not any(row is other for other in early)]),
            samples=_per_row(places, lambda row: row.samples, False, np.bool_),
            temperature=_per_row(places, lambda row: row.request.params.temperature, 0.0, np.float32),
            top_k=_per_row(places, lambda row: row.request.params.top_k, 0, np.int32),
            top_p=_per_row(places, lambda row: row.request.params.top_p, 1.0, np.float32),
            seed=_per_row(places, lambda row: row.request.params.seed, 0, np.int32),
        )

    def early_rows(self, bucket: Bucket, places: Sequence[Row | None]) -> list[Row]:
        """Returns the rows whose new pages the step has no room for: they enter on a long hit. Most steps have none."""
        early, room = [], self._max_page_updates(bucket)
        for row in places:
            if row is not None and len(row.allocation.pages) > room:
                early.append(row)
            elif row is not None:
                room -= len(row.allocation.pages)
        return early

    def _max_page_updates(self, bucket: Bucket) -> int:
        """The number of page entries that a step has room for: those of decode rows, of chunks, and of short hits."""
        each = 1 + -(-self._spec.window // self._page_size)
        chunks = bucket.prefill_tokens // self._page_size + _PAGES_PER_PREFILL_ROW * bucket.prefill_rows
        return each * bucket.decode_rows + chunks

    def _page_updates(self, bucket: Bucket, rows: Sequence[Row]) -> PageUpdates:
        return PageUpdates.from_host(
            self._spec.max_num_seqs,
            bucket.prefill_rows,
            self._max_page_updates(bucket),
            [row.request.slot for row in rows if row.enters],
            page_entries(rows),
            _keep_on_host,
        )

    def _tokens(self, bucket: Bucket, rows: Sequence[Row]) -> np.ndarray:
        tokens = np.zeros(bucket.decode_rows * self._spec.window + bucket.prefill_tokens, np.int32)
        packed = [token for row in rows for token in row.tokens]
        tokens[: len(packed)] = packed
        return tokens

    def _entering_tokens(self, bucket: Bucket, entering: Sequence[Row]) -> np.ndarray:
        tokens = np.zeros((bucket.prefill_rows, self._history), np.int32)
        for place, row in enumerate(entering if self._history else ()):
            tokens[place, : len(row.request.tokens)] = row.request.tokens
        return tokens

    def _batch(self, places: Sequence[Row | None]) -> StepBatch:
        lengths = [0 if row is None else row.num_tokens for row in places]
        return StepBatch.from_host(
            self._spec,
            len(places),
            [-1 if row is None else row.request.slot for row in places],
            np.cumsum([0, *lengths]).tolist(),
            [-1 if row is None or row.is_prefilling else len(row.drafts) for row in places],
            put=_keep_on_host,
        )

    def _table_updates(self, places: Sequence[Row | None], rows: Sequence[Row]) -> TableUpdates:
        groups = len(self._spec.groups)
        entries = [
            (group, row.request.slot, column, block)
            for group in range(groups)
            for row in rows
            for column, block in row.allocation.columns
        ]
        # In one step a row never gets more blocks than it may hold while another step is in flight.
        room = len(places) * groups * self._spec.blocks_per_request(1)
        return TableUpdates.from_host(self._spec, room, entries, _keep_on_host)


def page_entries(rows: Sequence[Row]) -> list[Entry]:
    """Returns the entries of pages that are new in the rows' page tables."""
    return [(row.request.slot, number, page) for row in rows for number, page in row.allocation.pages]


def _per_row(places: Sequence[Row | None], value: Callable[[Row], Any], padding: Any, dtype: type) -> Any:
    """Returns an array [rows] with the value of each row, and `padding` for places without one."""
    return _keep_on_host(np.array([padding if row is None else value(row) for row in places], dtype))
