"""Turns the messages of a chat into a prompt, with the chat template of the model."""

from collections.abc import Sequence
from typing import Any

from mamba_align_jax import _values as values
from mamba_align_jax.serve.api.fields import Fields
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.settings import Limits

_ROLES = ("system", "developer", "user", "assistant")


async def take_prompt(service: Service, fields: Fields) -> Sequence[int]:
    """Takes `messages` and what belongs to them, and returns the prompt's tokens.

    The call is refused if a message is malformed, or if the model has no chat template or one that refuses the messages.
    """
    messages = fields.need("messages", _messages, service.settings.limits)
    begins_answer = fields.take("add_generation_prompt", values.flag)
    variables = fields.take("chat_template_kwargs", _variables) or {}
    text = await service.chat_text(messages, begins_answer is not False, variables)
    return await service.encode(text, "messages", add_special_tokens=False)


def _variables(name: str, value: Any) -> dict[str, Any]:
    fixed = ("messages", "add_generation_prompt")
    is_object = isinstance(value, dict) and not any(other in value for other in fixed)
    values.require(is_object, name, f"an object without {' and '.join(fixed)}", value)
    return value


def _messages(name: str, value: Any, limits: Limits) -> list[dict[str, Any]]:
    wanted = f"a list of 1 to {limits.messages} messages"
    values.require(isinstance(value, list) and 0 < len(value) <= limits.messages, name, wanted, type(value))
    return [_message(f"{name}[{number}]", one) for number, one in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, Any]:
    fields = Fields(name, value)
    role = fields.need("role", values.choice, _ROLES, " (tools are not supported)")
    for other in ("tool_calls", "function_call", "refusal", "audio"):
        fields.refuse(other, ([], ""), "is not supported")
    content = fields.need("content", _content)
    author = fields.take("name", values.text)
    fields.end()
    return {"role": role, "content": content} | ({"name": author} if author else {})


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
