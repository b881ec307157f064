"""Counts how long callbacks of an event loop work, in seconds of CPU time, which no busy machine makes longer."""

import asyncio
import contextlib
import gc
import threading
import time


@contextlib.contextmanager
def longest_turn(thread: threading.Thread):
    """Yields a list, to which the longest time is added that a callback in the thread's event loop takes meanwhile.

    Python's garbage collector is off, because it would go through all that other tests have left.
    """
    run, found, longest = asyncio.events.Handle._run, [], [0.0]

    def watched(handle):
        if threading.current_thread() is not thread:
            return run(handle)
        begin = time.thread_time()
        try:
            return run(handle)
        finally:
            longest[0] = max(longest[0], time.thread_time() - begin)

    gc.disable()
    asyncio.events.Handle._run = watched
    try:
        yield found
    finally:
        asyncio.events.Handle._run = run
        gc.enable()
        assert longest[0] > 0, "no callback was seen"
        found.append(longest[0])
