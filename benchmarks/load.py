"""Serving load: sessions of random tokens, the loop that sends them, and what a cache could have kept of them.

Times are seconds since the load began. A request arrives when it is due, so that waiting for the engine counts.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mamba_align_jax import Engine, RequestOutput, SamplingParams

Tokens = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PrefixRepetition:
    """Prompts of a shared prefix and a suffix of their own; prompts of one prefix follow each other."""

    prefix: int = 4096
    suffix: int = 128
    output: int = 512
    prefixes: int = 1
    prompts: int = 64
    name: str = field(default="prefix_repetition", init=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prefix + self.suffix + self.output

    @property
    def num_requests(self) -> int:
        """Requests of all sessions."""
        return self.prompts

    def sessions(self, vocab: int, seed: int) -> list[tuple[Tokens, ...]]:
        """What the user of each session says, turn by turn."""
        rng = np.random.default_rng(seed)
        prefixes = [_draw(rng, self.prefix, vocab) for _ in range(self.prefixes)]
        owner = [number * self.prefixes // self.prompts for number in range(self.prompts)]
        return [(prefixes[each] + _draw(rng, self.suffix, vocab),) for each in owner]


@dataclass(frozen=True, kw_only=True)
class MultiTurn:
    """Conversations: each turn's prompt is the last one's, its answer, and something new."""

    conversations: int = 16
    turns: int = 8
    first: int = 1024
    turn: int = 128
    output: int = 256
    name: str = field(default="multi_turn", init=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.first + (self.turns - 1) * self.turn + self.turns * self.output

    @property
    def num_requests(self) -> int:
        """Requests of all sessions."""
        return self.conversations * self.turns

    def sessions(self, vocab: int, seed: int) -> list[tuple[Tokens, ...]]:
        """What the user of each session says, turn by turn."""
        rng = np.random.default_rng(seed)
        sizes = [self.first, *[self.turn] * (self.turns - 1)]
        return [tuple(_draw(rng, size, vocab) for size in sizes) for _ in range(self.conversations)]


Workload = PrefixRepetition | MultiTurn


def _draw(rng: np.random.Generator, size: int, vocab: int) -> Tokens:
    return tuple(rng.integers(0, vocab, size).tolist())


@dataclass(frozen=True)
class ClosedLoop:
    """So many sessions at once: the next one begins when one ends."""

    concurrency: int
    name: str = field(default="closed", init=False)

    def due(self, sessions: int) -> list[float]:
        """When each session begins; at infinity: when another ends."""
        return [0.0 if number < self.concurrency else math.inf for number in range(sessions)]


@dataclass(frozen=True)
class OpenLoop:
    """Sessions begin at random, `rate` a second on average (Poisson), whatever became of the others."""

    rate: float
    seed: int = 0
    name: str = field(default="open", init=False)

    def due(self, sessions: int) -> list[float]:
        """When each session begins."""
        return np.cumsum(np.random.default_rng(self.seed).exponential(1 / self.rate, sessions)).tolist()


@dataclass(frozen=True)
class Served:
    """A finished request: when it arrived and was first admitted, and when each of its tokens came."""

    prompt: Tokens
    tokens: Tokens
    cached: int
    arrival: float
    admitted: float
    times: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """From arrival to the first token."""
        return self.times[0] - self.arrival

    @property
    def tpot(self) -> float:
        """Mean per token after the first; of a single token, 0."""
        return (self.times[-1] - self.times[0]) / max(len(self.times) - 1, 1)

    @property
    def itl(self) -> list[float]:
        """From each delivery of tokens to the next: tokens of one step come together."""
        return [later - earlier for earlier, later in itertools.pairwise(self.times) if later > earlier]

    @property
    def e2e(self) -> float:
        """From arrival to the last token."""
        return self.times[-1] - self.arrival


@dataclass(frozen=True)
class Run:
    """A load that was served."""

    requests: list[Served]
    seconds: float
    calls: list[float]  # of `Engine.step`


@dataclass
class _Turn:
    """A request on its way. `arrival` is when it was due, `sent` when the engine got it."""

    session: tuple[Tokens, ...]
    number: int
    arrival: float
    sent: float
    admitted: float | None = None


def serve(engine: Engine, sessions: Sequence[tuple[Tokens, ...]], output: int, loop: ClosedLoop | OpenLoop) -> Run:
    """Sends the sessions as the loop says, each turn when the one before is answered, and steps until all are served.

    Args:
        engine: Warm, and without requests.
        sessions: What each says, turn by turn.
        output: Tokens of each answer; nothing ends one before.
        loop: When sessions begin.

    Raises:
        Exception: what a step raised.
    """
    begin = time.perf_counter()
    now = lambda: time.perf_counter() - begin
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    waiting = deque(zip(loop.due(len(sessions)), sessions, strict=True))
    live: dict[int, _Turn] = {}
    served: list[Served] = []
    calls: list[float] = []

    def send(session: tuple[Tokens, ...], number: int, arrival: float, history: Tokens = ()) -> None:
        request = engine.add_request(history + session[number], params)
        live[request] = _Turn(session, number, arrival, now())

    while waiting or live:
        while waiting and waiting[0][0] <= now():
            arrival, session = waiting.popleft()
            send(session, 0, arrival)
        if not live:
            time.sleep(max(0.0, waiting[0][0] - now()))
            continue
        start = now()
        outputs = engine.step()
        calls.append(now() - start)
        failed = next((out.error for out in outputs if out.error is not None), None)
        if failed is not None:
            raise failed
        for request in [request.id for request in engine.scheduler.running] + [out.request_id for out in outputs]:
            if live[request].admitted is None:
                live[request].admitted = start
        for out in outputs:
            turn = live.pop(out.request_id)
            served.append(_served(turn, out))
            if turn.number + 1 < len(turn.session):
                send(turn.session, turn.number + 1, now(), out.prompt_token_ids + out.token_ids)
            elif waiting and waiting[0][0] == math.inf:
                send(waiting.popleft()[1], 0, now())
    return Run(served, now(), calls)


def _served(turn: _Turn, output: RequestOutput) -> Served:
    assert turn.admitted is not None
    return Served(
        output.prompt_token_ids,
        output.token_ids,
        output.num_cached_tokens,
        turn.arrival,
        turn.admitted,
        tuple(turn.sent + t for t in output.token_times),
    )


def attainable(requests: Iterable[Served], block_size: int) -> list[int]:
    """Of each request, the most tokens that could have been cached when it was admitted.

    That is the largest boundary, at most its last token's, of a prefix that it shares with a request whose prefill had
    finished by then. Of those the prompts count, and once they are finished also the generated tokens whose states were
    computed: all but the last. Whether a cache would have kept that boundary is its own affair. Nothing here knows one: it
    is a tree of blocks, each with the time from which it is there.
    """
    requests = list(requests)
    children: dict[tuple[int, Tokens], int] = {}
    since: list[float] = []

    def blocks(tokens: Tokens) -> Iterator[Tokens]:
        return (tokens[end - block_size : end] for end in range(block_size, len(tokens) + 1, block_size))

    def add(tokens: Tokens, moment: float) -> None:
        node = -1
        for block in blocks(tokens):
            node = children.setdefault((node, block), len(since))
            if node == len(since):
                since.append(moment)
            since[node] = min(since[node], moment)

    for request in requests:
        add(request.prompt, request.times[0])
        add(request.prompt + request.tokens[:-1], request.times[-1])

    def reach(request: Served) -> int:
        node, length = -1, 0
        for block in blocks(request.prompt[:-1]):
            node = children[node, block]
            if since[node] > request.admitted:
                break
            length += block_size
        return length

    return [reach(request) for request in requests]


def summary(run: Run, block_size: int) -> dict[str, Any]:
    """Latencies in milliseconds, rates, and how much of what was attainable the cache gave."""
    requests = run.requests
    wanted = attainable(requests, block_size)
    # What is published before its request's prefill is done is nobody's due: it makes up for nothing.
    reached = sum(min(request.cached, most) for request, most in zip(requests, wanted, strict=True))
    latencies = dict(
        ttft=[request.ttft for request in requests],
        tpot=[request.tpot for request in requests],
        itl=[gap for request in requests for gap in request.itl] or [0.0],
        e2e=[request.e2e for request in requests],
    )
    row: dict[str, Any] = {}
    for name, seconds in latencies.items():
        row[f"{name}_ms_mean"] = 1e3 * float(np.mean(seconds))
        row |= {f"{name}_ms_p{p}": 1e3 * float(np.percentile(seconds, p)) for p in (50, 99)}
    return row | {
        "output_tokens_per_s": sum(len(request.tokens) for request in requests) / run.seconds,
        "requests_per_s": len(requests) / run.seconds,
        "seconds": run.seconds,
        "step_ms_mean": 1e3 * float(np.mean(run.calls)),
        "step_ms_max": 1e3 * max(run.calls),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "cached_tokens": sum(request.cached for request in requests),
        "attainable_tokens": sum(wanted),
        "hit_rate_of_attainable": reached / max(sum(wanted), 1),
    }
