"""The text of a reply that has come and is not read yet, and generators that read tags and JSON from it.

The readers are generators, because a reply comes in pieces: they yield None where they need more text. What they find
depends on the text alone, never on where the pieces are cut. Each character is looked at a bounded number of times: a reader
takes what it has seen, except for the beginning of a tag.
"""

import re
from collections.abc import Generator

WHITESPACE = " \t\r\n"
# JSON that is nested deeper is no call: decoders, here and at the client, recurse.
MAX_JSON_DEPTH = 100
_NO_SPACE = re.compile(f"[^{WHITESPACE}]")
# What matters in JSON: outside of strings all but spaces, numbers, names and the marks between values.
_MATTERS = re.compile(r"[^ \t\r\n0-9:,.+\-A-Za-z]")
_MATTERS_IN_STRING = re.compile(r'["\\]')


class NotACall(Exception):
    """The text after an opening tag is not a call."""


def behind_spaces(text: str, at: int) -> int:
    """Return the index of the first character from index `at` on that is not whitespace, or the text's length."""
    found = _NO_SPACE.search(text, at)
    return found.start() if found else len(text)


class Tags:
    """One or more tags to look for. None of them may begin with another one."""

    def __init__(self, *tags: str) -> None:
        self._whole = re.compile("|".join(map(re.escape, tags)))
        beginnings = {tag[:size] for tag in tags for size in range(1, len(tag))}
        self._begun = re.compile(f"(?:{'|'.join(map(re.escape, sorted(beginnings)))})\\Z") if beginnings else None
        self._longest = max(map(len, tags))

    def search(self, text: str, start: int) -> re.Match[str] | None:
        """Find the first tag from `start` on."""
        return self._whole.search(text, start)

    def match(self, text: str, start: int) -> re.Match[str] | None:
        """Find the tag that begins at `start`."""
        return self._whole.match(text, start)

    def begun(self, text: str, start: int) -> int:
        """Return where the beginning of a tag that reaches the end of the text begins, at or after `start`.

        It is the length of the text if no tag may have begun.
        """
        found = self._begun and self._begun.search(text, max(start, len(text) - self._longest + 1))
        return found.start() if found else len(text)


class Unread:
    """The text that has come and is not read yet.

    Attributes:
        text, at: The text from its index `at` on is unread.
        ended: No more text will come.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._record: list[str] = []

    def add(self, text: str) -> None:
        """Add text that has come."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def take_to(self, end: int) -> str:
        """Take the text before index `end`, and record it."""
        taken = self.text[self.at : end]
        self.at = end
        self._record.append(taken)
        return taken

    def take_until(self, tags: Tags) -> tuple[str, str]:
        """Take the text before the first tag, and the tag.

        Without a tag the second text is empty, and what may be the beginning of a tag stays unread, unless the reply has
        ended.
        """
        if found := tags.search(self.text, self.at):
            return self.take_to(found.start()), self.take_to(found.end())
        return self.take_to(len(self.text) if self.ended else tags.begun(self.text, self.at)), ""

    def forget(self) -> str:
        """Return what has been taken since the last call of this method, and begin a new record."""
        record, self._record = "".join(self._record), []
        return record


def up_to(unread: Unread, tags: Tags) -> Generator[None, None, tuple[str, str]]:
    """Read to the first tag. Returns the text before it, and the tag. Raises NotACall if the reply ends before."""
    pieces = []
    while True:
        piece, tag = unread.take_until(tags)
        pieces.append(piece)
        if tag:
            return "".join(pieces), tag
        if unread.ended:
            raise NotACall
        yield


def following(unread: Unread, tags: Tags, *, or_end: bool = False) -> Generator[None, None, tuple[str, str | None]]:
    """Read whitespace and the tag behind it, if one follows.

    Returns the whitespace, and the tag; None if none follows. With `or_end` the tag is empty if the reply ends here, or
    within a tag, which is then taken as far as it goes.
    """
    spaces = []
    while True:
        spaces.append(unread.take_to(behind_spaces(unread.text, unread.at)))
        if found := tags.match(unread.text, unread.at):
            return "".join(spaces), unread.take_to(found.end())
        has_begun = tags.begun(unread.text, unread.at) == unread.at
        if unread.ended and or_end and has_begun:
            unread.take_to(len(unread.text))
            return "".join(spaces), ""
        if unread.ended or not has_begun:
            return "".join(spaces), None
        yield


def required(unread: Unread, tags: Tags, *, or_end: bool = False) -> Generator[None, None, str]:
    """Read what `following` does. Returns the tag. Raises NotACall if none follows."""
    _, tag = yield from following(unread, tags, or_end=or_end)
    if tag is None:
        raise NotACall
    return tag


_BRACKETS = {"{": Tags("{"), "[": Tags("[")}


def json_text(unread: Unread, bracket: str) -> Generator[None, None, str]:
    """Read whitespace and a JSON object or array, to its last bracket. Returns its text, which may still be wrong JSON.

    Args:
        unread: The text.
        bracket: "{" for an object, "[" for an array.

    Raises:
        NotACall: Something else follows, or it has characters between its strings that JSON doesn't have, or it is nested
            deeper than `MAX_JSON_DEPTH`, or the reply ends before it does.
    """
    yield from required(unread, _BRACKETS[bracket])
    pieces, depth, state = [bracket], 1, "between"
    while True:
        text, end = unread.text, unread.at
        while end < len(text) and depth and state != "wrong":
            end, depth, state = _json_step(text, end, depth, state)
        pieces.append(unread.take_to(end))
        if not depth:
            return "".join(pieces)
        if state == "wrong" or unread.ended:
            raise NotACall
        yield


def _json_step(text: str, at: int, depth: int, state: str) -> tuple[int, int, str]:
    """Scan JSON from index `at`, which exists, to the next character that matters, and over it.

    Returns the index behind it, how many brackets are open, and the state: "between" strings, "string", "escape" (the next
    character of a string is escaped), or "wrong" (the character at the index can't be there).
    """
    if state == "escape":
        return at + 1, depth, "string"
    found = (_MATTERS_IN_STRING if state == "string" else _MATTERS).search(text, at)
    if not found:
        return len(text), depth, state
    at, character = found.start(), found[0]
    if state == "string":
        return at + 1, depth, "escape" if character == "\\" else "between"
    if character == '"':
        return at + 1, depth, "string"
    if character in "{[" and depth < MAX_JSON_DEPTH:
        return at + 1, depth + 1, "between"
    if character in "}]":
        return at + 1, depth - 1, "between"
    return at, depth, "wrong"
