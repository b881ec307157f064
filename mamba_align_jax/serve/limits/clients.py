"""Works for a client as long as it is there, and streams events to it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from mamba_align_jax.serve.refusals import Refusal, internal_error, to_json

T = TypeVar("T")
# A JSON value, or the slices of one that is written already: see `long_answers`.
Event = dict[str, Any] | list[bytes]
_LOG = logging.getLogger(__name__)

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # nginx would otherwise hold events back.
    (b"x-accel-buffering", b"no"),
)


class ClientLeft(Exception):
    """The client has closed its connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits work, or raises ClientLeft and cancels it if the client leaves first. The call's body must have been read."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def too_long(seconds: float) -> Refusal:
    """Returns the refusal of a call whose answer takes too long."""
    return Refusal(504, f"the answer took more than {seconds:g} s", code="call_timeout")


class EventStream:
    """A response of server-sent events. sse-starlette is not used: it ends streams at once when uvicorn drains.

    What is raised before the first event becomes the response, and what is raised later is the last event but one.
    """

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        call_s: float,
        refused: Callable[[int, str | None], None],
        *,
        named: bool = False,
    ) -> None:
        """Makes a response of events.

        Args:
            events: The events, the last of which must have come within `call_s` seconds.
            call_s: Number of seconds.
            refused: It is told the status and the code of a refusal that comes after the first event.
            named: Whether an event's field `type` is also its name for server-sent events, so that none tells the end.
        """
        self._events, self._call_s, self._refused, self._named = events, call_s, refused, named
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the client leaves."""
        try:
            await while_connected(receive, self._run(scope, receive, send))
        except ClientLeft:
            # Once the response has begun, no other one can be sent. That a client left is no error.
            if not self._has_begun:
                raise

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                async with asyncio.timeout(self._call_s):
                    async for event in self._events:
                        if not self._has_begun:
                            self._has_begun = True
                            await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS]})
                        if isinstance(event, list):
                            await self._send_slices(send, event)
                        else:
                            await send(self._event(event))
            except TimeoutError:
                raise too_long(self._call_s) from None
        except Exception as error:
            if not self._has_begun:
                raise
            refusal = error if isinstance(error, Refusal) else internal_error()
            if refusal is not error:
                _LOG.exception("the server failed in the middle of a stream")
            self._refused(refusal.status, refusal.code)
            await send(self._event({"type": "error", **refusal.content} if self._named else refusal.content))
        finally:
            await self._events.aclose()
        end = b"" if self._named else b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _send_slices(self, send: Send, slices: list[bytes]) -> None:
        """Sends an event without a name. Other calls go on between its slices."""
        for body in (b"data: ", *slices, b"\n\n"):
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(0)

    def _event(self, content: dict[str, Any]) -> dict[str, Any]:
        name = f"event: {content['type']}\n".encode() if self._named else b""
        return {"type": "http.response.body", "body": name + b"data: " + to_json(content) + b"\n\n", "more_body": True}
