"""The parts of a reply."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple


class Reasoning(NamedTuple):
    """A piece of the reasoning."""

    text: str


class Content(NamedTuple):
    """A piece of the answer."""

    text: str


class Call(NamedTuple):
    """A whole tool call. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


Part = Reasoning | Content | Call


def joined(parts: Iterable[Part]) -> list[Part]:
    """Join neighbouring pieces of reasoning, and neighbouring pieces of the answer. Calls stay apart."""
    result: list[Part] = []
    for kind, group in itertools.groupby(parts, type):
        if kind is Call:
            result += group
        else:
            text = "".join(part[0] for part in group)
            result.append(Reasoning(text) if kind is Reasoning else Content(text))
    return result
