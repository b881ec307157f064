"""Makes the masks of grammars in threads beside the engine's, so that no request's grammar stalls the others.

What a grammar's masks have cost so far says how the next one is made. A cheap one is made at once, beside those of other
requests, and the step waits for it. A dear one is made when it is its tenant's turn, by one thread of low priority, and the
request has no row until then.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar

import numpy as np

from mamba_align_jax.engine.fair_thread import FairThread
from mamba_align_jax.engine.interrupts import failure
from mamba_align_jax.engine.scheduling.request import Request

R = TypeVar("R")
Allowed = tuple[list[int], np.ndarray]
_MAX_THREADS = 8
# How much lower the priority of the thread is that makes dear masks. If processors are scarce, it gets a tenth of one.
_NICENESS = 10
# How long a step waits for masks that should be cheap, and how long the engine sleeps if it waits for nothing else.
_PATIENCE_S, _SLEEP_S = 0.02, 0.05


class _Job(NamedTuple):
    """The masks after a number of tokens, which are made or being made."""

    num_tokens: int
    is_cheap: bool
    allowed: Future[Allowed]


class Masks:
    """The masks of all requests of an engine. One thread calls its methods, but for `when_idle`."""

    def __init__(self) -> None:
        """Starts no thread before the first mask."""
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "mamba-align masks")
        self._slow = FairThread(_lower_priority)
        self._jobs: dict[int, _Job] = {}

    def when_idle(self, tenant: str, function: Callable[[], R]) -> Future[R]:
        """Runs what may take long, as to compile a grammar, where dear masks are made."""
        return self._slow.submit(tenant, function)

    def begin(self, request: Request, drafts: Callable[[], list[int]]) -> None:
        """Begins to make the masks for a request's next row, unless that was begun before.

        Args:
            request: A request with a grammar, all of whose tokens are known.
            drafts: Proposes tokens that may follow. What it raises is raised by `find`.
        """
        grammar, num_tokens, job = request.grammar, len(request.tokens), self._jobs.get(request.id)
        assert grammar is not None
        # A grammar that is still at work for tokens that were cut off is not used by two threads.
        if job is not None and (job.num_tokens == num_tokens or not job.allowed.done()):
            return
        is_cheap = grammar.is_cheap
        try:
            proposed = drafts()
        except BaseException as raised:
            answer: Future[Allowed] = Future()
            answer.set_exception(failure(raised))
        else:
            arguments = request.tokens, len(request.prompt), proposed
            if is_cheap:
                answer = self._pool.submit(grammar.allow, *arguments)
            else:
                answer = self._slow.submit(request.params.tenant, lambda: grammar.allow(*arguments))
        self._jobs[request.id] = _Job(num_tokens, is_cheap, answer)

    def await_cheap(self, requests: Iterable[Request]) -> None:
        """Waits for the masks of these requests that are cheap, but not long."""
        jobs = (self._jobs.get(request.id) for request in requests)
        wait([job.allowed for job in jobs if job is not None and job.is_cheap], _PATIENCE_S)

    def await_any(self, requests: Iterable[Request]) -> None:
        """Waits until the masks of one of these requests are made, but not long."""
        jobs = (self._jobs.get(request.id) for request in requests)
        wait([job.allowed for job in jobs if job is not None], _SLEEP_S, FIRST_COMPLETED)

    def find(self, request: Request) -> Allowed | None:
        """Returns the drafts that are allowed and the masks, as `GrammarState.allow` does; None if they aren't made yet.

        Raises:
            Exception: What `allow` or the drafter raised.
        """
        job = self._jobs.get(request.id)
        if job is None or job.num_tokens != len(request.tokens) or not job.allowed.done():
            return None
        try:
            drafts, masks = job.allowed.result()
        except BaseException:
            # Whatever ended it, an interrupt too, the next call begins anew.
            del self._jobs[request.id]
            raise
        return list(drafts), masks

    def forget(self, request: Request) -> None:
        """Drops what is kept for a request."""
        job = self._jobs.pop(request.id, None)
        if job is not None:
            job.allowed.cancel()


def _lower_priority() -> None:
    # Only Linux has priorities of threads.
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
