"""Block ids of one pool: who holds them, which are cached under a hash, and which is evicted next."""

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Ids 1 .. num_blocks-1 with reference counts; 0 is NULL_BLOCK and never handed out.

    A block is free, held by one holder or more, or cached: held by nobody but still findable by its hash. Cached blocks
    are evicted least recently used first, and only once no free block is left.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"BlockPool: num_blocks must be at least 2, one of them NULL_BLOCK, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._free = list(range(num_blocks - 1, 0, -1))
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders)

    def allocate(self, count: int) -> list[int] | None:
        """Holds `count` blocks with unspecified contents; None, and nothing changed, if there are not so many."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                del self._block_of[self._hash_of.pop(block)]
                self.num_evictions += 1
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def find(self, key: bytes) -> int | None:
        """The block that is published under `key`."""
        return self._block_of.get(key)

    def hold(self, block: int) -> None:
        """One more holder of a block that is held or cached."""
        self._cached.pop(block, None)
        self._holders[block] = self._holders.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less of each. The first of several cached ones is evicted first."""
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                del self._holders[block]
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int, key: bytes) -> None:
        """Makes a held block findable. If `key` is published already, the first block stays the one that is found."""
        if key not in self._block_of and block not in self._hash_of:
            self._block_of[key] = block
            self._hash_of[block] = key

    def check(self) -> None:
        """Raises AssertionError unless every block is free, held or cached, and exactly one of them."""
        places = [*self._free, *self._holders, *self._cached]
        assert sorted(places) == list(range(1, self.num_blocks)), "blocks lost or in two places"
        assert all(count > 0 for count in self._holders.values()), "a block is held by nobody"
        assert {b: h for h, b in self._block_of.items()} == self._hash_of, "hashes and blocks disagree"
        assert all(block in self._hash_of for block in self._cached), "a cached block without a hash"
