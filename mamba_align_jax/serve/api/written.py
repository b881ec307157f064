"""Answers calls of the APIs whose replies are blocks, in one piece or as named events."""

import contextlib
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from mamba_align_jax.engine.scheduling.request import RequestUpdate
from mamba_align_jax.serve.api.chat_plan import ChatPlan
from mamba_align_jax.serve.api.form import Form, Streaming
from mamba_align_jax.serve.api.generation import Asked, Choice, usage
from mamba_align_jax.serve.api.replies import Reply
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.limits.clients import Event, EventStream
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.replies.parts import Part


class Writer(Protocol):
    """Writes one reply as it comes. What a call has used is given by the names of /v1/chat/completions."""

    def begin(self, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the events with which a stream begins."""

    def add(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        """Takes new parts of the reply, and returns the events for them."""

    def end(self, reason: str | None, stop: object, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the events with which a stream ends, given why the reply ended, and at which stop string or token."""

    def whole(self, reason: str | None, stop: object, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the reply in one piece, given what `end` is given."""


async def answer(
    service: Service,
    request: Request,
    plan: ChatPlan,
    writer: Writer,
    names: Mapping[str, str],
    *,
    streams: bool,
) -> Response | EventStream:
    """Runs a chat of one choice, and returns what the writer makes of its reply. It raises what `Form.answer` raises.

    `names` has the endpoint's names of a chat's fields that differ.
    """
    field = names.get(plan.grammar_field, plan.grammar_field)
    reply = plan.replies[0]
    form = _WrittenForm(service=service, grammar_field=field, with_ids=False, writer=writer, reply=reply)
    return await form.answer(request, plan.asked, plan.n, Streaming() if streams else None)


@contextlib.contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Gives a Refusal of a chat's field the endpoint's name of it: `names` has those that differ."""
    try:
        yield
    except Refusal as error:
        if error.param is not None:
            # A message and its parts have another place here.
            first = re.split(r"[.\[]", error.param, maxsplit=1)[0]
            error.param = names.get(first, first)
        raise


@dataclass(frozen=True, kw_only=True)
class _WrittenForm(Form):
    """How a writer's endpoint writes answers.

    Attributes:
        writer: Writes the reply.
        reply: The reply, as far as it has come.
    """

    prefix, whole_kind, event_kind, named = "", "", "", True
    writer: Writer
    reply: Reply

    def read(self, place: int, update: RequestUpdate) -> None:
        self.writer.add(self.reply.parts(update))

    def usage(self, choices: Sequence[Choice], num_tokens: int, n: int) -> dict[str, Any]:
        return usage(choices, num_tokens, n) | {
            "completion_tokens_details": {"reasoning_tokens": self.reply.num_reasoning_tokens}
        }

    def written(self, choices: Sequence[Choice], num_tokens: int, n: int) -> dict[str, Any]:
        output = choices[0].output
        assert output is not None
        return self.writer.whole(output.finish_reason, output.stop_reason, self.usage(choices, num_tokens, n))

    async def events(self, asked: Sequence[Asked], n: int, streaming: Streaming) -> AsyncGenerator[Event, None]:
        choice, num_tokens, has_begun = Choice(asked[0][0]), 0, False
        updates = self.run(asked)
        try:
            async for _, update in updates:
                num_tokens += len(update.token_ids)
                choice.count(update)
                parts = self.reply.parts(update)
                used = self.usage([choice], num_tokens, 1)
                events = [] if has_begun else self.writer.begin(used)
                has_begun = True
                events += self.writer.add(parts)
                if update.output is not None:
                    events += self.writer.end(update.output.finish_reason, update.output.stop_reason, used)
                for event in events:
                    yield event
        finally:
            await updates.aclose()
