"""The endpoint /v1/completions: continues texts or tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mamba_align_jax import _values as values
from mamba_align_jax.engine.scheduling.request import RequestUpdate, TokenLogprobs
from mamba_align_jax.serve.api.field_table import COMPLETIONS, fields_at
from mamba_align_jax.serve.api.fields import Fields
from mamba_align_jax.serve.api.form import Form, Streaming
from mamba_align_jax.serve.api.generation import Choice
from mamba_align_jax.serve.api.offsets import TextOffsets
from mamba_align_jax.serve.api.sampling import make_params, take_grammar, take_sampling
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.keys import cache_salt
from mamba_align_jax.serve.limits.clients import EventStream
from mamba_align_jax.serve.refusals import Refusal

Prompt = str | tuple[int, ...]

_FIELDS = fields_at(COMPLETIONS)


async def complete(service: Service, request: Request) -> Response | EventStream:
    """Answers a call, or raises a Refusal if it is malformed, asks for too much, or can't be run."""
    limits = service.settings.limits
    key, fields = await service.read(request)
    prompts = await fields.aside(fields.need, "prompt", _prompts, service)
    n = fields.take("n", values.integer, 1, limits.choices) or 1
    service.check_count(n * len(prompts))
    streaming = take_stream(fields)
    echo = fields.take("echo", values.flag) or False
    logprobs = fields.take("logprobs", values.integer, 0, limits.logprobs)
    max_tokens = fields.take("max_tokens", values.integer, 0)
    with_ids = fields.take("return_token_ids", values.flag) or False
    salt = fields.take("cache_salt", values.text) or ""
    special = fields.take("add_special_tokens", values.flag) is not False
    fields.refuse("best_of", (1, n), "must be 1 or n: all choices are answers")
    found = take_sampling(fields, service.settings)
    grammar_field, grammar = take_grammar(fields, limits)
    fields.end(_FIELDS)
    if grammar is not None:
        found["grammar"] = grammar
        await service.check_grammar(grammar, grammar_field)
    has_seed = "seed" in found
    found |= {"seed": service.take_seed(found), "cache_salt": cache_salt(key, salt)}
    if logprobs is not None:
        found["logprobs"] = logprobs
        if echo:
            found["prompt_logprobs"] = logprobs
    tokens = [
        one if isinstance(one, tuple) else await service.encode(one, "prompt", add_special_tokens=special)
        for one in prompts
    ]
    if max_tokens is None:
        left = service.max_model_len - max(map(len, tokens))
        max_tokens = max(1, min(16, left, found.get("max_tokens", left)))
    for one in tokens:
        service.check_length(len(one), max_tokens, "prompt")
    asked = service.choices_of(tokens, make_params(found | {"max_tokens": max_tokens}), n, has_seed=has_seed)
    echoed = [text for one in prompts for text in n * [await _text(service, one)]] if echo else None
    shown = [("", 0)] * len(asked) if echoed is None else [*zip(echoed, (len(one) for one, _ in asked), strict=True)]
    skips = found.get("skip_special_tokens", True)
    starts = [TextOffsets(service, *one, skip_special_tokens=skips) for one in shown]
    offsets = starts if logprobs is not None else None
    form = _CompletionForm(
        service=service, grammar_field=grammar_field, with_ids=with_ids, echoed=echoed, offsets=offsets
    )
    return await form.answer(request, asked, n, streaming)


def take_stream(fields: Fields) -> Streaming | None:
    """Takes `stream` and `stream_options`. Returns what a stream has, or None if the answer is no stream.

    Options for a stream that is not asked for are refused.
    """
    stream = fields.take("stream", values.flag) or False
    options = fields.take("stream_options", Fields)
    if options is None:
        return Streaming() if stream else None
    include_usage = options.take("include_usage", values.flag) or False
    continuous = options.take("continuous_usage_stats", values.flag) or False
    options.refuse("include_obfuscation", (False,), "is not supported")
    options.end()
    if not stream:
        raise Refusal(400, "stream_options needs stream to be true", param="stream_options")
    return Streaming(include_usage, include_usage and continuous)


def _prompts(name: str, value: Any, service: Service) -> list[Prompt]:
    limits = service.settings.limits
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = value if several else [value]
    values.require(len(prompts) <= limits.prompts, name, f"at most {limits.prompts} prompts", len(prompts))
    wanted = "a string, a list of token ids, or a list of strings or of lists of token ids; none of them empty"
    for one in prompts:
        values.require(isinstance(one, str | list) and len(one) > 0, name, wanted, one)
    return [text_or_tokens(name, one, service) for one in prompts]


def text_or_tokens(name: str, value: object, service: Service) -> Prompt:
    """Returns a prompt, of which only its length is looked at if it is too long."""
    if isinstance(value, list):
        service.check_length(len(value), 0, name)
    return values.text(name, value) if isinstance(value, str) else values.integers(name, value)


async def _text(service: Service, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else await service.decode(prompt, "prompt")


@dataclass(frozen=True, kw_only=True)
class _CompletionForm(Form):
    """How /v1/completions writes answers.

    Attributes:
        echoed: The prompts' texts, one for each choice, if choices begin with them.
        offsets: For each choice, where its next token begins, if log-probabilities are reported.
    """

    prefix, whole_kind, event_kind = "cmpl-", "text_completion", "text_completion"
    echoed: Sequence[str] | None
    offsets: Sequence[TextOffsets] | None

    def whole(self, place: int, choice: Choice) -> dict[str, Any]:
        text, tokens, logprobs = choice.text, choice.token_ids, choice.logprobs
        if self.echoed is not None:
            text = self.echoed[place] + text
            tokens, logprobs = [*choice.prompt, *tokens], [*(choice.prompt_logprobs or ()), *logprobs]
        content = self._content(place, text, tokens, logprobs)
        return self.choice(place, content, choice.output, choice.token_ids)

    def opening(self, place: int, choice: Choice) -> dict[str, Any] | None:
        if self.echoed is None:
            return None
        content = self._content(place, self.echoed[place], choice.prompt, choice.prompt_logprobs)
        return self.choice(place, content, None, ())

    def update(self, place: int, update: RequestUpdate) -> dict[str, Any]:
        content = self._content(place, update.text or "", update.token_ids, update.logprobs)
        found = content["logprobs"]
        content["logprobs"] = found and {name: list(made) for name, made in found.items()}
        return self.choice(place, content, update.output, update.token_ids)

    def _content(
        self, place: int, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None
    ) -> dict[str, Any]:
        found = None if self.offsets is None else self._logprobs(self.offsets[place], tokens, logprobs or ())
        return {"text": text, "logprobs": found}

    def _logprobs(
        self, offsets: TextOffsets, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """Returns the log-probabilities of tokens. The lists are iterators, which are made while an answer is written."""
        service = self.service
        return {
            "tokens": map(service.token_name, tokens),
            "token_logprobs": (None if one is None else service.logprob(one.logprob) for one in logprobs),
            "top_logprobs": (None if one is None else self._top(one) for one in logprobs),
            "text_offset": map(offsets.add, tokens),
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        # The token itself is always among them.
        pairs = (*one.top, (one.token_id, one.logprob))
        return {self.service.token_name(token): self.service.logprob(value) for token, value in pairs}
