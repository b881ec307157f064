"""Runs what may take a while in a thread of its own, so that it delays neither other calls nor their threads."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import ParamSpec, TypeVar

from mamba_align_jax.engine.interrupts import contained
from mamba_align_jax.engine.scheduling.tenants import Lines, has_room
from mamba_align_jax.serve.refusals import overloaded

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(eq=False)
class _Place:
    """A call that waits until it is its turn."""

    id: int
    comes: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class OneAtATime:
    """Runs functions one after the other, tenant by tenant, and refuses one if many wait already. For one event loop."""

    def __init__(self, limit: int) -> None:
        """Makes a thread's queue, which `limit` calls may be in: see `has_room` for a tenant's share."""
        self._limit, self._numbers = limit, count()
        self._counts: Counter[str] = Counter()  # of calls that wait or run, by tenant
        self._waiting: Lines[_Place] = Lines()
        self._is_busy = False
        self._thread = ThreadPoolExecutor(1)

    async def run(self, tenant: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns what a function returns, or raises what it raises, or a Refusal if too many calls wait."""
        if not has_room(self._limit, tenant, self._counts):
            raise overloaded("too many chats, long texts and grammars wait to be read")
        self._counts[tenant] += 1
        try:
            await self._turn(tenant)
            try:
                return await asyncio.get_running_loop().run_in_executor(
                    self._thread, partial(contained(function), *args, **kwargs)
                )
            finally:
                self._next()
        finally:
            self._counts[tenant] -= 1
            if not self._counts[tenant]:
                del self._counts[tenant]

    async def _turn(self, tenant: str) -> None:
        """Waits for the tenant's turn, and takes it."""
        if not self._is_busy:
            self._is_busy = True
            return
        turn = _Place(next(self._numbers))
        self._waiting.add(tenant, turn)
        try:
            await turn.comes
        except asyncio.CancelledError:
            if self._waiting.has(tenant, turn):
                self._waiting.remove(tenant, turn)
            else:
                self._next()
            raise

    def _next(self) -> None:
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            self._waiting.take().comes.set_result(None)
