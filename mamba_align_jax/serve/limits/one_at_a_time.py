"""Runs what may take a while in a thread of its own, so that it delays neither other calls nor their threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from mamba_align_jax.engine.interrupts import contained
from mamba_align_jax.serve.refusals import overloaded

P = ParamSpec("P")
R = TypeVar("R")


class OneAtATime:
    """Runs functions one after the other, and refuses one if many wait already."""

    def __init__(self, limit: int) -> None:
        """Makes a thread's queue, which `limit` calls may be in."""
        self._limit, self._count = limit, 0
        self._thread = ThreadPoolExecutor(1)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns what a function returns, or raises what it raises, or a Refusal if too many calls wait."""
        if self._count >= self._limit:
            raise overloaded("too many chats, long texts and grammars wait to be read")
        self._count += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, partial(contained(function), *args, **kwargs)
            )
        finally:
            self._count -= 1
