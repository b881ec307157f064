"""Turns a call of OpenAI's Responses API into the fields of a call of /v1/chat/completions.

The source is OpenAI's reference: https://platform.openai.com/docs/api-reference/responses/create
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mamba_align_jax import _values as values
from mamba_align_jax.serve.api.field_table import ApiField
from mamba_align_jax.serve.api.fields import Fields, as_it_came, json_object, tool_list
from mamba_align_jax.serve.settings import Limits

_OF, _AT = ("OpenAI",), ("responses",)
_IGNORED = (
    "user",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "include",
)
_STATELESS = "the server keeps no responses: send the whole conversation as input"
KNOWN: Mapping[str, ApiField] = MappingProxyType(
    {
        field.name: field
        for field in (
            *(ApiField(name, _OF, _AT, "ignored") for name in _IGNORED),
            ApiField("previous_response_id", _OF, _AT, "refused", (), _STATELESS),
            ApiField("conversation", _OF, _AT, "refused", (), _STATELESS),
            ApiField("background", _OF, _AT, "refused", (False,), _STATELESS),
            ApiField("truncation", _OF, _AT, "refused", ("disabled",), "a prompt is never cut: send a shorter one"),
            ApiField("prompt", _OF, _AT, "refused", (), "the server keeps no prompts: send input"),
            ApiField("max_tool_calls", _OF, _AT, "refused", (), "the server calls no tools of its own"),
            ApiField("context_management", _OF, _AT, "refused", ([],), "send the input that counts"),
        )
    }
)
# What fields of the chat are called here, for errors.
NAMES: Mapping[str, str] = MappingProxyType(
    {"messages": "input", "response_format": "text.format", "reasoning_effort": "reasoning.effort"}
)


class Read(NamedTuple):
    """A call that was read.

    Attributes:
        chat: The fields of a chat.
        shown: What the response repeats of the call.
    """

    chat: dict[str, Any]
    shown: dict[str, Any]


def to_chat(fields: Fields, limits: Limits) -> Read:
    """Takes a call's fields, but for `model` and `stream`, and returns those of a chat.

    Raises:
        Refusal: A field is malformed or unknown.
    """
    instructions = fields.take("instructions", values.text)
    messages = fields.need("input", _input, limits)
    tools = fields.take("tools", tool_list, limits, _tool) or []
    choice = fields.take("tool_choice", _tool_choice) or "auto"
    parallel = fields.take("parallel_tool_calls", values.flag) is not False
    reasoning, effort = fields.take("reasoning", Fields), None
    if reasoning is not None:
        effort = reasoning.take("effort", values.text)
        for name in ("summary", "generate_summary"):
            # The reasoning itself is in the response.
            reasoning.take(name, values.text)
        reasoning.end()
    text = fields.take("text", Fields)
    form = None if text is None else _format(text)
    sampling = {name: fields.take(name, as_it_came) for name in ("temperature", "top_p", "top_k")}
    limit, metadata = fields.take("max_output_tokens", values.integer, 1), fields.take("metadata", json_object) or {}
    salt = fields.take("cache_salt", values.text)
    fields.end(KNOWN)
    chat = sampling | {
        "messages": ([{"role": "system", "content": instructions}] if instructions else []) + messages,
        "tools": [_for_chat(tool) for tool in tools] or None,
        "tool_choice": _choice_for_chat(choice) if tools else None,
        "parallel_tool_calls": parallel,
        "reasoning_effort": effort,
        "response_format": form and _format_for_chat(form),
        "max_completion_tokens": limit,
        "cache_salt": salt,
    }
    shown = sampling | {
        "instructions": instructions,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "reasoning": {"effort": effort, "summary": None},
        "text": {"format": form or {"type": "text"}},
        "max_output_tokens": limit,
        "metadata": metadata,
    }
    del shown["top_k"]
    return Read({name: value for name, value in chat.items() if value is not None}, shown)


def _input(name: str, value: Any, limits: Limits) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": values.text(name, value)}]
    values.require(isinstance(value, list) and bool(value), name, "text or a list of at least one item", type(value))
    values.require(len(value) <= limits.messages, name, f"at most {limits.messages} items", len(value))
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(value):
        message = _item(f"{name}[{number}]", item)
        last = messages[-1] if messages else {}
        if last.get("role") == message["role"] == "assistant" and _fit(last, message):
            # Reasoning, text and calls of one turn are items of their own here, and one message of a chat.
            last |= {**message, "tool_calls": last.get("tool_calls", []) + message.get("tool_calls", [])}
        else:
            messages.append(message)
    for message in messages:
        if message["role"] == "assistant":
            message.setdefault("content", "")
            if not message.get("tool_calls"):
                message.pop("tool_calls", None)
    return messages


def _fit(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether two messages of the assistant can be one: no text would follow calls or text, and no reasoning anything."""
    is_new_text = "content" in message and (last.keys() & {"content"} or last.get("tool_calls"))
    return not is_new_text and "reasoning_content" not in message


def _item(name: str, value: Any) -> dict[str, Any]:
    item = Fields(name, value)
    kind = item.take("type", values.choice, ("message", "function_call", "function_call_output", "reasoning"))
    for own in ("id", "status"):
        item.take(own, values.text)
    match kind or "message":
        case "message":
            role = item.need("role", values.choice, ("system", "developer", "user", "assistant"))
            found = {"role": role, "content": item.need("content", _content)}
            item.take("phase", values.text)
        case "function_call":
            function = {"name": item.need("name", values.text), "arguments": item.need("arguments", values.text)}
            call = {"id": item.need("call_id", values.text), "type": "function", "function": function}
            found = {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            identity, content = item.need("call_id", values.text), item.need("output", _content)
            found = {"role": "tool", "tool_call_id": identity, "content": content}
        case _:
            content = item.take("content", _content)
            # A summary is what other servers show of it.
            content = item.take("summary", _content) or "" if content is None else content
            item.take("encrypted_content", values.text)
            text = content if isinstance(content, str) else "".join(part["text"] for part in content)
            found = {"role": "assistant", "reasoning_content": text}
    item.take("summary", _content)
    item.end()
    return found


_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _content(name: str, value: Any) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return values.text(name, value)
    values.require(isinstance(value, list), name, "text or a list of parts", type(value))
    found = []
    for number, each in enumerate(value):
        part = Fields(f"{name}[{number}]", each)
        part.need("type", values.choice, _PARTS, " (images, sound and files are not supported)")
        found.append({"type": "text", "text": part.need("text", values.text)})
        for own in ("annotations", "logprobs"):
            part.take(own, as_it_came)
        part.end()
    return found


def _tool(name: str, value: Any) -> dict[str, Any]:
    tool = Fields(name, value)
    tool.need("type", values.choice, ("function",), " (the server has no tools of its own)")
    called, described = tool.need("name", values.text), tool.take("description", values.text)
    parameters, strict = (
        tool.take("parameters", json_object) or {"type": "object"},
        tool.take("strict", values.flag) or False,
    )
    tool.end()
    return dict(type="function", name=called, description=described, parameters=parameters, strict=strict)


def _for_chat(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool[name] is not None}
    return {"type": "function", "function": function}


def _tool_choice(name: str, value: Any) -> str | dict[str, Any]:
    if isinstance(value, str):
        return values.choice(name, value, ("auto", "none", "required"))
    choice = Fields(name, value)
    choice.need("type", values.choice, ("function",))
    called = choice.need("name", values.text)
    choice.end()
    return {"type": "function", "name": called}


def _choice_for_chat(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice["name"]}}


def _format(text: Fields) -> dict[str, Any] | None:
    text.refuse("verbosity", ("medium",), "is not supported: say it in the instructions")
    form = text.take("format", Fields)
    text.end()
    if form is None:
        return None
    found: dict[str, Any] = {"type": form.need("type", values.choice, ("text", "json_object", "json_schema"))}
    if found["type"] == "json_schema":
        found |= {"name": form.need("name", values.text), "schema": form.need("schema", json_object)}
        found |= {"description": form.take("description", values.text), "strict": form.take("strict", values.flag)}
    form.end()
    return found


def _format_for_chat(form: Mapping[str, Any]) -> dict[str, Any]:
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    schema = {name: form[name] for name in ("name", "schema", "description", "strict") if form[name] is not None}
    return {"type": "json_schema", "json_schema": schema}
