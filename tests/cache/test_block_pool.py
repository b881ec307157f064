"""BlockPool agrees with a simple model: a table of blocks, each with its holders, its key and its last use.

The model also has the set of keys that are expendable.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import depth
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mamba_align_jax.cache.block_pool import BlockPool

KEYS = [bytes([n]) for n in range(6)]


@dataclass
class Block:
    holders: int = 0
    key: bytes | None = None
    spare: bytes | None = None
    used: int = 0


class Machine(RuleBasedStateMachine):
    num_blocks = 8

    def __init__(self):
        super().__init__()
        self.lost, self.expected, self.num_evictions = [], [], 0
        self.pool = BlockPool(
            self.num_blocks,
            on_lost=lambda key, evicted: self.lost.append((key, evicted)),
            on_eviction=self.count_eviction,
        )
        self.blocks = {block: Block() for block in range(1, self.num_blocks)}
        self.time, self.expendable = 0, set()

    def count_eviction(self):
        self.num_evictions += 1

    def found(self, key):
        return next((b for b, block in self.blocks.items() if block.key == key), None)

    def cached(self):
        """The cached blocks in the order in which they are to be evicted."""
        cached = [b for b, block in self.blocks.items() if not block.holders and block.key is not None]
        return sorted(cached, key=lambda b: (self.blocks[b].key not in self.expendable, self.blocks[b].used))

    def spares(self, key):
        # In the order in which they were published.
        return sorted((b for b in self.blocks if self.blocks[b].spare == key), key=lambda b: self.blocks[b].used)

    def pick(self, data, condition):
        return data.draw(st.sampled_from([b for b, block in self.blocks.items() if condition(block)]))

    def forget(self, key, evicted=False):
        for block in self.blocks.values():
            if key in (block.key, block.spare):
                block.key = block.spare = None
        self.expendable.discard(key)
        self.expected.append((key, evicted))

    @rule(count=st.integers(0, 8))
    def allocate(self, count):
        free = {b for b, block in self.blocks.items() if not block.holders and block.key is None}
        cached = self.cached()
        before = self.num_evictions
        assert self.pool.fits(count) == (count <= len(free) + len(cached))
        blocks = self.pool.allocate(count)
        if count > len(free) + len(cached):
            assert blocks is None
            return
        assert len(set(blocks)) == count
        assert set(blocks[: len(free)]) <= free, "free blocks go first"
        assert blocks[len(free) :] == cached[: max(count - len(free), 0)], "then expendable ones, the oldest first"
        evictions = 0
        for b in blocks:
            key = self.blocks[b].key
            if key is not None and self.spares(key):
                heir = self.blocks[self.spares(key)[0]]
                heir.key, heir.spare = key, None
            elif key is not None:
                evictions += 1
                self.forget(key, evicted=True)
                assert self.pool.was_evicted(key)
            self.blocks[b] = Block(holders=1)
        assert self.num_evictions - before == evictions

    @precondition(lambda self: any(block.holders or block.key for block in self.blocks.values()))
    @rule(data=st.data())
    def hold(self, data):
        b = self.pick(data, lambda block: block.holders or block.key)
        assert self.pool.fits(self.pool.num_available, [b]) == (self.blocks[b].holders > 0)
        self.pool.hold(b)
        self.blocks[b].holders += 1

    @precondition(lambda self: self.pool.num_held < self.num_blocks - 1)
    @rule(some=st.lists(st.integers(0, 8), max_size=4))
    def hold_all(self, some):
        """Blocks may be given more than once. One that is neither held nor cached changes nothing."""
        if all(b in self.blocks and (self.blocks[b].holders or self.blocks[b].key) for b in some):
            self.pool.hold_all(some)
            for b in some:
                self.blocks[b].holders += 1
        else:
            with pytest.raises(ValueError, match="hold: block must be held or cached"):
                self.pool.hold_all(some)

    @precondition(lambda self: any(block.holders for block in self.blocks.values()))
    @rule(data=st.data())
    def release(self, data):
        held = [b for b, block in self.blocks.items() if block.holders]
        some = data.draw(st.lists(st.sampled_from(held), min_size=1, unique=True))
        self.pool.release(some)
        for b in some:
            self.time += 1
            block = self.blocks[b]
            block.holders -= 1
            if block.holders == 0:
                if block.spare is not None:
                    first = self.blocks[self.found(block.spare)]
                    first.used = first.used if first.holders else self.time
                    block.spare = None
                else:
                    block.used = self.time

    @precondition(lambda self: any(block.holders for block in self.blocks.values()))
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data, key):
        b = self.pick(data, lambda block: block.holders)
        block, new = self.blocks[b], False
        self.time += 1
        if block.key is None and block.spare is None:
            new = self.found(key) is None
            block.key, block.spare = (key, None) if new else (None, key)
            block.used = self.time
        assert self.pool.publish(b, key) == new

    @precondition(lambda self: self.pool.keys)
    @rule(data=st.data(), key=st.sampled_from(KEYS), expendable=st.booleans())
    def set_expendable(self, data, key, expendable):
        if self.found(key) is None and data.draw(st.booleans()):
            key = data.draw(st.sampled_from(sorted(self.pool.keys)))
        first = self.found(key)
        changes = first is not None and expendable != (key in self.expendable)
        assert self.pool.set_expendable(key, expendable) == changes
        if changes:
            self.time += 1
            self.expendable ^= {key}
            block = self.blocks[first]
            block.used = block.used if block.holders else self.time

    @precondition(lambda self: self.pool.keys)
    @rule(key=st.sampled_from(KEYS), evicted=st.booleans())
    def unpublish(self, key, evicted):
        before, first = self.num_evictions, self.found(key)
        assert self.pool.unpublish(key, evicted=evicted) == first
        assert self.num_evictions - before == (evicted and first is not None)
        if first is not None:
            self.forget(key, evicted)

    @precondition(lambda self: len(self.pool.keys) > 3)
    @rule()
    def reset(self):
        present = [key for key in KEYS if self.found(key) is not None]
        self.pool.reset()
        assert all(self.pool.was_evicted(key) for key in present)
        for key in present:
            self.forget(key)

    @invariant()
    def agrees(self):
        self.pool.check(Counter({b: block.holders for b, block in self.blocks.items() if block.holders}))
        assert [self.pool.find(key) for key in KEYS] == [self.found(key) for key in KEYS]
        for first in range(len(KEYS)):
            wanted = [self.found(key) for key in KEYS[first:]]
            assert self.pool.find_first(KEYS[first:]) == list(itertools.takewhile(bool, wanted))
        assert self.pool.keys == {key for key in KEYS if self.found(key) is not None}
        assert self.pool.expendable_keys == self.expendable
        # What is evicted next comes first, and no key that is not expendable before one that is.
        leaves = [self.blocks[b].key for b in self.cached() if not self.spares(self.blocks[b].key)]
        published = [key for key, block in self.pool.published]
        assert [key for key in published if key in leaves] == leaves
        assert sorted(published, key=lambda key: key not in self.expendable) == published
        assert dict(self.pool.published) == {key: self.found(key) for key in self.pool.keys}
        assert [self.pool.key_of(b) for b in self.blocks] == [block.key for block in self.blocks.values()]
        assert self.pool.keys_of([0, *self.blocks]) == [None, *(block.key for block in self.blocks.values())]
        assert Counter(self.lost) == Counter(self.expected)
        held = sum(block.holders > 0 for block in self.blocks.values())
        cached = sum(not block.holders and block.key is not None for block in self.blocks.values())
        assert (self.pool.num_held, self.pool.num_cached) == (held, cached)
        assert self.pool.num_available == len(self.blocks) - held


Machine.TestCase.settings = settings(max_examples=depth.examples(25, 80), stateful_step_count=40, deadline=None)
TestBlockPool = Machine.TestCase


def test_a_spare_replaces_the_first_block_when_that_is_evicted():
    evictions = []
    pool = BlockPool(4, on_eviction=lambda: evictions.append(1))
    first, second, third = pool.allocate(3)
    assert pool.publish(first, b"k")
    assert not pool.publish(second, b"k")
    assert pool.find(b"k") == first
    with pytest.raises(ValueError, match=r"as many holders as they are given, got \["):
        pool.release([first, third, first])
    pool.release([first, third])
    assert set(pool.allocate(2)) == {first, third}
    assert pool.find(b"k") == second, "the key stays when its first block is evicted"
    assert not evictions
    pool.release([second])
    assert pool.num_cached == 1


@pytest.mark.parametrize("expendable", [False, True])
def test_releasing_a_spare_marks_the_first_block_as_recently_used(expendable):
    """Otherwise a prefix could lose a page in its middle and keep the pages after it."""
    pool = BlockPool(4)
    first, spare, other = pool.allocate(3)
    for block, key in ((first, b"k"), (spare, b"k"), (other, b"m")):
        pool.publish(block, key)
        pool.set_expendable(key, expendable)
    pool.release([first, other, spare])
    assert pool.allocate(2) == [spare, other]
    assert (pool.find(b"k"), pool.find(b"m")) == (first, None)


class Twins(RuleBasedStateMachine):
    """Expendable blocks are as good as free ones: two pools do the same, and only one of them has expendable keys.

    Where the first pool makes a key expendable, the second one unpublishes it. Where a cached key is expendable no more, the
    second pool publishes it in a block that the first one has no use for.
    """

    def __init__(self):
        super().__init__()
        self.pool, self.without = BlockPool(8), BlockPool(8)
        self.twin, self.kept, self.keys = {}, set(), itertools.count()

    def held(self, data):
        return data.draw(st.sampled_from(sorted(self.pool._holders)))

    @rule(count=st.integers(0, 8))
    def allocate(self, count):
        blocks, twins = self.pool.allocate(count), self.without.allocate(count)
        assert (blocks is None) == (twins is None)
        self.twin.update(zip(blocks or [], twins or [], strict=True))

    @precondition(lambda self: self.pool._holders)
    @rule(data=st.data(), expendable=st.booleans())
    def publish(self, data, expendable):
        """Publishes a new key. What has a key already stays as it is."""
        block, key = self.held(data), next(self.keys).to_bytes(4, "big")
        if self.pool.publish(block, key):
            self.pool.set_expendable(key, expendable)
            if not expendable:
                assert self.without.publish(self.twin[block], key)

    @precondition(lambda self: self.pool.keys)
    @rule(data=st.data())
    def hit(self, data):
        """A request enters on what is cached. It needs a block for it if the other pool doesn't have it."""
        key = data.draw(st.sampled_from(sorted(self.pool.keys)))
        self.set_expendable(key, False)
        block = self.pool.find(key)
        self.pool.hold(block)
        self.without.hold(self.without.find(key))
        self.twin[block] = self.without.find(key)

    @precondition(lambda self: self.pool.keys)
    @rule(data=st.data(), expendable=st.booleans())
    def changes_class(self, data, expendable):
        self.set_expendable(data.draw(st.sampled_from(sorted(self.pool.keys))), expendable)

    def set_expendable(self, key, expendable):
        block = self.pool.find(key)
        if not self.pool.set_expendable(key, expendable):
            return
        if expendable:
            self.without.unpublish(key)
        elif block in self.pool._holders:
            self.without.publish(self.twin[block], key)
        else:
            (twin,) = self.without.allocate(1)
            self.without.publish(twin, key)
            self.without.release([twin])

    @precondition(lambda self: self.pool._holders)
    @rule(data=st.data())
    def release(self, data):
        block = self.held(data)
        self.pool.release([block])
        self.without.release([self.twin[block]])

    @invariant()
    def the_pools_agree_on_all_other_keys(self):
        assert self.pool.keys - self.pool.expendable_keys == self.without.keys
        assert self.pool.num_available == self.without.num_available
        order, twins = ([pool.key_of(block) for block in pool._cached] for pool in (self.pool, self.without))
        assert order == twins, "their order of eviction"


Twins.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestExpendableBlocksAreAsGoodAsFreeOnes = Twins.TestCase


def test_expendable_blocks_are_evicted_before_all_others():
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for block, key in zip(blocks, b"abcd", strict=True):
        pool.publish(block, bytes([key]))
    pool.set_expendable(b"b", True)
    pool.release(blocks[:3])
    pool.set_expendable(b"c", True)  # its block is cached already, and that of d is held
    pool.set_expendable(b"d", True)
    assert [key for key, _ in pool.published] == [b"b", b"c", b"d", b"a"]
    assert pool.allocate(2) == blocks[1:3]
    # No other block is left.
    assert pool.allocate(1) == blocks[:1]
    assert pool.keys == {b"d"}


def test_a_spare_of_an_expendable_key_replaces_its_first_block():
    pool = BlockPool(4)
    first, spare, other = pool.allocate(3)
    for block, key in ((first, b"k"), (spare, b"k"), (other, b"m")):
        pool.publish(block, key)
    pool.set_expendable(b"k", True)
    pool.release([first, other])
    assert pool.allocate(1) == [first]
    pool.release([spare])
    assert (pool.find(b"k"), pool.expendable_keys) == (spare, {b"k"})
    assert pool.allocate(1) == [spare]
    assert pool.keys == {b"m"}


def test_check_finds_inconsistent_counts():
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="reference counts disagree"):
        pool.check({3: 1})
    pool._free.append(3)
    with pytest.raises(AssertionError, match="in two places"):
        pool.check()


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="num_blocks must be at least 2, one of them NULL_BLOCK, got 1"):
        BlockPool(1)
