"""Block ids of one pool: who holds them, which are cached under a key, and which is evicted next."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence


class BlockPool:
    """Ids 1 .. num_blocks-1 with reference counts; 0 is NULL_BLOCK and never handed out.

    A block is free, held by one holder or more, or cached: held by nobody but still findable by its key. Cached blocks
    are evicted least recently used first, and only once no free block is left.

    A key has one block, the first that was published. Held blocks that are published later under the same key are its
    spares: if the first is evicted, one of them is found instead, and whoever lets a spare go has used the first. So what
    is published on top of a prefix is never left without it.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        on_lost: Callable[[bytes, bool], object] = lambda key, evicted: None,
        on_eviction: Callable[[], object] = lambda: None,
    ) -> None:
        """Creates a pool whose blocks are all free.

        Args:
            num_blocks: Size of the pool, NULL_BLOCK included.
            on_lost: Called with each key that can no longer be found, and with whether it was evicted.
            on_eviction: Called without arguments for each key that is evicted.

        Raises:
            ValueError: `num_blocks` leaves no block to hand out.
        """
        if num_blocks < 2:
            raise ValueError(f"BlockPool: num_blocks must be at least 2, one of them NULL_BLOCK, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.on_lost = on_lost
        self._on_eviction = on_eviction
        self._free = list(range(num_blocks - 1, 0, -1))
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._spares: dict[bytes, list[int]] = {}
        self._spare_key: dict[int, bytes] = {}
        # The last keys that were evicted, as many as there are blocks: they say why a lookup found nothing.
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and a lookup may find."""
        return len(self._cached)

    @property
    def keys(self) -> frozenset[bytes]:
        """Everything that is published."""
        return frozenset(self._block_of)

    def fits(self, count: int, hits: Iterable[int] = ()) -> bool:
        """Whether `hits` could be held and `count` blocks allocated besides."""
        return count + sum(block in self._cached for block in hits) <= self.num_available

    def allocate(self, count: int) -> list[int] | None:
        """Holds `count` blocks with unspecified contents; None, and nothing changed, if there are not so many."""
        if not self.fits(count):
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def find(self, key: bytes) -> int | None:
        """The block that is published under `key`."""
        return self._block_of.get(key)

    def key_of(self, block: int) -> bytes | None:
        """What a block is found under."""
        return self._key_of.get(block)

    def was_evicted(self, key: bytes) -> bool:
        """Whether `key` is not found because its block was evicted lately."""
        return key in self._evicted

    def hold(self, block: int) -> None:
        """One more holder of a block that is held or cached."""
        self._cached.pop(block, None)
        self._holders[block] = self._holders.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less of each. The first of several cached ones is evicted first."""
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] > 0:
                continue
            del self._holders[block]
            if block in self._key_of:
                self._cached[block] = None
                continue
            if block in self._spare_key:
                first = self._block_of[self._remove_spare(block)]
                if first in self._cached:
                    self._cached.move_to_end(first)
            self._free.append(block)

    def publish(self, block: int, key: bytes) -> bool:
        """Makes a held block findable. If `key` is published already, the first block stays the one that is found.

        Returns:
            Whether `key` is new.
        """
        if block in self._key_of or block in self._spare_key:
            return False
        if key in self._block_of:
            self._spare_key[block] = key
            self._spares.setdefault(key, []).append(block)
            return False
        self._block_of[key], self._key_of[block] = block, key
        self._evicted.pop(key, None)
        return True

    def unpublish(self, key: bytes, *, evicted: bool = False) -> int | None:
        """Makes `key` unfindable, whoever holds its block; one that nobody holds is free. Counted as evicted if so named.

        Returns:
            The block that was found under it; None if none was.
        """
        block = self._block_of.pop(key, None)
        if block is None:
            return None
        del self._key_of[block]
        for spare in self._spares.pop(key, ()):
            del self._spare_key[spare]
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)
        self._lose(key, evicted)
        return block

    def reset(self) -> None:
        """Makes everything unfindable; held blocks stay held."""
        for key in list(self._block_of):
            self.unpublish(key)
            self._remember(key)

    def check(self, holders: Mapping[int, int] | None = None) -> None:
        """Raises AssertionError unless every block is free, held or cached, and exactly one of them.

        Args:
            holders: How often each block should be held, where the caller knows.
        """
        places = [*self._free, *self._holders, *self._cached]
        assert sorted(places) == list(range(1, self.num_blocks)), "blocks lost or in two places"
        assert all(count > 0 for count in self._holders.values()), "a block is held by nobody"
        assert holders is None or dict(holders) == self._holders, "holders and reference counts disagree"
        assert {b: k for k, b in self._block_of.items()} == self._key_of, "keys and blocks disagree"
        assert all(block in self._key_of for block in self._cached), "a cached block without a key"
        spares = {block: key for key, blocks in self._spares.items() for block in blocks}
        assert spares == self._spare_key, "spares and keys disagree"
        assert all(block in self._holders and block not in self._key_of for block in spares), "a spare that is not held"
        assert self._spares.keys() <= self._block_of.keys(), "a spare without a first block"
        assert not self._evicted.keys() & self._block_of.keys(), "an evicted key is found"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._key_of.pop(block)
        if key in self._spares:
            first = self._spares[key][0]
            self._remove_spare(first)
            self._block_of[key], self._key_of[first] = first, key
        else:
            del self._block_of[key]
            self._lose(key, evicted=True)
        return block

    def _remove_spare(self, block: int) -> bytes:
        key = self._spare_key.pop(block)
        self._spares[key].remove(block)
        if not self._spares[key]:
            del self._spares[key]
        return key

    def _lose(self, key: bytes, evicted: bool) -> None:
        if evicted:
            self.num_evictions += 1
            self._on_eviction()
            self._remember(key)
        self.on_lost(key, evicted)

    def _remember(self, key: bytes) -> None:
        self._evicted[key] = None
        if len(self._evicted) > self.num_blocks:
            self._evicted.popitem(last=False)
