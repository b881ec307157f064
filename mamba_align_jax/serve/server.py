"""Runs the application on a socket until the process is told to stop."""

import asyncio
import contextlib
import functools
import math
import signal
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette

from mamba_align_jax.serve.limits.connections import BACKLOG, GuardedProtocol, max_connections
from mamba_align_jax.serve.settings import Limits

_LAST_STEP_S = 2  # for the engine to end the calls that have no more time
_LAST_WORDS_S = 5  # for that and the answers to them
_ACCEPTING_TURNS = 8  # of the event loop, of which a new connection needs four


class _DrainingServer(uvicorn.Server):
    """Ends the calls whose time to finish is over, so that each is told why. uvicorn would cancel them without a word."""

    def __init__(self, config: uvicorn.Config, app: Starlette, drain_s: float) -> None:
        super().__init__(config)
        self._service, self._drain_s = app.state.service, drain_s

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
        await asyncio.sleep(self._drain_s)
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
    refused, num_calls = app.state.service.metrics.refused, max_connections(limits.connections)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=functools.partial(GuardedProtocol, limits, num_calls, refused),  # type: ignore[arg-type]
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
    """Runs a server until SIGINT or SIGTERM, and drains it. A second SIGINT ends it at once."""
    # uvicorn handles the signals and sends them again when it has drained. Then there is nothing left to do.
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: None) for number in signals]
    try:
        server.run()
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
