"""A small router over HTTP that sends each call to the replica whose states resume its prompt from the most tokens.

    pip install "mamba-align-jax[serve,events]" httpx
    mamba-align serve --port 8001 --state-events "tcp://127.0.0.1:5559" --state-events-replay "tcp://127.0.0.1:5560"
    mamba-align serve --port 8002 --state-events "tcp://127.0.0.1:5569" --state-events-replay "tcp://127.0.0.1:5570"
    python examples/replicas/state_router.py --port 8000 \
      --replica http://127.0.0.1:8001 tcp://127.0.0.1:5559 tcp://127.0.0.1:5560 \
      --replica http://127.0.0.1:8002 tcp://127.0.0.1:5569 tcp://127.0.0.1:5570

It reads what each replica has cached from the replica's events, and asks any replica for the tokens of a text or a chat. A
call that a replica can't be reached for goes to the next best one.
"""

import argparse
import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mamba_align_jax.routing import StateRouter
from mamba_align_jax.serve.events.reader import EventReader
from mamba_align_jax.serve.keys import cache_salt

PAGE_SIZE = 16
_TIMES = httpx.Timeout(None, connect=5.0)


class Door:
    """Knows the replicas, what they have cached, and how many calls each has."""

    def __init__(self, replicas: Sequence[Sequence[str]]) -> None:
        """Begins to read the events of replicas, each of which is an address and its two addresses of events."""
        self._router = StateRouter([address for address, *_ in replicas], PAGE_SIZE)
        self.loads = {address: 0 for address, *_ in replicas}
        # The threads that read events and the loop that answers calls share the router.
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._client = httpx.AsyncClient(timeout=_TIMES, limits=httpx.Limits(), trust_env=False)
        self._asks_for_keys: bool | None = None  # None until a replica has shown it
        self._threads = [threading.Thread(target=self._read, args=replica, daemon=True) for replica in replicas]
        for thread in self._threads:
            thread.start()

    def _read(self, address: str, events: str, replay: str) -> None:
        reader = EventReader(events, replay)
        while not self._closing.is_set():
            found = reader.read(0.2)
            with self._lock:
                self._router.apply(address, found)
        reader.close()

    async def close(self) -> None:
        """Ends the threads and the connections."""
        self._closing.set()
        await self._client.aclose()

    async def answer(self, request: Request) -> Response:
        """Sends a call to the best replica that can be reached, and passes on its answer as it comes."""
        body = await request.body()
        left = dict(self.loads)
        tokens, salt = await self._tokens(request, body)
        headers = [(name, value) for name, value in request.headers.raw if name not in (b"host", b"connection")]
        while left:
            with self._lock:
                best = self._router.choose(tokens, left, salt)
            call = self._client.build_request(request.method, best + request.url.path, content=body, headers=headers)
            self.loads[best] += 1
            try:
                # The head of a stream comes with its first event, so nothing was answered yet if this raises.
                answer = await self._client.send(call, stream=True)
            except httpx.TransportError:
                self.loads[best] -= 1
                del left[best]
                continue
            except BaseException:
                self.loads[best] -= 1
                raise
            kind = {"content-type": answer.headers.get("content-type", ""), "x-replica": best}
            return StreamingResponse(self._passed_on(best, answer), answer.status_code, kind)
        return JSONResponse({"error": {"message": "no replica can be reached"}}, 503)

    async def _passed_on(self, replica: str, answer: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_bytes():
                yield piece
        finally:
            self.loads[replica] -= 1
            await answer.aclose()

    async def _tokens(self, request: Request, body: bytes) -> tuple[list[int], bytes]:
        """Returns the tokens of a call and the salt under which they are cached. A call that has none goes anywhere."""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            fields: dict[str, Any] = json.loads(body)
            key = request.headers.get("authorization", "").partition(" ")[2].strip()
            own = key.encode() if key and await self._tell_keys_apart() else None
            salt = cache_salt(own, fields.get("cache_salt") or "").encode()
            prompt = fields.get("prompt")
            if isinstance(prompt, list):
                first = prompt[0] if prompt and isinstance(prompt[0], list) else prompt
                # A replica refuses other tokens by name.
                are_tokens = all(type(token) is int and 0 <= token < 2**31 for token in first)
                return (first, salt) if are_tokens else ([], salt)
            names = "prompt", "messages", "add_generation_prompt", "chat_template_kwargs"
            asked = {name: fields[name] for name in names if name in fields}
            for replica in self.loads:
                with contextlib.suppress(httpx.TransportError):
                    headers = {"authorization": request.headers.get("authorization", "")}
                    found = await self._client.post(replica + "/tokenize", json=asked, headers=headers)
                    return found.json()["tokens"], salt
        return [], b""

    async def _tell_keys_apart(self) -> bool:
        """Whether the replicas ask for keys. Those that don't share what is cached between all keys that clients send."""
        for replica in self.loads if self._asks_for_keys is None else ():
            with contextlib.suppress(httpx.TransportError):
                status = (await self._client.get(replica + "/v1/models")).status_code
                if status in (200, 401):
                    self._asks_for_keys = status == 401
                    break
        return bool(self._asks_for_keys)


def make_app(door: Door) -> Starlette:
    """Returns the application that answers the calls of /v1."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await door.close()

    paths = ("/v1/completions", "/v1/chat/completions")
    return Starlette(routes=[Route(path, door.answer, methods=["POST"]) for path in paths], lifespan=lifespan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replica", nargs=3, action="append", required=True, metavar=("HTTP", "EVENTS", "REPLAY"))
    options = parser.parse_args()
    asyncio.run(uvicorn.Server(uvicorn.Config(make_app(Door(options.replica)), port=options.port)).serve())


if __name__ == "__main__":
    main()
