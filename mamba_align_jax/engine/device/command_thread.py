"""A thread that makes the calls that are handed to it, in the order in which they come."""

import atexit
import functools
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from jax.sharding import Mesh

from mamba_align_jax.engine.interrupts import as_exception

P = ParamSpec("P")
R = TypeVar("R")
_PATIENCE_S = 120.0  # for calls that are still to be made when the process ends


def is_slow_to_start(mesh: Mesh | None) -> bool:
    """Whether it takes the host longer to start a program on a model's devices than to plan a step. None is one device."""
    return mesh is not None and mesh.size > 1 and not mesh.is_multi_process


class Answer(Generic[R]):
    """What a call has returned or raised, or will.

    It arrives in a `SimpleQueue`, which an interrupt cannot leave locked. The `Future` of the standard library can be.
    """

    def __init__(self) -> None:
        """Makes the answer of a call that is still to be made."""
        self._arrives: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._outcome: tuple[Any, BaseException | None] | None = None

    @classmethod
    def of(cls, call: Callable[[], R]) -> "Answer[R]":
        """Makes a call, and returns its answer. What the call raises is raised here."""
        answer = cls()
        answer._outcome = call(), None
        return answer

    def give(self, call: Callable[[], R]) -> None:
        """Makes the call, for whoever waits in `result`."""
        try:
            outcome: tuple[Any, BaseException | None] = call(), None
        except BaseException as error:
            # It was not the caller's thread that was interrupted.
            outcome = None, as_exception(error)
        self._arrives.put(outcome)

    def result(self) -> R:
        """Waits for the call, and returns what it has returned, or raises what it has raised."""
        if self._outcome is None:
            self._outcome = self._arrives.get()
        result, error = self._outcome
        if error is not None:
            raise error
        return result


class CommandThread:
    """Makes calls one after the other in a thread of its own. The thread ends when this object is gone.

    An interrupt reaches the callers' threads alone, so a call that was handed over is always made.
    """

    def __init__(self, at_exit: Callable[[], Callable[[], Any] | None] = lambda: None) -> None:
        """Starts the thread. A process that ends waits for the calls that were handed over, two minutes at most.

        Args:
            at_exit: A weak reference to a function that is called after that.
        """
        self._calls: SimpleQueue[tuple[Answer[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._calls,), name="mamba-align commands", daemon=True)
        self._thread.start()
        finish = weakref.finalize(self, self._calls.put, None)
        # A thread that came back from a program to an interpreter that is gone would end the process by a signal.
        atexit.register(_end, os.getpid(), finish, weakref.ref(self._thread), at_exit)

    def is_current(self) -> bool:
        """Whether the caller is the thread."""
        return threading.current_thread() is self._thread

    def start(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Answer[R]:
        """Hands over a call, and returns its answer without waiting."""
        answer: Answer[R] = Answer()
        self._calls.put((answer, functools.partial(call, *args, **kwargs)))
        return answer

    def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Hands over a call and waits for it. A call that is made by the thread itself is made at once."""
        if self.is_current():
            return call(*args, **kwargs)
        return self.start(call, *args, **kwargs).result()


def _end(
    process: int, finish: Callable[[], Any], thread: Callable[[], threading.Thread | None], at_exit: Callable[[], Any]
) -> None:
    """Lets a thread finish, waits for it, and calls what is to be called then, if these still exist."""
    if os.getpid() != process:
        return  # A process that was forked has no such thread.
    finish()
    running, function = thread(), at_exit()
    if running is not None:
        running.join(_PATIENCE_S)
    if function is not None:
        function()


def _work(calls: SimpleQueue[tuple[Answer[Any], Callable[[], Any]] | None]) -> None:
    while _make(calls.get()):
        pass


def _make(entry: tuple[Answer[Any], Callable[[], Any]] | None) -> bool:
    """Makes a call, unless there will be no more. What it refers to is gone when this function returns."""
    if entry is not None:
        answer, call = entry
        answer.give(call)
    return entry is not None
