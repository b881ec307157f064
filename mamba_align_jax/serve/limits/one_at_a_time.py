"""Runs what may take a while in a thread of its own, so that it delays neither other calls nor their threads."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mamba_align_jax.engine.fair_thread import FairThread
from mamba_align_jax.engine.interrupts import contained
from mamba_align_jax.engine.tenants import has_room
from mamba_align_jax.serve.refusals import overloaded

P = ParamSpec("P")
R = TypeVar("R")


class OneAtATime:
    """Runs functions one after the other, tenant by tenant, and refuses one if many wait already. For one event loop."""

    def __init__(self, limit: int) -> None:
        """Makes a thread's queue, which `limit` calls may be in: see `has_room` for a tenant's share."""
        self._limit = limit
        self._counts: Counter[str] = Counter()  # of calls that wait or run, by tenant
        self._thread = FairThread()

    async def run(self, tenant: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns what a function returns, or raises what it raises, or a Refusal if too many calls wait."""
        if not has_room(self._limit, tenant, self._counts):
            raise overloaded("too many chats, long texts and grammars wait to be read")
        self._counts[tenant] += 1
        try:
            return await asyncio.wrap_future(self._thread.submit(tenant, contained(function), *args, **kwargs))
        finally:
            self._counts[tenant] -= 1
            if not self._counts[tenant]:
                del self._counts[tenant]
