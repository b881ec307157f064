"""Turns the messages of a chat into a prompt, with the chat template of the model."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mamba_align_jax import _values as values
from mamba_align_jax.serve.api.checkpoints import ChatPrompt
from mamba_align_jax.serve.api.fields import Fields
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.api.tools import check_depth, function_name, take_tools
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.settings import Limits

_ROLES = ("system", "developer", "user", "assistant", "tool")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# What calls give as fields of their own.
_FIXED = ("messages", "add_generation_prompt", "tools")


async def take_prompt(service: Service, fields: Fields) -> ChatPrompt:
    """Takes `messages`, `tools` and what else belongs to a prompt, and returns it.

    The call is refused if a field is malformed, or if the model has no chat template, or one that refuses the messages or
    lacks what they need.
    """
    limits, source = service.settings.limits, service.template.source if service.template else ""
    messages = await fields.aside(fields.need, "messages", _messages, limits)
    tools = await fields.aside(take_tools, fields, limits)
    begins_answer = fields.take("add_generation_prompt", values.flag)
    variables = await fields.aside(fields.take, "chat_template_kwargs", _variables, limits) or {}
    effort = fields.take("reasoning_effort", values.choice, _EFFORTS)
    if service.template is not None:
        _check_template(source, messages, has_tools=bool(tools), has_effort=effort is not None)
        if not names(source, "developer"):
            messages = [one | {"role": "system"} if one["role"] == "developer" else one for one in messages]
    if tools:
        variables = {"tools": [one.for_template() for one in tools], **variables}
    if effort is not None:
        variables = {"reasoning_effort": effort, **variables}
    text = await service.chat_text(messages, begins_answer is not False, variables)
    tokens = await service.encode(text, "messages", add_special_tokens=False)
    return ChatPrompt(messages, variables, text, tokens, tools)


def names(source: str, word: str) -> bool:
    """Whether the source of a chat template has a word."""
    return re.search(rf"\b{word}\b", source) is not None


def _check_template(source: str, messages: Sequence[Mapping[str, Any]], *, has_tools: bool, has_effort: bool) -> None:
    """Refuses what the model would never read, because its chat template leaves it out."""
    calling = next((number for number, one in enumerate(messages) if one.get("tool_calls")), None)
    wanted = (
        ("tools", has_tools, "tools"),
        ("tool_calls", calling is not None, f"messages[{calling}].tool_calls"),
        ("reasoning_effort", has_effort, "reasoning_effort"),
    )
    for word, is_used, param in wanted:
        if is_used and not names(source, word):
            message = f"{param} is not supported: the model's chat template does not use {word}"
            raise Refusal(400, message, param=param, code="unsupported_field")


def _variables(name: str, value: Any, limits: Limits) -> dict[str, Any]:
    is_object = isinstance(value, dict) and not any(other in value for other in _FIXED)
    values.require(is_object, name, f"an object without {', '.join(_FIXED)}", value)
    check_depth(name, value, limits.json_depth)
    return value


def _messages(name: str, value: Any, limits: Limits) -> list[dict[str, Any]]:
    values.require(isinstance(value, list), name, "a list of messages", type(value))
    values.require(bool(value), name, "have at least one message", "an empty list", "must")
    values.require(len(value) <= limits.messages, name, f"at most {limits.messages} messages", len(value))
    return [_message(f"{name}[{number}]", one, limits) for number, one in enumerate(value)]


def _message(name: str, value: Any, limits: Limits) -> dict[str, Any]:
    fields = Fields(name, value)
    role = fields.need("role", values.choice, _ROLES)
    for other in ("function_call", "refusal", "audio", "annotations"):
        fields.refuse(other, ([], ""), "is not supported")
    found: dict[str, Any] = {"role": role}
    if role == "assistant":
        found |= _said(fields, limits)
    content = fields.take("content", _content)
    if content is None and not found.keys() & {"tool_calls", "reasoning"}:
        raise Refusal(400, f"{name}.content is missing", param=f"{name}.content")
    # Many templates would write a null as "None".
    found["content"] = "" if content is None else content
    author = fields.take("name", values.text)
    if author:
        found["name"] = author
    answered = fields.take("tool_call_id", values.text) if role == "tool" else None
    if answered is not None:
        found["tool_call_id"] = answered
    fields.end()
    return found


def _said(fields: Fields, limits: Limits) -> dict[str, Any]:
    """Takes what only messages of the model have: its reasoning and its calls."""
    found: dict[str, Any] = {}
    # Templates and servers have one name or the other.
    given = [fields.take(name, values.text) for name in ("reasoning_content", "reasoning")]
    reasoning = next(filter(None, given), None)
    if reasoning is not None:
        found |= {"reasoning_content": reasoning, "reasoning": reasoning}
    calls = fields.take("tool_calls", _calls, limits)
    return found | ({"tool_calls": calls} if calls else {})


def _calls(name: str, value: Any, limits: Limits) -> list[dict[str, Any]]:
    wanted = f"a list of at most {limits.tools} calls"
    values.require(isinstance(value, list) and len(value) <= limits.tools, name, wanted, type(value))
    return [_call(f"{name}[{number}]", one, limits) for number, one in enumerate(value)]


def _call(name: str, value: Any, limits: Limits) -> dict[str, Any]:
    call = Fields(name, value)
    call.take("type", values.choice, ("function",))
    # Events of a stream have it.
    call.take("index", values.integer)
    identity = call.take("id", values.text)
    function = call.need("function", Fields)
    call.end()
    called = function.need("name", function_name)
    arguments = function.take("arguments", _arguments, limits) or {}
    function.end()
    return {"id": identity, "type": "function", "function": {"name": called, "arguments": arguments}}


def _arguments(name: str, value: Any, limits: Limits) -> dict[str, Any]:
    """Returns the arguments of a call, an object, which is given as JSON in a string. Templates take the object."""
    if isinstance(value, str):
        try:
            value = json.loads(values.text(name, value) or "{}", parse_constant=_no_constant)
        except RecursionError:
            values.require(False, name, "JSON that is not nested so deeply", "more")
        except ValueError:
            values.require(False, name, "a JSON object in a string", value)
    values.require(isinstance(value, dict), name, "a JSON object in a string", value)
    check_depth(name, value, limits.json_depth)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _content(name: str, value: Any) -> str | list[dict[str, str]]:
    """Returns a message's text, which is given in one piece or in parts."""
    if isinstance(value, list):
        return [{"type": "text", "text": _part(f"{name}[{number}]", part)} for number, part in enumerate(value)]
    return values.text(name, value)


def _part(name: str, value: Any) -> str:
    part = Fields(name, value)
    part.need("type", values.choice, ("text",))
    text = part.need("text", values.text)
    part.end()
    return text
