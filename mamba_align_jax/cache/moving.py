"""Which cached entries leave a cache, and which enter it: pages and state blocks with their keys, but not their contents.

An entry is a page or a state block. Entries are listed in the order in which they are to be evicted, so a prefix's last
page comes first. A cache that can't hold a whole list takes the end of it, which is what eviction would have left.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mamba_align_jax.cache.block_pool import BlockPool
from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.hybrid import HybridCache

# A key and the id of its page or block.
Entry = tuple[bytes, int]


class Entries(NamedTuple):
    """Cached entries, in the order in which they are to be evicted. The keys of `states` are keys of `pages` too."""

    pages: list[Entry]
    states: list[Entry]


def entries_of_prefix(cache: HybridCache, tokens: Sequence[int], salt: bytes = b"") -> Entries:
    """Returns the states that are cached of a prefix under a salt, and its pages up to the last of them.

    A state after all of its tokens counts as well.
    """
    chain, size, page_size = HashChain(cache.kv.page_size, salt), cache.states.granularity, cache.kv.page_size
    pages = cache.kv.lookup(tokens, chain)
    ends = range(size, len(pages) * page_size + 1, size)
    found = [(end, cache.states.pool.find(chain.at(tokens, end))) for end in ends]
    states = [(end, block) for end, block in found if block is not None]
    length = states[-1][0] if states else 0
    return Entries(
        pages=[(chain.at(tokens, (n + 1) * page_size), pages[n]) for n in reversed(range(length // page_size))],
        states=[(chain.at(tokens, end), block) for end, block in states],
    )


def all_entries(cache: HybridCache) -> Entries:
    """Returns everything that a cache can find."""
    return Entries(cache.kv.pool.published, cache.states.pool.published)


class Admission:
    """Entries that enter a cache. They are held until `publish` or `withdraw` is called, and one of them must be.

    Attributes:
        pages: The pages that must be filled, each with its place in the list of keys.
        states: The same for state blocks.
        length: Number of pages that are kept, those included that were cached before.
        num_states: The same for state blocks.
    """

    def __init__(
        self, cache: HybridCache, page_keys: Sequence[bytes], state_keys: Sequence[bytes], *, is_prefix: bool
    ) -> None:
        """Holds those entries that are cached already, and allocates the others, which evicts as usual.

        Keys are in the order in which their entries are to be evicted. Those of states are among those of pages. With
        `is_prefix` the entries are those of one prefix: pages after its last state are left out.
        """
        pages = _fitting(cache.kv.pool, page_keys)
        kept = set(pages)
        states = _fitting(cache.states.pool, [key for key in state_keys if key in kept])
        if is_prefix:
            pages = pages[pages.index(states[-1]) :] if states else []
        # Pages first: when a page is evicted, the state with the same key becomes free.
        log = cache.log
        self._pages = _Claim(cache.kv.pool, pages, None if log is None else log.import_page)
        self._states = _Claim(cache.states.pool, states, None if log is None else log.store_state)
        self.pages = self._pages.places(page_keys)
        self.states = self._states.places(state_keys)
        self.length, self.num_states = len(pages), len(states)

    def publish(self) -> None:
        """Makes the entries findable, none of them expendable, and lets go of them. Call it when they are filled."""
        self._pages.publish()
        self._states.publish()
        self.withdraw()

    def withdraw(self) -> None:
        """Lets go of the entries: those that are not cached are free again."""
        self._pages.release()
        self._states.release()


class _Claim:
    """The entries of one pool that are held for an admission. `tell` is called with each key before it is published."""

    def __init__(self, pool: BlockPool, keys: Sequence[bytes], tell: Callable[[bytes], None] | None) -> None:
        self._pool, self._keys, self._tell = pool, keys, tell
        self._blocks: dict[bytes, int] = {}
        self._missing = [key for key in keys if pool.find(key) is None]
        for key in keys:
            block = pool.find(key)
            if block is not None:
                pool.hold(block)
                self._blocks[key] = block
        self._blocks.update(zip(self._missing, pool.allocate(len(self._missing)) or [], strict=True))

    def places(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Returns the place in `keys` of each entry that must be filled, with its page or block."""
        missing = set(self._missing)
        return [(place, self._blocks[key]) for place, key in enumerate(keys) if key in missing]

    def publish(self) -> None:
        # A prefix's last entry comes first in `_missing`, and is published last, as by a request.
        for key in reversed(self._missing):
            if self._tell is not None:
                self._tell(key)
            self._pool.publish(self._blocks[key], key)
        for key in self._keys:
            self._pool.set_expendable(key, False)

    def release(self) -> None:
        self._pool.release([self._blocks[key] for key in self._keys])


def _fitting(pool: BlockPool, keys: Sequence[bytes]) -> Sequence[bytes]:
    """Returns the longest end of `keys` that a pool can hold, together with what running requests hold."""

    def fits(length: int) -> bool:
        found = [pool.find(key) for key in keys[len(keys) - length :]]
        return pool.fits(found.count(None), [block for block in found if block is not None])

    shortest, longest = 0, len(keys)
    while shortest < longest:
        length = (shortest + longest + 1) // 2
        shortest, longest = (length, longest) if fits(length) else (shortest, length - 1)
    return keys[len(keys) - shortest :]
