"""The queue of requests that wait to run, in the order in which they may run: by priority, then by arrival."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from mamba_align_jax.engine.request import Request
from mamba_align_jax.errors import QueueFullError

by_rank = attrgetter("rank")


class WaitingQueue:
    """Waiting requests by rank.

    A preempted request that is put back keeps its rank, and so runs before all requests of its priority that came
    later.
    """

    def __init__(self, limit: int | None = None) -> None:
        """Makes an empty queue that takes `limit` requests, those that were put back not counted; None is no limit."""
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
        """The request that runs next."""
        return self._requests[0]

    def add(self, request: Request) -> None:
        """Queues a request that has just arrived, and sets its rank.

        Raises:
            QueueFullError: The queue is full. Nothing has changed.
        """
        if self.limit is not None and len(self._requests) - len(self._returned) >= self.limit:
            raise QueueFullError(f"max_waiting = {self.limit} requests wait already")
        request.rank = request.params.priority, next(self._arrivals)
        insort(self._requests, request, key=by_rank)

    def put_back(self, request: Request) -> None:
        """Queues a preempted request again, by the rank that it has."""
        insort(self._requests, request, key=by_rank)
        self._returned.add(request.id)

    def remove(self, request: Request) -> None:
        """Takes a waiting request out of the queue."""
        del self._requests[bisect_left(self._requests, request.rank, key=by_rank)]
        self._returned.discard(request.id)
