"""Runs the application on a socket until the process is told to stop."""

import functools
import signal
from typing import Any

import uvicorn
from starlette.applications import Starlette

from mamba_align_jax.serve.connections import GuardedProtocol
from mamba_align_jax.serve.settings import Limits


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

    When it is told to stop, it closes its door, lets running calls finish for `limits.drain_s`, and ends the others.

    Args:
        app: What `create_app` returned.
        limits: The limits of its settings.
        host: The address to listen at; "0.0.0.0" is all of them.
        port: The port; 0 takes a free one.
        access_log: Whether each call is logged.
        log_config: How the process logs, as `logging.config.dictConfig` takes it; None leaves it as it is.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=functools.partial(GuardedProtocol, limits),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        access_log=access_log,
        log_config=log_config,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(limits.drain_s)),
    )
    return uvicorn.Server(config)


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
