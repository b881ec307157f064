"""Tells an interrupt, which stops whoever calls, from a failure, which ends one request.

Libraries in Rust, such as tokenizers and llguidance, raise a `PanicException` where their code panics. It is no Exception,
so `except Exception` would let it through as if someone had interrupted the caller.
"""

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mamba_align_jax import _values as values
from mamba_align_jax.errors import PanicError

P = ParamSpec("P")
R = TypeVar("R")


class ServiceThread(threading.Thread):
    """A thread that no one interrupts, so whatever is raised in it is a failure."""


def failure(error: BaseException) -> Exception:
    """Returns what was raised as an Exception. An interrupt of the caller's own thread is raised again.

    Only KeyboardInterrupt and SystemExit interrupt a thread at any place. GeneratorExit and CancelledError arrive where a
    generator or a task waits. A function that raises one of these has not been interrupted: it has failed.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit) and not isinstance(threading.current_thread(), ServiceThread):
        raise error
    return as_exception(error)


def as_exception(error: BaseException) -> Exception:
    """Returns an Exception as it is, and a PanicError for anything else."""
    if isinstance(error, Exception):
        return error
    panic = PanicError(f"other code has failed in a way that is no Exception: {values.shown(error)}")
    panic.__cause__ = error
    return panic


def contained(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function raise nothing but Exceptions, for a thread that works for another one."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            raise as_exception(error)  # noqa: B904

    return call
