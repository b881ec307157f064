"""What enters a cache is what eviction would have left of it, and what was there stays."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.moving import Admission, all_entries, entries_of_prefix
from mamba_align_jax.cache.state_blocks import StateBlockManager

BLOCK, PAGE = 4, 2


def make(blocks=8, pages=12, granularity=None):
    return HybridCache(StateBlockManager(blocks, BLOCK, granularity=granularity), KVPageManager(pages, PAGE))


def keys_of(tokens):
    """The keys of a prefix's pages and states, in the order in which they are to be evicted."""
    chain = HashChain(PAGE)
    pages = [chain.at(tokens, end) for end in range(PAGE, len(tokens) + 1, PAGE)]
    return pages[::-1], pages[1::2]


def put(cache, pages, states, *, is_prefix=True):
    admission = Admission(cache, pages, states, is_prefix=is_prefix)
    admission.publish()
    cache.check()
    assert cache.states.pool.num_held == cache.kv.pool.num_held == 0
    return admission


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2)), max_size=6), st.integers(3, 12), st.integers(2, 16))
def test_an_admission_takes_the_longest_beginning_that_fits(prompts, blocks, pages):
    """Prompts share beginnings. Whatever is cached, a prefix then hits as far as the pools can hold it."""
    cache = make(blocks, pages)
    for length, kind in prompts:
        tokens = list(range(10)) + [kind] * 20
        tokens = tokens[: length // BLOCK * BLOCK]
        admission = put(cache, *keys_of(tokens))
        wanted = min(len(tokens), (pages - 1) * PAGE // BLOCK * BLOCK)
        assert admission.length * PAGE == wanted
        assert admission.num_states == min(wanted // BLOCK, blocks - 1)
        assert cache.lookup([*tokens[:wanted], 7]).length == wanted


def test_entries_leave_in_the_order_in_which_they_are_evicted():
    tokens = list(range(12))
    cache = make()
    put(cache, *keys_of(tokens))
    found = entries_of_prefix(cache, tokens)
    assert ([key for key, _ in found.pages], [key for key, _ in found.states]) == keys_of(tokens)
    assert all_entries(cache) == found
    inside = make(granularity=PAGE)
    put(inside, keys_of(tokens)[0], keys_of(tokens)[0][2::-1])
    assert [key for key, _ in entries_of_prefix(inside, tokens).states] == keys_of(tokens)[0][2::-1]
    # A part of a block, and other tokens, end the prefix.
    assert entries_of_prefix(cache, tokens[:7]).pages == found.pages[-2:]
    assert entries_of_prefix(cache, [*tokens[:5], 0, 0, 0]).states == found.states[:1]
    assert entries_of_prefix(cache, tokens, b"salt") == ([], [])
    # The pool evicts the last pages first.
    cache.kv.pool.release(cache.kv.pool.allocate(11 - 4))
    assert [key for key, _ in all_entries(cache).pages] == keys_of(tokens)[0][2:]


def test_held_entries_are_listed_too():
    cache, tokens = make(), list(range(9))
    cache.allocate("a", 0, 0, 8)
    cache.dispatched("a", tokens[:8])
    assert [key for key, _ in all_entries(cache).pages] == keys_of(tokens[:8])[0]
    assert [key for key, _ in entries_of_prefix(cache, tokens).states] == keys_of(tokens[:8])[1][1:]
    # The entries that a request holds are no room.
    admission = Admission(cache, *keys_of([5] * 20), is_prefix=True)
    assert admission.length * PAGE == 12
    admission.withdraw()
    assert entries_of_prefix(cache, [5] * 20) == ([], [])
    cache.free("a")
    cache.forget("a")
    cache.check()
    assert cache.kv.pool.num_held == 0


@pytest.mark.parametrize("is_prefix", [True, False])
def test_withdrawn_entries_are_free_again(is_prefix):
    cache = make()
    put(cache, *keys_of([1] * 8))
    before = cache.kv.pool.num_cached, cache.states.pool.num_cached
    admission = Admission(cache, *keys_of([1] * 16), is_prefix=is_prefix)
    # Two pages and two states were there.
    assert ([place for place, _ in admission.pages], [place for place, _ in admission.states]) == ([0, 1, 2, 3], [2, 3])
    admission.withdraw()
    cache.check()
    assert (cache.kv.pool.num_cached, cache.states.pool.num_cached) == before


def run(cache, name, tokens, hit=None):
    """Runs a prompt block by block, from where a hit ends."""
    for begin in range(hit.length if hit else 0, len(tokens), BLOCK):
        end = min(begin + BLOCK, len(tokens))
        assert cache.allocate(name, begin, begin, end - begin, hit=hit) is not None
        hit = None
        cache.dispatched(name, tokens[:end])
        cache.commit(name, tokens[:end], end)


def test_a_prefix_that_was_imported_keeps_its_order_while_a_request_holds_it():
    """A smaller cache that takes the entries later then keeps the beginning of the prefix."""
    tokens, cache = list(range(12)), make()
    put(cache, *keys_of(tokens))
    run(cache, "a", [*tokens, 99], cache.lookup([*tokens, 99]))
    found = all_entries(cache)
    assert ([key for key, _ in found.pages], [key for key, _ in found.states][-3:]) == keys_of(tokens)
    smaller = make(pages=4)
    put(smaller, [key for key, _ in found.pages], [key for key, _ in found.states], is_prefix=False)
    assert smaller.lookup([*tokens, 99]).length == 4


def test_a_prefix_whose_first_pages_were_evicted_keeps_its_order():
    """Two requests compute a prompt. When the pages of the first one are evicted, those of the second one are found."""
    tokens, cache = list(range(12)), make(blocks=12, pages=15)
    for end in range(BLOCK, 13, BLOCK):
        for name in "ab":
            cache.allocate(name, end - BLOCK, end - BLOCK, BLOCK)
            cache.dispatched(name, tokens[:end])
            cache.commit(name, tokens[:end], end)
    cache.free("a")
    cache.forget("a")
    run(cache, "c", list(range(50, 66)))
    pages = keys_of(tokens)[0]
    assert [key for key, _ in all_entries(cache).pages if key in pages] == pages


def test_a_whole_cache_keeps_what_was_used_last():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 9, 8).tolist() for _ in range(4)]
    pages, states = zip(*map(keys_of, prompts), strict=True)
    cache = make(blocks=6, pages=11)
    admission = put(cache, [*itertools.chain(*pages)], [*itertools.chain(*states)], is_prefix=False)
    assert (admission.length, admission.num_states) == (10, 5)
    assert [cache.cached_prefix(prompt).boundaries for prompt in prompts] == [(), (4,), (4, 8), (4, 8)]
