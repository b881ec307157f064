"""A thread that runs the calls of several tenants, which take turns."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from mamba_align_jax.engine.tenants import Lines

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(eq=False)
class _Waiting:
    id: int
    function: Callable[[], Any]
    answer: Future[Any] = field(default_factory=Future)


class FairThread:
    """Runs functions one after the other, tenant by tenant. Any thread may call it. The first call starts the thread."""

    def __init__(self, begin: Callable[[], object] = lambda: None) -> None:
        """`begin` is called in the thread before anything else."""
        self._thread = ThreadPoolExecutor(1, initializer=begin)
        self._numbers = itertools.count()
        self._lines: Lines[_Waiting] = Lines()
        self._lock = threading.Lock()

    def submit(self, tenant: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queues a call in a tenant's line, and returns its result. If that is cancelled before its turn, nothing is run."""
        call = _Waiting(next(self._numbers), partial(function, *args, **kwargs))
        with self._lock:
            self._lines.add(tenant, call)
        self._thread.submit(self._run_next)
        return call.answer

    def _run_next(self) -> None:
        with self._lock:
            call = self._lines.take()
        if not call.answer.set_running_or_notify_cancel():
            return
        try:
            result = call.function()
        except BaseException as error:
            call.answer.set_exception(error)
        else:
            call.answer.set_result(result)
