"""What a request might go on with: drafts for its verify rows, guessed on the host."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

# Stands for a token, drafted or sampled, that only the device knows.
UNKNOWN = -1


class Drafter(Protocol):
    """Proposes tokens that the next step verifies: a wrong one costs time and changes nothing that is generated.

    Proposals must not be drawn at random: verification keeps the target's distribution because a draft is certain once the
    tokens before it are known.
    """

    def draft(self, request: Hashable, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` >= 1 tokens that may follow `tokens`, all that the request has: those of the last call and more."""
        ...

    def forget(self, request: Hashable) -> None:
        """Drops what is kept of a request; unknown ones are none of its business."""
        ...


@dataclass
class _Index:
    """Where every n-gram that ends before the last of `length` tokens ended last; by n, then by n-gram."""

    ends: dict[int, dict[tuple[int, ...], int]]
    length: int = 0


class PromptLookupDrafter:
    """Prompt lookup: what followed the last occurrence of the longest n-gram that the tokens end with.

    An index per request grows with its tokens, so a step costs as much as it brings, however long the context is.
    Source: Saxena, "Prompt Lookup Decoding" (2023).
    """

    def __init__(self, longest: int, shortest: int) -> None:
        """N-grams of `longest` down to `shortest` tokens are looked up.

        Raises:
            ValueError: not 1 <= shortest <= longest.
        """
        if not 1 <= shortest <= longest:
            raise ValueError(f"PromptLookupDrafter: wanted 1 <= shortest <= longest, got {shortest} and {longest}")
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[Hashable, _Index] = {}

    def draft(self, request: Hashable, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafter`. Where the occurrence is nearer than `most` tokens, what lies between is taken to repeat."""
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = _Index({n: {} for n in self._sizes})
        for n, ends in index.ends.items():
            # The n-gram at the very end waits for the next call: it must not find itself.
            begin = max(index.length - n, 0)
            new = tokens[begin:-1]
            ends.update(zip(zip(*(new[i:] for i in range(n)), strict=False), count(begin + n), strict=False))
        index.length = len(tokens)
        for n, ends in index.ends.items():
            end = ends.get(tuple(tokens[-n:]))
            if end is not None:
                period = len(tokens) - end
                return [tokens[end + i % period] for i in range(most)]
        return []

    def forget(self, request: Hashable) -> None:
        """See `Drafter`."""
        self._indices.pop(request, None)
