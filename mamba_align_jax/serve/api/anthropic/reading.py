"""Turns a call of Anthropic's API into the fields of a call of /v1/chat/completions.

The source is Anthropic's reference of the Messages API: https://docs.anthropic.com/en/api/messages
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mamba_align_jax import _values as values
from mamba_align_jax.serve.api.field_table import ApiField
from mamba_align_jax.serve.api.fields import Fields, as_it_came, json_object, tool_list
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.settings import Limits

_OF, _AT = ("Anthropic",), ("messages",)
KNOWN: Mapping[str, ApiField] = MappingProxyType(
    {
        field.name: field
        for field in (
            *(ApiField(name, _OF, _AT, "ignored") for name in ("metadata", "service_tier", "cache_control", "betas")),
            ApiField("mcp_servers", _OF, _AT, "refused", ([],), "the server calls no other ones"),
            ApiField("container", _OF, _AT, "refused", (), "the server runs no code"),
            ApiField("context_management", _OF, _AT, "refused", ({}, {"edits": []}), "send the messages that count"),
        )
    }
)
# What fields of the chat are called here, for errors.
NAMES: Mapping[str, str] = MappingProxyType({"stop": "stop_sequences", "response_format": "output_config"})


def to_chat(fields: Fields, limits: Limits, *, counts: bool = False) -> dict[str, Any]:
    """Takes a call's fields, but for `model` and `stream`, and returns those of a chat.

    Args:
        fields: The call's fields.
        limits: What one client may ask for.
        counts: Whether the call only counts tokens, and so has no `max_tokens`.

    Raises:
        Refusal: A field is malformed or unknown.
    """
    found: dict[str, Any] = {}
    if not counts:
        found["max_tokens"] = fields.need("max_tokens", values.integer, 1)
    system, messages = fields.take("system", _texts, limits), fields.need("messages", _messages, limits)
    found["messages"] = ([{"role": "system", "content": system}] if system else []) + messages
    for name, own in (("temperature", "temperature"), ("top_p", "top_p"), ("top_k", "top_k")):
        found[own] = fields.take(name, as_it_came)
    found["stop"] = fields.take("stop_sequences", as_it_came)
    found["tools"] = fields.take("tools", tool_list, limits, _tool)
    found |= fields.take("tool_choice", _tool_choice) or {}
    found["chat_template_kwargs"] = fields.take("thinking", _thinking)
    found |= fields.take("output_config", _output) or {}
    fields.end(KNOWN)
    return {name: value for name, value in found.items() if value is not None}


def _messages(name: str, value: Any, limits: Limits) -> list[dict[str, Any]]:
    values.require(isinstance(value, list) and bool(value), name, "a list of at least one message", type(value))
    values.require(len(value) <= limits.messages, name, f"at most {limits.messages} messages", len(value))
    found = [one for number, each in enumerate(value) for one in _message(f"{name}[{number}]", each, limits)]
    if found[-1]["role"] == "assistant":
        raise Refusal(400, f"{name} must end with the user's: a message is never continued", param=name)
    return found


def _message(name: str, value: Any, limits: Limits) -> list[dict[str, Any]]:
    """Returns the messages of a chat that a message is: results of tools are messages of their own, before the text."""
    message = Fields(name, value)
    role = message.need("role", values.choice, ("user", "assistant"))
    content = message.need("content", as_it_came)
    message.end(_CACHE_CONTROL)
    if isinstance(content, str):
        return [{"role": role, "content": values.text(f"{name}.content", content)}]
    values.require(isinstance(content, list), f"{name}.content", "text or a list of blocks", type(content))
    said = _Said()
    for number, block in enumerate(content):
        _block(f"{name}.content[{number}]", block, role, said, limits)
    return said.messages(role)


class _Said:
    """What the blocks of one message say."""

    def __init__(self) -> None:
        self.texts: list[dict[str, Any]] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.results: list[dict[str, Any]] = []

    def messages(self, role: str) -> list[dict[str, Any]]:
        """Returns them as messages of a chat."""
        if role == "user":
            return [*self.results, *([{"role": role, "content": self.texts}] if self.texts or not self.results else [])]
        message: dict[str, Any] = {"role": role, "content": self.texts}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        return [message | ({"tool_calls": self.calls} if self.calls else {})]


def _block(name: str, value: Any, role: str, said: _Said, limits: Limits) -> None:
    block = Fields(name, value)
    kinds = ("text", "tool_result") if role == "user" else ("text", "thinking", "redacted_thinking", "tool_use")
    match block.need("type", values.choice, kinds, " (images and documents are not supported)"):
        case "text":
            said.texts.append({"type": "text", "text": block.need("text", values.text)})
            block.take("citations", as_it_came)
        case "thinking":
            said.reasoning.append(block.need("thinking", values.text))
            block.take("signature", values.text)
        case "redacted_thinking":
            # What another server has encrypted can't be read here.
            block.take("data", values.text)
        case "tool_use":
            called = {"name": block.need("name", values.text), "arguments": block.need("input", _input)}
            identity = block.need("id", values.text)
            block.take("caller", as_it_came)
            said.calls.append({"id": identity, "type": "function", "function": called})
        case "tool_result":
            identity = block.need("tool_use_id", values.text)
            content = block.take("content", _texts, limits) or ""
            # No chat template has a word for failure.
            failed = block.take("is_error", values.flag)
            content = f"Error: {_joined(content)}" if failed else content
            said.results.append({"role": "tool", "tool_call_id": identity, "content": content})
    block.end(_CACHE_CONTROL)


_CACHE_CONTROL: Mapping[str, ApiField] = MappingProxyType(
    {"cache_control": ApiField("cache_control", _OF, _AT, "ignored")}
)


def _texts(name: str, value: Any, limits: Limits) -> str | list[dict[str, str]]:
    """Returns a text, which is given in one piece or as blocks."""
    if isinstance(value, str):
        return values.text(name, value)
    values.require(isinstance(value, list), name, "text or a list of blocks of text", type(value))
    said = _Said()
    for number, block in enumerate(value):
        one = Fields(f"{name}[{number}]", block)
        one.need("type", values.choice, ("text",), " (images and documents are not supported)")
        said.texts.append({"type": "text", "text": one.need("text", values.text)})
        one.take("citations", as_it_came)
        one.end(_CACHE_CONTROL)
    return said.texts


def _joined(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _input(name: str, value: Any) -> str:
    values.require(isinstance(value, dict), name, "a JSON object", type(value))
    return json.dumps(value)


def _tool(name: str, value: Any) -> dict[str, Any]:
    tool = Fields(name, value)
    tool.take("type", values.choice, ("custom",), " (the server has no tools of its own)")
    function = {"name": tool.need("name", values.text), "parameters": tool.need("input_schema", json_object)}
    described, strict = tool.take("description", values.text), tool.take("strict", values.flag)
    tool.take("input_examples", as_it_came)
    tool.end(_CACHE_CONTROL)
    function |= {} if described is None else {"description": described}
    return {"type": "function", "function": function | ({"strict": True} if strict else {})}


def _tool_choice(name: str, value: Any) -> dict[str, Any]:
    wanted = Fields(name, value)
    kind = wanted.need("type", values.choice, ("auto", "any", "tool", "none"))
    function = wanted.need("name", values.text) if kind == "tool" else None
    alone = wanted.take("disable_parallel_tool_use", values.flag)
    wanted.end()
    choice = {"any": "required", "tool": {"type": "function", "function": {"name": function}}}.get(kind, kind)
    return {"tool_choice": choice} | ({"parallel_tool_calls": False} if alone else {})


def _thinking(name: str, value: Any) -> dict[str, bool]:
    """Returns what templates are told of reasoning. Its length is the model's own: a budget is a wish here."""
    thinking = Fields(name, value)
    kind = thinking.need("type", values.choice, ("enabled", "disabled", "adaptive"))
    thinking.take("budget_tokens", values.integer, 1)
    thinking.take("display", values.choice, ("summarized", "omitted"))
    thinking.end()
    return {"enable_thinking": kind != "disabled", "thinking": kind != "disabled"}


def _output(name: str, value: Any) -> dict[str, Any]:
    output = Fields(name, value)
    effort, form = output.take("effort", values.text), output.take("format", Fields)
    output.end()
    found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if form is not None:
        form.need("type", values.choice, ("json_schema",))
        schema = form.need("schema", json_object)
        form.end()
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    return found
