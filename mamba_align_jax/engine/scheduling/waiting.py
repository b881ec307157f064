"""The queue of requests that wait to run, in the order in which they may run: by priority, then tenant by tenant."""

import heapq
import itertools
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter

from mamba_align_jax.engine.scheduling.request import Request
from mamba_align_jax.engine.tenants import Lines, has_room
from mamba_align_jax.errors import QueueFullError

by_rank = attrgetter("rank")


class _SamePriority:
    """The waiting requests of one priority: preempted requests by rank, and then new requests, tenant by tenant."""

    def __init__(self) -> None:
        self.returned: list[Request] = []
        self.new: Lines[Request] = Lines()

    def __bool__(self) -> bool:
        return bool(self.returned or self.new)

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(self.returned, self.new)

    @property
    def first(self) -> Request:
        return self.returned[0] if self.returned else self.new.first

    @property
    def heads(self) -> Iterator[Request]:
        return itertools.chain(self.returned, self.new.heads)


class WaitingQueue:
    """Waiting requests. At one priority, tenants take turns, and a tenant's requests run in the order of their arrival.

    A preempted request that is put back has had its tenant's turn. It runs before all requests of its priority that never
    ran, and keeps its rank.
    """

    def __init__(self, limit: int | None = None, overtaking_limit: int | None = None) -> None:
        """Makes an empty queue.

        Args:
            limit: Number of requests that it takes, those that were put back not counted; None is no limit. See
                `has_room` for a tenant's share of it.
            overtaking_limit: Number of later requests that may run before a request whose turn it is, for each level of
                priority between them; None is no limit.
        """
        self.limit, self.overtaking_limit = limit, overtaking_limit
        self._arrivals, self._turns = itertools.count(), itertools.count(1)
        self._levels: defaultdict[int, _SamePriority] = defaultdict(_SamePriority)
        self._returned: set[int] = set()
        # How many of each tenant's requests wait that never ran.
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(self._counts.values()) + len(self._returned)

    def __bool__(self) -> bool:
        return bool(self._levels)

    def __iter__(self) -> Iterator[Request]:
        """Goes through all requests, in the order in which they run if no other one comes."""
        return heapq.merge(*self._levels.values(), key=by_rank)

    def __contains__(self, request: Request) -> bool:
        params = request.params
        level = self._levels.get(params.priority)
        return request.id in self._returned or (level is not None and level.new.has(params.tenant, request))

    @property
    def first(self) -> Request:
        """The request that runs next."""
        return min((level.first for level in self._levels.values()), key=by_rank)

    def first_that(self, may_run: Callable[[Request], bool]) -> Request | None:
        """Returns the request that runs next of those that may. A tenant's requests don't overtake each other."""
        found = (next(filter(may_run, level.heads), None) for level in self._levels.values())
        return min((request for request in found if request is not None), key=by_rank, default=None)

    def add(self, request: Request) -> None:
        """Queues a request that has just arrived, and sets its rank.

        Raises:
            QueueFullError: The queue is full, or the tenant's share of it. Nothing has changed.
        """
        self.check_room(request.params.tenant)
        request.rank = self._rank(request.params.priority, next(self._arrivals))
        self._add(request)

    def _add(self, request: Request) -> None:
        tenant = request.params.tenant
        self._levels[request.params.priority].new.add(tenant, request)
        self._counts[tenant] += 1

    def check_room(self, tenant: str = "", coming: Mapping[str, int] | None = None) -> None:
        """Raises QueueFullError if there is no room for a tenant's request once those are in the queue that come before.

        Args:
            tenant: The tenant.
            coming: How many requests of each tenant come before.
        """
        if self.limit is None:
            return
        counts = self._counts if not coming else Counter(dict(self._counts)) + Counter(dict(coming))
        if not has_room(self.limit, tenant, counts):
            raise QueueFullError(f"max_waiting = {self.limit} requests wait already, or half as many of one tenant's")

    def _rank(self, priority: int, arrival: int) -> tuple[int, int, int]:
        if self.overtaking_limit is None:
            return priority, arrival, 0
        # Each level of priority is worth as many arrivals.
        return arrival + priority * self.overtaking_limit, priority, 0

    def enter(self, request: Request, running: Iterable[Request]) -> None:
        """Takes a request out, because it runs from now on.

        If it runs for the first time, its rank is then behind those of its priority that run already, so that it gives way
        to them even if it came before them and its tenant had to wait.
        """
        if request.id not in self._returned:
            ranks = [other.rank[:2] for other in running if other.params.priority == request.params.priority]
            request.rank = (*max([request.rank[:2], *ranks]), next(self._turns))
        self.remove(request)

    def put_back(self, request: Request) -> None:
        """Queues a preempted request again, by the rank that it has."""
        insort(self._levels[request.params.priority].returned, request, key=by_rank)
        self._returned.add(request.id)

    def remove(self, request: Request) -> None:
        """Takes a waiting request out of the queue. If it was the one that runs next, its tenant has had a turn.

        Raises:
            ValueError: The request does not wait.
        """
        if request not in self:
            raise ValueError(f"remove: request {request.id} does not wait")
        priority, tenant = request.params.priority, request.params.tenant
        level = self._levels[priority]
        if request.id in self._returned:
            level.returned.remove(request)
            self._returned.discard(request.id)
        else:
            level.new.remove(tenant, request)
            self._counts[tenant] -= 1
            if not self._counts[tenant]:
                del self._counts[tenant]
        if not level:
            del self._levels[priority]

    def replace(self, requests: Iterable[Request]) -> None:
        """Makes these requests the ones that wait. Those that have run before count as put back."""
        self._levels.clear()
        self._returned.clear()
        self._counts.clear()
        for request in sorted(requests, key=by_rank):
            (self.put_back if request.num_admissions else self._add)(request)
