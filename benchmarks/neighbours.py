"""Times one client's tokens while another one misbehaves: `python -m benchmarks.neighbours --json FILE`.

For each case a server of the bundled model runs in a process of its own. The neighbour streams answers, first alone and then
beside the clients of the case, which are a third process. A row has the time between the neighbour's tokens in both.
"""

import argparse
import contextlib
import itertools
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.http_client import Server
from benchmarks.rows import Row, append, facts

_ROOT = Path(__file__).parents[1]
_STARTED = re.compile(r"Uvicorn running on (http://\S+)")
_READY = "the harm has begun"
# The bundled model's answers are short, so the neighbour asks again and again. Prompts are no longer than this.
_PROMPT, _TOKENS = "def read(self, name):\n", 256


@dataclass(frozen=True)
class Case:
    """What the other clients do.

    Attributes:
        about: What they do, in words.
        harm: Does it at the server's address until the process is ended. It yields once it has begun.
        options: Options of `mamba-align serve`.
    """

    about: str
    harm: Callable[[str], Iterator[None]]
    options: Sequence[str] = ()


def large_bodies(url: str) -> Iterator[None]:
    """Sends bodies of 4 MB, all of which are expensive to read and refused in the end, one after the other."""
    for path, body in itertools.cycle(large_calls().values()):
        _post(url, path, body)
        yield


def large_calls() -> dict[str, tuple[str, bytes]]:
    """Returns calls with bodies of about 4 MB in many shapes: the address and the body, by the shape's name."""
    size, complete, chat = 4 * 10**6, "/v1/completions", "/v1/chat/completions"
    many = lambda one: b",".join([one] * (size // (len(one) + 1)))
    keys = json.dumps({str(number): 1 for number in range(size // 12)}, separators=(",", ":")).encode()
    parts = [{"type": "text", "text": "x"}] * 150
    prompts = b",".join([b"[" + b",".join([b"97"] * 10_000) + b"]"] * 128)
    user = lambda content, count: {"messages": [{"role": "user", "content": content}] * count}
    return {
        "empty lists": (complete, b'{"prompt":5,"user":[' + many(b"[]") + b"]}"),
        "a wrong list": (complete, b'{"prompt":"x","temperature":[' + many(b"7") + b"]}"),
        "tokens": (complete, b'{"prompt":[' + many(b"97") + b"]}"),
        "tokens of several prompts": (complete, b'{"prompt":[' + prompts + b"]}"),
        "numbers that are hard to round": (complete, b'{"prompt":[' + many(b"1.7976931348623157e308") + b"]}"),
        "a long text": (complete, b'{"prompt":"' + b"x" * size + b'"}'),
        "escapes": (complete, b'{"prompt":"' + b"\\n" * (size // 2) + b'"}'),
        "biases": (complete, b'{"prompt":"x","logit_bias":' + keys + b"}"),
        "unknown fields": (complete, b'{"prompt":"x",' + keys[1:]),
        "a long name": (complete, b'{"prompt":"x","' + b"x" * size + b'":1}'),
        "a deep list": (complete, b'{"prompt":"x","user":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}"),
        "spaces": (complete, b'{"prompt":' + b" " * size + b"5}"),
        "parts of messages": (chat, json.dumps(user(parts, 750)).encode()),
        "long messages": (chat, json.dumps(user("x" * 4000, 1000)).encode()),
    }


def idle_connections(url: str) -> Iterator[None]:
    """Opens as many connections as the server takes, and holds them. Those that the server closes are opened again."""
    host, port = url.removeprefix("http://").split(":")
    held: list[socket.socket] = []
    while True:
        while len(held) < 1100:
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((host, int(port)), timeout=5))
                held[-1].setblocking(False)
        yield
        time.sleep(0.2)
        held = [one for one in held if _is_open(one)]


def _is_open(connection: socket.socket) -> bool:
    """Whether the server has not closed a connection. One that it has closed is closed here, too."""
    try:
        if connection.recv(2**16):
            return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


def grammar_bombs(url: str) -> Iterator[None]:
    """Asks for answers of a schema that is short, and each of whose masks takes many milliseconds, from 20 addresses."""
    schema = {"type": "string", "pattern": "^((a{40}){40}){40}$"}
    wanted = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}
    message = {"role": "user", "content": "x"}
    body = json.dumps({"messages": [message], "max_tokens": 256, "response_format": wanted}).encode()
    yield from _flood(url, "/v1/chat/completions", body, [f"127.0.0.{number}" for number in range(2, 22)])


def one_tenants_flood(url: str) -> Iterator[None]:
    """Asks for 16 answers to each of 30 prompts from one address, again and again."""
    body = json.dumps({"prompt": ["x"] * 30, "n": 16, "max_tokens": 64, "ignore_eos": True}).encode()
    yield from _flood(url, "/v1/completions", body, ["127.0.0.2"])


def _flood(url: str, path: str, body: bytes, addresses: Sequence[str]) -> Iterator[None]:
    """Sends a call from each address, and another one as soon as it was answered."""

    def send(address: str) -> None:
        while True:
            _post(url, path, body, address)

    for address in addresses:
        threading.Thread(target=send, args=(address,), daemon=True).start()
    time.sleep(3.0)
    yield
    threading.Event().wait()


CASES = {
    "large bodies": Case("one client sends bodies of 4 MB, one after the other", large_bodies),
    "idle connections": Case("1,100 connections are open and send nothing", idle_connections),
    "grammar bombs": Case("20 tenants ask for a schema whose masks are dear", grammar_bombs, ("--max-num-seqs=32",)),
    "one tenant's flood": Case("one tenant asks for 480 answers at a time", one_tenants_flood, ("--max-num-seqs=8",)),
}


def _post(url: str, path: str, body: bytes, address: str = "") -> None:
    """Sends a call, from an address of this machine if one is given, and reads its answer, whatever it is."""
    host, port = url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, int(port)), timeout=600, source_address=(address, 0)) as connection,
    ):
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while connection.recv(2**16):
            pass


@contextlib.contextmanager
def served(options: Sequence[str]) -> Iterator[str]:
    """Serves the bundled model from a process of its own, whose programs are compiled. Yields the address."""
    command = [sys.executable, "-m", "mamba_align_jax", "serve", "--port=0", "--warmup=none", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=_ROOT, stdout=log, stderr=log)
        try:
            yield _wait_until_ready(process, log)
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_ready(process: subprocess.Popen, log) -> str:
    while process.poll() is None:
        time.sleep(0.1)
        log.seek(0)
        found = _STARTED.search(log.read())
        with contextlib.suppress(OSError):
            if found and _is_ready(found[1]):
                return found[1]
    log.seek(0)
    raise RuntimeError(f"the server has not started: {log.read()[-2000:]}")


def _is_ready(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"GET /ready HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n".encode())
        return connection.recv(100).split()[1] == b"200"


@contextlib.contextmanager
def harmed(case: str, url: str) -> Iterator[None]:
    """Runs the clients of a case in a process of their own, from when they have begun."""
    command = [sys.executable, "-m", "benchmarks.neighbours", "--harm", url, "--case", case]
    process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != _READY:
            raise RuntimeError(f"the clients of {case!r} have not begun")
        yield
    finally:
        process.kill()
        process.wait()


def gaps(url: str, seconds: float) -> tuple[list[float], list[float]]:
    """Streams answers for some seconds. Returns the times between their tokens, and each answer's time to its first token.

    A call that the server refuses or cuts raises an OSError: a neighbour must not notice.
    """
    server, found, firsts, end = Server(url, "byte_model"), [], [], time.perf_counter() + seconds
    body = dict(prompt=_PROMPT, max_tokens=_TOKENS, temperature=0, ignore_eos=True, stream=True)
    while time.perf_counter() < end:
        times, begin = [], time.perf_counter()
        with server.request("/completions", body) as response:
            for line in response:
                if line.startswith(b'data: {"error"'):
                    raise OSError(line.decode())
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
        found += [after - before for before, after in itertools.pairwise(times)]
        firsts.append(times[0] - begin)
    return found, firsts


def measure(name: str, seconds: float) -> Row:
    """Measures the neighbour for `seconds` alone, and then for `seconds` beside the case's other clients."""
    case = CASES[name]
    row: Row = {"case": f"neighbours {name}", "about": case.about, "seconds": seconds}
    with served(case.options) as url:
        gaps(url, 1.0)
        row |= _numbers("without", *gaps(url, seconds))
        with harmed(name, url):
            row |= _numbers("with", *gaps(url, seconds))
    row["p50_ratio"] = row["gap_ms_p50_with"] / row["gap_ms_p50_without"]
    return row


def _numbers(which: str, found: Sequence[float], firsts: Sequence[float]) -> Row:
    percentile = lambda percent: 1e3 * float(np.percentile(found, percent))
    row = {f"gap_ms_p{percent}_{which}": percentile(percent) for percent in (50, 99)}
    row |= {f"first_ms_p50_{which}": 1e3 * statistics.median(firsts), f"first_ms_max_{which}": 1e3 * max(firsts)}
    return row | {f"gap_ms_max_{which}": 1e3 * max(found), f"gap_ms_mean_{which}": 1e3 * statistics.fmean(found)}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    cases = "\n".join(f"  {name}: {case.about}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nCases:\n{cases}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (default: %(default)g)")
    parser.add_argument("--json", metavar="FILE", help="append the rows to FILE")
    parser.add_argument("--commit", default="unknown", help="the commit that rows name")
    parser.add_argument("--harm", metavar="URL", help="only do what the other clients of the case do")
    return parser


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measures each case, and returns the rows."""
    options = parser().parse_args(arguments)
    names = options.case or list(CASES)
    if options.harm:
        (name,) = names
        for number, _ in enumerate(CASES[name].harm(options.harm)):
            if number == 0:
                print(_READY, flush=True)
        return []
    rows = []
    for name in names:
        row = measure(name, options.seconds) | facts(options.commit)
        append(options.json, row)
        rows.append(row)
        without, beside = (
            f"{row[f'gap_ms_p50_{which}']:.1f} and {row[f'gap_ms_p99_{which}']:.1f} ms" for which in ("without", "with")
        )
        print(f"{name}: p50 and p99 of the neighbour's gaps {without} alone, {beside} beside", flush=True)
        print(
            f"  first token {row['first_ms_p50_without']:.0f} ms alone, {row['first_ms_p50_with']:.0f} ms beside",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
