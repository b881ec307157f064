"""What a cache reports: the pages and states that can be found from now on, and those that can't be found any more.

Whoever applies the events in their order knows the cache: see `mamba_align_jax.routing`.
"""

from collections.abc import Container
from dataclasses import dataclass

from mamba_align_jax.cache.hashing import HashChain


def block_hash(key: bytes) -> int:
    """Returns the last 8 bytes of a key of the cache as an unsigned number, which is what events name it by."""
    return int.from_bytes(key[-8:], "big")


@dataclass(frozen=True, slots=True)
class PageStored:
    """A page of keys and values can be found.

    Attributes:
        block_hash: Stands for all tokens up to the end of the page, and for the salt.
        parent: The hash of the page before it, or None for the first page.
        tokens: The page's own tokens. None are known of a page that was imported: then `parent` is None and `salt` empty.
        salt: The salt under which the page was published.
    """

    block_hash: int
    parent: int | None
    tokens: tuple[int, ...]
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class PageRemoved:
    """A page can't be found any more."""

    block_hash: int


@dataclass(frozen=True, slots=True)
class StateStored:
    """The state after `num_tokens` tokens can be found. Its hash is that of the page that ends there.

    The number is 0 if the state was imported. Its hash stands for its tokens all the same.
    """

    block_hash: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StateRemoved:
    """A state can't be found any more. Its page may still be cached."""

    block_hash: int


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing can be found."""


CacheEvent = PageStored | PageRemoved | StateStored | StateRemoved | CacheCleared


class CacheLog:
    """Collects the events of one cache in their order.

    It also remembers what is stored, so that it can report everything anew after a change was cut off. A key is therefore
    written here before the cache publishes it, and crossed out after the cache has lost it.

    Attributes:
        pending: The events that were not taken yet.
    """

    def __init__(self) -> None:
        """Creates the log of an empty cache. Its first event is `CacheCleared`."""
        self.pending: list[CacheEvent] = [CacheCleared()]
        self._pages: dict[bytes, PageStored] = {}
        self._states: dict[bytes, StateStored] = {}

    def store_page(self, chain: HashChain, tokens: tuple[int, ...], end: int) -> None:
        """Records that the page of `tokens` that ends after `end` tokens is about to be published.

        `chain` has the hashes of the request's tokens in blocks of one page, up to `end`.
        """
        key, start = chain.at((), end), end - chain.block_size
        parent = block_hash(chain.at((), start)) if start else None
        event = self._pages[key] = PageStored(block_hash(key), parent, tokens, chain.salt)
        self.pending.append(event)

    def import_page(self, key: bytes) -> None:
        """Records that a page is about to be published whose tokens are not known."""
        event = self._pages[key] = PageStored(block_hash(key), None, ())
        self.pending.append(event)

    def remove_page(self, key: bytes) -> None:
        """Records that a page was lost."""
        self._pages.pop(key, None)
        self.pending.append(PageRemoved(block_hash(key)))

    def store_state(self, key: bytes, num_tokens: int = 0) -> None:
        """Records that the state after `num_tokens` tokens is about to be published. 0 is for an imported one."""
        event = self._states[key] = StateStored(block_hash(key), num_tokens)
        self.pending.append(event)

    def remove_state(self, key: bytes) -> None:
        """Records that a state was lost."""
        self._states.pop(key, None)
        self.pending.append(StateRemoved(block_hash(key)))

    def restart(self, pages: Container[bytes] = (), states: Container[bytes] = ()) -> None:
        """Replaces all pending events by `CacheCleared` and the cached `pages` and `states`, all stored here."""
        self._pages = {key: event for key, event in self._pages.items() if key in pages}
        self._states = {key: event for key, event in self._states.items() if key in states}
        self.pending = [CacheCleared(), *self._pages.values(), *self._states.values()]
