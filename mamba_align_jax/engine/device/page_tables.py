"""The page tables on the device: which KV pages each slot has. The host sends only the entries that change."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

PageEntry = tuple[int, int, int]  # a slot, which page of its request, and the page

# Updates of one call of `store_pages`.
_UPDATES_PER_CALL = 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PageUpdates:
    """Changes of the page tables. Padding has a slot that is out of range. All int32.

    Attributes:
        cleared: Slots that requests enter. Their entries become 0, the NULL page, before others are set: a drafter may look
            at positions after a request's pages, where the slot's last request had some. [rows that may enter]
        slot: The slot of each entry to set. [updates]
        number: Which page of the request the entry is, counted from its first token. [updates]
        page: The page. [updates]
    """

    cleared: jax.Array
    slot: jax.Array
    number: jax.Array
    page: jax.Array

    @classmethod
    def from_host(
        cls,
        num_slots: int,
        max_cleared: int,
        max_updates: int,
        cleared: Sequence[int],
        entries: Sequence[PageEntry],
        put: Callable[[np.ndarray], Any] = jax.device_put,
    ) -> "PageUpdates":
        """Pads slots to clear and entries to set; for `put` see `StepBatch.from_host`.

        Raises:
            ValueError: There are more slots or entries than there is room for.
        """
        if len(cleared) > max_cleared or len(entries) > max_updates:
            raise ValueError(
                f"PageUpdates: cleared and entries must be at most {max_cleared} and {max_updates}, "
                f"got {len(cleared)} and {len(entries)}"
            )
        slots = np.full(max_cleared, num_slots, np.int32)
        slots[: len(cleared)] = cleared
        padded = np.zeros((3, max_updates), np.int32)
        padded[0] = num_slots
        # Long hits bring thousands of entries, for which `asarray` would take longer.
        numbers = np.fromiter(itertools.chain.from_iterable(entries), np.int32, 3 * len(entries))
        padded[:, : len(entries)] = numbers.reshape(-1, 3).T
        slot, number, page = map(put, padded)
        return cls(cleared=put(slots), slot=slot, number=number, page=page)


def set_pages(page_tables: jax.Array, updates: PageUpdates) -> jax.Array:
    """Applies updates to page tables, int32 [slots, pages]. `page_tables` is donated."""
    page_tables = page_tables.at[updates.cleared].set(0, mode="drop")
    return page_tables.at[updates.slot, updates.number].set(updates.page, mode="drop")


_set_pages = functools.partial(jax.jit, donate_argnums=0)(set_pages)


def store_pages(page_tables: jax.Array, cleared: Sequence[int], entries: Sequence[PageEntry]) -> jax.Array:
    """Clears slots and sets any number of entries, in calls of one size, ahead of a step that has no room for them.

    A request that enters on a long hit brings the pages of the whole hit at once. `page_tables` is donated.
    """
    num_slots = page_tables.shape[0]
    for begin in range(0, max(len(entries), 1), _UPDATES_PER_CALL):
        part = slice(begin, begin + _UPDATES_PER_CALL)
        # All slots fit the first call, because no entry may be set before its slot is cleared.
        updates = PageUpdates.from_host(
            num_slots, num_slots, _UPDATES_PER_CALL, [] if begin else cleared, entries[part], lambda array: array
        )
        page_tables = _set_pages(page_tables, updates)
    return page_tables
