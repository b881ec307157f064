"""The queue of requests that wait to run, in the order in which they may run: by priority, then by arrival."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter

from mamba_align_jax.engine.scheduling.request import Request
from mamba_align_jax.errors import QueueFullError

by_rank = attrgetter("rank")


class WaitingQueue:
    """Waiting requests by rank.

    A preempted request that is put back keeps its rank, and so runs before all requests of its priority that came
    later.
    """

    def __init__(self, limit: int | None = None, overtaking_limit: int | None = None) -> None:
        """Makes an empty queue.

        Args:
            limit: Number of requests that it takes, those that were put back not counted; None is no limit.
            overtaking_limit: Number of later requests that may run before a request, for each level of priority between
                them; None is no limit.
        """
        self.limit, self.overtaking_limit = limit, overtaking_limit
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
        self.check_room()
        request.rank = self._rank(request.params.priority, next(self._arrivals))
        insort(self._requests, request, key=by_rank)

    def check_room(self, num_coming: int = 0) -> None:
        """Raises QueueFullError if the queue is full once `num_coming` requests are in it that come before."""
        if self.limit is not None and len(self._requests) - len(self._returned) + num_coming >= self.limit:
            raise QueueFullError(f"max_waiting = {self.limit} requests wait already")

    def _rank(self, priority: int, arrival: int) -> tuple[int, int]:
        if self.overtaking_limit is None:
            return priority, arrival
        # Each level of priority is worth as many arrivals.
        return arrival + priority * self.overtaking_limit, priority

    def put_back(self, request: Request) -> None:
        """Queues a preempted request again, by the rank that it has."""
        insort(self._requests, request, key=by_rank)
        self._returned.add(request.id)

    def remove(self, request: Request) -> None:
        """Takes a waiting request out of the queue.

        Raises:
            ValueError: The request does not wait.
        """
        place = bisect_left(self._requests, request.rank, key=by_rank)
        if self._requests[place : place + 1] != [request]:
            raise ValueError(f"remove: request {request.id} does not wait")
        del self._requests[place]
        self._returned.discard(request.id)

    def replace(self, requests: Iterable[Request]) -> None:
        """Makes these requests the ones that wait. Those that have run before count as put back."""
        self._requests = sorted(requests, key=by_rank)
        self._returned = {request.id for request in self._requests if request.num_admissions}
