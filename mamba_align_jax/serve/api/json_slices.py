"""Decodes JSON in slices, so that a thread that reads a large body leaves Python's lock to others every few milliseconds.

A decoder in C keeps the lock until it is done, and four megabytes of empty lists take it half a second. So long lists and
objects are cut at commas, and each slice is decoded by msgspec as a list or an object of its own. Wherever the cuts are, the
text is JSON if all slices are.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Bool, Int

# Bytes of a text that is decoded in a few milliseconds, whatever it says.
SLICE_BYTES = 2**14
# msgspec's own reader takes 13 microseconds for a number such as 1e308, and Python's a twentieth of that.
_DECODE = msgspec.json.Decoder(float_hook=float).decode
_SPACES = b" \t\r\n"
_QUOTE, _BACKSLASH, _COLON, _COMMA = b'"\\:,'
# No call needs more.
_DEEPEST = 200


class TooManyValues(ValueError):
    """A text has more texts, lists and objects than are allowed. Nothing has been decoded."""


def decode(text: bytes, max_values: int) -> Any:
    """Returns the JSON value of a text. It is called in a thread of its own if the text is longer than `SLICE_BYTES`.

    Args:
        text: The value in UTF-8. Neither NaN nor infinities are JSON.
        max_values: The largest number of texts (keys, too), lists and objects. Each costs time to make, to look at and to
            free, and a long list of them is freed in one piece.

    Raises:
        TooManyValues: The text has more of them.
        RecursionError: It is nested too deeply.
        ValueError: It is no JSON.
    """
    if len(text) <= SLICE_BYTES:
        return _DECODE(text)
    return _Text(text, max_values).value(0, len(text), 1)


class _Text:
    """A text, and where in it the characters are that JSON gives a meaning: found by NumPy, which frees Python's lock."""

    def __init__(self, text: bytes, max_values: int) -> None:
        self._text = text
        characters = np.frombuffer(text, np.uint8)
        self._escapes, quotes = _escapes_and_quotes(characters)

        def outside(found: Bool[np.ndarray, " bytes"]) -> Int[np.ndarray, " found"]:
            places = np.flatnonzero(found)
            return places[np.searchsorted(quotes, places) % 2 == 0]

        # The brackets of lists and objects differ in one bit.
        opening, closing = outside(characters | 0x20 == ord("{")), outside(characters | 0x20 == ord("}"))
        if len(quotes) // 2 + len(opening) > max_values:
            raise TooManyValues(f"must have at most {max_values} texts, lists and objects")
        commas = outside(characters == _COMMA)
        depths = np.searchsorted(opening, commas) - np.searchsorted(closing, commas)
        if len(depths) and depths.max() > _DEEPEST:
            raise RecursionError
        # The commas of each depth, in their order.
        order = np.argsort(depths, kind="stable")
        self._commas, self._first = commas[order], np.searchsorted(depths[order], np.arange(_DEEPEST + 2))
        self._colons = outside(characters == _COLON)

    def value(self, start: int, end: int, depth: int) -> Any:
        """Returns the value of a part of the text, whose commas have the depth `depth`."""
        if depth > _DEEPEST:
            raise RecursionError
        start, end = self._stripped(start, end)
        if end - start <= SLICE_BYTES:
            return _DECODE(self._text[start:end])
        match self._text[start : start + 1] + self._text[end - 1 : end]:
            case b'""':
                return "".join(self._pieces(start + 1, end - 1))
            case b"[]":
                return self._list(*self._stripped(start + 1, end - 1), depth)
            case b"{}":
                return self._object(*self._stripped(start + 1, end - 1), depth)
        raise ValueError(f"malformed at byte {start}")  # a long number, or a list without its end

    def _list(self, start: int, end: int, depth: int) -> list[Any]:
        found: list[Any] = []
        for first, last, is_one in self._parts(start, end, depth) if start < end else ():
            found += [self.value(first, last, depth + 1)] if is_one else self._slice(b"[", first, last, b"]")
        return found

    def _object(self, start: int, end: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for first, last, is_one in self._parts(start, end, depth) if start < end else ():
            if is_one:
                colon = self._colon(first, last)
                name = self.value(first, colon, depth + 1)
                if not isinstance(name, str):
                    raise ValueError(f"a name is missing at byte {first}")
                found[name] = self.value(colon + 1, last, depth + 1)
            else:
                found |= self._slice(b"{", first, last, b"}")
        return found

    def _slice(self, begin: bytes, start: int, end: int, finish: bytes) -> Any:
        found = _DECODE(begin + self._text[start:end] + finish)
        if not found:
            raise ValueError(f"a value is missing at byte {start}")
        return found

    def _stripped(self, start: int, end: int) -> tuple[int, int]:
        """Returns the bounds of a part without the spaces around it."""
        while start < end:
            part = self._text[start : min(end, start + SLICE_BYTES)]
            rest = part.lstrip(_SPACES)
            start += len(part) - len(rest)
            if rest:
                break
        while start < end:
            part = self._text[max(start, end - SLICE_BYTES) : end]
            rest = part.rstrip(_SPACES)
            end -= len(part) - len(rest)
            if rest:
                break
        return start, end

    def _parts(self, start: int, end: int, depth: int) -> Iterator[tuple[int, int, bool]]:
        """Cuts the inside of a list or an object at commas. Yields each part's bounds, and whether it is one long value."""
        first, last = self._first[depth : depth + 2]
        commas = self._commas[first:last]
        last = int(np.searchsorted(commas, end))
        while start <= end:
            # The last comma by which a slice is full, or else the next one.
            place = int(np.searchsorted(commas, start + SLICE_BYTES, "right"))
            before = place and int(commas[place - 1])
            if end - start <= SLICE_BYTES:
                stop, is_one = end, False
            elif before > start:
                stop, is_one = before, False
            else:
                stop, is_one = int(commas[place]) if place < last else end, True
            yield start, stop, is_one
            start = stop + 1

    def _colon(self, start: int, end: int) -> int:
        """Returns where the first colon of a part is."""
        place = int(np.searchsorted(self._colons, start))
        if place == len(self._colons) or self._colons[place] >= end:
            raise ValueError(f"a colon is missing after byte {start}")
        return int(self._colons[place])

    def _pieces(self, start: int, end: int) -> Iterator[str]:
        """Decodes the inside of a text. It is cut before escapes, or not at all if there are none: then it is quick."""
        while True:
            place, stop = int(np.searchsorted(self._escapes, start + SLICE_BYTES)), end
            while place < len(self._escapes) and self._escapes[place] < end:
                stop = int(self._escapes[place])
                if not _is_second_half(self._text[stop : stop + 4]):
                    break
                place, stop = place + 1, end
            yield msgspec.json.decode(b'"' + self._text[start:stop] + b'"', type=str)
            if stop == end:
                return
            start = stop


def _is_second_half(escape: bytes) -> bool:
    r"""Whether an escape may be the second half of a character, as \udc00 is, which is not decoded without the first."""
    return escape[:3].lower() == rb"\ud" and escape[3:].lower() in b"cdef"


def _escapes_and_quotes(
    characters: Int[np.ndarray, " bytes"],
) -> tuple[Int[np.ndarray, " escapes"], Int[np.ndarray, " quotes"]]:
    """Returns where escapes begin, and the quotes at which texts begin and end."""
    quotes, backslashes = np.flatnonzero(characters == _QUOTE), np.flatnonzero(characters == _BACKSLASH)
    # Of backslashes in a row, the first begins an escape, and so does every second one after it.
    begins = np.diff(backslashes, prepend=-2) != 1
    first = np.maximum.accumulate(np.where(begins, backslashes, 0))
    escapes = backslashes[(backslashes - first) % 2 == 0]
    is_escaped = np.zeros(len(characters) + 1, bool)
    is_escaped[escapes + 1] = True
    return escapes, quotes[~is_escaped[quotes]]
