"""Prompt lookup on the host: drafts are the tokens that followed an earlier occurrence of a request's last tokens."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count

from mamba_align_jax import _values as values
from mamba_align_jax.engine.config import LONGEST_LOOKUP


@dataclass
class _Index:
    """The n-grams that end before the last of a request's first `length` tokens.

    `ends[n]` maps each n-gram to the end of its last occurrence.
    """

    ends: dict[int, dict[tuple[int, ...], int]]
    length: int = 0


class PromptLookupDrafter:
    """Drafts what followed the last occurrence of the longest n-gram that the tokens end with.

    An index per request grows with its tokens, so the cost of a call depends on the number of new tokens and not on the
    length of the context. Source: Saxena, "Prompt Lookup Decoding" (2023).
    """

    def __init__(self, longest: int, shortest: int) -> None:
        """Makes a drafter that looks up n-grams of `longest` down to `shortest` tokens.

        Raises:
            ValueError: The sizes aren't whole numbers with 1 <= shortest <= longest <= `LONGEST_LOOKUP`.
        """
        longest = values.integer("PromptLookupDrafter: longest", longest, maximum=LONGEST_LOOKUP)
        shortest = values.integer("PromptLookupDrafter: shortest", shortest)
        if not 1 <= shortest <= longest:
            raise ValueError(f"PromptLookupDrafter: wanted 1 <= shortest <= longest, got {shortest} and {longest}")
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[Hashable, _Index] = {}

    def draft(self, request: Hashable, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Proposes tokens: see `Drafter`.

        If fewer than `max_drafts` tokens follow the occurrence, they are repeated.
        """
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = _Index({n: {} for n in self._sizes})
        # The new tokens, and those before that an n-gram with a new end begins with. One slice, as `tokens` may be slow.
        first = max(index.length - self._sizes[0], 0)
        recent = tokens[first:]
        for n, ends in index.ends.items():
            # The n-gram at the very end is added by the next call, so that it is not found as its own occurrence.
            begin = max(index.length - n, 0)
            new = recent[begin - first : -1]
            ends.update(zip(zip(*(new[i:] for i in range(n)), strict=False), count(begin + n), strict=False))
        index.length = len(tokens)
        for n, ends in index.ends.items():
            end = ends.get(tuple(recent[-n:]))
            if end is not None:
                found = tokens[end : end + max_drafts]
                return [found[i % len(found)] for i in range(max_drafts)]
        return []

    def forget(self, request: Hashable) -> None:
        """Drops the index of a request: see `Drafter`."""
        self._indices.pop(request, None)
