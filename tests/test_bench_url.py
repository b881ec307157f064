"""Tests of `mamba-align bench --url`: what it sends to a server, and what it makes of the answers."""

import contextlib
import http.server
import json
import threading
import time

import pytest

from mamba_align_jax.cli import main
from mamba_align_jax.load.client import Run, Served
from mamba_align_jax.load.http_client import Server, serve_url
from mamba_align_jax.load.metrics import summary
from mamba_align_jax.load.workloads import ClosedLoop, MultiTurn, OpenLoop, PrefixRepetition

TALKS = MultiTurn(conversations=4, turns=3, first=20, turn=5, output=4)
SERVED = Served((1,) * 9, (2,), 0, 0.0, 0.0, (1.0,))


class FakeServer(http.server.BaseHTTPRequestHandler):
    """Answers each prompt with tokens that count up from its length. It takes a hundredth of a second for each."""

    def log_message(self, *_):
        pass

    def setup(self):
        super().setup()
        self.world = self.server.world

    def do_GET(self):
        self.world.keys.append(self.headers.get("Authorization"))
        if self.world.kind == "ssh":
            self.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        else:
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
        tokens = [len(prompt) + place for place in range(count)]
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
    row = summary(run, 8)
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


@pytest.mark.parametrize(
    "option",
    [
        "--rate=0", "--rate=-1", "--rate=nan", "--prompts=0", "--prompts=-1", "--concurrency=0", "--prefixes=0",
        "--conversations=0", "--turns=0", "--first=0", "--turn=-1", "--turn-output=0", "--output=0", "--prefix=-1",
        "--suffix=-1", "--vocab-size=0", "--seed=-1", "--runs=0", "--block-size=0", "--kv-page-size=0", "--idle=0",
        "--max-num-batched-tokens=0", "--max-prefill-rows=0", "--drafts=-1", "--budget=-1", "--budget=nan",
    ],
)  # fmt: skip
@pytest.mark.parametrize("loop", ["closed", "open"])
def test_a_bad_option_is_refused_by_name(option, loop, capsys):
    name, value = option.split("=")
    with fake() as (world, url):
        assert main(["bench", f"--url={url}", f"--loop={loop}", option]) == 2
    assert not world.keys
    line = one_line(capsys)
    assert line.startswith(f"mamba-align: {name} must be "), line
    assert value in line


def test_prompts_have_tokens(capsys):
    assert main(["bench", "--prefix=0", "--suffix=0"]) == 2
    assert one_line(capsys) == "mamba-align: --suffix must be at least 1 with --prefix 0, got 0"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: PrefixRepetition(prompts=0), "PrefixRepetition: prompts"),
        (lambda: PrefixRepetition(prefix=0, suffix=0), "PrefixRepetition: suffix"),
        (lambda: MultiTurn(turns=1.5), "MultiTurn: turns"),
        (lambda: ClosedLoop(0), "ClosedLoop: concurrency"),
        (lambda: OpenLoop(0.0), "OpenLoop: rate"),
        (lambda: OpenLoop("1"), "OpenLoop: rate"),
        (lambda: OpenLoop(1.0, -1), "OpenLoop: seed"),
        (lambda: TALKS.sessions(0, 0), "vocab"),
        (lambda: TALKS.sessions(9, -1), "seed"),
        (lambda: summary(Run([], 1.0, []), 8), "run"),
        (lambda: summary(Run([SERVED], 1.0, []), 0), "block_size"),
    ],
    ids=range(11),
)
def test_a_bad_load_is_refused_by_name(make, name):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        make()


def test_bench_prints_the_table_and_writes_the_rows_of_a_server(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    sizes = ["--prefix=16", "--suffix=4", "--output=4", "--prompts=6", "--block-size=8", "--runs=2", "--concurrency=2"]
    sizes += ["--conversations=2", "--turns=2", "--first=10", "--turn=3", "--turn-output=2", f"--json={file}"]
    with fake() as (world, url):
        arguments = ["bench", f"--url={url}", *sizes, "--workload=prefix_repetition", "--workload=multi_turn"]
        assert main([*arguments, "--api-key=secret"]) == 0
    assert world.keys == ["Bearer secret"]
    assert all(0 <= token < 256 for _, body in world.bodies for token in body["prompt"])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    cases = ["prefix_repetition x6 closed first", "multi_turn x4 closed first"]
    assert [(row["case"], row["runs"]) for row in rows] == [(case, runs) for runs in (1, 2) for case in cases]
    assert rows[0]["prefix"] == 16
    assert {row["mode"] for row in rows} == {"server"}
    assert 0 < rows[-1]["hit_rate_of_attainable"] <= 1
    table = capsys.readouterr().out.split("\n")[4:]
    assert table[0].split() == ["case", "TTFT", "p99", "TPOT", "ITL", "p99", "tokens/s", "hits", "idle"]
    # The number of tokens per second, whole, although the table is wider than 80 characters.
    assert f" {rows[-1]['output_tokens_per_s']:.1f} " in "\n".join(table)
    assert {line.split()[0] for line in table if line[:1].strip()} >= {"prefix_repetition", "multi_turn"}


def one_line(capsys):
    """Returns the one line that a command wrote to stderr."""
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_bad_url_is_refused_by_name(capsys):
    assert main(["bench", "--url=127.0.0.1:8000"]) == 2
    assert "url must begin with http:// or https://" in one_line(capsys)
    for port in ("99999", "a"):
        assert main(["bench", f"--url=http://127.0.0.1:{port}"]) == 2
        assert f"url must have a port from 0 to 65535 or none, got 'http://127.0.0.1:{port}'" in one_line(capsys)
    assert main(["bench", "--url=http://127.0.0.1:1/a b"]) == 2
    assert "url must be one that HTTP allows, got 'http://127.0.0.1:1/a b'" in one_line(capsys)
    # No one listens on the port that a closed socket had.
    with fake() as (_, url):
        pass
    assert main(["bench", f"--url={url}"]) == 2
    assert "Connection refused" in one_line(capsys)


def test_a_server_without_models_is_refused(capsys):
    with fake() as (world, url):
        world.models = json.dumps({"data": []})
        assert main(["bench", f"--url={url}"]) == 2
    assert one_line(capsys) == f"mamba-align: --served-model must be given, because {url} names no model"


def test_a_server_that_speaks_no_http_is_refused(capsys):
    with fake("ssh") as (_, url):
        assert main(["bench", f"--url={url}"]) == 2
    assert f"{url} must answer as HTTP says, got BadStatusLine" in one_line(capsys)


@pytest.mark.parametrize("models", ["", "{}", "[]", '{"data": 5}', '{"data": [5]}', '{"data": [{}]}'])
def test_a_server_that_names_no_models_as_openai_does_is_refused(models, capsys):
    with fake() as (world, url):
        world.models = models
        assert main(["bench", f"--url={url}"]) == 2
    assert f"{url} must name its models as OpenAI's servers do, got {models.encode()!r}" in one_line(capsys)
