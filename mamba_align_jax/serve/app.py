"""The server as an ASGI application: its addresses, and what is answered at each."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mamba_align_jax import __version__
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.interrupts import contained
from mamba_align_jax.engine.running.async_engine import AsyncEngine
from mamba_align_jax.engine.running.engine import Engine
from mamba_align_jax.engine.scheduling.levels import changes_logits
from mamba_align_jax.engine.text.chat_template import ChatTemplate
from mamba_align_jax.serve.api.anthropic.endpoint import count_tokens, create_message
from mamba_align_jax.serve.api.cache_view import view_cache
from mamba_align_jax.serve.api.chat import chat
from mamba_align_jax.serve.api.completions import complete
from mamba_align_jax.serve.api.responses.endpoint import create_response
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.api.words import detokenize, tokenize
from mamba_align_jax.serve.limits.clients import ClientLeft, EventStream
from mamba_align_jax.serve.page import show_page
from mamba_align_jax.serve.refusals import Refusal, internal_error, json_response
from mamba_align_jax.serve.settings import Settings

_LOG = logging.getLogger(__name__)
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    engine: Engine,
    settings: Settings | None = None,
    template: ChatTemplate | None = None,
    *,
    when_compiled: Callable[[], object] = lambda: None,
) -> Starlette:
    """Makes the application that serves an engine. While it runs, no one else may step the engine.

    `settings` say how it is served; None takes the defaults. `template` writes chats as text; None refuses them.
    `when_compiled` is called once, after the programs have been compiled that the settings want, and before the first
    call is let in. If it raises, no call is let in, as if the programs could not be compiled.
    """
    service = Service(AsyncEngine(engine), settings or Settings(), template)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.serving.start()
        warming = asyncio.create_task(_warm(service, when_compiled))
        try:
            yield
        finally:
            service.is_ready, service.is_stopping = False, True
            # The thread that compiles stops after the program that it is at.
            await asyncio.gather(warming, return_exceptions=True)
            # uvicorn has waited for calls already. What still runs has used up its time.
            await service.serving.shutdown(drain=False)

    def api(path: str, endpoint: Callable[[Service, Request], Awaitable[Response | EventStream]], method: str) -> Route:
        async def respond(request: Request) -> Response | EventStream:
            return await endpoint(service.of(request), request)

        return Route(path, respond, methods=[method])

    app = Starlette(
        routes=[
            api("/v1/completions", complete, "POST"),
            api("/v1/chat/completions", chat, "POST"),
            api("/v1/responses", create_response, "POST"),
            api("/v1/messages", create_message, "POST"),
            api("/v1/messages/count_tokens", count_tokens, "POST"),
            api("/v1/models", _models, "GET"),
            api("/version", _version, "GET"),
            api("/reset_prefix_cache", _reset_prefix_cache, "POST"),
            api("/v1/models/{name:path}", _model, "GET"),
            api("/tokenize", tokenize, "POST"),
            api("/detokenize", detokenize, "POST"),
            api("/health", _health, "GET"),
            api("/ready", _ready, "GET"),
            api("/metrics", _metrics, "GET"),
            api("/cache", view_cache, "POST"),
            api("/", show_page, "GET"),
        ],
        exception_handlers=_handlers(service),
        lifespan=lifespan,
    )
    # A redirection would lead to whatever host the call names.
    app.router.redirect_slashes = False
    app.state.service = service
    return app


async def _warm(service: Service, when_compiled: Callable[[], object]) -> None:
    """Compiles the engine's programs if the operator wants it, and then lets calls in."""

    def check() -> None:
        if service.is_stopping:
            raise _Stopping

    warmup, usual = service.settings.warmup, SamplingParams(**service.settings.sampling_defaults)
    # Nearly every call has the model's own defaults.
    is_full = warmup == "full" or changes_logits(usual)
    try:
        if warmup != "none":
            seconds = await asyncio.to_thread(service.serving.engine.warmup, check, full=is_full)
            _LOG.info("compiled the programs in %.0f s", seconds)
        when_compiled()
    except _Stopping:
        return
    except Exception:
        _LOG.exception("the programs could not be compiled: calls are not taken")
        service.has_failed_to_compile = True
        return
    service.is_ready = True


class _Stopping(Exception):
    """The server was told to stop while programs were being compiled."""


def _handlers(service: Service) -> dict:
    async def answer(request: Request, error: Exception) -> Response:
        match error:
            case Refusal():
                refusal = error
            case HTTPException():
                message = f"{request.method} {request.url.path[:200]}: {error.detail}"
                refusal = Refusal(error.status_code, message, headers=error.headers)
            case ClientLeft():
                # No one reads it; nginx logs this status for such calls.
                refusal = Refusal(499, "the client left", code="client_left")
            case _:
                # Starlette raises the error again, and uvicorn logs it.
                refusal = internal_error()
        service.metrics.refused(refusal.status, refusal.code)
        if request.url.path.startswith("/v1/messages"):
            # Anthropic's errors are OpenAI's with a type around them.
            return json_response({"type": "error", **refusal.content}, refusal.status, refusal.headers)
        return refusal.response()

    return dict.fromkeys((Refusal, HTTPException, ClientLeft, Exception), answer)


async def _models(service: Service, request: Request) -> Response:
    service.keys.check(request.headers)
    return json_response({"object": "list", "data": [_card(service, name) for name in service.names]})


async def _model(service: Service, request: Request) -> Response:
    service.keys.check(request.headers)
    name = request.path_params["name"]
    service.check_model(name)
    return json_response(_card(service, name))


def _card(service: Service, name: str) -> dict:
    owner, length = "mamba-align-jax", service.max_model_len
    return {"id": name, "object": "model", "created": service.started, "owned_by": owner, "max_model_len": length}


async def _version(service: Service, request: Request) -> Response:
    service.keys.check(request.headers)
    return json_response({"version": __version__})


async def _reset_prefix_cache(service: Service, request: Request) -> Response:
    """Forgets every cached prefix, for an administrator. Without an administrator's key there is no such address."""
    if service.administrators is None:
        raise HTTPException(404)
    service.administrators.check(request.headers)
    service.check_alive()
    # It waits for the step that runs.
    await asyncio.to_thread(contained(service.serving.engine.reset_prefix_cache))
    return json_response({"object": "prefix_cache", "reset": True})


async def _health(service: Service, request: Request) -> Response:
    """Says whether the process is worth keeping: the engine's thread lives, and its programs can be compiled."""
    service.check_alive()
    return json_response({"status": "live"})


async def _ready(service: Service, request: Request) -> Response:
    """Says whether calls are taken."""
    service.check_ready()
    return json_response({"status": "ready"})


async def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.text(), media_type=_PROMETHEUS)
