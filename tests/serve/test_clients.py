"""Clients that vanish, stall, send garbage or come in numbers: each gets a reason, and no block stays held."""

import contextlib
import json
import random
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest
from fakes.http import Served, parse_events, wait_until
from fakes.raw_http import LONG, call, connect, head, read_answer, read_to_end, refused, status_and_code
from serve.conftest import KEYS, LIMITS

from mamba_align_jax import SamplingParams
from mamba_align_jax.data import encode
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.settings import Limits, Settings


@pytest.mark.parametrize("stream", [False, True])
def test_a_vanished_client_ends_its_requests(served, stream):
    aborted = served.engine.stats.aborted_requests
    with connect(served) as connection:
        connection.sendall(call(LONG | {"stream": stream, "n": 3}))
        wait_until(lambda: len(served.engine.scheduler.running) == 3)
    wait_until(lambda: served.engine.stats.aborted_requests == aborted + 3)
    served.wait_until_idle()


def test_a_client_that_vanishes_before_its_body_is_read_runs_nothing(served):
    admitted = served.engine.stats.admitted_requests
    with connect(served) as connection:
        connection.sendall(call(LONG)[:-5])
        time.sleep(0.05)
    time.sleep(0.1)
    assert served.engine.stats.admitted_requests == admitted


def test_a_client_that_closes_its_stream_ends_its_request(served):
    aborted = served.engine.stats.aborted_requests
    with served.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        next(response.iter_lines())
    wait_until(lambda: served.engine.stats.aborted_requests == aborted + 1)
    served.wait_until_idle()


def test_half_of_a_head_ends_in_time(served):
    for sent in (b"", b"POST /v1/comp", head(5)[:-2]):
        with connect(served) as connection:
            connection.sendall(sent)
            assert status_and_code(read_to_end(connection)) == (408, "head_timeout")


def test_half_of_a_second_head_ends_in_time(served):
    with connect(served) as connection:
        connection.sendall(call({"prompt": "x", "max_tokens": 1}))
        assert b" 200 " in read_answer(connection).partition(b"\r\n")[0]
        connection.sendall(b"POST /v1/comp")
        assert status_and_code(read_to_end(connection)) == (408, "head_timeout")


def test_half_of_a_body_ends_in_time(served):
    with connect(served) as connection:
        connection.sendall(call(LONG)[:-5])
        assert status_and_code(read_to_end(connection)) == (408, "body_timeout")


REFUSED_EARLY = head(6).replace(b"application/json", b"text/plain")


@contextlib.contextmanager
def refused_early(served):
    """A connection on which a call was refused before its body came. Afterwards, the client was told nothing more."""
    late = refused(served, 408, "head_timeout")
    with connect(served) as connection:
        connection.sendall(REFUSED_EARLY)
        assert b" 415 " in read_answer(connection).partition(b"\r\n")[0]
        yield connection
    assert refused(served, 408, "head_timeout") == late


def test_the_rest_of_a_refused_call_is_no_late_head(served):
    with refused_early(served) as connection:
        for part in (b"abc", b"def"):
            connection.sendall(part)
            time.sleep(0.1)
        time.sleep(LIMITS.receive_s)
        connection.sendall(call({"prompt": "x", "max_tokens": 1}))
        assert b" 200 " in read_answer(connection).partition(b"\r\n")[0]


def test_a_connection_is_closed_in_time_after_the_rest_of_a_refused_call(engine):
    """It is closed like any that is idle, and not only when the rest of the call would have been late."""
    with Served(engine, Settings(warmup="none", limits=replace(LIMITS, receive_s=600))) as served:
        served.server.config.timeout_keep_alive = 0.3
        with refused_early(served) as connection:
            connection.sendall(b"abcdef")
            assert read_to_end(connection) == b""


def test_the_rest_of_a_refused_call_must_come_in_time(served):
    with refused_early(served) as connection:
        connection.sendall(b"abc")
        assert read_to_end(connection) == b""


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00", b"GARBAGE\r\n\r\n", b"GET / SMTP/9\r\n\r\n", b"\x00" * 100]
)
def test_what_is_no_http_is_refused(served, sent):
    with connect(served) as connection:
        before = refused(served, 400, "no_http")
        connection.sendall(sent)
        assert status_and_code(read_to_end(connection)) == (400, "no_http")
    assert refused(served, 400, "no_http") == before + 1


@pytest.mark.parametrize(("excess", "wanted"), [(0, 200), (1, 431)])
def test_a_head_that_comes_in_one_piece_has_the_same_limit(served, excess, wanted):
    begin, end = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ", b"\r\n\r\n"
    with connect(served) as connection:
        connection.sendall(begin + b"a" * (LIMITS.head_bytes + excess - len(begin) - len(end)) + end)
        if wanted == 200:
            assert b" 200 " in read_answer(connection).partition(b"\r\n")[0]
            # A second one may be as long, and the parts of a body that come with a head do not count.
            connection.sendall(call({"prompt": "x", "max_tokens": 1, "user": "u" * (LIMITS.body_bytes - 100)}))
            assert b" 200 " in read_answer(connection).partition(b"\r\n")[0]
        else:
            assert status_and_code(read_to_end(connection)) == (431, "head_too_large")


def test_a_head_without_end_is_refused(served):
    with connect(served) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nx: " + b"a" * (LIMITS.head_bytes + 1))
        assert status_and_code(read_to_end(connection)) == (431, "head_too_large")


@pytest.mark.parametrize(
    ("begin", "line"),
    [
        (call(LONG), b"\r\n" * 500),
        (call(LONG | {"stream": True}), b"\r\n" * 500),
        (call(LONG) + b"GET / HTTP/1.1\r\n", b"x: " + b"a" * 1000 + b"\r\n"),
        (
            head(5).replace(b"content-length: 5", b"transfer-encoding: chunked") + b"0\r\n",
            b"x: " + b"a" * 1000 + b"\r\n",
        ),
    ],
)
def test_what_follows_a_call_before_its_answer_is_bounded(served, begin, line):
    """Empty lines, another call's head, or trailers. The connection ends without an answer."""
    with connect(served) as connection:
        connection.sendall(begin)
        if b"chunked" not in begin and b"GET" not in begin:
            wait_until(lambda: served.engine.scheduler.running)
        with contextlib.suppress(OSError):  # It may be closed already.
            for _ in range(2**20 // len(line)):  # more than what is read at once
                connection.sendall(line)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            answer = read_to_end(connection)
        assert b" 408 " not in answer
        assert b'finish_reason":"length' not in answer.replace(b" ", b"")
    wait_until(lambda: not served.server.server_state.tasks)  # A call may not have reached the engine yet.
    served.wait_until_idle()


def test_a_call_that_does_not_wait_for_the_answer_before_it_ends_both(served):
    aborted = served.engine.stats.aborted_requests
    with connect(served) as connection:
        connection.sendall(call(LONG))
        wait_until(lambda: served.engine.scheduler.running)
        connection.sendall(call(LONG))
        assert read_to_end(connection) == b""
    wait_until(lambda: served.engine.stats.aborted_requests == aborted + 1)
    served.wait_until_idle()


@pytest.mark.parametrize(
    "wish",
    [b"Upgrade, HTTP2-Settings\r\nUpgrade: h2c", b"close, upgrade\r\nupgrade: websocket"],
    ids=["h2c", "websocket"],
)
@pytest.mark.parametrize("cut", [0, 20, -1, None], ids=["one", "head", "body", "bare"])
def test_upgrades_are_answered_as_other_calls(served, wish, cut):
    """Whether a body comes with its head or after it, or there is none. A client may wish for HTTP/2 with each call."""
    if cut is None:
        sent = [b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"]
    else:
        whole = call({"prompt": "x", "max_tokens": 1})
        sent = [whole[:cut], whole[cut:]]
    wished = b"\r\nconnection: " + wish + b"\r\nhost: localhost\r\n"
    with connect(served) as connection:
        for _ in range(1 if b"close" in wish else 2):
            for part in sent:
                connection.sendall(part.replace(b"\r\nhost: localhost\r\n", wished))
                time.sleep(0.05)
            assert b" 200 " in read_answer(connection).partition(b"\r\n")[0]


def test_no_connection_to_another_server_is_made(served):
    with connect(served) as connection:
        connection.sendall(b"CONNECT example.org:80 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert status_and_code(read_to_end(connection)) == (400, "no_http")


def test_a_stalled_client_is_disconnected(engine):
    """It reads nothing, and its answer is longer than what the system keeps for it."""
    limits = replace(LIMITS, send_s=1.5)
    # The name is in every event.
    with Served(engine, Settings(model_name="m" * 10_000, warmup="none", limits=limits)) as served:
        aborted, finished = engine.stats.aborted_requests, engine.stats.finished_requests
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**10)
            connection.connect(("127.0.0.1", served.port))
            connection.sendall(call(LONG | {"n": 16, "stream": True}))
            wait_until(lambda: engine.has_unfinished)
            wait_until(lambda: not engine.has_unfinished)
        assert engine.stats.aborted_requests > aborted
        assert engine.stats.aborted_requests + engine.stats.finished_requests == aborted + finished + 16
        served.wait_until_idle()


def test_calls_beyond_the_queue_are_refused_at_once(served):
    with connect(served) as connection:
        connection.sendall(call(LONG | {"prompt": ["x"] * 100}))
        wait_until(lambda: len(served.engine.scheduler.waiting) > 50)
        response = served.post("/v1/completions", LONG | {"prompt": ["x"] * 100, "max_tokens": 1})
        assert response.status_code == 429
        assert (response.json()["error"]["code"], response.headers["retry-after"]) == ("queue_full", "1")
    served.wait_until_idle()


def test_a_call_that_the_queue_could_never_hold_is_not_told_to_try_again(served):
    """The engine takes all requests of a call before it runs one of them, so idle slots are no room for them."""
    for number in (256, 130):
        fields = {"prompt": ["x"] * (number // 2), "n": 2, "max_tokens": 1}
        response = served.post("/v1/completions", LONG | fields)
        assert response.status_code == 400, response.text
        message = f"n times the number of prompts must be at most 128, got {number}"
        assert response.json()["error"]["message"] == message
        assert "retry-after" not in response.headers
    assert len(served.complete(["x"] * 64, n=2, max_tokens=1)["choices"]) == 128


def test_requests_that_the_engine_fails_tell_nothing_of_the_exception(served, monkeypatch):
    def fail(*args):
        raise RuntimeError("a secret")

    for stream in (False, True):
        monkeypatch.setattr(served.engine.scheduler, "finished", fail)  # an engine that recovers makes another one
        response = served.post("/v1/completions", {"prompt": "x", "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_error"
        assert "secret" not in response.text
    served.wait_until_idle()


def test_a_stream_in_which_the_server_fails_ends_with_the_reason(served, monkeypatch):
    name, names = served.service.token_name, []

    def fail(token):
        names.append(name(token))
        if len(names) > 4:
            raise KeyError("a secret")
        return names[-1]

    count = lambda: served.metric("mamba_align:refused_calls_total", status="500", code="internal_error")
    monkeypatch.setattr(served.service, "token_name", lambda token: 1 / 0)
    response = served.post("/v1/completions", LONG | {"logprobs": 0, "max_tokens": 1})
    assert (response.status_code, response.headers["connection"]) == (500, "close")
    before = count()
    monkeypatch.setattr(served.service, "token_name", fail)
    *parts, last = served.events("/v1/completions", LONG | {"logprobs": 0})
    assert parts
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in str(last)
    assert count() == before + 1
    served.wait_until_idle()


def behave(locked, number, rights):
    """One client among many: asks, and checks what it gets, or misbehaves."""
    rng = random.Random(number)
    kind = rng.choice(("ask", "ask", "stream", "stream", "vanish", "garbage", "oversize", "utf8", "key", "field"))
    prompt, expected = rng.choice(rights)
    fields = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    path, key = "/v1/completions", rng.choice(KEYS)
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    with locked.new_client(headers=headers) as client:
        if kind == "ask":
            response = client.post(path, json=fields)
            assert response.json()["choices"][0]["token_ids"] == expected
        elif kind == "stream":
            events = parse_events(client.post(path, json=fields | {"stream": True}).text)
            assert [token for event in events for token in event["choices"][0]["token_ids"]] == expected
        elif kind == "vanish":
            request = client.build_request("POST", path, json=LONG | {"stream": rng.random() < 0.5})
            lines = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
            with connect(locked) as connection:
                connection.sendall(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + request.content)
                time.sleep(rng.uniform(0, 0.5))
        elif kind == "garbage":
            with connect(locked) as connection:
                connection.sendall(b"\x80" + rng.randbytes(200))
                assert connection.recv(100).startswith(b"HTTP/1.1 400")
        elif kind == "oversize":
            assert client.post(path, content=b"x" * 2**17).status_code == 413
        elif kind == "utf8":
            assert client.post(path, content=b'{"prompt": "\xff"}').status_code == 400
        elif kind == "key":
            assert client.post(path, json=fields, headers={"authorization": f"Bearer {key}x"}).status_code == 401
        else:
            assert client.post(path, json=fields | {"temperature": -1}).status_code == 400


def test_many_clients_of_all_kinds_get_what_is_theirs(locked):
    prompts = [f"def method_{number}(self):\n    " + "return self\n" * number for number in range(8)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs = locked.engine.generate([encode(prompt) for prompt in prompts], params)
    rights = [(prompt, list(output.token_ids)) for prompt, output in zip(prompts, outputs, strict=True)]
    wrongs = []

    def client(number):
        try:
            behave(locked, number, rights)
        except Exception as error:
            wrongs.append((number, repr(error)))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert wrongs == []
    wait_until(lambda: not locked.engine.has_unfinished)
    locked.wait_until_idle()


def test_a_call_ends_at_its_time_limit(engine):
    settings = Settings(warmup="none", limits=Limits(call_s=0.3))
    with Served(engine, settings) as served:
        response = served.post("/v1/completions", LONG)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "call_timeout")
        streamed = served.post("/v1/completions", LONG | {"stream": True})
        # The limit may come before the first token.
        last = streamed.json() if streamed.status_code == 504 else parse_events(streamed.text)[-1]
        assert last["error"]["code"] == "call_timeout"
        assert served.metric("mamba_align:refused_calls_total", status="504", code="call_timeout") == 2
        served.wait_until_idle()


@pytest.mark.parametrize(("drain_s", "num_tokens"), [(300, 100), (1, None)])
def test_a_server_that_stops_lets_calls_finish_for_a_while(engine, drain_s, num_tokens):
    with Served(engine, Settings(warmup="none", limits=Limits(drain_s=drain_s))) as served:
        fields = LONG | {"max_tokens": 100 if num_tokens else 490, "stream": True, "n": 1 if num_tokens else 4}
        with served.new_client() as client, client.stream("POST", "/v1/completions", json=fields) as response:
            lines = response.iter_lines()
            next(lines)
            served.server.should_exit = True
            wait_until(lambda: not can_connect(served))
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        events = [json.loads(line.removeprefix("data: ")) for line in rest if line.startswith("data: {")]
        if num_tokens:
            assert len(events) + 1 <= num_tokens
        else:
            assert events[-1]["error"]["code"] == "stopping"
        served.thread.join(300)
        assert not served.thread.is_alive()
        served.wait_until_idle()
        assert not served.service.serving.is_running


def test_calls_that_have_no_more_time_are_told_that_the_server_stops(engine):
    answers = []
    with Served(engine, Settings(warmup="none", limits=Limits(drain_s=0.5))) as served:

        def call(stream):
            with served.new_client() as client:
                response = client.post("/v1/completions", json=LONG | dict(max_tokens=490, n=8, stream=stream))
                answers.append((response.status_code, response.text))

        threads = [threading.Thread(target=call, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(engine.core.requests) == 16)
        served.server.should_exit = True
        for thread in threads:
            thread.join(300)
        served.thread.join(300)
        assert not served.thread.is_alive()
    assert len(answers) == 2
    texts = dict(answers)
    assert json.loads(texts[503])["error"]["code"] == "stopping"
    assert "stopping" in texts.get(200, texts[503])


def test_a_call_that_has_no_more_time_is_told_so_even_in_the_middle_of_a_long_step(engine, monkeypatch):
    """A step may be compiled for longer than uvicorn waits for calls."""
    step, entered, gate = engine.step_outputs, threading.Event(), threading.Event()

    def slow():
        entered.set()
        gate.wait(300)
        return step()

    monkeypatch.setattr(engine, "step_outputs", slow)
    with Served(engine, Settings(warmup="none", limits=Limits(drain_s=0.1))) as served, connect(served) as connection:
        connection.sendall(call(LONG))
        assert entered.wait(300)
        served.server.should_exit = True
        assert status_and_code(read_to_end(connection)) == (503, "stopping")
        gate.set()


def test_calls_on_their_way_when_the_server_is_told_to_stop_are_answered(engine):
    """Of some, not even the connection was accepted. Closing a connection with unread bytes would reset it."""
    with Served(engine, Settings(warmup="none", limits=LIMITS)) as served:
        begun = [connect(served) for _ in range(3)]
        time.sleep(0.2)
        hold, held = threading.Event(), threading.Event()

        def stop():
            # The loop does nothing else while the calls arrive.
            held.set()
            assert hold.wait(300)
            served.server.should_exit = True

        served.server.servers[0].get_loop().call_soon_threadsafe(stop)
        assert held.wait(300)
        late = [connect(served) for _ in range(3)]
        for one in (*begun, *late):
            one.sendall(call({"prompt": "x", "max_tokens": 1}))
        time.sleep(0.2)  # The server looks every 0.1 s whether it was told to stop.
        hold.set()
        for one in (*begun, *late):
            assert b" 200 " in read_to_end(one).partition(b"\r\n")[0]
            one.close()


def test_a_call_that_is_complete_when_there_is_no_more_time_is_told_that_the_server_stops(engine):
    with Served(engine, Settings(warmup="none", limits=Limits(drain_s=0.2))) as served, connect(served) as connection:
        sent = call(LONG)
        connection.sendall(sent[:-5])
        time.sleep(0.1)
        served.server.should_exit = True
        wait_until(lambda: not served.service.serving.is_running)
        connection.sendall(sent[-5:])
        assert status_and_code(read_to_end(connection)) == (503, "stopping")
        served.thread.join(300)
        with pytest.raises(Refusal) as raised:
            served.service.check_alive()
        assert raised.value.code == "stopping"


@pytest.mark.parametrize("send_s", [1e-4, 1e7])
def test_a_limit_of_any_size_lets_clients_in(engine, send_s):
    """The system takes whole milliseconds of 32 bits, and 0 for no limit."""
    with Served(engine, Settings(warmup="none", limits=Limits(send_s=send_s))) as served:
        assert served.client.get("/health").status_code == 200


def can_connect(served):
    try:
        connect(served).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("options", [{}, {"when_compiled": lambda: 1 / 0}], ids=["warmup", "when_compiled"])
def test_a_server_whose_programs_do_not_compile_says_so(engine, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "warmup", lambda *args, **given: 0.0 if options else 1 / 0)
        with Served(engine, Settings(), **options) as served:
            wait_until(lambda: served.service.has_failed_to_compile)
            answers = [served.client.get("/health"), served.client.get("/ready"), served.post("/v1/completions", LONG)]
            for response in answers:
                assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
                assert "could not be compiled" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "is_full"),
    [
        ({}, False),
        ({"warmup": "full"}, True),
        ({"top_k": 5}, False),
        ({"min_p": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_programs_that_the_models_own_defaults_need_are_compiled_first(engine, fields, is_full):
    defaults = {name: value for name, value in fields.items() if name != "warmup"}
    settings = Settings(warmup=fields.get("warmup", "usual"), sampling_defaults=defaults)
    with pytest.MonkeyPatch.context() as patch:
        compiled = []
        patch.setattr(engine, "warmup", lambda progress, *, full: compiled.append(full) or 0.0)
        served = Served(engine, settings, when_compiled=lambda: compiled.append(served.service.is_ready))
        with served:
            wait_until(lambda: served.service.is_ready)
    assert compiled == [is_full, False]


def test_a_dead_engine_is_said(engine):
    with Served(engine, Settings(warmup="none")) as served:
        assert served.client.get("/health").json() == {"status": "live"}
        assert served.client.get("/ready").json() == {"status": "ready"}
        served.service.is_ready = False
        for response in (served.client.get("/ready"), served.post("/v1/completions", {"prompt": "x"})):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        served.service.is_ready = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "step_outputs", lambda: 1 / 0)
            response = served.post("/v1/completions", {"prompt": "x"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
        for path in ("/health", "/ready"):
            response = served.client.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")


def test_a_client_that_sends_more_than_it_may_reads_why(served):
    """The system would tell it of an error instead if the connection were closed before the rest has come."""
    body = b"x" * (64 * LIMITS.body_bytes)
    with connect(served) as connection:
        connection.sendall(head(len(body)))
        time.sleep(0.1)
        connection.sendall(body)
        assert status_and_code(read_to_end(connection)) == (413, "body_too_large")


def test_a_second_interrupt_ends_calls_at_once_and_tells_them_why(engine, caplog):
    limits, replies = replace(LIMITS, drain_s=600), []
    with Served(engine, Settings(warmup="none", limits=limits)) as served:
        threads = [
            threading.Thread(target=lambda: replies.append(served.new_client().post("/v1/completions", json=LONG)))
            for _ in range(20)
        ]
        with served.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            for thread in threads:
                thread.start()
            wait_until(lambda: len(engine.scheduler.running) + len(engine.scheduler.waiting) == 21)
            begin = time.monotonic()
            for _ in range(2):
                served.server.handle_exit(signal.SIGINT, None)
            stream.read()
            for thread in threads:
                thread.join()
            assert time.monotonic() - begin < 60
        served.thread.join(60)
        assert not served.thread.is_alive()
    assert {(reply.status_code, reply.json()["error"]["code"]) for reply in replies} == {(503, "stopping")}
    assert len(replies) == 20
    assert parse_events(stream.text)[-1]["error"]["code"] == "stopping"
    assert not [record for record in caplog.records if record.exc_info]
