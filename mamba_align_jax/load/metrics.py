"""Says what a run measured: latencies, rates, and how much the prefix cache returned of what it could have."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from mamba_align_jax import _values as values
from mamba_align_jax.load.client import Run, Served
from mamba_align_jax.load.workloads import Tokens

Row = dict[str, Any]
# Prompts are compared in pieces of so many tokens.
_PIECE = 64


def attainable(requests: Iterable[Served]) -> list[int]:
    """For each request, the largest number of prompt tokens that could have been cached when it was admitted.

    That is the longest prefix, in tokens, that it shares with an earlier request, and it leaves at least the prompt's last
    token to compute. A request's prompt can be shared once its prefill has finished. Once the request has finished, its
    generated tokens can be shared as well, except the last, whose state was never computed. The number depends neither on
    what the engine's cache kept nor on the size of its blocks. It comes from a tree of pieces of tokens that knows when each
    piece became available.
    """
    requests = list(requests)
    children: list[dict[Tokens, int]] = [{}]
    available_at = [-math.inf]

    def add(tokens: Tokens, moment: float) -> None:
        node = 0
        for start in range(0, len(tokens), _PIECE):
            piece = tokens[start : start + _PIECE]
            node = children[node].setdefault(piece, len(children))
            if node == len(children):
                children.append({})
                available_at.append(moment)
            available_at[node] = min(available_at[node], moment)

    for request in requests:
        add(request.prompt, request.times[0])
        add(request.prompt + request.tokens[:-1], request.times[-1])

    def reach(request: Served) -> int:
        node, prompt = 0, request.prompt[:-1]
        for start in range(0, len(prompt), _PIECE):
            piece = prompt[start : start + _PIECE]
            found = {other: at for other, at in children[node].items() if available_at[at] <= request.admitted}
            if len(piece) < _PIECE or piece not in found:
                return start + max((_shared(piece, other) for other in found), default=0)
            node = found[piece]
        return len(prompt)

    return [reach(request) for request in requests]


def _shared(first: Tokens, second: Tokens) -> int:
    """Returns the number of tokens that two sequences begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


def summary(run: Run) -> Row:
    """A row of results: latencies in milliseconds, rates per second, and the share of attainable tokens that were hits."""
    requests = run.requests
    values.require(bool(requests), "run", "of at least one request", run)
    limits = attainable(requests)
    # A request can hit what another one published before its own prefill ended. `attainable` does not count those tokens, so
    # they must not make up for others that were missed.
    reached = sum(min(request.num_cached_tokens, limit) for request, limit in zip(requests, limits, strict=True))
    latencies = dict(
        ttft=[request.ttft for request in requests],
        tpot=[request.tpot for request in requests],
        itl=[gap for request in requests for gap in request.itl] or [0.0],
        e2e=[request.e2e for request in requests],
    )
    row: Row = {}
    for name, seconds in latencies.items():
        row[f"{name}_ms_mean"] = 1e3 * float(np.mean(seconds))
        row |= {f"{name}_ms_p{p}": 1e3 * float(np.percentile(seconds, p)) for p in (50, 99)}
    # A server keeps the times of its steps to itself.
    if run.calls:
        row |= {"step_ms_mean": 1e3 * float(np.mean(run.calls)), "step_ms_max": 1e3 * max(run.calls)}
    return row | {
        "output_tokens_per_s": sum(len(request.tokens) for request in requests) / run.seconds,
        "requests_per_s": len(requests) / run.seconds,
        "seconds": run.seconds,
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "cached_tokens": sum(request.num_cached_tokens for request in requests),
        "attainable_tokens": sum(limits),
        "hit_rate_of_attainable": reached / max(sum(limits), 1),
    }
