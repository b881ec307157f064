"""The example of a router: a call goes to the replica that has its states, and to another one when that one is gone."""

import asyncio
import contextlib
import importlib.util
import json
import threading
from pathlib import Path

import httpx
import pytest
import uvicorn
from fakes.engines import load_two_layers
from fakes.http import Served, wait_until
from serve.conftest import LIMITS, SIZES
from starlette.requests import Request

from mamba_align_jax import Engine, EngineConfig
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.text.chat_template import load_chat_template
from mamba_align_jax.engine.text.tokenizer import load_tokenizer
from mamba_align_jax.serve.events.publisher import EventPublisher
from mamba_align_jax.serve.keys import cache_salt
from mamba_align_jax.serve.settings import Settings

EXAMPLE = Path(__file__).parents[2] / "examples" / "replicas" / "state_router.py"
JSON, KEY = {"content-type": "application/json"}, {"authorization": "Bearer sk-first"}
SETTINGS = Settings(model_name="bytes", api_keys=("sk-first", "sk-second"), warmup="none", limits=LIMITS)


class Router:
    """The example in a thread, in front of replicas."""

    def __init__(self, replicas):
        spec = importlib.util.spec_from_file_location("state_router", EXAMPLE)
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        self.door = example.Door(replicas)
        self.server = uvicorn.Server(uvicorn.Config(example.make_app(self.door), port=0, log_config=None))
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        wait_until(lambda: self.server.started)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False)
        return self

    def __exit__(self, *error):
        self.client.close()
        self.server.should_exit = True
        self.thread.join(300)
        assert not self.thread.is_alive()

    def call(self, path="/v1/completions", key="sk-first", **fields):
        fields = {"model": "bytes", "max_tokens": 4, "temperature": 0} | fields
        return self.client.post(path, json=fields, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("settings", [SETTINGS, Settings(model_name="bytes", warmup="none", limits=LIMITS)])
def test_only_replicas_that_ask_for_keys_tell_them_apart(engine, settings):
    """Clients send some key to servers that ask for none, because OpenAI's library wants one."""
    headers = [(name.encode(), value.encode()) for name, value in KEY.items()]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers})

    async def asked(door):
        found = await door._tokens(request, json.dumps({"prompt": [1, 2, 3]}).encode())
        await door.close()
        return found

    with Served(engine, settings) as served:
        door = Router([(f"http://127.0.0.1:{served.port}", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")]).door
        tokens, salt = asyncio.run(asked(door))
    wanted = cache_salt(b"sk-first" if settings.api_keys else None, "").encode()
    assert (tokens, salt) == ([1, 2, 3], wanted)


@pytest.mark.deep
def test_calls_follow_their_states_and_survive_their_replica(engine, few_programs):
    tokenizer = load_tokenizer(BYTE_MODEL)
    engines = [engine, Engine(load_two_layers(BYTE_MODEL), EngineConfig(**SIZES), tokenizer=tokenizer)]
    publishers = [EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", states=True) for _ in engines]
    for each, publisher in zip(engines, publishers, strict=True):
        each.on_cache_event(publisher.publish)
    template = load_chat_template(BYTE_MODEL)
    stack = contextlib.ExitStack()
    running = [contextlib.ExitStack() for _ in engines]
    served = [one.enter_context(Served(each, SETTINGS, template)) for one, each in zip(running, engines, strict=True)]
    for one, each, publisher in zip(running, engines, publishers, strict=True):
        stack.callback(publisher.close)
        stack.callback(each.on_cache_event, None)
        stack.callback(one.close)
    names = [f"http://127.0.0.1:{each.port}" for each in served]
    replicas = [(name, p.endpoint, p.replay_endpoint) for name, p in zip(names, publishers, strict=True)]
    with stack, Router(replicas) as router:
        reaches = lambda tokens, salt: router.door._router.reaches(tokens, salt)
        text = "def read(self, name):\n" * 8
        first = router.call(prompt=text)
        assert first.status_code == 200
        home = first.headers["x-replica"]
        wait_until(lambda: router.door._router.mirrors[home].states)
        for token in (2**70, -1, 1.5, float("inf")):
            wrong = router.client.post("/v1/completions", content=json.dumps({"prompt": [token]}), headers=JSON | KEY)
            assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error"), token
        for load in (0, 3):
            router.door.loads[home] += load
            again = router.call(prompt=text + "    return")
            assert again.headers["x-replica"] == home
            assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        # Nothing is shared with another key, so the replica with fewer calls is taken.
        assert router.call(prompt=text, key="sk-second").headers["x-replica"] != home
        router.door.loads[home] -= 3
        chat = [{"role": "user", "content": "Hello " * 30}]
        streamed = router.call("/v1/chat/completions", messages=chat, stream=True)
        assert streamed.text.rstrip().endswith("data: [DONE]")
        assert reaches([1] * 40, b"")[home].num_paged_tokens == 0
        assert set(router.door.loads.values()) == {0}
        running[names.index(home)].close()
        moved = router.call(prompt=text)
        assert moved.status_code == 200
        assert moved.headers["x-replica"] != home
        assert moved.json()["choices"] == first.json()["choices"]
        running[1 - names.index(home)].close()
        assert router.call(prompt=text).status_code == 503
