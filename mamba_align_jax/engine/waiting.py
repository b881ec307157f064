"""Who waits, in the order in which they may run: by priority, and within one by arrival."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from mamba_align_jax.engine.request import Request
from mamba_align_jax.errors import QueueFullError

by_rank = attrgetter("rank")


class WaitingQueue:
    """Requests by rank. One that is put back has the place it had, ahead of whoever came later with its priority."""

    def __init__(self, limit: int | None = None) -> None:
        """An empty queue that takes `limit` requests; None is no limit. Those that are put back don't count."""
        self.limit = limit
        self._arrivals = itertools.count()
        self._requests: list[Request] = []
        self._returned: set[int] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        place = bisect_left(self._requests, request.rank, key=by_rank)
        return place < len(self._requests) and self._requests[place] is request

    @property
    def first(self) -> Request:
        """Whose turn it is."""
        return self._requests[0]

    def add(self, request: Request) -> None:
        """Takes in a request that has just arrived, and ranks it.

        Raises:
            QueueFullError: as many wait as may; nothing is changed.
        """
        if self.limit is not None and len(self._requests) - len(self._returned) >= self.limit:
            raise QueueFullError(f"max_waiting = {self.limit} requests wait already")
        request.rank = request.params.priority, next(self._arrivals)
        insort(self._requests, request, key=by_rank)

    def put_back(self, request: Request) -> None:
        """Takes back a request that has left, by the rank it has."""
        insort(self._requests, request, key=by_rank)
        self._returned.add(request.id)

    def remove(self, request: Request) -> None:
        """Lets go of one that waits."""
        del self._requests[bisect_left(self._requests, request.rank, key=by_rank)]
        self._returned.discard(request.id)
