"""JSON that a model wrote: its parts as they were written, so that numbers and escapes stay what they were."""

import json
import re
from collections.abc import Iterator

from mamba_align_jax.serve.replies.unread import NotACall, behind_spaces


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=_refuse)
# Takes strings with line breaks and other control characters, which models write.
_LENIENT = json.JSONDecoder(parse_constant=_refuse, strict=False)


def encoded(value: object) -> str:
    """Encode a value as JSON, which is valid UTF-8 also where the value has lone surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not re.search("[\ud800-\udfff]", text) else json.dumps(value)


def decoded(text: str) -> object:
    """Decode JSON. Raises ValueError if it is wrong, also for NaN and infinities."""
    return _STRICT.decode(text)


def object_text(text: str) -> str:
    """Return the text of a JSON object, as it is if it is valid.

    If only control characters within strings make it invalid, it is encoded again. Raises NotACall if it is no object.
    """
    try:
        value, valid = _STRICT.decode(text), text
    except ValueError:
        try:
            value = _LENIENT.decode(text)
        except ValueError as error:
            raise NotACall from error
        valid = encoded(value)
    if not isinstance(value, dict):
        raise NotACall
    return valid


def string_of(text: str) -> str:
    """Decode a JSON string. Raises NotACall if the text is something else."""
    try:
        value = _LENIENT.decode(text)
    except ValueError as error:
        raise NotACall from error
    if not isinstance(value, str):
        raise NotACall
    return value


def members(text: str) -> Iterator[tuple[str, str]]:
    """Return the members of a JSON object: each key, decoded, and the text of its value. Raises NotACall if it is wrong."""
    for key, value in _items(text, "}", has_keys=True):
        yield string_of(key), value


def elements(text: str) -> Iterator[str]:
    """Return the text of each element of a JSON array. Raises NotACall if it is wrong."""
    for _, element in _items(text, "]", has_keys=False):
        yield element


def _items(text: str, bracket: str, *, has_keys: bool) -> Iterator[tuple[str, str]]:
    """Return the items between the outermost brackets of a JSON text: the text of the key, or "", and that of the value."""
    at = _behind(text, 1)
    if text.startswith(bracket, at):
        return
    while True:
        key = ""
        if has_keys:
            end = _end_of_value(text, at)
            key, at = text[at:end], _behind(text, end, ":")
        end = _end_of_value(text, at)
        yield key, text[at:end]
        at = _behind(text, end)
        if text.startswith(bracket, at):
            return
        at = _behind(text, at, ",")


def _behind(text: str, at: int, mark: str = "") -> int:
    """Return the index behind whitespace, a mark, and more whitespace. Raises NotACall without the mark."""
    at = behind_spaces(text, at)
    if not text.startswith(mark, at):
        raise NotACall
    return behind_spaces(text, at + len(mark))


def _end_of_value(text: str, at: int) -> int:
    try:
        return _LENIENT.raw_decode(text, at)[1]
    except ValueError as error:
        raise NotACall from error
