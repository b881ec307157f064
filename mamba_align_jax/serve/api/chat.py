"""The endpoint /v1/chat/completions: answers the last message of a conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mamba_align_jax.engine.scheduling.request import RequestUpdate, TokenLogprobs
from mamba_align_jax.serve.api.chat_plan import plan_chat
from mamba_align_jax.serve.api.form import Form
from mamba_align_jax.serve.api.generation import Choice
from mamba_align_jax.serve.api.replies import Reply
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.limits.clients import EventStream


async def chat(service: Service, request: Request) -> Response | EventStream:
    """Answers a call, or raises a Refusal if it is malformed, asks for too much, or can't be run."""
    key, fields = await service.read(request)
    plan = await plan_chat(service, key, fields)
    form = _ChatForm(
        service=service,
        grammar_field=plan.grammar_field,
        with_ids=plan.with_ids,
        with_logprobs=plan.with_logprobs,
        replies=plan.replies,
    )
    return await form.answer(request, plan.asked, plan.n, plan.streaming)


@dataclass(frozen=True, kw_only=True)
class _ChatForm(Form):
    """How /v1/chat/completions writes answers, with log-probabilities if `with_logprobs` is true.

    Attributes:
        replies: The choices' replies, as far as they have come.
    """

    prefix, whole_kind, event_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    with_logprobs: bool
    replies: Sequence[Reply]

    def read(self, place: int, update: RequestUpdate) -> None:
        self.replies[place].add(update)

    def usage(self, choices: Sequence[Choice], num_tokens: int, n: int) -> dict[str, Any]:
        details = {"reasoning_tokens": sum(reply.num_reasoning_tokens for reply in self.replies)}
        return super().usage(choices, num_tokens, n) | {"completion_tokens_details": details}

    def whole(self, place: int, choice: Choice) -> dict[str, Any]:
        return self._choice(place, dict(message=self.replies[place].message), choice)

    def opening(self, place: int, choice: Choice) -> dict[str, Any] | None:
        delta = dict(role="assistant", content="")
        return self.choice(place, dict(delta=delta, logprobs=None), None, ())

    def update(self, place: int, update: RequestUpdate) -> dict[str, Any]:
        return self._choice(place, dict(delta=self.replies[place].add(update)), update)

    def _choice(self, place: int, content: Mapping[str, Any], said: Choice | RequestUpdate) -> dict[str, Any]:
        logprobs = None
        if self.with_logprobs and said.logprobs:
            scores = map(self._logprobs, said.logprobs)
            # A whole answer may have many log-probabilities, so they are made while it is written.
            logprobs = {"content": scores if isinstance(said, Choice) else list(scores)}
        written = self.choice(place, {**content, "logprobs": logprobs}, said.output, said.token_ids)
        if written["finish_reason"] == "stop" and self.replies[place].has_calls:
            written["finish_reason"] = "tool_calls"
        return written

    def _logprobs(self, one: TokenLogprobs) -> dict[str, Any]:
        tops = [self._token(token, value) for token, value in one.top]
        return self._token(one.token_id, one.logprob) | {"top_logprobs": tops}

    def _token(self, token: int, value: float) -> dict[str, Any]:
        service = self.service
        name, whole = service.token_name(token), service.token_bytes(token)
        return {"token": name, "logprob": service.logprob(value), "bytes": whole}
