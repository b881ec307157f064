"""Lines of what waits, one for each tenant. The tenants take turns, and share a limit of how much may wait."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar


class HasId(Protocol):
    """What can wait: it has a number that no one else in the lines has."""

    id: int


T = TypeVar("T", bound=HasId)


class Lines(Generic[T]):
    """What waits, in one line for each tenant. In each turn the first in one line leaves, and the line goes to the end.

    So whoever is first in a line waits for at most one turn of each other tenant, however many others come, and however
    long the others' lines are.
    """

    def __init__(self) -> None:
        """Makes no lines."""
        # By tenant, the next one first; in a line by id, the oldest first.
        self._lines: dict[str, dict[int, T]] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[T]:
        """Goes through all that wait, in the order of their turns if nothing else comes."""
        rounds = itertools.zip_longest(*(line.values() for line in self._lines.values()))
        return (item for one in rounds for item in one if item is not None)

    @property
    def first(self) -> T:
        """What leaves in the next turn."""
        return next(iter(next(iter(self._lines.values())).values()))

    @property
    def heads(self) -> Iterator[T]:
        """The first in each line, in the order of the lines' turns."""
        return (next(iter(line.values())) for line in self._lines.values())

    def take(self) -> T:
        """Takes out what leaves in this turn."""
        tenant, first = next(iter(self._lines)), self.first
        self.remove(tenant, first)
        return first

    def has(self, tenant: str, item: T) -> bool:
        """Whether something waits."""
        return item.id in self._lines.get(tenant, ())

    def add(self, tenant: str, item: T) -> None:
        """Puts something at the end of its tenant's line. A line that was empty is the last."""
        self._lines.setdefault(tenant, {})[item.id] = item

    def remove(self, tenant: str, item: T) -> None:
        """Takes out what waits. If it was to leave in the next turn, that was the tenant's turn."""
        line, had_turn = self._lines[tenant], item is self.first
        del line[item.id]
        if not line or had_turn:
            del self._lines[tenant]
        if line and had_turn:
            self._lines[tenant] = line


def has_room(limit: int, tenant: str, counts: Mapping[str, int]) -> bool:
    """Whether a tenant may queue one more.

    A tenant that is alone may fill the queue. While others wait, each may have half of it, and what one has besides is not
    counted: it was queued while nobody else was there, and does not keep them out.

    Args:
        limit: How many may wait, at least 1.
        tenant: Who asks.
        counts: How many wait for each tenant. Another thread may change them meanwhile.
    """
    # One call that no other thread interrupts.
    found = dict(counts)
    own = found.pop(tenant, 0)
    others = [count for count in found.values() if count > 0]
    if not others:
        return own < limit
    half = -(-limit // 2)
    return own < half and own + sum(min(count, half) for count in others) < limit
