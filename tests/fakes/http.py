"""A server in a thread, on a free port, and what clients say to it."""

import json
import threading
import time

import httpx

from mamba_align_jax.serve.app import create_app
from mamba_align_jax.serve.server import make_server


class Served:
    """A server that runs in this context. `client` is connected to it."""

    def __init__(self, engine, settings, template=None, **options):
        self.engine, self.settings = engine, settings
        self.app = create_app(engine, settings, template, **options)
        self.service = self.app.state.service
        self.server = make_server(self.app, settings.limits, host="127.0.0.1", port=0)
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        wait_until(lambda: self.server.started and (self.service.is_ready or self.service.has_failed_to_compile))
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.client = self.new_client()
        return self

    def __exit__(self, *error):
        self.client.close()
        self.server.should_exit = True
        self.thread.join(300)
        assert not self.thread.is_alive(), "the server does not stop"

    def new_client(self, **options):
        # A client that may verify certificates reads those of all authorities, which takes 50 ms.
        options |= dict(timeout=300, trust_env=False, verify=False)
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", **options)

    def post(self, path, content, **options):
        # httpx would not write half of a surrogate pair.
        headers = {"content-type": "application/json"} | options.pop("headers", {})
        return self.client.post(path, content=json.dumps(content), headers=headers, **options)

    def complete(self, prompt, **fields):
        """Returns the answer of /v1/completions, which must be one."""
        return answer(self.post("/v1/completions", {"prompt": prompt, "return_token_ids": True, **fields}))

    def events(self, path, content, **options):
        """Returns the events of a stream, the last of which must be [DONE]."""
        with self.client.stream("POST", path, json={**content, "stream": True}, **options) as response:
            response.read()
            assert response.status_code == 200, response.text
            assert response.headers["content-type"].startswith("text/event-stream")
            return parse_events(response.text)

    def metric(self, name, **labels):
        """Returns a metric's value, summed over the labels that are not given."""
        from prometheus_client.parser import text_string_to_metric_families as parse

        families = parse(self.client.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        assert samples, f"no metric {name}"
        return sum(one.value for one in samples if labels.items() <= one.labels.items())

    def wait_until_idle(self):
        """Waits until the engine runs nothing, and checks that nothing is held."""
        wait_until(lambda: not self.engine.has_unfinished and not self.engine.unread_steps)
        cache = self.engine.cache
        assert (cache.states.pool.num_held, cache.kv.pool.num_held) == (0, 0)


def answer(response):
    assert response.status_code == 200, response.text
    return response.json()


def parse_events(text):
    *events, end, rest = text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def wait_until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)
