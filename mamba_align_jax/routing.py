"""Chooses among replicas of an engine by what they have cached: states first, because a request resumes from a state.

It runs no model and needs no JAX. What replicas have cached is known from their events: see `Engine.on_cache_event` and,
over a network, `mamba_align_jax.serve.events.stream`.
"""

import numbers
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mamba_align_jax import _values as values
from mamba_align_jax.cache.events import (
    CacheCleared,
    CacheEvent,
    PageRemoved,
    PageStored,
    StateRemoved,
    StateStored,
    block_hash,
)
from mamba_align_jax.cache.hashing import HashChain

# What names a replica.
R = TypeVar("R", bound=Hashable)


@dataclass
class CacheMirror:
    """What one engine has cached, by its events.

    Attributes:
        pages: The hashes of its pages.
        states: The number of tokens that each of its states stands for, by hash; 0 if the engine does not know it.
    """

    pages: set[int] = field(default_factory=set)
    states: dict[int, int] = field(default_factory=dict)

    def apply(self, events: Iterable[CacheEvent]) -> None:
        """Follows events in their order. Events that come twice in one piece do no harm.

        Raises:
            ValueError: Something else is among them. None is followed.
        """
        values.require(isinstance(events, Iterable), "events", "an iterable of CacheEvents", events)
        events = tuple(events)
        other = [event for event in events if not isinstance(event, CacheEvent)]
        values.require(not other, "events", "an iterable of CacheEvents", other[:1] and other[0])
        for event in events:
            match event:
                case PageStored():
                    self.pages.add(event.block_hash)
                case PageRemoved():
                    self.pages.discard(event.block_hash)
                case StateStored():
                    self.states[event.block_hash] = event.num_tokens
                case StateRemoved():
                    self.states.pop(event.block_hash, None)
                case CacheCleared():
                    self.pages.clear()
                    self.states.clear()

    def reach(self, hashes: Sequence[int], page_size: int) -> "Reach":
        """Returns how much of a prompt is cached.

        Args:
            hashes: The hashes of the prompt's pages that end before its last token, in order. A request computes at least
                one token.
            page_size: Tokens per page.
        """
        paged = resumable = 0
        for number, name in enumerate(hashes, start=1):
            if name not in self.pages:
                break
            paged = number * page_size
            if name in self.states:
                resumable = paged
        return Reach(resumable, paged)


@dataclass(frozen=True, order=True)
class Reach:
    """How much of a prompt one replica has cached. The greater of two has more states, or else more pages.

    Attributes:
        num_resumable_tokens: The number of tokens from whose state a request would start.
        num_paged_tokens: The number of tokens whose keys and values are cached.
    """

    num_resumable_tokens: int
    num_paged_tokens: int


class StateRouter(Generic[R]):
    """Sends each prompt to the replica that resumes it from the most tokens.

    Attributes:
        mirrors: What each replica has cached.
    """

    def __init__(self, replicas: Iterable[R], page_size: int) -> None:
        """Makes a router over replicas whose caches are empty.

        Args:
            replicas: Their names.
            page_size: Tokens per page, the same for all: `EngineConfig.kv_page_size`, and the field `block_size` of vLLM's
                events.

        Raises:
            ValueError: There is no replica, a name is not hashable, or the page size is no size.
        """
        self.page_size = values.integer("StateRouter: page_size", page_size, 1)
        # The characters of a text are not meant to be names.
        is_iterable = isinstance(replicas, Iterable) and not isinstance(replicas, str | bytes)
        values.require(is_iterable, "StateRouter: replicas", "an iterable of names", replicas)
        self.mirrors: dict[R, CacheMirror] = {}
        for replica in replicas:
            values.known(self.mirrors, replica, "StateRouter: replica")
            self.mirrors[replica] = CacheMirror()
        values.require(bool(self.mirrors), "StateRouter: replicas", "at least one name", replicas)

    def apply(self, replica: R, events: Iterable[CacheEvent]) -> None:
        """Follows what a replica reports.

        Raises:
            ValueError: The replica is unknown, or something else is among the events. None is followed.
        """
        self._known(replica).apply(events)

    def reaches(self, tokens: Sequence[int], salt: bytes = b"") -> dict[R, Reach]:
        """Returns how much of a prompt each replica has cached under a salt."""
        values.tokens("StateRouter: tokens", tokens)
        chain, size = HashChain(self.page_size, salt), self.page_size
        hashes = [block_hash(chain.at(tokens, end)) for end in range(size, len(tokens), size)]
        return {replica: mirror.reach(hashes, size) for replica, mirror in self.mirrors.items()}

    def choose(self, tokens: Sequence[int], loads: Mapping[R, float] | None = None, salt: bytes = b"") -> R:
        """Returns the replica from whose state the prompt starts after the most tokens.

        Among equals it is the one with the least load, then the one with the most pages, and then the first.

        Args:
            tokens: The prompt.
            loads: The replicas that may be chosen, with how busy they are, for instance their numbers of requests. None
                allows all.
            salt: The request's cache salt.

        Raises:
            ValueError: No replica may be chosen, one is unknown, or a load is no number. NaN is none.
        """
        loads = dict.fromkeys(self.mirrors, 0.0) if loads is None else loads
        wanted = "a number for each replica, or None"
        values.require(isinstance(loads, Mapping), "StateRouter: loads", wanted, loads)
        values.require(bool(loads), "StateRouter: loads", "at least one replica", loads)
        for replica, load in loads.items():
            self._known(replica)
            # NaN, which is not even itself, has no place in any order.
            is_number = isinstance(load, numbers.Real) and not isinstance(load, bool) and load == load
            values.require(is_number, "StateRouter: loads", wanted, load)
        reaches = self.reaches(tokens, salt)

        def worth(replica: R) -> tuple[float, float, float]:
            reach = reaches[replica]
            return reach.num_resumable_tokens, -loads[replica], reach.num_paged_tokens

        return max(loads, key=worth)

    def _known(self, replica: R) -> CacheMirror:
        mirror = values.known(self.mirrors, replica, "StateRouter: replica")
        if mirror is None:
            raise ValueError(f"StateRouter: replica must be one of {list(self.mirrors)}, got {values.shown(replica)}")
        return mirror
