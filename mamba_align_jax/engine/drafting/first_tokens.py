"""What a drafter on the host gets of a request: its tokens, to be read."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any


class FirstTokens(Sequence):
    """The tokens that a list has when this is made. They can't be changed, and none is copied.

    It compares like a list, and a slice of it, or its sum with a list, is a list of its own.
    """

    __slots__ = ("_length", "_tokens")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tokens: Sequence[int]) -> None:
        """Takes a list, to which its owner may only append."""
        self._tokens, self._length = tokens, len(tokens)

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return self._length

    def __getitem__(self, place: Any) -> Any:
        """Returns a token, or for a slice a list of tokens."""
        places = range(self._length)[place]
        if isinstance(places, int):
            return self._tokens[places]
        if places.step != 1:
            return [self._tokens[i] for i in places]
        return self._tokens[places.start : max(places.start, places.stop)]

    def __iter__(self) -> Iterator[int]:
        """Yields the tokens. `Sequence` would ask for one after the other."""
        return islice(self._tokens, self._length)

    def __eq__(self, other: object) -> bool:
        """Returns whether a list or other first tokens have the same tokens."""
        return list(self) == list(other) if isinstance(other, list | FirstTokens) else NotImplemented

    def __add__(self, other: list[int]) -> list[int]:
        """Returns a list of these tokens and others after them."""
        return [*self, *other]

    def __repr__(self) -> str:
        """Returns what the list would return."""
        return repr(list(self))
