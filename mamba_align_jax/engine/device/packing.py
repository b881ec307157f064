"""Packs the rows of a plan into the arrays of a step, padded to the sizes of one of few compiled programs."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.state import Additions
from mamba_align_jax.align.tables import TableUpdates
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.device.packed import Packed, pack
from mamba_align_jax.engine.device.page_tables import PageEntry, PageUpdates
from mamba_align_jax.engine.device.program import Inputs
from mamba_align_jax.engine.drafting.protocols import UNKNOWN
from mamba_align_jax.engine.sampling.adjust import AdjustOptions
from mamba_align_jax.engine.sampling.choice import SamplingInputs
from mamba_align_jax.engine.sampling.draw import DrawOptions
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level, changes_logits
from mamba_align_jax.engine.scheduling.scheduler import Row
from mamba_align_jax.engine.text.grammar_state import mask_words

# Pages that hits may bring to a step with prefill rows, beside the pages of its chunks. Four hits of 4096 tokens bring 1024.
_PAGES_OF_HITS = 1024
_GREEDY = SamplingParams()


class Packer:
    """Packs rows into `Inputs` in host memory."""

    def __init__(self, align: AlignConfig, page_size: int, keeps_history: bool, vocab_size: int) -> None:
        """Makes a packer.

        Args:
            align: How states are kept.
            page_size: Number of tokens of a KV page.
            keeps_history: Whether the device keeps each slot's tokens for a drafter.
            vocab_size: Number of the model's tokens.
        """
        self._align, self._page_size, self._keeps_history = align, page_size, keeps_history
        self._mask_words = mask_words(vocab_size)
        # The last step's inputs, and what they follow from: see `_follows_from`.
        self._last_packed: tuple[Any, Packed] | None = None
        # The rows of the last step, and their batch.
        self._last_batch: tuple[list[tuple[int, int, int]], StepBatch] | None = None

    def packed(self, bucket: Bucket, places: Sequence[Row | None], early: Sequence[Row] = ()) -> Packed:
        """Packs like `pack`, and into one array. Steps that follow each other and differ in nothing get the same one."""
        origin = _follows_from(bucket, places)
        if origin is None or self._last_packed is None or self._last_packed[0] != origin:
            self._last_packed = origin, pack(self.pack(bucket, places, early))
        return self._last_packed[1]

    def pack(self, bucket: Bucket, places: Sequence[Row | None], early: Sequence[Row] = ()) -> Inputs:
        """Packs the row of each place, None being padding, without the pages of `early_rows`, which are stored already."""
        rows = [row for row in places if row is not None]
        entering = [row for row in rows if row.enters]
        return Inputs(
            tokens=_keep_on_host(self._tokens(bucket, rows)),
            following=_keep_on_host(self._following(places[bucket.decode_rows :])),
            batch=self._batch(places),
            updates=self._table_updates(bucket, places, rows),
            additions=Additions.from_host(
                self._align,
                bucket.prefill_rows,
                [row.slot for row in entering],
                [row.start for row in entering],
                _keep_on_host,
            ),
            pages=self._page_updates(bucket, rows, early),
            samples=_keep_on_host(np.array([row is not None and row.samples for row in places])),
            sampling=self._sampling(bucket, places),
        )

    def early_rows(self, bucket: Bucket, places: Sequence[Row | None]) -> list[Row]:
        """Returns the rows whose new pages the step has no room for: they enter on a long hit. Most steps have none."""
        early, room = [], self._max_page_updates(bucket)
        for row in places:
            if row is None or not row.allocation.pages:
                continue
            if len(row.allocation.pages) > room:
                early.append(row)
            else:
                room -= len(row.allocation.pages)
        return early

    def _max_page_updates(self, bucket: Bucket) -> int:
        """The number of page entries that a step has room for: those of decode rows, of chunks, and of short hits."""
        each = 1 + -(-self._align.window // self._page_size)
        chunks = bucket.prefill_tokens // self._page_size + bucket.prefill_rows
        return each * bucket.decode_rows + chunks + (_PAGES_OF_HITS if bucket.prefill_rows else 0)

    def _page_updates(self, bucket: Bucket, rows: Sequence[Row], early: Sequence[Row]) -> PageUpdates:
        stored = set(map(id, early))
        rows = [row for row in rows if row.allocation.pages and id(row) not in stored]
        return PageUpdates.from_host(
            self._align.max_num_seqs,
            bucket.prefill_rows,
            self._max_page_updates(bucket),
            [row.slot for row in rows if row.enters],
            page_entries(rows),
            _keep_on_host,
        )

    def _tokens(self, bucket: Bucket, rows: Sequence[Row]) -> np.ndarray:
        packed: list[int] = []
        for row in rows:
            packed += row.tokens
        return self._padded(bucket, packed)

    def _padded(self, bucket: Bucket, packed: Sequence[int]) -> np.ndarray:
        tokens = np.zeros(bucket.decode_rows * self._align.window + bucket.prefill_tokens, np.int32)
        tokens[: len(packed)] = packed
        return tokens

    def _following(self, prefill: Sequence[Row | None]) -> np.ndarray:
        following = [UNKNOWN if row is None else row.following for row in prefill if self._keeps_history]
        return np.array(following, np.int32)

    def _batch(self, places: Sequence[Row | None]) -> StepBatch:
        rows = [
            (-1, 0, -1) if row is None else (row.slot, row.num_tokens, -1 if row.is_prefilling else len(row.drafts))
            for row in places
        ]
        # Checking the rows takes longer than comparing them, and most decode steps have the rows of the step before.
        if self._last_batch is not None and self._last_batch[0] == rows:
            return self._last_batch[1]
        batch = StepBatch.from_host(
            self._align,
            len(rows),
            [slot for slot, _, _ in rows],
            [0, *itertools.accumulate(length for _, length, _ in rows)],
            [drafts for _, _, drafts in rows],
            put=_keep_on_host,
        )
        self._last_batch = rows, batch
        return batch

    def _table_updates(self, bucket: Bucket, places: Sequence[Row | None], rows: Sequence[Row]) -> TableUpdates:
        groups = len(self._align.groups)
        rows = [row for row in rows if row.allocation.columns]
        entries = [
            (group, row.slot, column, block)
            for group in range(groups)
            for row in rows
            for column, block in row.allocation.columns
        ]
        # In one step a row never gets more blocks than it may hold while one other step is in flight, however many are.
        room = len(places) * groups * self._align.blocks_per_request(1, max_chunk=0)
        room += groups * self._align.blocks_of_chunk(bucket.prefill_tokens)
        return TableUpdates.from_host(self._align, room, entries, _keep_on_host)

    def _sampling(self, bucket: Bucket, places: Sequence[Row | None]) -> SamplingInputs:
        return SamplingInputs(
            draw=_draw_options(places) if bucket.level >= Level.DRAW else None,
            adjust=self._adjust_options(places) if bucket.level >= Level.FULL else None,
            masks=self._masks(bucket, places) if bucket.level >= Level.CONSTRAINED else None,
            following=self._following_tokens(bucket, places) if bucket.level >= Level.PROMPT else None,
        )

    def _masks(self, bucket: Bucket, places: Sequence[Row | None]) -> Any:
        """Returns the tokens that are allowed in each place where one is chosen: see `SamplingInputs.masks`."""
        window = self._align.window
        masks = np.full((bucket.decode_rows * window + bucket.prefill_rows, self._mask_words), -1, np.int32)
        for number, row in enumerate(places):
            if row is not None and row.masks is not None:
                begin = number * window if number < bucket.decode_rows else number + bucket.decode_rows * (window - 1)
                masks[begin : begin + 1 + len(row.drafts)] = row.masks[: 1 + len(row.drafts)]
        return _keep_on_host(masks)

    def _following_tokens(self, bucket: Bucket, places: Sequence[Row | None]) -> Any:
        """Returns the prompt's token after each packed token: see `SamplingInputs.following`."""
        packed: list[int] = []
        for row in places:
            if row is not None:
                known = row.request.prompt[row.start + 1 : row.start + 1 + row.num_tokens] if row.scores_prompt else ()
                packed += [*known, *[0] * (row.num_tokens - len(known))]
        return self._padded(bucket, packed)

    def _adjust_options(self, places: Sequence[Row | None]) -> AdjustOptions:
        """Returns how each row's logits are changed. Those of padding rows are not."""
        changes = [row is not None and changes_logits(row.request.params) for row in places]
        slots = [
            row.slot if row and change else self._align.max_num_seqs
            for row, change in zip(places, changes, strict=True)
        ]
        options = [
            row.request.params if row and change else _GREEDY for row, change in zip(places, changes, strict=True)
        ]
        floats = lambda name: _keep_on_host(np.array([getattr(each, name) for each in options], np.float32))
        return AdjustOptions(
            slot=_keep_on_host(np.array(slots, np.int32)),
            min_p=floats("min_p"),
            repetition=floats("repetition_penalty"),
            presence=floats("presence_penalty"),
            frequency=floats("frequency_penalty"),
        )


def _follows_from(bucket: Bucket, places: Sequence[Row | None]) -> Any:
    """Returns what determines a step's inputs, if that is only which request decodes how many tokens in each place.

    That is so for most decode steps under asynchronous stepping. For others it returns None: those with new blocks, pages,
    or masks, and those of whose tokens the host knows one.
    """
    rows: list[Any] = []
    for row in places:
        if row is None:
            rows.append(None)
        elif row.allocation.columns or row.allocation.pages or _is_known(row):
            return None
        else:
            rows.append((row.request.id, row.slot, row.num_tokens))
    return bucket, rows


def _is_known(row: Row) -> bool:
    """Whether the host knows any of a row's tokens, as it knows those of a chunk, or which tokens may follow them."""
    drafts_are_known = any(token != UNKNOWN for token in row.drafts)
    return row.start < len(row.request.tokens) or drafts_are_known or row.masks is not None


def page_entries(rows: Sequence[Row]) -> list[PageEntry]:
    """Returns the entries of pages that are new in the rows' page tables."""
    return [(row.slot, number, page) for row in rows for number, page in row.allocation.pages]


def _keep_on_host(array: np.ndarray) -> Any:
    """Keeps an array in host memory. `pack` makes one array of all."""
    return array


def _draw_options(places: Sequence[Row | None]) -> DrawOptions:
    """Returns how each row draws its tokens. Padding rows take their most likely token."""
    options = [_GREEDY if row is None else row.request.params for row in places]
    return DrawOptions(
        temperature=_keep_on_host(np.array([each.temperature for each in options], np.float32)),
        top_k=_keep_on_host(np.array([each.top_k for each in options], np.int32)),
        top_p=_keep_on_host(np.array([each.top_p for each in options], np.float32)),
        seed=_keep_on_host(np.array([each.seed for each in options], np.int32)),
    )
