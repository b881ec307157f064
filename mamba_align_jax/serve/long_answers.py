"""Writes a long JSON answer in slices, of which neither a thread nor the event loop works on one for long.

An encoder in C keeps Python's lock until it is done, and so does whatever frees a large value. So a long list is given as
an iterator: each of its items is made, written and dropped before the next one.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mamba_align_jax.serve.refusals import to_json

# Bytes that the event loop hands over at a time, before it looks after other calls.
SLICE_BYTES = 2**16
_ITEMS = 1000


def json_slices(content: Any) -> Iterator[bytes]:
    """Yields a value as JSON, in slices of `SLICE_BYTES`, the last one shorter.

    Iterators stand for lists. Objects are written field by field, and lists, which should have no large items, a thousand
    items at a time. A text is written in one piece: a million characters take a few milliseconds.
    """
    waiting = bytearray()
    for piece in _pieces(content):
        waiting += piece
        while len(waiting) >= SLICE_BYTES:
            yield bytes(waiting[:SLICE_BYTES])
            del waiting[:SLICE_BYTES]
    if waiting:
        yield bytes(waiting)


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        before = b"{"
        for key, one in value.items():
            yield before + to_json(key) + b":"
            yield from _pieces(one)
            before = b","
        yield b"{}" if before == b"{" else b"}"
    elif isinstance(value, Iterator):
        before = b"["
        for one in value:
            yield before
            yield from _pieces(one)
            before = b","
        yield b"[]" if before == b"[" else b"]"
    elif isinstance(value, list | tuple) and len(value) > _ITEMS:
        for begin in range(0, len(value), _ITEMS):
            yield (b"," if begin else b"[") + to_json(value[begin : begin + _ITEMS])[1:-1]
        yield b"]"
    else:
        yield to_json(value)


class SlicedResponse(Response):
    """A response with a JSON body that was written in slices. Other calls go on between two of them."""

    media_type = "application/json"

    def __init__(self, slices: list[bytes]) -> None:
        """Makes a response of slices, which it empties while it sends them."""
        super().__init__(headers={"content-length": str(sum(map(len, slices)))})
        self._slices = slices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the slices."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for number, body in enumerate(self._slices, 1):
            await send({"type": "http.response.body", "body": body, "more_body": number < len(self._slices)})
            await asyncio.sleep(0)
