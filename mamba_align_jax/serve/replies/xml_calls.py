"""Forms of tool calls whose arguments stand between tags: Qwen's and Ling's.

Nothing is escaped in them. So that a string may contain tags, a closing tag ends a value only where the call can go on
behind it: with the next argument's tag or the call's end. A value that contains this too can't be written in the form; it is
read to that point.
"""

import re
from collections.abc import Generator, Mapping

from mamba_align_jax.serve.replies.json_calls import named
from mamba_align_jax.serve.replies.json_text import encoded
from mamba_align_jax.serve.replies.parts import Call
from mamba_align_jax.serve.replies.schemas import Schemas
from mamba_align_jax.serve.replies.unread import NotACall, Tags, Unread, following, required, up_to

_CALL_END = Tags("</tool_call>")

QWEN_CALL, QWEN_FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
_FUNCTION = Tags(QWEN_FUNCTION)
_NAME_END = Tags(">", "<", "\n")
_PARAMETER_END = Tags("</parameter>")
_NEXT_PARAMETER = Tags(_PARAMETER, "</function>")

_KEY = "<arg_key>"
_LING_NAME = re.compile(r"""[^\s<>{}"]+""")
_LING_NAME_END = Tags(_KEY, "\n", "</tool_call>")
_NEXT_KEY = Tags(_KEY, "</tool_call>")
_KEY_END = Tags("</arg_key>")
_VALUE = Tags("<arg_value>")
_VALUE_END = Tags("</arg_value>")


def read_qwen(unread: Unread, tag: str, schemas: Schemas) -> Generator[Call | None, None, None]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

    One line break at each end of a value belongs to the tags. `<tool_call>` may lack, as Qwen3-Coder often leaves it out.
    """
    is_wrapped = tag == QWEN_CALL
    if is_wrapped:
        yield from required(unread, _FUNCTION)
    function, arguments = (yield from _qwen_name(unread)), {}
    _, following_tag = yield from _next_parameter(unread, is_wrapped=is_wrapped)
    while following_tag == _PARAMETER:
        key, pieces = (yield from _qwen_name(unread)), []
        following_tag = None
        while following_tag is None:
            pieces += yield from up_to(unread, _PARAMETER_END)
            behind, following_tag = yield from _next_parameter(unread, is_wrapped=is_wrapped)
            pieces.append(behind)
        value = "".join(pieces[:-2]).removeprefix("\n").removesuffix("\n")
        arguments[key] = schemas.argument(function, key, value)
    if following_tag is None:
        raise NotACall
    yield named(function, _object(arguments))
    if not is_wrapped:
        yield from following(unread, _CALL_END)


def _qwen_name(unread: Unread) -> Generator[None, None, str]:
    """Read a name and the `>` behind it."""
    name, end = yield from up_to(unread, _NAME_END)
    if end != ">":
        raise NotACall
    return name


def _next_parameter(unread: Unread, *, is_wrapped: bool) -> Generator[None, None, tuple[str, str | None]]:
    """Read the tag of the next parameter, or the end of the call.

    Returns what it has read, and the tag; None if something else follows.
    """
    text, tag = yield from following(unread, _NEXT_PARAMETER)
    if tag is None or tag == _PARAMETER or not is_wrapped:
        return text, tag
    spaces, end = yield from following(unread, _CALL_END, or_end=True)
    return text + tag + spaces, None if end is None else tag


def read_ling(unread: Unread, tag: str, schemas: Schemas) -> Generator[Call | None, None, None]:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`, whose values are not trimmed."""
    text, end = yield from up_to(unread, _LING_NAME_END)
    function, arguments = text.strip(), {}
    if not _LING_NAME.fullmatch(function):
        raise NotACall
    following_tag: str | None = end if end != "\n" else (yield from required(unread, _NEXT_KEY))
    while following_tag == _KEY:
        key, _ = yield from up_to(unread, _KEY_END)
        yield from required(unread, _VALUE)
        pieces, following_tag = [], None
        while following_tag is None:
            pieces += yield from up_to(unread, _VALUE_END)
            behind, following_tag = yield from following(unread, _NEXT_KEY)
            pieces.append(behind)
        arguments[key] = schemas.argument(function, key, "".join(pieces[:-2]))
    yield named(function, _object(arguments))


def _object(arguments: Mapping[str, str]) -> str:
    """Return the text of a JSON object from the texts of its values."""
    return f"{{{', '.join(f'{encoded(key)}: {value}' for key, value in arguments.items())}}}"
