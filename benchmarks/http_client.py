"""Sends a workload's sessions to an OpenAI-compatible server and records when each token arrives.

Each open session has a thread and a connection for each of its requests, as different users have. Prompts are token ids, so
that their sizes are exact and the server needs no tokenizer. Times are seconds since the load began.

`python -m benchmarks.http_client URL` prints a row for prompts that share a prefix. `benchmarks.server` runs it in a process
of its own, so that client and server don't wait for each other's Python.
"""

import argparse
import contextlib
import http.client
import json
import math
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mamba_align_jax.load.client import Run, Served
from mamba_align_jax.load.metrics import summary
from mamba_align_jax.load.workloads import ClosedLoop, Loop, PrefixRepetition, Session, Tokens


@dataclass(frozen=True)
class Server:
    """A server that answers as OpenAI's does, under `/v1`.

    Attributes:
        url: Its address, as "http://127.0.0.1:8000". A path is kept, and `/v1` is added unless the path ends with it.
        model: The model's name on the server.
        api_key: The key that each request carries; None for none.
        timeout_s: The longest time to wait for a connection or for the next part of an answer.
    """

    url: str
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0

    def request(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """Sends a request, a POST if it has a body, and returns the response, whose body is not read yet.

        Args:
            path: The path after `/v1`, as "/models".
            body: What is sent as JSON.

        Raises:
            ValueError: The URL is not one of HTTP.
            OSError: There is no connection, the server does not speak HTTP, or it refuses the request. The error has the
                server's reason.
        """
        with _plain_errors(self.url):
            return self._request(path, body)

    def _request(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must begin with http:// or https:// and name a host, got {self.url!r}")
        try:
            port = parts.port
        except ValueError:
            raise ValueError(f"url must have a port from 0 to 65535 or none, got {self.url!r}") from None
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, port, timeout=self.timeout_s)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        root = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        try:
            connection.request("POST" if body else "GET", root + path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        if response.status != 200:
            with response:
                reason = response.read(2000).decode(errors="replace")
            raise OSError(f"{self.url} answered {response.status} to {root + path}: {reason}")
        return response

    def models(self) -> list[str]:
        """Returns the names of the models that the server has.

        Raises:
            ValueError: See `request`.
            OSError: See `request`, or the server answers with something else.
        """
        with self.request("/models") as response, _plain_errors(self.url):
            content = response.read()
        try:
            return [model["id"] for model in json.loads(content)["data"]]
        except (ValueError, TypeError, KeyError) as error:
            raise OSError(f"{self.url} must name its models as OpenAI's servers do, got {content[:200]!r}") from error


@contextlib.contextmanager
def _plain_errors(url: str) -> Iterator[None]:
    """Raises a ValueError for a URL that HTTP doesn't allow, and an OSError for an answer that is none of HTTP."""
    try:
        yield
    except http.client.InvalidURL as error:
        raise ValueError(f"url must be one that HTTP allows, got {url!r}: {error}") from error
    except http.client.HTTPException as error:
        raise OSError(f"{url} must answer as HTTP says, got {error!r}") from error


@dataclass
class _Answer:
    """What has arrived of an answer. `tokens` are those that the server named, `times` when each token came."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    num_cached: int = 0


def _events(response: http.client.HTTPResponse, url: str) -> Iterator[dict[str, Any]]:
    """Yields the events of a stream. Raises an OSError if the server reports one, or ends the stream without an end."""
    with _plain_errors(url):
        for line in response:
            text = line.decode().strip()
            if text == "data: [DONE]":
                return
            if text.startswith("data:"):
                event = json.loads(text.removeprefix("data:"))
                if "error" in event:
                    raise OSError(f"the server ended an answer: {event['error']}")
                yield event
    raise OSError("the server closed a stream before its end")


class _Load:
    """A load on its way: the sessions that begin when another one ends, and the requests that are finished."""

    def __init__(self, server: Server, output: int) -> None:
        self.server, self.output = server, output
        self.later: deque[Session] = deque()
        self.served: list[Served] = []
        self.error: BaseException | None = None
        self._begin = time.perf_counter()

    def now(self) -> float:
        """The seconds since the load began."""
        return time.perf_counter() - self._begin

    def run(self, arrival: float, session: Session | None) -> None:
        """Runs a session, and after it those that begin when another one ends. The first error ends the load."""
        try:
            while session is not None and self.error is None:
                self._run(arrival, session)
                arrival, session = self.now(), self._next()
        except BaseException as error:
            self.error = error

    def _next(self) -> Session | None:
        try:
            return self.later.popleft()
        except IndexError:
            return None

    def _run(self, arrival: float, session: Session) -> None:
        history: Tokens = ()
        for number, own in enumerate(session):
            if self.error is not None:
                return
            prompt, sent = history + own, self.now()
            answer = self._complete(prompt)
            tokens = tuple(answer.tokens)
            if not tokens and number + 1 < len(session):
                raise OSError(
                    "the server names no token ids (return_token_ids), which the next turn of multi_turn needs"
                )
            # Places of tokens that the server did not name. Nothing is sent after them.
            tokens = tokens or (-1,) * len(answer.times)
            self.served.append(Served(prompt, tokens, answer.num_cached, arrival, sent, tuple(answer.times)))
            history, arrival = prompt + tokens, self.now()

    def _complete(self, prompt: Tokens) -> _Answer:
        body = {
            "model": self.server.model,
            "prompt": prompt,
            "max_tokens": self.output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            # Not of OpenAI, but of most servers that one runs oneself.
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = _Answer()
        with self.server.request("/completions", body) as response:
            for event in _events(response, self.server.url):
                for choice in event.get("choices") or ():
                    ids = choice.get("token_ids") or ()
                    answer.tokens += ids
                    # A server that names no tokens is taken to send one at a time.
                    answer.times += [self.now()] * (len(ids) or bool(choice.get("text")))
                if usage := event.get("usage"):
                    answer.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                    # It may have sent several at a time, or parts of characters without a text.
                    answer.times += [self.now()] * (usage["completion_tokens"] - len(answer.times))
        if len(answer.times) != self.output:
            raise OSError(f"the server must answer with {self.output} tokens (ignore_eos), got {len(answer.times)}")
        return answer


def serve_url(server: Server, sessions: Sequence[Session], output: int, loop: Loop) -> Run:
    """Sends the sessions when the loop says, and waits until all of them are served.

    The next turn of a session is sent when the previous one is answered.

    Args:
        server: The server, with the name of the model.
        sessions: The user's tokens in each turn of each session.
        output: The number of tokens of each answer. No end token ends an answer early.
        loop: When each session begins.

    Returns:
        The load, without times of steps, which the server keeps to itself.

    Raises:
        OSError: The server refused a request, went away, or sent something other than was asked for.
    """
    load, threads = _Load(server, output), []
    due = list(zip(loop.due(len(sessions)), sessions, strict=True))
    load.later.extend(session for arrival, session in due if arrival == math.inf)
    for arrival, session in due:
        if arrival == math.inf or load.error is not None:
            break
        time.sleep(max(0.0, arrival - load.now()))
        threads.append(threading.Thread(target=load.run, args=(arrival, session), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if load.error is not None:
        raise load.error
    return Run(load.served, load.now(), [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of a server with OpenAI's API, as http://127.0.0.1:8000")
    for name in ("prompts", "prefix", "suffix", "output", "concurrency", "seed", "vocab-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in ("prompts", "prefix", "suffix", "output")}
    sessions = PrefixRepetition(**sizes).sessions(options.vocab_size, options.seed)
    model, *_ = Server(options.url).models()
    run = serve_url(Server(options.url, model), sessions, options.output, ClosedLoop(options.concurrency))
    print(json.dumps(summary(run)))


if __name__ == "__main__":
    main()
