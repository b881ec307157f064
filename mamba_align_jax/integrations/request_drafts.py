"""Drafts for the requests of another stack, from a drafter of this library that forgets each request when it is gone."""

import itertools
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from mamba_align_jax.engine.drafting import Drafter


class Joined(Sequence):
    """Two lists as one sequence. Neither is copied, so that a step's work does not grow with a request's text."""

    def __init__(self, first: list[int], second: list[int]) -> None:
        """Takes the lists. What is appended to the second one belongs to the sequence as well."""
        self._first, self._second = first, second

    def __len__(self) -> int:
        """Returns the number of tokens of both."""
        return len(self._first) + len(self._second)

    def __getitem__(self, place: Any) -> Any:
        """Returns a token, or for a slice a list of tokens."""
        size, places = len(self._first), range(len(self))[place]
        if isinstance(places, int):
            return self._first[places] if places < size else self._second[places - size]
        if places.step != 1:
            return [self[i] for i in places]
        begin, end = places.start, max(places.start, places.stop)
        return [*self._first[begin:end], *self._second[max(begin - size, 0) : max(end - size, 0)]]


class RequestDrafts:
    """Asks a drafter for drafts of sglang-jax's requests, and has it forget each request that is gone.

    sglang-jax has many ways to drop a request: one that is retracted may be aborted while it waits, or for want of memory.
    A request has also ended when nothing refers to its object any more.
    """

    def __init__(self, drafter: Drafter) -> None:
        """Keeps the drafter, which knows no request yet."""
        self._drafter, self._numbers = drafter, itertools.count()
        self._names: weakref.WeakKeyDictionary[Any, Hashable] = weakref.WeakKeyDictionary()
        self._gone: deque[Hashable] = deque()

    def draft(self, request: Any, max_drafts: int) -> list[int]:
        """Proposes tokens for a request: see `Drafter`. Its name there is its id and a number, as ids may come again."""
        while self._gone:
            self._drafter.forget(self._gone.popleft())
        name = self._names.get(request)
        if name is None:
            name = self._names[request] = request.rid, next(self._numbers)
            # A request may be collected at any time, also while the drafter works, so it is told with the next draft.
            weakref.finalize(request, self._gone.append, name)
        tokens = Joined(request.origin_input_ids, request.output_ids)
        return self._drafter.draft(name, tokens, max_drafts)[:max_drafts]

    def forget(self, request: Any) -> None:
        """Has the drafter forget a request that is finished."""
        name = self._names.pop(request, None)
        if name is not None:
            self._drafter.forget(name)
