"""Forms of tool calls whose arguments are JSON."""

import json
from collections.abc import Generator, Mapping

from mamba_align_jax.serve.replies.parts import Call
from mamba_align_jax.serve.replies.unread import WHITESPACE, NotACall, Tags, Unread, closed, json_text

_HERMES_END = Tags("</tool_call>")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


# Strings may have line breaks of their own, which models write; `checked_object` then escapes them.
_DECODER = json.JSONDecoder(parse_constant=_refuse, strict=False)


def checked_object(text: str) -> str:
    """Return the text of a JSON object as it is, or encoded again if its strings have bare control characters.

    Raises:
        NotACall: The text is no JSON object.
    """
    try:
        value = _DECODER.decode(text)
    except ValueError as error:
        raise NotACall from error
    if not isinstance(value, dict):
        raise NotACall
    has_control = any(character < " " and character not in WHITESPACE for character in text)
    return json.dumps(value, ensure_ascii=False) if has_control or _has_broken_strings(text) else text


def _has_broken_strings(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return True
    return False


def _members(text: str) -> Mapping[str, str]:
    """Return the members of a JSON object, each value as its text. Raises NotACall if the text is no JSON object."""
    found, at = {}, text.index("{") + 1
    try:
        at = _after_spaces(text, at)
        while text[at] != "}":
            key, at = _DECODER.raw_decode(text, at)
            at = _expect(text, at, ":")
            _, end = _DECODER.raw_decode(text, at)
            found[key] = text[at:end]
            at = _after_spaces(text, end)
            if text[at] != "}":
                at = _expect(text, at, ",")
    except (ValueError, IndexError, TypeError) as error:
        raise NotACall from error
    return found


def _after_spaces(text: str, at: int) -> int:
    while text[at] in WHITESPACE:
        at += 1
    return at


def _expect(text: str, at: int, character: str) -> int:
    at = _after_spaces(text, at)
    if text[at] != character:
        raise ValueError(character)
    return _after_spaces(text, at + 1)


def call_of(text: str) -> Call:
    """Read a call from the text of a JSON object with "name" and "arguments".

    The arguments are an object, or a string that holds an object, or absent if there are none. Raises NotACall otherwise.
    """
    members = _members(text)
    name, arguments = _DECODER.decode(members.get("name", "0")), members.get("arguments", "{}")
    if not isinstance(name, str) or not name:
        raise NotACall
    if arguments.startswith('"'):
        arguments = _DECODER.decode(arguments)
    return Call(name, checked_object(arguments))


def read_hermes(unread: Unread, tag: str, functions: Mapping) -> Generator[Call | None, None, None]:
    """`<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>`, with whitespace between."""
    text = yield from json_text(unread, "{")
    _, is_closed = yield from closed(unread, _HERMES_END)
    if not is_closed:
        raise NotACall
    yield call_of(text)
