"""However many connections are open, there is room for a new one, and whoever asks whether the process lives is answered."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from fakes.http import Served, wait_until
from fakes.raw_http import LONG, call, connect, read_answer, read_to_end, refused, status_and_code
from serve.conftest import LIMITS

from mamba_align_jax.serve.limits.connections import BACKLOG, RESERVED, max_connections
from mamba_align_jax.serve.settings import Settings

PROBES = ("/health", "/ready", "/metrics")


def ask(served, path):
    """Returns the status of a call on a connection of its own."""
    with served.new_client() as client:
        return client.get(path).status_code


@pytest.fixture(scope="module")
def served(engine):
    """A server that closes no connection because of the time, as a machine that does much else opens them slowly."""
    with Served(engine, Settings(warmup="none", limits=replace(LIMITS, receive_s=3600, send_s=3600))) as served:
        served.server.config.timeout_keep_alive = 3600
        yield served


@contextlib.contextmanager
def many(served, count, sent=b""):
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(connect(served)) for _ in range(count)]
        for one in found:
            one.sendall(sent)
        yield found


def open_connections(served):
    return len(served.server.server_state.connections)


@pytest.fixture
def fresh(served):
    """The server, once it has seen that the connections of earlier tests are closed: else they would give way."""
    served.client.close()
    wait_until(lambda: not open_connections(served))
    served.client = served.new_client()
    return served


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp"], ids=["nothing", "half"])
def test_idle_connections_give_way_to_new_ones_the_oldest_first(fresh, sent):
    served = fresh
    with many(served, LIMITS.connections + RESERVED, sent) as (first, *_, last):
        for path in PROBES:
            assert ask(served, path) == 200
        assert served.complete("x", max_tokens=1)["choices"]
        assert read_to_end(first) == b""
        last.sendall(call({"prompt": "x", "max_tokens": 1}) if not sent else b"\r\n\r\n")
        assert b"HTTP/1.1" in read_answer(last)
    assert refused(served, 503, "too_many_connections") == 0


def test_a_connection_that_has_just_been_used_does_not_give_way(fresh):
    served = fresh
    with many(served, LIMITS.connections + RESERVED) as (first, *_):
        # Those that are accepted after the first one's call are newer than it.
        wait_until(lambda: open_connections(served) == LIMITS.connections + RESERVED)
        first.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b" 200 " in read_answer(first)
        with many(served, LIMITS.connections):
            first.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 " in read_answer(first)


def test_calls_beyond_the_limit_are_refused_but_for_those_that_ask_how_the_process_is(engine, monkeypatch):
    limits = replace(LIMITS, connections=2, receive_s=3600, send_s=3600)
    step, ended = engine.step_outputs, threading.Event()

    def step_until_two_run():
        if len(engine.scheduler.running) == 2:
            ended.wait(300)
        return step()

    monkeypatch.setattr(engine, "step_outputs", step_until_two_run)
    with Served(engine, Settings(warmup="none", limits=limits)) as served:
        served.client.close()
        served.client = served.new_client()
        with many(served, 2, call(LONG | {"stream": True})):
            wait_until(lambda: len(engine.scheduler.running) == 2)
            for path in PROBES:
                assert ask(served, path) == ask(served, f"{path}?x=1") == 200
            for path in ("/", "/v1/models", "/healthy"):
                assert ask(served, path) == 503
            with connect(served) as connection:
                connection.sendall(call(LONG))
                assert status_and_code(read_to_end(connection)) == (503, "too_many_connections")
            with many(served, RESERVED + 5):
                assert ask(served, "/health") == 200
            assert len(engine.scheduler.running) == 2
            ended.set()
        served.wait_until_idle()
        assert ask(served, "/v1/models") == 200


def test_clients_that_leave_their_answers_unread_give_way(engine):
    """As many connections as may be open have answers that nobody reads, and are not closed before their time."""
    limits = replace(LIMITS, connections=2, send_s=600)
    with Served(engine, Settings(model_name="m" * 10_000, warmup="none", limits=limits)) as served:
        served.client.close()
        with contextlib.ExitStack() as stack:
            for _ in range(2 + RESERVED):
                one = stack.enter_context(socket.socket())
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**10)
                one.connect(("127.0.0.1", served.port))
                one.setblocking(False)
                with contextlib.suppress(OSError):  # A call that does not wait for the answer before it ends both.
                    for _ in range(20):
                        one.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
                        time.sleep(0.01)
            served.client = served.new_client(headers={"connection": "close"})
            for _ in range(3):
                assert served.client.get("/health", timeout=60).status_code == 200


@pytest.mark.parametrize(("soft", "wanted"), [(resource.RLIM_INFINITY, 1024), (10**6, 1024), (1024, 600), (64, 1)])
def test_the_number_of_connections_follows_from_that_of_descriptors(monkeypatch, soft, wanted):
    """With 1024 descriptors, 1024 connections would leave none for anything else."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    monkeypatch.setattr(os, "listdir", lambda path: ["0"] * 200)
    assert max_connections(1024) == wanted
    assert max_connections(1) == 1
    assert wanted + RESERVED + BACKLOG + 200 <= max(soft, 400) or soft == resource.RLIM_INFINITY


@pytest.mark.deep
def test_a_server_with_few_descriptors_answers_beside_more_connections_than_it_can_hold(tmp_path):
    command = [sys.executable, "-m", "mamba_align_jax", "serve", "--port=0", "--warmup=none"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(f"ulimit -n 512; exec {' '.join(command)}", shell=True, stdout=log, stderr=log)
    read = lambda: (tmp_path / "log").read_text()
    wait_until(lambda: "Uvicorn running on" in read())
    served = type("Server", (), {"port": int(read().split("Uvicorn running on http://127.0.0.1:")[1].split()[0])})
    try:
        with many(served, 700):
            for _ in range(20):
                with connect(served) as connection:
                    connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
                    assert b" 200 " in read_answer(connection)
            with connect(served) as connection:
                # A chat needs pipes to the process that renders it.
                content = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
                connection.sendall(
                    call(content)
                    .replace(b"completions", b"chat/completions")
                    .replace(b"host: localhost", b"host: 127.0.0.1")
                )
                assert b" 200 " in read_answer(connection)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert "Traceback" not in read()
    assert "because `ulimit -n` is 512" in read()
