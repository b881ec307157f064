"""Says what a run measured: latencies, rates, and how much the prefix cache returned of what it could have."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mamba_align_jax import _values as values
from mamba_align_jax.load.client import Run, Served
from mamba_align_jax.load.workloads import Tokens

Row = dict[str, Any]


def attainable(requests: Iterable[Served], block_size: int) -> list[int]:
    """For each request, the largest number of prompt tokens that could have been cached when it was admitted.

    That is the largest multiple of `block_size` that lies within a prefix shared with an earlier request and leaves at
    least the prompt's last token to compute. A request's prompt can be shared once its prefill has finished. Once the
    request has finished, its generated tokens can be shared as well, except the last, whose state was never computed.
    The number does not depend on what the engine's cache kept. It comes from a tree of blocks that knows when each
    block became available.
    """
    requests, block_size = list(requests), values.integer("block_size", block_size, 1)
    children: dict[tuple[int, Tokens], int] = {}
    available_at: list[float] = []

    def blocks(tokens: Tokens) -> Iterator[Tokens]:
        return (tokens[end - block_size : end] for end in range(block_size, len(tokens) + 1, block_size))

    def add(tokens: Tokens, moment: float) -> None:
        node = -1
        for block in blocks(tokens):
            node = children.setdefault((node, block), len(available_at))
            if node == len(available_at):
                available_at.append(moment)
            available_at[node] = min(available_at[node], moment)

    for request in requests:
        add(request.prompt, request.times[0])
        add(request.prompt + request.tokens[:-1], request.times[-1])

    def reach(request: Served) -> int:
        node, length = -1, 0
        for block in blocks(request.prompt[:-1]):
            node = children[node, block]
            if available_at[node] > request.admitted:
                break
            length += block_size
        return length

    return [reach(request) for request in requests]


def summary(run: Run, block_size: int) -> Row:
    """A row of results: latencies in milliseconds, rates per second, and the share of attainable tokens that were hits."""
    requests = run.requests
    values.require(bool(requests), "run", "of at least one request", run)
    limits = attainable(requests, block_size)
    # A request can hit blocks that another one published before its own prefill ended. `attainable` does not count those
    # blocks, so they must not make up for other blocks that were missed.
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
