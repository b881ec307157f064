"""Lets several threads call one object: one of them is inside at a time, and those that wait get their turns."""

import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """A lock that no thread can keep to itself by taking it again and again, and that no interrupt leaves held.

    A thread that waits for the lock holds the gate, so the thread that has the lock can't come back before it.
    """

    def __init__(self, owner: str, is_helper: Callable[[], bool] = lambda: False) -> None:
        """Makes a lock that is free.

        Args:
            owner: What the lock guards, for errors.
            is_helper: Tells whether the caller is a thread that works for whoever has the lock.
        """
        self._owner, self._is_helper, self._process = owner, is_helper, os.getpid()
        # They know which thread holds them.
        self._gate, self._lock = threading.RLock(), threading.RLock()
        # A context that only releases the lock, without a line of Python.
        self._releasing = type("Releasing", (), {"__enter__": int, "__exit__": self._lock.__exit__})()

    def take(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Waits for the thread's turn, and calls a function. No other thread is in `take` meanwhile.

        Raises:
            RuntimeError: The thread is in `take` already, or helps the one that is: a function that the owner called, as
                an engine's drafter, called the owner. Or this process was forked from the one that made the lock: it
                has none of that process's threads, and one of these may have held the lock.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{self._owner} works in the process that made it, {self._process}, and not in one that was forked from it, "
                f"{os.getpid()}: start processes by 'spawn', or make {self._owner} after the fork"
            )
        if self._lock._is_owned() or self._is_helper():  # type: ignore[attr-defined]
            raise RuntimeError(f"{self._owner} was called by a function that it is calling itself")
        try:
            return self._take(function, *args, **kwargs)
        except BaseException:
            # Under a tracer, as that of a debugger, an interrupt may come at any instruction, also between the two locks.
            for lock in (self._gate, self._lock):
                if lock._is_owned():  # type: ignore[attr-defined]
                    lock.release()
            raise

    # No line comes after the function has returned. An interrupt there would lose what it returned.
    # fmt: off
    def _take(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        with self._gate: self._lock.acquire()  # noqa: E701
        with self._releasing: return function(*args, **kwargs)  # noqa: E701
    # fmt: on
