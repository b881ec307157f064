"""What all calls of one server share: the engine, the model's words, the keys and the metrics."""

import asyncio
import copy
import functools
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Self

from starlette.requests import Request

from mamba_align_jax import _values as values
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.grammar import Grammar
from mamba_align_jax.engine.interrupts import contained
from mamba_align_jax.engine.running.admission import NUM_SEEDS, seeded, with_seed, with_tenant
from mamba_align_jax.engine.running.async_engine import AsyncEngine
from mamba_align_jax.engine.text.chat_template import ChatTemplate
from mamba_align_jax.engine.text.generated_text import BROKEN
from mamba_align_jax.engine.text.tokenizer import Tokenizer
from mamba_align_jax.errors import FieldError, WorkerLostError
from mamba_align_jax.serve.api.checkpoints import Beginnings, ChatCheckpoints, ChatPrompt
from mamba_align_jax.serve.api.fields import Fields, read_fields
from mamba_align_jax.serve.api.generation import Asked, stopped
from mamba_align_jax.serve.keys import Keys
from mamba_align_jax.serve.limits.grammars import GrammarCheck, special_tokens_of
from mamba_align_jax.serve.limits.one_at_a_time import OneAtATime
from mamba_align_jax.serve.metrics import Metrics
from mamba_align_jax.serve.refusals import Refusal, overloaded
from mamba_align_jax.serve.replies.forms import REASONING_FORMS, TOOL_FORMS, reasoning_form_of, tool_form_of
from mamba_align_jax.serve.settings import Settings

# Chats that may wait to be rendered, long texts and bodies to be read, and grammars to be checked.
_MAX_WAITING = 64
# The number of characters of a text that is read quickly.
_LONG_TEXT = 2**16
# As vLLM writes the logarithm of 0.
_LEAST_LOGPROB = -9999.0


class Service:
    """What all calls of one server share. Its methods raise a `Refusal` where they refuse a call.

    Attributes:
        tenant: Whose call it is that has this service: see `of`.
    """

    tenant = ""

    def __init__(self, serving: AsyncEngine, settings: Settings, template: ChatTemplate | None) -> None:
        """Makes the service of an engine. `template` writes chats as text; None refuses them."""
        self.serving, self.settings, self.template = serving, settings, template
        source = template.source if template is not None else ""
        tools, reasoning = settings.tool_call_parser, settings.reasoning_parser
        self.tool_form = TOOL_FORMS.get((tool_form_of(source) or "none") if tools == "auto" else tools)
        found = reasoning_form_of(source) or "none"
        self.reasoning_form = REASONING_FORMS.get(found if reasoning == "auto" else reasoning)
        self.max_model_len = serving.engine.longest_sequence
        self.names = (settings.model_name, *settings.model_aliases)
        self._new_seed = secrets.randbelow if settings.seed is None else random.Random(settings.seed).randrange
        self.keys = Keys(settings.api_keys)
        self.administrators = Keys(settings.admin_keys) if settings.admin_keys else None
        self.metrics = Metrics(serving.engine, settings.model_name)
        self._rendering, self._reading, self._compiling = (OneAtATime(_MAX_WAITING) for _ in range(3))
        self._special_tokens = functools.cache(lambda: special_tokens_of(serving.engine.tokenizer))
        self._bodies = OneAtATime(_MAX_WAITING)
        self._grammars = GrammarCheck(settings.limits.grammar_s, self._special_tokens)
        self._beginnings: Beginnings = OrderedDict()
        self.is_ready, self.is_stopping, self.started = False, False, int(time.time())
        self.has_failed_to_compile = False
        # A token's text never changes.
        self.token_text = functools.lru_cache(maxsize=2**16)(self._token_text)

    def of(self, request: Request) -> Self:
        """Returns the service as one call has it: what the call asks for waits in its tenant's line.

        A tenant is a key, or the address of a peer where no client needs a key.
        """
        one = copy.copy(self)
        one.tenant = self.keys.tenant(request.headers) or (request.client.host if request.client else "")
        return one

    def check_alive(self) -> None:
        """Refuses calls if the engine has stopped or was stopped, or its programs could not be compiled."""
        if not self.serving.is_running:
            raise stopped(self.serving)
        if self.has_failed_to_compile:
            raise Refusal(503, "the engine's programs could not be compiled", code="engine_dead")

    def check_ready(self) -> None:
        """Refuses calls while the programs are being compiled, and where `check_alive` does."""
        self.check_alive()
        if not self.is_ready:
            raise overloaded("the server is compiling its programs; /ready says when it is done")

    async def read(self, request: Request) -> tuple[bytes | None, Fields]:
        """Reads a call, and returns its key and the fields of its body but for the model.

        A call is refused whose key is wrong, whose body is malformed, whose model is another one, or that comes too
        early.
        """
        key = self.keys.check(request.headers)
        self.check_ready()
        fields = await read_fields(request, self.settings.limits, functools.partial(self._bodies.run, self.tenant))
        model = fields.take("model", values.text)
        if model is not None:
            self.check_model(model)
        return key, fields

    def check_model(self, name: str) -> None:
        """Refuses a call that means another model than the one that is served."""
        if name not in self.names:
            message = f"the model {name[:80]!r} does not exist: this server has {', '.join(map(repr, self.names))}"
            raise Refusal(404, message, param="model", code="model_not_found")

    def tokenizer(self, param: str) -> Tokenizer:
        """Returns the engine's tokenizer, or refuses the call if there is none: the field `param` can't be text then."""
        if self.serving.engine.tokenizer is None:
            message = f"{param} must be token ids: the model has no tokenizer"
            raise Refusal(400, message, param=param, code="no_tokenizer")
        return self.serving.engine.tokenizer

    async def encode(self, text: str, param: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Returns a text's tokens, if the model has a tokenizer and could take them. Other calls go on meanwhile."""
        tokenizer = self.tokenizer(param)
        longest = getattr(tokenizer, "longest_token", None)
        if longest is not None and len(text) > longest * self.max_model_len:
            message = (
                f"{param} must fit in {self.max_model_len} tokens of at most {longest} characters each, "
                f"got {len(text)} characters"
            )
            raise Refusal(400, message, param=param, code="context_length_exceeded")
        encode = functools.partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        if len(text) > _LONG_TEXT:
            # A few long texts would otherwise take all threads for seconds, and short ones would wait for them.
            return await self._reading.run(self.tenant, encode)
        return await asyncio.to_thread(contained(encode))

    async def decode(self, tokens: Sequence[int], param: str) -> str:
        """Returns the text of tokens, special ones too, if the model has a tokenizer. Other calls go on meanwhile."""
        decode = contained(self.tokenizer(param).decode)
        return await asyncio.to_thread(decode, tokens, skip_special_tokens=False)

    async def chat_text(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Returns the text of a chat. A call is refused if there is no template, or if `ChatTemplate.render` refuses it."""
        template = self.template
        if template is None:
            message = "the model has no chat template: use /v1/completions"
            raise Refusal(400, message, param="messages", code="no_chat_template")
        render = functools.partial(template.render, messages, add_generation_prompt=add_generation_prompt, **variables)
        try:
            return await self._rendering.run(self.tenant, render)
        except WorkerLostError as error:
            raise overloaded(str(error)) from error
        except ValueError as error:
            raise Refusal(400, str(error), param="messages", code="chat_template") from error

    async def special_tokens(self) -> Sequence[str]:
        """Returns the names of the tokenizer's special tokens. Other calls go on meanwhile."""
        return await asyncio.to_thread(self._special_tokens)

    async def checkpoint_offsets(self, prompt: ChatPrompt) -> tuple[int, ...]:
        """Returns the offsets into a chat's prompt at which states should stay cached: see `ChatCheckpoints`."""
        if self.serving.engine.config.prefix_cache == "none":
            return ()
        render = lambda messages, variables: self.chat_text(messages, True, variables)
        encode = functools.partial(self.encode, param="messages", add_special_tokens=False)
        return await ChatCheckpoints(render, encode, self._beginnings).offsets(prompt)

    async def check_grammar(self, grammar: Grammar, param: str) -> None:
        """Refuses a call whose grammar, which the field `param` asks for, doesn't compile quickly."""
        try:
            await self._compiling.run(self.tenant, self._grammars.check, grammar)
        except WorkerLostError as error:
            raise overloaded(str(error)) from error
        except FieldError as error:
            raise Refusal(400, str(error.renamed(param)), param=param, code="grammar") from error

    def _token_text(self, token: int) -> str:
        """Returns the text of a token as far as it has one of its own; without a tokenizer, nothing.

        It is the text that the token has within a longer one. Many tokenizers take the space from a text's first word.
        """
        tokenizer = self.serving.engine.tokenizer
        if tokenizer is None:
            return ""
        once, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
        return twice[len(once) :] if twice.startswith(once) else once

    def special_text(self, token: int) -> str:
        """Returns the text of a special token, which generated texts leave out; without a tokenizer, nothing."""
        tokenizer = self.serving.engine.tokenizer
        return tokenizer.decode([token], skip_special_tokens=False) if tokenizer is not None else ""

    def _whole_text(self, token: int) -> str | None:
        """Returns a token's text if that is whole characters."""
        text = self.token_text(token) or self.special_text(token)
        return text if text and BROKEN not in text else None

    def token_name(self, token: int) -> str:
        """Returns a token's text, or its number if the text is no whole characters, so that names differ."""
        text = self._whole_text(token)
        return f"token_id:{token}" if text is None else text

    def token_bytes(self, token: int) -> list[int] | None:
        """Returns the bytes of a token's text; None if they aren't known, because they are no whole characters."""
        text = self._whole_text(token)
        return None if text is None else list(text.encode())

    def logprob(self, value: float) -> float:
        """Returns a log-probability as JSON can write it, which has no infinity."""
        return max(value, _LEAST_LOGPROB)

    def check_length(self, num_tokens: int, max_tokens: int, param: str) -> None:
        """Refuses a call if the prompt that a field has made has no tokens, or does not fit in the model with its answer."""
        if num_tokens == 0:
            raise Refusal(400, f"{param} must make a prompt of at least one token, got none", param=param)
        limit = self.max_model_len
        if num_tokens + max_tokens > limit:
            message = (
                f"{param} and the largest number of generated tokens must fit in {limit} tokens, "
                f"got {num_tokens} + {max_tokens}"
            )
            raise Refusal(400, message, param=param, code="context_length_exceeded")

    def check_count(self, count: int) -> None:
        """Refuses a call whose requests the queue can't hold, before any work is done for them.

        To try again would not help: all are queued before one can run.
        """
        room = self.serving.engine.config.max_waiting
        if room is not None and count > room:
            raise Refusal(400, f"n times the number of prompts must be at most {room}, got {count}", param="n")

    def choices_of(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, *, has_seed: bool = True
    ) -> list[Asked]:
        """Returns the requests for n choices to each prompt: the seed is the next number for each choice.

        Without a seed of the caller's, each prompt has one of its own, so that equal prompts get different answers.
        """
        params = with_tenant(params, self.tenant)
        first = lambda: params if has_seed else with_seed(params, self._new_seed(NUM_SEEDS))
        return [(prompt, one) for prompt in prompts for one in seeded(first(), n)]

    def take_seed(self, found: Mapping[str, Any]) -> int:
        """Returns a call's seed, which may be any whole number; without one, a new one: see `Settings.seed`."""
        seed = found.get("seed")
        return (self._new_seed(NUM_SEEDS) if seed is None else seed) % NUM_SEEDS
