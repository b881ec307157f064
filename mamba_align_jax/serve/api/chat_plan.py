"""Reads a chat: its prompt, what it asks for, and the requests that answer it."""

from dataclasses import replace
from typing import NamedTuple

from mamba_align_jax import _values as values
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.running.admission import NUM_SEEDS
from mamba_align_jax.serve.api.checkpoints import ChatPrompt
from mamba_align_jax.serve.api.completions import take_stream
from mamba_align_jax.serve.api.field_table import CHAT, fields_at
from mamba_align_jax.serve.api.fields import Fields
from mamba_align_jax.serve.api.form import Streaming
from mamba_align_jax.serve.api.generation import Asked
from mamba_align_jax.serve.api.messages import take_prompt
from mamba_align_jax.serve.api.replies import Reply, ReplyForm, take_reply_form
from mamba_align_jax.serve.api.sampling import make_params, take_grammar, take_sampling
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.keys import cache_salt
from mamba_align_jax.serve.refusals import Refusal

_FIELDS = fields_at(CHAT)


class ReadChat(NamedTuple):
    """A chat that was read. Nothing has been drawn or rendered for its requests yet.

    Attributes:
        prompt: The prompt.
        form: How the model writes its replies.
        params: How each choice is sampled, but for its seed.
        n: The number of choices.
        streaming: What a stream has; None if the answer is no stream.
        has_seed: Whether the caller gave a seed.
        with_ids: Whether token ids are reported.
        with_logprobs: Whether log-probabilities are.
        grammar_field: The field that the replies' grammar comes from, if they have one.
    """

    prompt: ChatPrompt
    form: ReplyForm
    params: SamplingParams
    n: int
    streaming: Streaming | None
    has_seed: bool
    with_ids: bool
    with_logprobs: bool
    grammar_field: str


class ChatPlan(NamedTuple):
    """What answers a chat.

    Attributes:
        asked: The requests, one for each choice.
        n: The number of choices.
        streaming: What a stream has; None if the answer is no stream.
        replies: The choices' replies, which have not begun.
        with_ids: Whether token ids are reported.
        with_logprobs: Whether log-probabilities are.
        grammar_field: The field that the replies' grammar comes from, if they have one.
    """

    asked: list[Asked]
    n: int
    streaming: Streaming | None
    replies: list[Reply]
    with_ids: bool
    with_logprobs: bool
    grammar_field: str


async def plan_chat(service: Service, key: bytes | None, fields: Fields) -> ChatPlan:
    """Takes a chat's fields, but for the model, and returns what is to run. It raises what `read_chat` raises."""
    chat = await read_chat(service, key, fields)
    params = replace(chat.params, checkpoint_at=await service.checkpoint_offsets(chat.prompt))
    asked = service.choices_of([chat.prompt.tokens], params, chat.n, has_seed=chat.has_seed)
    begun = [chat.form.begin(service, params) for _ in range(chat.n)]
    return ChatPlan(asked, chat.n, chat.streaming, begun, chat.with_ids, chat.with_logprobs, chat.grammar_field)


async def read_chat(service: Service, key: bytes | None, fields: Fields) -> ReadChat:
    """Takes a chat's fields, but for the model.

    Raises:
        Refusal: The call is malformed, asks for too much, or can't be run.
    """
    limits = service.settings.limits
    prompt = await take_prompt(service, fields)
    tokens, form = prompt.tokens, take_reply_form(service, fields, prompt)
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
    grammar = await form.grammar(service, response)
    if grammar is not None:
        grammar_field = "tools" if response is None else grammar_field
        await service.check_grammar(grammar, grammar_field)
        found["grammar"] = grammar
    if form.needs_special_tokens:
        found["skip_special_tokens"] = False
    if top_logprobs is not None and not with_logprobs:
        raise Refusal(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    has_seed = "seed" in found
    found |= {"seed": found.get("seed", 0) % NUM_SEEDS, "cache_salt": cache_salt(key, salt)}
    if with_logprobs:
        found["logprobs"] = top_logprobs or 0
    service.check_length(len(tokens), 1, "messages")
    # Without a limit an answer may be as long as the model and its authors' defaults allow.
    limit, left = old_max_tokens if max_tokens is None else max_tokens, service.max_model_len - len(tokens)
    params = make_params(found | {"max_tokens": limit or min(left, found.get("max_tokens", left))})
    service.check_length(len(tokens), params.max_tokens, "messages")
    return ReadChat(prompt, form, params, n, streaming, has_seed, with_ids, with_logprobs, grammar_field)
