"""`benchmarks.http_client`: what it sends to a server, and what it makes of the answers."""

import contextlib
import http.server
import json
import sys
import threading
import time

import pytest

from benchmarks import http_client
from benchmarks.http_client import Server, serve_url
from mamba_align_jax.load.metrics import summary
from mamba_align_jax.load.workloads import ClosedLoop, MultiTurn, OpenLoop, PrefixRepetition

TALKS = MultiTurn(conversations=4, turns=3, first=20, turn=5, output=4)


class FakeServer(http.server.BaseHTTPRequestHandler):
    """Answers each prompt with tokens that count up from its length. It takes a hundredth of a second for each."""

    def log_message(self, *_):
        pass

    def setup(self):
        super().setup()
        self.world = self.server.world

    def do_GET(self):
        self.world.keys.append(self.headers.get("Authorization"))
        self.answer(200, self.world.models)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.world.lock:
            self.world.bodies.append((self.path, body))
            self.world.open += 1
            self.world.most = max(self.world.most, self.world.open)
        self.complete(body)

    def leave(self):
        """Counts the call as done. The client may send the next one as soon as it has the last line."""
        with self.world.lock:
            self.world.open -= 1

    def complete(self, body):
        kind, prompt = self.world.kind, body["prompt"]
        if kind == "full":
            self.leave()
            return self.answer(503, json.dumps({"error": {"message": "the queue is full"}}))
        if kind == "cut off in a chunk":
            self.leave()
            head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            return self.wfile.write(head + b"ff\r\ndata: {")
        count = body["max_tokens"] - (kind == "short")
        tokens = [len(prompt) + index for index in range(count)]
        lines = []
        for first in range(0, count, self.world.chunk):
            choice = {"text": "x", "index": 0, "token_ids": tokens[first : first + self.world.chunk]}
            lines.append({"choices": [choice if kind != "no ids" else {"text": "x", "index": 0}]})
        details = {"prompt_tokens_details": {"cached_tokens": len(prompt) // 8 * 8}}
        lines.append({"choices": [], "usage": {"completion_tokens": count, **(details if kind != "no ids" else {})}})
        if kind == "error":
            lines[1:] = [{"error": {"message": "the engine is dead"}}]
        self.send_response(200)
        self.end_headers()
        for line in lines:
            time.sleep(0.01)
            self.wfile.write(f"data: {json.dumps(line)}\n\n".encode())
        self.leave()
        if kind != "cut off":
            self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")
        return None

    def answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


class World:
    """What the fake server does, and what it has seen."""

    models = json.dumps({"data": [{"id": "first"}, {"id": "second"}]})

    def __init__(self, kind="", chunk=1):
        self.kind, self.chunk, self.lock = kind, chunk, threading.Lock()
        self.bodies, self.keys, self.open, self.most = [], [], 0, 0


@contextlib.contextmanager
def fake(*args, **kwargs):
    """Starts a fake server. Yields what it has seen, and its URL."""
    world = World(*args, **kwargs)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as server:
        server.world = world
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield world, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_turn_sends_all_that_was_said_before_as_token_ids(chunk):
    sessions = TALKS.sessions(256, 0)
    with fake(chunk=chunk) as (world, url):
        run = serve_url(Server(f"{url}/v1/", "first"), sessions, 4, ClosedLoop(2))
    assert world.most == 2
    assert len(run.requests) == len(world.bodies) == 12
    for path, body in world.bodies:
        assert path == "/v1/completions"
        assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("first", 4, True)
    prompts = {tuple(body["prompt"]) for _, body in world.bodies}
    for first, second, third in sessions:
        then = (*first, *range(20, 24), *second)
        assert {first, then, (*then, *range(29, 33), *third)} <= prompts
    for served in run.requests:
        assert served.tokens == tuple(range(len(served.prompt), len(served.prompt) + 4))
        assert served.arrival <= served.admitted < served.times[0]
        # Tokens of one chunk arrive together.
        assert len(set(served.times)) == (4 if chunk == 1 else 2)
        assert served.num_cached_tokens == len(served.prompt) // 8 * 8
    row = summary(run)
    assert row["tpot_ms_p50"] > 1
    assert "step_ms_mean" not in row


def test_an_open_loop_does_not_wait_for_answers():
    with fake() as (world, url):
        serve_url(Server(url), PrefixRepetition(prefix=8, suffix=2, prompts=6).sessions(9, 0), 20, OpenLoop(1e4))
    assert world.most == 6


def test_a_server_that_names_no_tokens_still_has_its_tokens_counted():
    with fake("no ids", chunk=2) as (_, url):
        run = serve_url(Server(url), PrefixRepetition(prompts=2).sessions(9, 0), 6, ClosedLoop(1))
        assert [len(served.times) for served in run.requests] == [6, 6]
        assert {served.num_cached_tokens for served in run.requests} == {0}
        with pytest.raises(OSError, match="return_token_ids"):
            serve_url(Server(url), TALKS.sessions(9, 0), 4, ClosedLoop(1))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("full", "503 to /v1/completions: .*the queue is full"),
        ("error", "the engine is dead"),
        ("cut off", "closed a stream"),
        ("cut off in a chunk", "must answer as HTTP says, got IncompleteRead"),
        ("short", "must answer with 4 tokens"),
    ],
)
def test_a_server_that_fails_ends_the_load_with_its_reason(kind, reason):
    with fake(kind) as (_, url), pytest.raises(OSError, match=reason):
        serve_url(Server(url), TALKS.sessions(9, 0), 4, ClosedLoop(2))


def test_a_key_is_sent_with_each_request():
    with fake() as (world, url):
        assert Server(url, api_key="secret").models() == ["first", "second"]
    assert world.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000", "url must begin with http:// or https://"),
        ("http://127.0.0.1:99999", "url must have a port from 0 to 65535 or none, got 'http://127.0.0.1:99999'"),
        ("http://127.0.0.1:a", "url must have a port from 0 to 65535 or none, got 'http://127.0.0.1:a'"),
        ("http://127.0.0.1:1/a b", "url must be one that HTTP allows, got 'http://127.0.0.1:1/a b'"),
    ],
)
def test_a_bad_url_is_refused_by_name(url, message):
    with pytest.raises(ValueError, match=message):
        Server(url).models()


@pytest.mark.parametrize("content", ["{}", "[]", "no JSON", json.dumps({"data": [{}]})])
def test_a_server_that_names_no_models_is_refused(content):
    with fake() as (world, url):
        world.models = content
        with pytest.raises(OSError, match="must name its models as OpenAI's servers do"):
            Server(url).models()


def test_the_command_prints_a_row(monkeypatch, capsys):
    sizes = dict(prompts=6, prefix=16, suffix=4, output=4, concurrency=2, seed=0) | {"vocab-size": 256}
    with fake() as (world, url):
        monkeypatch.setattr(sys, "argv", ["http_client", url, *(f"--{name}={n}" for name, n in sizes.items())])
        http_client.main()
    row = json.loads(capsys.readouterr().out)
    assert {body["model"] for _, body in world.bodies} == {"first"}
    assert len(world.bodies) == 6
    assert all(0 <= token < 256 for _, body in world.bodies for token in body["prompt"])
    assert 0 < row["hit_rate_of_attainable"] <= 1
