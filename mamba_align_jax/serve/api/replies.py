"""Replies to a chat: the form in which the model writes them, and their answers, reasoning and tool calls, as they come."""

import bisect
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mamba_align_jax import _values as values
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.grammar import Grammar
from mamba_align_jax.engine.scheduling.request import RequestUpdate
from mamba_align_jax.serve.api.fields import Fields
from mamba_align_jax.serve.api.messages import ChatPrompt
from mamba_align_jax.serve.api.offsets import TextOffsets
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.api.tools import Function, ToolChoice, take_tool_choice
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.replies.forms import ReasoningForm, ToolForm
from mamba_align_jax.serve.replies.grammar import grammar_of
from mamba_align_jax.serve.replies.parser import ReplyParser, begins_in_reasoning
from mamba_align_jax.serve.replies.parts import Call, Content, Part, Reasoning


@dataclass(frozen=True, kw_only=True)
class ReplyForm:
    """How the model writes its replies to one call, and what of them is told.

    Attributes:
        reasoning: The form of its reasoning; None to take it for a part of the answer.
        tools: The form of its tool calls; None to take them for a part of the answer.
        functions: The functions that it may call.
        choice: Which of them it is to call.
        begins_in_reasoning: Whether the prompt ends within the reasoning.
        shows_reasoning: Whether the reasoning is told.
    """

    reasoning: ReasoningForm | None
    tools: ToolForm | None
    functions: Sequence[Function]
    choice: ToolChoice
    begins_in_reasoning: bool
    shows_reasoning: bool

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must be decoded with its special tokens."""
        return any(form is not None and form.needs_special_tokens for form in (self.reasoning, self.tools))

    async def grammar(self, service: Service, response: Grammar | None) -> Grammar | None:
        """Returns what the replies must match, whose answers must match `response`; None for anything."""
        return grammar_of(
            self.reasoning,
            self.tools,
            {function.name: function.parameters for function in self.functions},
            self.choice.functions,
            response,
            parallel=self.choice.parallel,
            begins_in_reasoning=self.begins_in_reasoning,
            strict=[function.name for function in self.functions if function.is_strict],
            special_tokens=await service.special_tokens(),
        )

    def begin(self, service: Service, params: SamplingParams) -> "Reply":
        """Begins the reply of a choice, which is sampled as `params` say."""
        functions = {function.name: function.parameters for function in self.functions}
        begun = self.begins_in_reasoning
        parser = ReplyParser(self.reasoning, self.tools, functions, begins_in_reasoning=begun)
        offsets = TextOffsets(service, skip_special_tokens=params.skip_special_tokens)
        return Reply(parser, offsets, self.shows_reasoning, self.choice.parallel)


def take_reply_form(service: Service, fields: Fields, prompt: ChatPrompt) -> ReplyForm:
    """Takes the fields that say what replies to a chat may be and what of them is told.

    The call is refused if one is malformed, or if the model is to call functions and it is not known how it writes calls.
    """
    choice = take_tool_choice(fields, prompt.tools)
    has_calls = bool(prompt.tools) and choice.functions != "none"
    if has_calls and service.tool_form is None:
        message = "tools need to know how the model writes calls: start the server with --tool-call-parser"
        raise Refusal(400, message, param="tools", code="unsupported_field")
    return ReplyForm(
        reasoning=service.reasoning_form,
        tools=service.tool_form if has_calls else None,
        functions=prompt.tools,
        choice=choice,
        begins_in_reasoning=begins_in_reasoning(prompt.text, service.reasoning_form),
        shows_reasoning=fields.take("include_reasoning", values.flag) is not False,
    )


@dataclass
class Reply:
    """One choice's reply, as far as it has come.

    Attributes:
        parser: Cuts the text into parts.
        offsets: Where the tokens begin in the text, from which those of the reasoning are counted.
        shows_reasoning: Whether the reasoning is told.
        parallel: Whether calls after the first one are told.
        num_reasoning_tokens: The number of tokens of the reasoning with its tags, whether or not it is told.
    """

    parser: ReplyParser
    offsets: TextOffsets
    shows_reasoning: bool = True
    parallel: bool = True
    num_reasoning_tokens: int = 0
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[dict[str, Any]] = field(default_factory=list)
    # Where the tokens begin, until the end of the reasoning is known.
    _begins: list[int] = field(default_factory=list)
    _is_counted: bool = False
    _num_calls: int = 0

    def add(self, update: RequestUpdate) -> dict[str, Any]:
        """Reads an update, and returns what is new as the delta of an event."""
        return self._delta(self.parts(update))

    def parts(self, update: RequestUpdate) -> list[Part]:
        """Reads an update, and returns what is new of what is told."""
        parts = self.parser.add(update.text or "")
        if update.output is not None:
            parts += self.parser.end()
        if not self._is_counted:
            self._count(update.token_ids)
        return [part for part in parts if self._is_told(part)]

    def _is_told(self, part: Part) -> bool:
        if isinstance(part, Call):
            self._num_calls += 1
            return self.parallel or self._num_calls == 1
        return self.shows_reasoning or not isinstance(part, Reasoning)

    @property
    def message(self) -> dict[str, Any]:
        """What has come as a message."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        # OpenAI's API has no text beside calls then.
        is_silent = not content and bool(reasoning or self._calls)
        calls = {"tool_calls": self._calls} if self._calls else {}
        return (
            {"role": "assistant", "content": None if is_silent else content, "refusal": None} | _both(reasoning) | calls
        )

    @property
    def has_calls(self) -> bool:
        """Whether a call has come."""
        return bool(self._calls)

    def _count(self, tokens: Sequence[int]) -> None:
        self._begins += map(self.offsets.add, tokens)
        self.num_reasoning_tokens, end = len(self._begins), self.parser.reasoning_end
        if end is not None:
            # The text of a token never comes before it.
            self.num_reasoning_tokens = bisect.bisect_left(self._begins, end)
            self._begins, self._is_counted = [], True

    def _delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = [_call(part) for part in parts if isinstance(part, Call)]
        numbered = [{"index": number, **call} for number, call in enumerate(calls, len(self._calls))]
        self._content.append(content)
        self._reasoning.append(reasoning)
        self._calls += calls
        said = {"content": content} if content else {}
        return _both(reasoning) | said | ({"tool_calls": numbered} if numbered else {})


def _both(reasoning: str) -> dict[str, str]:
    """Returns reasoning under the two names that clients look for; nothing if there is none."""
    return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}


def _call(part: Call) -> dict[str, Any]:
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
