"""Tells a function what an engine's prefix cache stores and loses."""

import logging
from collections.abc import Callable

from mamba_align_jax.cache.events import CacheEvent, CacheLog
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.engine.interrupts import failure

_LOG = logging.getLogger(__name__)

Listener = Callable[[tuple[CacheEvent, ...]], object]


class CacheReports:
    """Passes on what the engine's cache writes to its log. Without a listener there is no log."""

    def __init__(self) -> None:
        """Makes reports that no one hears."""
        self._listener: Listener | None = None
        self._log: CacheLog | None = None

    def listen(self, listener: Listener | None) -> None:
        """Passes events to a listener from the next cache on; None ends that."""
        self._listener = listener
        self._log = None if listener is None else CacheLog()

    def new_log(self) -> CacheLog | None:
        """Returns an empty log for a new cache, or None if no one listens."""
        self.listen(self._listener)
        return self._log

    def knows(self, cache: HybridCache) -> bool:
        """Whether the cache writes to the log that is passed on."""
        return cache.log is self._log

    def flush(self) -> None:
        """Passes on what was not passed on yet. A listener that raises hears nothing more."""
        log = self._log
        if log is None or not log.pending:
            return
        try:
            if self._listener is not None:
                self._listener(tuple(log.pending))
        except BaseException as raised:
            failure(raised)
            _LOG.exception("the listener to the cache's events raised: it hears nothing more")
            self._listener = None
        log.pending.clear()

    def restart(self, cache: HybridCache) -> None:
        """Reports all that is cached anew, after a change of the cache was cut off."""
        if self._log is not None:
            self._log.restart(cache.kv.pool.keys, cache.states.pool.keys)
            self.flush()
