"""Runs the requests of one call, and gathers what they generate."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.running.async_engine import AsyncEngine
from mamba_align_jax.engine.scheduling.request import RequestOutput, RequestUpdate, TokenLogprobs
from mamba_align_jax.errors import EngineDeadError, GrammarError, QueueFullError
from mamba_align_jax.serve.api.sampling import wrong_value
from mamba_align_jax.serve.metrics import Metrics
from mamba_align_jax.serve.refusals import Refusal

T = TypeVar("T")
Asked = tuple[Sequence[int], SamplingParams]


async def run_requests(
    serving: AsyncEngine, metrics: Metrics, requests: Sequence[Asked], grammar_field: str
) -> AsyncGenerator[tuple[int, RequestUpdate], None]:
    """Runs requests side by side, and yields what is new of each with the request's place. Closing it aborts them.

    It raises a Refusal if the engine takes one of the requests not at all or not now, or if an exception ended one. That
    names `grammar_field`, a field of the call, if it is about the grammar.
    """
    called = time.perf_counter()
    known, begun = set[int](), set[int]()
    try:
        async with aclosing(_merged([serving.generate(*request) for request in requests])) as updates:
            async for place, update in updates:
                begins = bool(update.token_ids) and place not in begun
                metrics.updated(update, called, is_first=place not in known, has_first_token=begins)
                known.add(place)
                if begins:
                    begun.add(place)
                if update.output is not None:
                    _check_end(update.output, grammar_field)
                yield place, update
    except QueueFullError as error:
        raise Refusal(429, f"{error}; try again later", code="queue_full", headers={"retry-after": "1"}) from error
    except EngineDeadError as error:
        raise stopped(serving) from error
    except ValueError as error:
        raise wrong_value(error, grammar_field) from error


def stopped(serving: AsyncEngine) -> Refusal:
    """Returns the refusal of a call that comes when the engine takes no more: it is stopping, or it has failed."""
    if serving.error is None:
        return Refusal(503, "the server is stopping", code="stopping")
    return Refusal(503, "the engine has stopped", code="engine_dead")


def _check_end(output: RequestOutput, grammar_field: str) -> None:
    if isinstance(output.error, GrammarError):
        raise Refusal(400, str(output.error), param=grammar_field, code="grammar")
    if output.finish_reason == "error":
        # The text of an exception may tell of other requests, so it stays in the log.
        raise Refusal(500, "the engine failed while it ran this request", code="engine_error")
    if output.finish_reason == "abort":
        raise Refusal(503, "the server is stopping", code="stopping")


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields what several sources yield, as it comes, with the source's place. One item of each waits at most."""
    if len(sources) == 1:
        # Without a task for each item, which would take as long as all else that the server does for it.
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    waiting = {asyncio.ensure_future(_next(source)): place for place, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                for item in task.result():
                    waiting[asyncio.ensure_future(_next(sources[place]))] = place
                    yield place, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def _next(source: AsyncGenerator[T, None]) -> list[T]:
    """Returns the next item of a source, or nothing at its end."""
    async for item in source:
        return [item]
    return []


@dataclass
class Choice:
    """One answer to one prompt, as far as it is known.

    Attributes:
        prompt: The prompt's tokens.
        text: The generated text.
        token_ids: The generated tokens.
        logprobs: One entry for each of them, if they were asked for.
        prompt_logprobs: One entry for each token of the prompt, if they were asked for; None for the first token.
        num_cached_tokens: Number of prompt tokens that came from the cache.
        cache_miss: Why not more of them did: see `RequestOutput.cache_miss`.
        output: The request's output; None before its end.
    """

    prompt: Sequence[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    cache_miss: str | None = None
    output: RequestOutput | None = None

    def add(self, update: RequestUpdate) -> None:
        """Adds what is new."""
        self.text += update.text or ""
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs or ()
        self.count(update)

    def count(self, update: RequestUpdate) -> None:
        """Takes over what an update says of the request as a whole."""
        self.prompt_logprobs = update.prompt_logprobs or self.prompt_logprobs
        self.num_cached_tokens, self.cache_miss = update.num_cached_tokens, update.cache_miss
        self.output = update.output


def usage(choices: Sequence[Choice], num_completion_tokens: int, n: int) -> dict[str, Any]:
    """Returns what a call has used. Each prompt counts once, and its cached tokens are those of its first choice."""
    firsts = choices[::n]
    num_prompt_tokens = sum(len(choice.prompt) for choice in firsts)
    misses = [choice.cache_miss for choice in firsts]
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in firsts)},
        "cache_miss": misses[0] if len(misses) == 1 else misses,
    }
