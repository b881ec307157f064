"""Answers a call: runs its requests, and writes what they generate in the form of an endpoint, in one piece or as events."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from mamba_align_jax.engine.scheduling.request import RequestOutput, RequestUpdate
from mamba_align_jax.serve.api.generation import Asked, Choice, run_requests, usage
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.limits.clients import Event, EventStream, too_long, while_connected
from mamba_align_jax.serve.long_answers import SlicedResponse, json_slices

# The number of tokens of an answer that is written quickly: with all log-probabilities, and without any.
_LONG_WITH_SCORES, _LONG = 256, 4096


class Streaming(NamedTuple):
    """What a stream has besides the updates: the usage in an event at its end, and so far in every event."""

    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, kw_only=True)
class Form:
    """How an endpoint writes the answer to one call. Choices and events are JSON values.

    Attributes:
        prefix: What the names of calls begin with.
        whole_kind: The kind of an answer in one piece.
        event_kind: The kind of an event.
        named: Whether events have names: see `EventStream`.
        service: The service.
        grammar_field: The field of the call that the replies' grammar comes from, if they have one.
        with_ids: Whether token ids are reported.
        id: The call's name, without the prefix.
        created: When it came, in seconds since 1970.
    """

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    event_kind: ClassVar[str]
    named: ClassVar[bool] = False
    service: Service
    grammar_field: str
    with_ids: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, place: int, choice: Choice) -> dict[str, Any]:
        """Returns the choice in place `place` of an answer that is complete, for `json_slices`."""
        raise NotImplementedError

    def opening(self, place: int, choice: Choice) -> dict[str, Any] | None:
        """Returns the event with which a choice begins, for `json_slices`, or None.

        `Choice.count` was called with the first update.
        """
        raise NotImplementedError

    def update(self, place: int, update: RequestUpdate) -> dict[str, Any]:
        """Returns the event for an update of a choice."""
        raise NotImplementedError

    def read(self, place: int, update: RequestUpdate) -> None:
        """Takes note of an update of a choice that is answered in one piece."""

    def usage(self, choices: Sequence[Choice], num_tokens: int, n: int) -> dict[str, Any]:
        """Returns what the call has used so far, of which `num_tokens` were generated."""
        return usage(choices, num_tokens, n)

    def choice(
        self, place: int, content: Mapping[str, Any], output: RequestOutput | None, tokens: Sequence[int]
    ) -> dict[str, Any]:
        """Returns a choice with this content, why it has ended, and perhaps the ids of tokens."""
        ending = {name: output and getattr(output, name) for name in ("finish_reason", "stop_reason")}
        return {"index": place, **content, **ending} | ({"token_ids": list(tokens)} if self.with_ids else {})

    def _object(self, kind: str, choices: Iterable[dict[str, Any]]) -> dict[str, Any]:
        name, model = self.prefix + self.id, self.service.settings.model_name
        return dict(id=name, object=kind, created=self.created, model=model, choices=choices)

    def run(self, asked: Sequence[Asked]) -> AsyncGenerator[tuple[int, RequestUpdate], None]:
        """Runs a call's requests: see `run_requests`."""
        return run_requests(self.service.serving, self.service.metrics, asked, self.grammar_field)

    async def answer(
        self, request: Request, asked: Sequence[Asked], n: int, streaming: Streaming | None
    ) -> Response | EventStream:
        """Runs a call's requests and returns the answer to it, in one piece if `streaming` is None, or else as events.

        The call is refused if the engine doesn't take the requests, or one fails, or they take too long. ClientLeft says
        that the client has left.
        """
        service, limit = self.service, self.service.settings.limits.call_s
        if streaming is not None:
            return EventStream(self.events(asked, n, streaming), limit, service.metrics.refused, named=self.named)
        choices = [Choice(prompt) for prompt, _ in asked]

        async def gather() -> None:
            try:
                async with asyncio.timeout(limit):
                    async for place, update in self.run(asked):
                        choices[place].add(update)
                        self.read(place, update)
            except TimeoutError:
                raise too_long(limit) from None

        def write() -> list[bytes]:
            return [*json_slices(self.written(choices, num_tokens, n))]

        await while_connected(request.receive, gather())
        num_tokens = sum(len(choice.token_ids) for choice in choices)
        num_scores = sum(len(choice.logprobs) + len(choice.prompt_logprobs or ()) for choice in choices)
        # A long answer takes a while to write, in which other calls go on.
        if num_scores > _LONG_WITH_SCORES or num_tokens > _LONG:
            return SlicedResponse(await asyncio.to_thread(write))
        return SlicedResponse(write())

    def written(self, choices: Sequence[Choice], num_tokens: int, n: int) -> dict[str, Any]:
        """Returns an answer that is complete, of which `num_tokens` tokens were generated, for `json_slices`."""
        whole = self._object(self.whole_kind, (self.whole(*numbered) for numbered in enumerate(choices)))
        return whole | {"usage": self.usage(choices, num_tokens, n)}

    async def events(self, asked: Sequence[Asked], n: int, streaming: Streaming) -> AsyncGenerator[Event, None]:
        """Runs a call's requests, and yields the events of its answer."""
        choices = [Choice(prompt) for prompt, _ in asked]
        num_tokens, opened = 0, set[int]()

        def opening(place: int) -> list[bytes]:
            found = self.opening(place, choices[place])
            if found is None:
                return []
            whole = event(found, with_usage=streaming.continuous_usage)
            return [*json_slices(whole | {"choices": iter((found,))})]

        def event(*parts: dict[str, Any], with_usage: bool) -> dict[str, Any]:
            written = self._object(self.event_kind, parts)
            return written | {"usage": self.usage(choices, num_tokens, n)} if with_usage else written

        updates = self.run(asked)
        try:
            async for place, update in updates:
                num_tokens += len(update.token_ids)
                choices[place].count(update)
                if place not in opened:
                    opened.add(place)
                    is_long = len(choices[place].prompt_logprobs or ()) > _LONG_WITH_SCORES
                    slices = await asyncio.to_thread(opening, place) if is_long else opening(place)
                    if slices:
                        yield slices
                yield event(self.update(place, update), with_usage=streaming.continuous_usage)
            if streaming.include_usage:
                yield event(with_usage=True)
        finally:
            await updates.aclose()
