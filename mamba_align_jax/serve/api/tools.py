"""The functions that a call offers to the model, and which of them the model is to call."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from mamba_align_jax import _values as values
from mamba_align_jax.serve.api.fields import Fields
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.replies.grammar import Named
from mamba_align_jax.serve.settings import Limits

# Names go into tags and ids. Those of OpenAI's API have 64 characters at most, those of Anthropic's 128.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
_MODES = ("auto", "none", "required")


class Function(NamedTuple):
    """A function that the model may call.

    Attributes:
        name: Its name.
        parameters: The JSON schema of its arguments, which are an object.
        is_strict: Whether a call of it must match the schema.
        description: What it does; None if the call does not say it.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False
    description: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the function as chat templates write it. The order of its parts is always the same."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


class ToolChoice(NamedTuple):
    """What a call wants of the tools.

    Attributes:
        functions: "auto", "none", "required", or the one function that must be called.
        parallel: Whether one reply may have several calls.
    """

    functions: Literal["auto", "none", "required"] | Named
    parallel: bool


def take_tools(fields: Fields, limits: Limits) -> tuple[Function, ...]:
    """Takes `tools`. Tools that are malformed, too many, too large, nested too deeply or of one name are refused."""
    return fields.take("tools", _functions, limits) or ()


def take_tool_choice(fields: Fields, tools: Iterable[Function]) -> ToolChoice:
    """Takes `tool_choice` and `parallel_tool_calls`. A choice that the tools don't allow is refused."""
    parallel = fields.take("parallel_tool_calls", values.flag) is not False
    choice = fields.take("tool_choice", _choice) or "auto"
    names = [function.name for function in tools]
    if choice == "required" and not names:
        raise Refusal(400, "tool_choice needs tools", param="tool_choice")
    if isinstance(choice, Named) and choice.name not in names:
        message = f"tool_choice must name one of the tools, got {values.shown(choice.name)}"
        raise Refusal(400, message, param="tool_choice")
    return ToolChoice(choice, parallel)


def _choice(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        wanted = f"one of {_MODES}, or a function"
        values.require(isinstance(value, str) and value in _MODES, name, wanted, value)
        return value
    wanted = Fields(name, value)
    wanted.need("type", values.choice, ("function",))
    function = wanted.need("function", Fields)
    wanted.end()
    chosen = function.need("name", values.text)
    function.end()
    return Named(chosen)


def _functions(name: str, value: Any, limits: Limits) -> tuple[Function, ...]:
    wanted = f"a list of at most {limits.tools} tools"
    values.require(isinstance(value, list) and len(value) <= limits.tools, name, wanted, type(value))
    check_depth(name, value, limits.json_depth)
    # The size of what was sent, in which no character is longer than its escape.
    size = len(json.dumps(value, ensure_ascii=False))
    values.require(size <= limits.tool_bytes, name, f"at most {limits.tool_bytes} characters of JSON", size)
    functions = tuple(_function(f"{name}[{number}]", one) for number, one in enumerate(value))
    names = [function.name for function in functions]
    twice = next((one for number, one in enumerate(names) if one in names[:number]), None)
    values.require(twice is None, name, "functions with different names", twice)
    return functions


def _function(name: str, value: Any) -> Function:
    tool = Fields(name, value)
    tool.need("type", values.choice, ("function",))
    described = tool.need("function", Fields)
    tool.end()
    function = described.need("name", function_name)
    text = described.take("description", values.text)
    parameters = described.take("parameters", _parameters)
    is_strict = described.take("strict", values.flag) or False
    described.end()
    if parameters is None:
        # As in OpenAI's API.
        parameters = {"type": "object", "properties": {}}
    return Function(function, parameters, is_strict, text)


def function_name(name: str, value: Any) -> str:
    """Checks the name of a function."""
    wanted = "1 to 128 letters, digits, underscores, dots and dashes"
    values.require(isinstance(value, str) and _NAME.fullmatch(value) is not None, name, wanted, value)
    return value


def _parameters(name: str, value: Any) -> Mapping[str, Any]:
    values.require(isinstance(value, Mapping), name, "a JSON schema", type(value))
    kind = value.get("type", "object")
    values.require(kind == "object", name, "a schema of the type object", kind)
    return value


def check_depth(name: str, value: Any, limit: int) -> None:
    """Checks that a JSON value has at most `limit` objects and lists within each other."""
    level, depth = [value], 0
    while level:
        level = [one for one in level if isinstance(one, dict | list)]
        depth += bool(level)
        values.require(depth <= limit, name, f"at most {limit} objects and lists within each other", "more")
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
