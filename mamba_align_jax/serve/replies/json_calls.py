"""Forms of tool calls whose arguments are JSON: hermes, Kimi's, and that of Nemotron Nano 2."""

from collections.abc import Generator

from mamba_align_jax.serve.replies.json_text import elements, members, object_text, string_of
from mamba_align_jax.serve.replies.parts import Call
from mamba_align_jax.serve.replies.schemas import Schemas
from mamba_align_jax.serve.replies.unread import NotACall, Tags, Unread, following, json_text, required, up_to

_HERMES_END = Tags("</tool_call>")
_NEMOTRON_END = Tags("</TOOLCALL>")
KIMI_CALLS, KIMI_CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"
_KIMI_CALL = Tags(KIMI_CALL)
_KIMI_NEXT = Tags(KIMI_CALL, "<|tool_calls_section_end|>")
_KIMI_ARGUMENTS = Tags("<|tool_call_argument_begin|>")
_KIMI_END = Tags("<|tool_call_end|>")


def named(name: str, arguments: str) -> Call:
    """Return a call. Raises NotACall if the name is empty or has characters that can't be shown."""
    if not name or not name.isprintable():
        raise NotACall
    return Call(name, arguments)


def _call_of(text: str) -> Call:
    """Read a call from the text of a JSON object with "name" and "arguments".

    The arguments are an object, a string that holds an object, or absent if there are none. Raises NotACall otherwise.
    """
    found = dict(members(text)) if text.startswith("{") else {}
    arguments = found.get("arguments", "{}")
    if arguments.startswith('"'):
        arguments = string_of(arguments)
    return named(string_of(found.get("name", "")), object_text(arguments))


def read_hermes(unread: Unread, tag: str, schemas: Schemas) -> Generator[Call | None, None, None]:
    """`<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>`."""
    text = yield from json_text(unread, "{")
    yield from required(unread, _HERMES_END, or_end=True)
    yield _call_of(text)


def read_nemotron(unread: Unread, tag: str, schemas: Schemas) -> Generator[Call | None, None, None]:
    """`<TOOLCALL>[{"name": NAME, "arguments": OBJECT}, ...]</TOOLCALL>`."""
    text = yield from json_text(unread, "[")
    yield from required(unread, _NEMOTRON_END, or_end=True)
    calls = [_call_of(element) for element in elements(text)]
    if not calls:
        raise NotACall
    yield from calls


def read_kimi(unread: Unread, tag: str, schemas: Schemas) -> Generator[Call | None, None, None]:
    """Calls between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`.

    Each is `<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>OBJECT<|tool_call_end|>`. A call may begin
    without the section, as after one that can't be read.
    """
    if tag == KIMI_CALLS:
        yield from required(unread, _KIMI_CALL)
    while True:
        identifier, _ = yield from up_to(unread, _KIMI_ARGUMENTS)
        text = yield from json_text(unread, "{")
        yield from required(unread, _KIMI_END, or_end=True)
        name, _, index = identifier.strip().rpartition(":")
        name = name if index.isdecimal() else identifier.strip()
        yield named(name.removeprefix("functions."), object_text(text))
        _, following_tag = yield from following(unread, _KIMI_NEXT)
        if following_tag != KIMI_CALL:
            return
