"""The endpoint /v1/chat/completions: answers the last message of a conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mamba_align_jax import _values as values
from mamba_align_jax.engine.scheduling.request import RequestUpdate, TokenLogprobs
from mamba_align_jax.serve.api.completions import take_stream
from mamba_align_jax.serve.api.field_table import CHAT, fields_at
from mamba_align_jax.serve.api.form import Form
from mamba_align_jax.serve.api.generation import Choice
from mamba_align_jax.serve.api.messages import take_prompt
from mamba_align_jax.serve.api.replies import Reply, take_reply_form
from mamba_align_jax.serve.api.sampling import make_params, take_grammar, take_sampling
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.keys import cache_salt
from mamba_align_jax.serve.limits.clients import EventStream
from mamba_align_jax.serve.refusals import Refusal

_FIELDS = fields_at(CHAT)


async def chat(service: Service, request: Request) -> Response | EventStream:
    """Answers a call, or raises a Refusal if it is malformed, asks for too much, or can't be run."""
    limits = service.settings.limits
    key, fields = await service.read(request)
    prompt = await take_prompt(service, fields)
    tokens, replies = prompt.tokens, take_reply_form(service, fields, prompt)
    n = fields.take("n", values.integer, 1, limits.choices) or 1
    service.check_count(n)
    streaming = take_stream(fields)
    with_logprobs = fields.take("logprobs", values.flag) or False
    top_logprobs = fields.take("top_logprobs", values.integer, 0, limits.logprobs)
    max_tokens = fields.take("max_completion_tokens", values.integer, 1)
    old_max_tokens = fields.take("max_tokens", values.integer, 1)
    with_ids = fields.take("return_token_ids", values.flag) or False
    salt = fields.take("cache_salt", values.text) or ""
    found = take_sampling(fields, service.settings)
    grammar_field, response = take_grammar(fields, limits)
    fields.end(_FIELDS)
    grammar = await replies.grammar(service, response)
    if grammar is not None:
        await service.check_grammar(grammar, "tools" if response is None else grammar_field)
        found["grammar"] = grammar
    if replies.needs_special_tokens:
        found["skip_special_tokens"] = False
    if top_logprobs is not None and not with_logprobs:
        raise Refusal(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    found |= {"seed": service.take_seed(found), "cache_salt": cache_salt(key, salt)}
    if with_logprobs:
        found["logprobs"] = top_logprobs or 0
    service.check_length(len(tokens), 1, "messages")
    found["checkpoint_at"] = await service.checkpoint_offsets(prompt)
    # Without a limit an answer may be as long as the model and its authors' defaults allow.
    limit, left = old_max_tokens if max_tokens is None else max_tokens, service.max_model_len - len(tokens)
    params = make_params(found | {"max_tokens": limit or min(left, found.get("max_tokens", left))})
    service.check_length(len(tokens), params.max_tokens, "messages")
    asked = service.choices_of([tokens], params, n)
    begun = [replies.begin(service, params) for _ in range(n)]
    form = _ChatForm(service=service, with_ids=with_ids, with_logprobs=with_logprobs, replies=begun)
    return await form.answer(request, asked, n, streaming)


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
        scores = [self._logprobs(one) for one in said.logprobs or ()] if self.with_logprobs else []
        logprobs = {"content": scores} if scores else None
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
