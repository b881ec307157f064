"""The form of tool calls that looks like Python: LFM2's.

A call is `name(key=value, ...)`. Values are Python's or JSON's literals. LFM2's template puts strings between single quotes
and escapes nothing in them, so a quote ends an argument that is a string only where the call can go on behind it. A string
that contains this too can't be written in the form, and its backslashes are read as escapes.
"""

import re
from collections.abc import Generator

from mamba_align_jax.serve.replies.json_calls import named
from mamba_align_jax.serve.replies.json_text import encoded
from mamba_align_jax.serve.replies.parts import Call
from mamba_align_jax.serve.replies.schemas import Schemas
from mamba_align_jax.serve.replies.unread import MAX_JSON_DEPTH, NotACall, Tags, Unread, behind_spaces, required

_LIST = Tags("[")
_END = Tags("<|tool_call_end|>")

_ANYTHING = re.compile("")
_NAME = re.compile(r"[^\W\d][\w.-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.])")
_CONSTANT = re.compile(r"(?:True|False|None|true|false|null)(?!\w)")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_STRING_MARK = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in "\"'"}
# What may stand behind an argument: the next one, or the end of the call and then the next call or the end of the list.
_AFTER_ARGUMENT = re.compile(r"\s*(?:,\s*[^\W\d][\w.-]*\s*=|\)\s*(?:,\s*[^\W\d][\w.-]*\s*\(|\]\s*\Z))")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|U0010[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": "", **{c: c for c in "\\'\"/"}}


def read_lfm2(unread: Unread, tag: str, schemas: Schemas) -> Generator[Call | None, None, None]:
    """`<|tool_call_start|>[NAME(KEY=VALUE, ...), ...]<|tool_call_end|>`."""
    yield from required(unread, _LIST)
    pieces, last = [], ""
    while True:
        piece, end = unread.take_until(_END)
        pieces.append(piece)
        last = piece.rstrip()[-1:] or last
        if end and last == "]":
            break
        if end:
            pieces.append(end)
            last = end[-1]
        elif unread.ended:
            break
        else:
            yield
    text = "".join(pieces)
    if unread.ended and not end:
        text = text[: _END.begun(text, 0)]
    calls = _Literals(text.rstrip()).calls()
    if not calls:
        raise NotACall
    yield from calls


class _Literals:
    """Reads the text of a list of calls, behind its first bracket, from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def calls(self) -> list[Call]:
        """Read the calls. Raises NotACall if they are wrong."""
        calls = [] if self._skipped("]") else [self._call()]
        while calls and not self._skipped("]"):
            self._expect(",")
            calls.append(self._call())
        if self._at < len(self._text):
            raise NotACall
        return calls

    def _call(self) -> Call:
        name, arguments = self._matched(_NAME), {}
        self._expect("(")
        while not self._skipped(")"):
            if arguments:
                self._expect(",")
            key = self._matched(_NAME)
            self._expect("=")
            arguments[key] = self._value(0)
        return named(name, f"{{{', '.join(f'{encoded(key)}: {value}' for key, value in arguments.items())}}}")

    def _value(self, depth: int) -> str:
        """Read a literal. Returns its JSON."""
        if depth > MAX_JSON_DEPTH:
            raise NotACall
        self._skipped("")
        start = self._text[self._at : self._at + 1]
        if start in _STRING_MARK:
            return encoded(self._string(start, _AFTER_ARGUMENT if depth == 0 else _ANYTHING))
        if self._skipped("["):
            return f"[{', '.join(self._values(']', depth + 1))}]"
        if self._skipped("{"):
            return f"{{{', '.join(self._members(depth + 1))}}}"
        if _NUMBER.match(self._text, self._at):
            return self._matched(_NUMBER)
        constant = self._matched(_CONSTANT)
        return _CONSTANTS.get(constant, constant)

    def _values(self, bracket: str, depth: int) -> list[str]:
        values: list[str] = []
        while not self._skipped(bracket):
            if values:
                self._expect(",")
            values.append(self._value(depth))
        return values

    def _members(self, depth: int) -> list[str]:
        found: list[str] = []
        while not self._skipped("}"):
            if found:
                self._expect(",")
            self._skipped("")
            quote = self._text[self._at : self._at + 1]
            if quote not in _STRING_MARK:
                raise NotACall
            key = encoded(self._string(quote, _ANYTHING))
            self._expect(":")
            found.append(f"{key}: {self._value(depth)}")
        return found

    def _string(self, quote: str, behind: re.Pattern[str]) -> str:
        """Read a string, which ends at the first quote that is not escaped and has `behind` behind it."""
        for mark in _STRING_MARK[quote].finditer(self._text, self._at + 1):
            if mark[0] == quote and behind.match(self._text, mark.end()):
                text = self._text[self._at + 1 : mark.start()]
                self._at = mark.end()
                return _unescaped(text) if "\\" in text else text
        raise NotACall

    def _skipped(self, mark: str) -> bool:
        """Skip whitespace, and the mark if it follows. Returns whether it did."""
        self._at = behind_spaces(self._text, self._at)
        follows = self._text.startswith(mark, self._at)
        self._at += len(mark) if follows else 0
        return follows

    def _expect(self, mark: str) -> None:
        if not self._skipped(mark):
            raise NotACall

    def _matched(self, pattern: re.Pattern[str]) -> str:
        """Skip whitespace, and read what the pattern matches. Raises NotACall if it doesn't."""
        self._skipped("")
        found = pattern.match(self._text, self._at)
        if not found:
            raise NotACall
        self._at = found.end()
        return found[0]


def _unescaped(text: str) -> str:
    """Decode the escapes of Python and JSON. Others stay as they are written, as in Python."""

    def character(found: re.Match[str]) -> str:
        code = found[1]
        if len(code) > 1:
            return chr(int(code[1:], 16))
        return _ESCAPES.get(code, found[0])

    # JSON writes one character as two surrogates.
    return _ESCAPE.sub(character, text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
