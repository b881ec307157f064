"""The events of a cache tell what is cached: a mirror that applies them has the cache's keys after every change."""

import depth
import pytest
from fakes.cache_machine import BLOCK, PAGE, Machine
from fakes.reported_cache import assert_mirrors, make, run_prompt, taken
from hypothesis import settings
from hypothesis.stateful import invariant, rule

from mamba_align_jax.cache.events import (
    CacheCleared,
    PageRemoved,
    PageStored,
    StateRemoved,
    StateStored,
    block_hash,
)
from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.routing import CacheMirror


class Reporting(Machine):
    """Runs the cache's schedules: requests start, resume, fail, are preempted and aborted; the cache evicts and is reset."""

    def __init__(self):
        super().__init__()
        self.cache, self.log = make(self.num_blocks, self.num_pages)
        self.mirror, self.stored = CacheMirror(), {}

    @rule()
    def start_the_log_again(self):
        self.log.restart(self.cache.kv.pool.keys, self.cache.states.pool.keys)
        events = self.log.pending
        assert events.count(CacheCleared()) == 1
        assert events[0] == CacheCleared()

    @invariant()
    def the_mirror_has_the_keys_of_the_cache(self):
        events = taken(self.log)
        for event in events:
            before = self.mirror.pages | self.mirror.states.keys()
            if isinstance(event, PageStored):
                # Whoever knows the parent knows all tokens.
                assert event.parent is None or event.parent in before, "a page is reported before its parent"
                tokens = (*self.stored.get(event.parent, ()), *event.tokens)
                assert event.block_hash == block_hash(self.key(tokens))
                self.stored[event.block_hash] = tokens
            elif isinstance(event, StateStored):
                tokens = self.stored.get(event.block_hash)
                assert tokens is None or len(tokens) == event.num_tokens
                assert event.block_hash not in self.mirror.states, "a state is stored twice"
            elif not isinstance(event, CacheCleared):
                kept = self.mirror.pages if isinstance(event, PageRemoved) else self.mirror.states
                assert event.block_hash in kept, "lost what was never stored"
            self.mirror.apply([event])
        assert_mirrors(self.mirror, self.cache)
        # The positions of states are right as well.
        assert all(len(self.stored[name]) == count for name, count in self.mirror.states.items())
        again = CacheMirror(set(self.mirror.pages), dict(self.mirror.states))
        again.apply(events)
        assert again == self.mirror, "events that come twice do harm"


Reporting.TestCase.settings = settings(max_examples=depth.examples(20, 60), stateful_step_count=50, deadline=None)
TestReporting = Reporting.TestCase


def test_a_prompt_is_reported_page_by_page_with_its_state():
    cache, log = make()
    chain, tokens = HashChain(PAGE, b"tenant"), [5, 6, 7, 8, 9]
    names = [block_hash(chain.at(tokens, end)) for end in (2, 4)]
    run_prompt(cache, "r", tokens, b"tenant")
    first, *events = taken(log)
    assert first == CacheCleared()
    assert set(events) == {
        PageStored(names[0], None, (5, 6), b"tenant"),
        PageStored(names[1], names[0], (7, 8), b"tenant"),
        StateStored(names[1], 4),
    }


def test_a_state_is_lost_before_its_page_and_a_reset_is_one_event():
    cache, log = make(num_pages=6)
    run_prompt(cache, "r", [1, 2, 3, 4, 5])
    taken(log)
    run_prompt(cache, "s", [9, 8, 7, 6, 5, 4, 3, 2, 1])
    lost = [event for event in taken(log) if isinstance(event, StateRemoved | PageRemoved)]
    last = block_hash(HashChain(PAGE).at([1, 2, 3, 4], 4))
    assert lost[:2] == [StateRemoved(last), PageRemoved(last)]
    cache.reset_prefix_cache()
    assert taken(log) == [CacheCleared()]


def test_a_cache_without_a_log_has_none_to_write_to():
    cache = HybridCache(StateBlockManager(12, BLOCK), KVPageManager(34, PAGE))
    run_prompt(cache, "r", [1, 2, 3, 4, 5])
    assert cache.log is None


def test_a_log_of_another_type_is_refused():
    with pytest.raises(ValueError, match="HybridCache: log must be CacheLog or None"):
        HybridCache(StateBlockManager(12, BLOCK), KVPageManager(34, PAGE), log=[])
