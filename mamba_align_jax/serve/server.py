"""Runs the application on a socket until the process is told to stop."""

import asyncio
import contextlib
import functools
import math
import signal
import socket
import threading
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from mamba_align_jax.serve.limits.connections import BACKLOG, GuardedProtocol, max_connections
from mamba_align_jax.serve.limits.hosts import Hosts
from mamba_align_jax.serve.settings import Limits

_LAST_STEP_S = 2  # for the engine to end the calls that have no more time
_LAST_WORDS_S = 5  # for that and the answers to them
_LOOK_S = 0.1  # between two looks whether the process was told to stop again
_ACCEPTING_TURNS = 8  # of the event loop, of which a new connection needs four


class _DrainingServer(uvicorn.Server):
    """Ends the calls whose time to finish is over, so that each is told why. uvicorn would cancel them without a word."""

    def __init__(self, config: uvicorn.Config, app: Starlette, drain_s: float) -> None:
        super().__init__(config)
        self._service, self._drain_s = app.state.service, drain_s
        self._is_hurried = threading.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See `uvicorn.Server`. It is called by signals. A second SIGINT ends all calls, and a third the process."""
        if sig == signal.SIGINT and self.should_exit and not self._is_hurried.is_set():
            self._is_hurried.set()
            self._captured_signals.append(sig)
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`. It is called when the server is told to stop."""
        # The system resets the connections that no one has accepted when a door is closed.
        for _ in range(_ACCEPTING_TURNS):
            await asyncio.sleep(0)
        ending = asyncio.create_task(self._end_late_calls())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_late_calls(self) -> None:
        end = asyncio.get_running_loop().time() + self._drain_s
        # A signal's handler can't wake the loop.
        while not self._is_hurried.is_set() and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(min(_LOOK_S, self._drain_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_STEP_S):
                await self._service.serving.shutdown(drain=False)
        # A step may take longer than that, as one that is being compiled.
        self._service.serving.dismiss()


def make_server(
    app: Starlette,
    limits: Limits,
    *,
    host: str,
    port: int,
    access_log: bool = False,
    log_config: dict[str, Any] | None = None,
) -> uvicorn.Server:
    """Makes a server that has not started.

    When it is told to stop, it closes its door and lets running calls finish for `limits.drain_s`. The others end as
    503, or with an error as the last event but one of a stream. `app` is what `create_app` returned for settings with
    these limits. Host "0.0.0.0" is all addresses, and port 0 a free one. `log_config` says how the process logs, as
    `logging.config.dictConfig` takes it; None leaves it as it is.
    """
    service, num_calls = app.state.service, max_connections(limits.connections)
    hosts = Hosts(host, service.settings.allowed_hosts)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=functools.partial(GuardedProtocol, limits, hosts, num_calls, service.metrics.refused),  # type: ignore[arg-type]
        backlog=BACKLOG,
        ws="none",
        lifespan="on",
        access_log=access_log,
        log_config=log_config,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(limits.drain_s) + _LAST_WORDS_S,
    )
    return _DrainingServer(config, app, limits.drain_s)


def run(server: uvicorn.Server) -> None:
    """Runs a server until SIGINT or SIGTERM, and drains it. A second SIGINT ends the calls that run at once."""
    # uvicorn handles the signals and sends them again when it has drained. Then there is nothing left to do.
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: None) for number in signals]
    try:
        server.run()
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
