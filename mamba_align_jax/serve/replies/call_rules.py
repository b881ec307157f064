"""Rules of tool calls, in each form, that hold the arguments to the schemas of the functions.

Arguments are JSON by the schema, and in an order that the schema gives, with two exceptions. In the forms without JSON an
argument that may be a string is any text without its closing tag, or one of the values that its schema lists. And a function
whose schema says nothing of its parameters takes any.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mamba_align_jax.serve.replies.json_text import encoded
from mamba_align_jax.serve.replies.lark import Rules, json_of, literal
from mamba_align_jax.serve.replies.schemas import listed_values, types_in

_ANY_KEY = r"/[^<>\n]+/"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class _Argument(NamedTuple):
    """An argument that a function may have, with what stands for its key and value."""

    body: str
    is_required: bool


@dataclass(frozen=True)
class Frame:
    """How a form writes calls: `opening` and `begin`, the calls with `between` between them, and `end`.

    `begin`, `between` and `end` are texts and tags in turn. `call` returns what stands for a call, from the name of the
    function and the schema of its parameters.
    """

    opening: str
    begin: tuple[str, ...]
    between: tuple[str, ...]
    end: tuple[str, ...]
    call: Callable[[Rules, str, Mapping], str]

    def calls(self, rules: Rules, functions: Mapping[str, object], *, parallel: bool) -> str:
        """Return what stands for calls of the functions, behind the opening tag."""
        bodies = [
            self.call(rules, name, schema if isinstance(schema, Mapping) else _NO_PARAMETERS)
            for name, schema in functions.items()
        ]
        call = rules.add(" | ".join(bodies))
        more = f"({rules.sequence(*self.between)} {call})*" if parallel else ""
        return " ".join([rules.sequence(*self.begin), call, more, rules.sequence(*self.end)])


def _arguments(
    rules: Rules, schema: Mapping, written: Callable[[str, str], str], closing: str, behind: str = ""
) -> list[_Argument]:
    """Return the arguments of a function in a form without JSON.

    Args:
        rules: The grammar.
        schema: The schema of the function's parameters.
        written: Returns what stands for an argument, from what stands for its key, and for its value with the closing tag.
        closing: The tag that closes values.
        behind: What stands before the closing tag; a string may have it too.
    """
    if _takes_any(schema):
        return [_Argument(f"({written(_ANY_KEY, rules.until(closing))})*", is_required=True)]
    return [
        _Argument(written(literal(key), _plain_value(rules, each, closing, behind)), is_required)
        for key, each, is_required in _parameters(schema)
    ]


def _takes_any(schema: Mapping) -> bool:
    """Say whether a schema says nothing of a function's parameters."""
    return not schema.get("properties") and schema.get("additionalProperties") is not False


def _parameters(schema: Mapping) -> list[tuple[str, object, bool]]:
    """Return each parameter's name, its schema, and whether it is required."""
    properties, required = schema.get("properties"), schema.get("required")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [
        (
            key,
            {**shared, **each} if isinstance(each, Mapping) else each,
            key in (required if isinstance(required, list) else ()),
        )
        for key, each in (properties.items() if isinstance(properties, Mapping) else ())
    ]


def _plain_value(rules: Rules, schema: object, closing: str, behind: str) -> str:
    """Return what stands for a value in plain text, with its closing tag."""
    if values := listed_values(schema):
        texts = [value if isinstance(value, str) else encoded(value) for value in values]
        return f"({' | '.join(map(literal, texts))}) {rules.sequence(behind, closing)}"
    types = set(types_in(schema, schema))
    if types and "string" not in types:
        return f"{json_of(schema)} {rules.sequence(behind, closing)}"
    return rules.until(closing)


def _object(schema: Mapping) -> str:
    """Return what stands for the arguments of a function as JSON."""
    return json_of({"type": "object", **schema})


def _joined(arguments: list[_Argument]) -> str:
    return " ".join(each.body if each.is_required else f"({each.body})?" for each in arguments)


def _json_call(rules: Rules, name: str, schema: Mapping) -> str:
    beginning = f'{{"name": {encoded(name)}, "arguments": '
    return f'{literal(beginning)} {_object(schema)} "}}"'


def _kimi_call(rules: Rules, name: str, schema: Mapping) -> str:
    begin, end = rules.sequence("<|tool_call_begin|>", f"functions.{name}:"), rules.sequence("<|tool_call_end|>")
    return f"{begin} /[0-9]{{1,3}}/ {rules.sequence('<|tool_call_argument_begin|>')} {_object(schema)} {end}"


def _qwen_call(rules: Rules, name: str, schema: Mapping) -> str:
    def written(key: str, value: str) -> str:
        return rf'"<parameter=" {key} ">\n" {value} "\n"'

    arguments = _arguments(rules, schema, written, "</parameter>", "\n")
    return " ".join([rules.sequence(f"<function={name}>", "\n"), _joined(arguments), rules.sequence("</function>")])


def _ling_call(rules: Rules, name: str, schema: Mapping) -> str:
    def written(key: str, value: str) -> str:
        return " ".join([rules.sequence("<arg_key>"), key, rules.sequence("</arg_key>", "\n", "<arg_value>"), value])

    return f"{literal(name)} {_joined(_arguments(rules, schema, written, '</arg_value>'))}"


def _lfm2_call(rules: Rules, name: str, schema: Mapping) -> str:
    if _takes_any(schema):
        argument = rules.add(f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {json_of({})}')
        return f'{literal(f"{name}(")} ({argument} (", " {argument})*)? ")"'
    # What may follow the first arguments, whether one was written or none, from the last argument to the first.
    behind_some = behind_none = '")"'
    for key, each, is_required in reversed(_parameters(schema)):
        argument = rules.add(f"{literal(f'{key}=')} {json_of(each)}")
        some, none = f'", " {argument} {behind_some}', f"{argument} {behind_some}"
        behind_some = rules.add(some if is_required else f"{some} | {behind_some}")
        behind_none = rules.add(none if is_required else f"{none} | {behind_none}")
    return f"{literal(f'{name}(')} {behind_none}"


def _tagged(call: Callable[[Rules, str, Mapping], str], begin: str) -> Frame:
    """Each call between tags of its own."""
    end = ("\n", "</tool_call>")
    return Frame("<tool_call>", (begin,), (*end, "\n", "<tool_call>", begin), end, call)


FRAMES: Mapping[str, Frame] = {
    "hermes": _tagged(_json_call, "\n"),
    "granite4": _tagged(_json_call, "\n"),
    "qwen3_xml": _tagged(_qwen_call, "\n"),
    "ling": _tagged(_ling_call, ""),
    "kimi": Frame("<|tool_calls_section_begin|>", (), (), ("<|tool_calls_section_end|>",), _kimi_call),
    "lfm2": Frame("<|tool_call_start|>", ("[",), (", ",), ("]", "<|tool_call_end|>"), _lfm2_call),
    "nemotron_json": Frame("<TOOLCALL>", ("[",), (", ",), ("]", "</TOOLCALL>"), _json_call),
}
