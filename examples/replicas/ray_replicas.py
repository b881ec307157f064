"""Serves a model by replicas under Ray Serve, with its prefix-aware request router.

    pip install "mamba-align-jax[serve,models,text]" "ray[serve]==2.60.*"
    python examples/replicas/ray_replicas.py --port 8000 --model DIR

A replica is an actor with an engine and the server's application, without a socket. The door is the deployment that
clients reach: it asks the router for a replica, and for another one if the first dies before its first byte.
"""

import argparse
import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError

# ray.serve.llm exports the class as well, but its import needs pyarrow and more.
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from mamba_align_jax import Engine, EngineConfig
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.text.chat_template import load_chat_template
from mamba_align_jax.serve.app import create_app
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.settings import Settings

# How often a call is sent to a replica that dies before it answers.
_ATTEMPTS = 5


@dataclass(frozen=True)
class Call:
    """A client's call. The router chooses a replica by `prompt`, so that is its name."""

    prompt: str
    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


def routing_text(path: str, body: bytes) -> str:
    """Returns a text that begins as those of earlier calls do whose states this call can use. It is never empty."""
    try:
        content = json.loads(body)
        if "messages" in content:
            return "".join(f"{one['role']}: {one['content']}\n" for one in content["messages"]) or path
        prompt = content["prompt"]
        return (prompt if isinstance(prompt, str) else " ".join(map(str, prompt))) or path
    except (ValueError, KeyError, TypeError):
        # The server refuses such a call by name, or it is of another kind.
        return path


class Replica:
    """An engine with the server's application, which is called without a socket."""

    async def __init__(self, model: Path, config: EngineConfig, dtype: str | None, settings: Settings) -> None:
        engine = Engine.from_pretrained(model, config, dtype=dtype)
        self._app = create_app(engine, settings, load_chat_template(model))
        self._service = self._app.state.service
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        # Ray sends calls once this returns.
        while not self._service.is_ready:
            self.check_health()
            await asyncio.sleep(0.1)

    async def answer(self, call: Call) -> AsyncGenerator[tuple | bytes, None]:
        """Yields an answer's status and headers with the first piece of its body, and then the other pieces."""
        pieces: asyncio.Queue = asyncio.Queue()
        body = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> dict:
            if not body:
                # A client that leaves makes Ray cancel the call.
                await asyncio.Event().wait()
            return body.pop()

        async def run() -> None:
            scope = {
                "type": "http",
                "asgi": {"version": "3.0"},
                "http_version": "1.1",
                "scheme": "http",
                "root_path": "",
            }
            scope |= {"method": call.method, "path": call.path, "raw_path": call.path.encode(), "query_string": b""}
            try:
                await self._app(scope | {"headers": call.headers}, receive, pieces.put)
            finally:
                await pieces.put(None)

        head, running = None, asyncio.create_task(run())
        try:
            while (message := await pieces.get()) is not None:
                if message["type"] == "http.response.start":
                    head = message
                elif head is not None:
                    yield head["status"], head["headers"], message["body"]
                    head = None
                else:
                    yield message["body"]
            await running
        finally:
            running.cancel()

    def about(self) -> dict:
        """Returns the process and the metrics."""
        return {"process": os.getpid(), "metrics": self._service.metrics.text().decode()}

    def check_health(self) -> None:
        """Raises if the engine has stopped or could not start, upon which Ray starts the replica anew."""
        try:
            self._service.check_alive()
        except Refusal as refusal:
            raise RuntimeError(str(refusal)) from None


async def _joined(first: bytes, others: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    yield first
    async for piece in others:
        yield piece


class Door:
    """What clients reach. It has no model."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas

    async def __call__(self, request: Request) -> Response:
        if request.url.path == "/replicas":
            return JSONResponse(await self._replicas.broadcast("about").results_async())
        body = await request.body()
        text = routing_text(request.url.path, body)
        call = Call(text, request.method, request.url.path, request.headers.raw, body)
        for _ in range(_ATTEMPTS):
            pieces = self._replicas.options(stream=True).answer.remote(call)
            try:
                status, headers, first = await anext(pieces)
            except (ActorDiedError, ActorUnavailableError):
                # Nothing was streamed yet, so another replica may answer. Ray itself does not try again.
                continue
            response = StreamingResponse(_joined(first, pieces), status)
            response.raw_headers = headers
            return response
        return JSONResponse({"error": {"message": "no replica answered", "code": "overloaded"}}, 503)


# What a replica is given: for replicas on GPUs {"num_gpus": 1}.
_ACTOR = {"num_cpus": 0}
_ROUTER = RequestRouterConfig(
    request_router_class=PrefixCacheAffinityRouter,
    # A call goes to the replica that has had the longest part of its text, unless that one has so many calls more.
    request_router_kwargs={"imbalanced_threshold": 16, "do_eviction": True},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="the port (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="the number of replicas (default: %(default)s)")
    parser.add_argument("--model", type=Path, default=BYTE_MODEL, help="default: the bundled model")
    parser.add_argument("--dtype", help="default: the dtype of the weights")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--warmup", default="usual")
    options = parser.parse_args()
    config = EngineConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
    )
    settings = Settings(model_name=options.model.resolve().name, warmup=options.warmup)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=True)
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=options.port))
    deploy = serve.deployment(
        num_replicas=options.replicas,
        ray_actor_options=_ACTOR,
        request_router_config=_ROUTER,
        max_ongoing_requests=256,
        health_check_period_s=1,
    )
    replicas = deploy(Replica).bind(options.model, config, options.dtype, settings)
    door = serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000)(Door)
    serve.run(door.bind(replicas), route_prefix="/")
    print(f"ready at http://127.0.0.1:{options.port}", flush=True)
    while not stopping.wait(1.0):
        pass
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
