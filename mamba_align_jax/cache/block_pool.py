"""The block ids of one pool: which are held, which are cached under a key, and which is evicted next."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from mamba_align_jax import _values as values


def ensure(condition: bool, message: str) -> None:
    """Raises AssertionError unless `condition` is true, also where Python leaves out `assert`."""
    if not condition:
        raise AssertionError(message)


class BlockPool:
    """Keeps reference counts of the block ids 1 to num_blocks - 1. Id 0 is NULL_BLOCK and is never handed out.

    Each block is in one of three states. It is held if it has at least one holder. It is cached if it has no holder but
    can still be found by its key. Otherwise it is free. When no free block is left, `allocate` evicts cached blocks,
    the least recently used first. A key may be expendable: `allocate` evicts the cached blocks of all expendable keys before
    it evicts another one.

    A lookup of a key returns the first block that was published under it. A held block that is published later under
    the same key is kept as a spare. A spare replaces the first block if that one is evicted. When a spare is released,
    the first block is marked as recently used. So a prefix stays cached at least as long as what was published after it.

    Attributes:
        num_blocks: Size of the pool, NULL_BLOCK included.
        num_evictions: The number of keys that this pool has evicted.
    """

    def __init__(
        self,
        num_blocks: int,
        on_lost: Callable[[bytes, bool], object] = lambda key, evicted: None,
        *,
        on_eviction: Callable[[], object] = lambda: None,
    ) -> None:
        """Creates a pool whose blocks are all free.

        `on_lost` is called with each key that can no longer be found, and with whether it was evicted, `on_eviction`
        without arguments for each key that is evicted.

        Raises:
            ValueError: `num_blocks` leaves no block to hand out.
        """
        num_blocks = values.integer("BlockPool: num_blocks", num_blocks)
        if num_blocks < 2:
            raise ValueError(f"BlockPool: num_blocks must be at least 2, one of them NULL_BLOCK, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._observers = [on_lost]
        self._on_eviction = on_eviction
        self._free = list(range(num_blocks - 1, 0, -1))
        self._holders: dict[int, int] = {}
        # The cached blocks of expendable keys, and all other ones, each in the order in which they will be evicted.
        self._cached_expendable: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._expendable: set[bytes] = set()
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._spares: dict[bytes, list[int]] = {}
        self._spare_key: dict[int, bytes] = {}
        # The keys that were evicted last, at most `num_blocks` of them. They tell why a lookup found nothing.
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """The number of blocks that `allocate` could hand out: the free ones and the cached ones."""
        return len(self._free) + self.num_cached

    @property
    def num_held(self) -> int:
        """The number of blocks that have a holder."""
        return len(self._holders)

    @property
    def num_cached(self) -> int:
        """The number of blocks that have no holder but are still cached, so that a lookup can return them."""
        return len(self._cached) + len(self._cached_expendable)

    @property
    def keys(self) -> frozenset[bytes]:
        """All keys that can be found."""
        return frozenset(self._block_of)

    @property
    def expendable_keys(self) -> frozenset[bytes]:
        """The keys that can be found and are expendable."""
        return frozenset(self._expendable)

    @property
    def published(self) -> list[tuple[bytes, int]]:
        """Every key that can be found, with its block: first the cached ones, in the order in which they will be evicted.

        Those whose blocks are held follow, and those with spares, which replace an evicted block. Of these, the key that
        became findable last comes first, so that a prefix's last page does. Expendable keys come before all others.
        """
        stays = lambda key, block: block in self._holders or key in self._spares
        held = [(key, block) for key, block in self._block_of.items() if stays(key, block)]
        cached = [(self._key_of[block], block) for block in (*self._cached_expendable, *self._cached)]
        pairs = [pair for pair in cached if not stays(*pair)] + held[::-1]
        return sorted(pairs, key=lambda pair: pair[0] not in self._expendable)

    def watch(self, observer: Callable[[bytes, bool], object]) -> None:
        """Calls a function from now on as `on_lost` is called, after those that were given before."""
        self._observers.append(observer)

    def fits(self, count: int, hits: Sequence[int] = ()) -> bool:
        """True if the pool can hold the blocks `hits` and allocate `count` further blocks.

        Raises:
            ValueError: `hits` is no sequence. Otherwise as for `allocate`.
        """
        if type(count) is not int or count < 0:
            raise ValueError(f"allocate: count must be a whole number, at least 0, got {count!r}")
        values.require(isinstance(hits, Sequence), "fits: hits", "a sequence of block ids", hits)
        blocks = [block for block in hits if type(block) is int]
        unheld = sum(map(self._cached.__contains__, blocks)) + sum(map(self._cached_expendable.__contains__, blocks))
        return count + unheld <= self.num_available

    def allocate(self, count: int) -> list[int] | None:
        """Returns `count` blocks, each with one holder. Returns None and changes nothing if there are fewer.

        Raises:
            ValueError: `count` is no whole number, or negative.
        """
        if not self.fits(count):
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def find(self, key: bytes) -> int | None:
        """Returns the block that is published under `key`, or None."""
        return self._block_of.get(key) if isinstance(key, bytes) else None

    def find_first(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the blocks that are published under `keys`, up to the first key that has none."""
        # Other types may have no hash.
        found = [*map(self._block_of.get, keys)] if {*map(type, keys)} <= {bytes} else [*map(self.find, keys)]
        end = found.index(None) if None in found else len(found)
        return [block for block in found[:end] if block is not None]

    def key_of(self, block: int) -> bytes | None:
        """Returns the key under which `block` is found, or None."""
        return self._key_of.get(block) if type(block) is int else None

    def keys_of(self, blocks: Sequence[int]) -> list[bytes | None]:
        """Returns what `key_of` returns for each block."""
        # Other types may have no hash.
        return [*map(self._key_of.get if {*map(type, blocks)} <= {int} else self.key_of, blocks)]

    def was_evicted(self, key: bytes) -> bool:
        """True if `key` cannot be found because its block was evicted recently."""
        return isinstance(key, bytes) and key in self._evicted

    def hold(self, block: int) -> None:
        """Adds a holder to a block that is held or cached.

        Raises:
            ValueError: The block is neither.
        """
        self.hold_all((block,))

    def hold_all(self, blocks: Sequence[int]) -> None:
        """Adds a holder to each block.

        Raises:
            ValueError: A block is neither held nor cached. Nothing has changed.
        """
        holders, cached, expendable = self._holders, self._cached, self._cached_expendable
        for block in blocks:
            if type(block) is not int or not (block in holders or block in cached or block in expendable):
                raise ValueError(f"hold: block must be held or cached, got {block!r}")
        for block in blocks:
            before = holders.get(block, 0)
            holders[block] = before + 1
            if not before:
                del (cached if block in cached else expendable)[block]

    def release(self, blocks: Sequence[int]) -> None:
        """Removes one holder from each block. Blocks that become cached will be evicted in the given order.

        Raises:
            ValueError: A block is not held, or is given more often than it has holders. Nothing has changed.
        """
        is_list = isinstance(blocks, Sequence) and {*map(type, blocks)} <= {int}
        if not is_list or not self._holders.keys() >= set(blocks):
            raise ValueError(f"release: blocks must be held, got {blocks!r}")
        if len(set(blocks)) < len(blocks) and any(self._holders[block] < blocks.count(block) for block in blocks):
            raise ValueError(f"release: blocks must have as many holders as they are given, got {blocks!r}")
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] > 0:
                continue
            del self._holders[block]
            if block in self._key_of:
                self._queue(self._key_of[block])[block] = None
                continue
            if block in self._spare_key:
                key = self._remove_spare(block)
                first, queue = self._block_of[key], self._queue(key)
                if first in queue:
                    queue.move_to_end(first)
            self._free.append(block)

    def publish(self, block: int, key: bytes) -> bool:
        """Makes a held block findable under `key`. If the key already has a block, `block` becomes a spare of it.

        Returns:
            True if `key` is new.

        Raises:
            ValueError: The block is not held.
        """
        values.instance("publish: key", key, bytes)
        if type(block) is not int or block not in self._holders:
            raise ValueError(f"publish: block must be held, got {block!r}")
        if block in self._key_of or block in self._spare_key:
            return False
        if key in self._block_of:
            self._spare_key[block] = key
            self._spares.setdefault(key, []).append(block)
            return False
        self._block_of[key], self._key_of[block] = block, key
        self._evicted.pop(key, None)
        return True

    def set_expendable(self, key: bytes, expendable: bool) -> bool:
        """Makes a published key expendable, or expendable no more. `publish` makes keys that are not expendable.

        If the key's block is cached, a change marks it as recently used.

        Returns:
            True if the key has changed, False if it was so already or is not published.

        Raises:
            ValueError: `expendable` is no bool.
        """
        values.flag("set_expendable: expendable", expendable)
        block = self.find(key)
        if block is None or expendable == (key in self._expendable):
            return False
        before = self._queue(key)
        (self._expendable.add if expendable else self._expendable.remove)(key)
        if block in before:
            del before[block]
            self._queue(key)[block] = None
        return True

    def use(self, key: bytes) -> None:
        """Marks the block of `key` as recently used. Nothing happens if it is held or the key is not published."""
        block = self.find(key)
        if block is not None and block in (queue := self._queue(key)):
            queue.move_to_end(block)

    def unpublish(self, key: bytes, *, evicted: bool = False) -> int | None:
        """Makes `key` unfindable, and counts it as evicted with `evicted`. Nothing happens if it is not published.

        The block that was found under the key is returned. It stays with its holders, or becomes free if it has none.
        """
        block = self.find(key)
        if block is None:
            return None
        del self._block_of[key], self._key_of[block]
        for spare in self._spares.pop(key, ()):
            del self._spare_key[spare]
        queue = self._queue(key)
        if block in queue:
            del queue[block]
            self._free.append(block)
        self._lose(key, evicted)
        return block

    def reset(self) -> None:
        """Makes every key unfindable. Held blocks stay held."""
        for key in list(self._block_of):
            self.unpublish(key)
            self._remember(key)

    def check(self, holders: Mapping[int, int] | None = None) -> None:
        """Raises AssertionError unless every block is in exactly one state: free, held or cached.

        Args:
            holders: The number of holders that each block should have, or None to skip that comparison.
        """
        places = [*self._free, *self._holders, *self._cached_expendable, *self._cached]
        ensure(sorted(places) == list(range(1, self.num_blocks)), "blocks lost or in two places")
        ensure(all(count > 0 for count in self._holders.values()), "a held block has no holder")
        ensure(holders is None or dict(holders) == self._holders, "holders and reference counts disagree")
        ensure({b: k for k, b in self._block_of.items()} == self._key_of, "keys and blocks disagree")
        ensure(self._expendable <= self._block_of.keys(), "an expendable key can't be found")
        expendable = {block for key, block in self._block_of.items() if key in self._expendable}
        others = self._key_of.keys() - expendable
        ensure(self._cached_expendable.keys() <= expendable, "a cached block is expendable, and its key is not")
        ensure(self._cached.keys() <= others, "a cached block has no key, or an expendable one")
        spares = {block: key for key, blocks in self._spares.items() for block in blocks}
        ensure(spares == self._spare_key, "spares and keys disagree")
        ensure(all(block in self._holders and block not in self._key_of for block in spares), "a spare is not held")
        ensure(self._spares.keys() <= self._block_of.keys(), "a spare has no first block")
        ensure(not self._evicted.keys() & self._block_of.keys(), "an evicted key can be found")

    def _evict(self) -> int:
        block, _ = (self._cached_expendable or self._cached).popitem(last=False)
        key = self._key_of.pop(block)
        if key in self._spares:
            first = self._spares[key][0]
            self._remove_spare(first)
            self._block_of[key], self._key_of[first] = first, key
        else:
            del self._block_of[key]
            self._lose(key, evicted=True)
        return block

    def _queue(self, key: bytes) -> OrderedDict[int, None]:
        """Returns the cached blocks to which the block of `key` belongs while it is cached, in the order of eviction."""
        return self._cached_expendable if key in self._expendable else self._cached

    def _remove_spare(self, block: int) -> bytes:
        key = self._spare_key.pop(block)
        self._spares[key].remove(block)
        if not self._spares[key]:
            del self._spares[key]
        return key

    def _lose(self, key: bytes, evicted: bool) -> None:
        self._expendable.discard(key)
        if evicted:
            self.num_evictions += 1
            self._on_eviction()
            self._remember(key)
        for tell in self._observers:
            tell(key, evicted)

    def _remember(self, key: bytes) -> None:
        self._evicted[key] = None
        if len(self._evicted) > self.num_blocks:
            self._evicted.popitem(last=False)
