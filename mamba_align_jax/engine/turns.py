"""Lets several threads call one engine: one of them is inside at a time, and those that wait get their turns."""

import contextlib
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """A lock that no thread can keep to itself by taking it again and again.

    A thread that waits for the lock holds the gate, so the thread that has the lock can't come back before it.

    Each `with` below is on one line. An exception that arrives while a `with` of several lines is being left, as a
    KeyboardInterrupt may, would leave its lock held for ever.
    """

    def __init__(self, is_helper: Callable[[], bool] = lambda: False) -> None:
        """Makes a lock that is free.

        Args:
            is_helper: Tells whether the caller is a thread that works for whoever has the lock.
        """
        self._gate, self._lock, self._is_helper = threading.Lock(), threading.RLock(), is_helper

    # fmt: off
    def take(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Waits for the thread's turn, and calls a function. No other thread is in `take` meanwhile.

        Raises:
            RuntimeError: The thread is in `take` already, or helps the one that is: a function that the engine called, as
                a drafter, called the engine.
        """
        if self._lock._is_owned() or self._is_helper():  # type: ignore[attr-defined]
            raise RuntimeError("the engine was called by a function that it is calling itself")
        with contextlib.ExitStack() as stack: return self._enter(stack, function, *args, **kwargs)  # noqa: E701

    def _enter(
        self, stack: contextlib.ExitStack, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        with self._gate: stack.enter_context(self._lock)  # noqa: E701
        return function(*args, **kwargs)
    # fmt: on
