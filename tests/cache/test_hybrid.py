"""HybridCache finds the prefixes that have both their pages and a state."""

import hashlib

import depth
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax.cache import hashing
from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import StateBlockManager

BLOCK, PAGE = 8, 4


def make(num_blocks=20, num_pages=40, mode="align", check=True, granularity=None, **options):
    states = StateBlockManager(num_blocks, BLOCK, mode=mode, granularity=granularity)
    return HybridCache(states, KVPageManager(num_pages, PAGE), check=check, **options)


def prefill(cache, name, tokens, budget=1000, salt=b""):
    """Runs a prompt. Returns how many of its tokens were cached, or None if the pools are full."""
    hit = cache.lookup(tokens, salt)
    start, here, keep = hit.length, hit, cache.checkpoints(len(tokens), (), hit.junction)
    while start < len(tokens):
        end = cache.chunk_end(start, budget, budget, len(tokens), keep.stops(start))
        if cache.allocate(name, start, start, end - start, hit=here, keep=keep) is None:
            cache.free(name)
            return None
        cache.dispatched(name, tokens[:end])
        cache.commit(name, tokens, end)
        start, here = end, None
    return hit.length


def decode(cache, name, tokens, start):
    """Runs the tokens from `start` on, one per step."""
    for computed in range(start, len(tokens)):
        assert cache.allocate(name, computed, computed, 1) is not None
        cache.dispatched(name)
        cache.commit(name, tokens, computed + 1)


def test_the_newest_decoded_boundary_stays_until_all_its_requests_pass_the_next():
    tokens, found = list(range(60)), lambda end: cache.lookup(tokens[: end + 1]).length == end
    cache = make(60, 100)
    prefill(cache, "a", tokens[:12])
    decode(cache, "a", tokens[:25], 12)
    assert (found(8), found(16), found(24)) == (True, False, True)
    # Another request hits it, so it stays.
    assert prefill(cache, "b", tokens[:26]) == 24
    decode(cache, "a", tokens[:33], 25)
    assert (found(24), found(32)) == (True, True)
    # Two requests pass the same boundary. The one that ends there keeps it, whichever of them saved it.
    for first, second in (("a", "c"), ("c", "a")):
        cache = make(60, 100)
        prefill(cache, first, tokens[:12])
        prefill(cache, second, tokens[:12])
        decode(cache, first, tokens[:17], 12)
        decode(cache, second, tokens[:17], 12)
        decode(cache, "a", tokens[:25], 17)
        cache.free("c")
        assert (found(8), found(16), found(24)) == (True, True, True)
        decode(cache, "a", tokens[:33], 25)
        assert (found(16), found(24), found(32)) == (True, False, True)
    # The boundary is released when both have passed the next one.
    cache = make(60, 100)
    for name in "ac":
        prefill(cache, name, tokens[:12])
        decode(cache, name, tokens[:17], 12)
    for name in "ac":
        decode(cache, name, tokens[:25], 17)
    assert (found(8), found(16), found(24)) == (True, False, True)


def test_forgotten_requests_leave_no_records():
    """Five requests pass one boundary. It stays when they end, whether they end running or waiting."""
    tokens = list(range(60))
    cache = make(60, 100)
    for name in range(5):
        prefill(cache, name, tokens[:12])
        decode(cache, name, tokens[:17], 12)
        cache.free(name)
        assert list(cache.states._rolling.left) == [name]
        cache.forget(name)
        assert cache.states._rolling.kept == cache.states._rolling.left == {}
    assert cache.lookup(tokens[:17]).length == 16
    # A request that returns at another boundary than its own does not release its own.
    cache = make(60, 100)
    for name, end in (("a", 17), ("b", 25)):
        prefill(cache, name, tokens[:12])
        decode(cache, name, tokens[:end], 12)
    assert cache.lookup(tokens[:26]).length == 24
    cache.free("a")
    assert prefill(cache, "a", tokens[:26]) == 24
    assert cache.states._rolling.left == {}
    decode(cache, "a", tokens[:34], 26)
    assert cache.lookup(tokens[:17]).length == 16


def test_an_identical_prompt_hits_when_it_is_sent_again():
    cache, tokens = make(), list(range(30))
    assert prefill(cache, "a", tokens) == 0
    assert prefill(cache, "b", tokens) == 24
    cache.free("a")
    assert prefill(cache, "c", tokens) == 24
    cache.check()


def test_one_token_is_always_left_to_compute():
    cache = make()
    assert prefill(cache, "a", list(range(30))) == 0  # leaves a state at token 24
    assert cache.lookup(list(range(25))).length == 24
    assert cache.lookup(list(range(24))).length == 0


def test_a_shared_prefix_hits_on_the_third_request_at_the_latest():
    """The second request finds pages but no state, and ends a chunk at the junction. The third finds a state there."""
    cache, shared = make(), list(range(100, 120))
    assert prefill(cache, "a", shared + [1] * 20) == 0
    assert cache.lookup(shared + [2] * 20).junction == 16
    assert prefill(cache, "b", shared + [2] * 20) == 0
    assert prefill(cache, "c", shared + [3] * 20) == 16


def test_a_state_never_extends_a_hit_beyond_the_pages(monkeypatch):
    cache, tokens = make(num_pages=9, check=False), list(range(30))
    # So that the state outlives its pages.
    monkeypatch.setattr(cache.states.pool, "unpublish", lambda key, *, evicted=False: None)
    prefill(cache, "a", tokens)
    cache.free("a")
    assert prefill(cache, "b", list(range(50, 59))) == 0
    assert cache.states.lookup(tokens, chain=HashChain(PAGE)).length == 24
    assert cache.lookup(tokens).length == 0


def test_a_state_becomes_free_when_its_last_page_is_evicted():
    cache, tokens = make(num_pages=9), list(range(30))
    prefill(cache, "a", tokens)
    cache.free("a")
    assert cache.lookup(tokens).length == 24
    # Other tokens take the last of a's pages. The state at 24 is then useless, so its block is free and not cached.
    assert prefill(cache, "b", list(range(50, 59))) == 0
    assert cache.lookup(tokens).length == 0
    cache.free("b")
    assert cache.states.pool.num_cached == 1
    assert cache.lookup(tokens).miss == "evicted"


def test_spare_pages_keep_a_prefix_findable_after_an_eviction():
    """b computes some of a's published pages again. When a's are evicted, b's replace them, and b's prefix is found."""
    cache, shared = make(num_pages=16), list(range(100, 120))
    prefill(cache, "a", [*shared, 1, 2, 3, 4])
    long = shared + [5] * 12
    prefill(cache, "b", long)
    cache.free("a")
    assert cache.kv.allocate("c", 10 * PAGE) is None
    assert cache.kv.allocate("c", 7 * PAGE) is not None  # all pages that are left, which include a's
    cache.kv.free("c")
    cache.free("b")
    assert cache.lookup([*long, 1]).length == 32
    cache.check()


def test_allocation_over_both_pools_is_all_or_nothing():
    for cache in (make(num_blocks=3), make(num_pages=6)):
        assert prefill(cache, "a", list(range(9))) == 0
        assert cache.allocate("b", 0, 0, 5) is not None
        before = cache.states.pool.num_available, cache.kv.pool.num_available
        assert cache.allocate("c", 0, 0, 5) is None
        assert (cache.states.pool.num_available, cache.kv.pool.num_available) == before
        cache.free("c")
        cache.check()


def test_mode_none_never_hits():
    cache, tokens = make(mode="none"), list(range(30))
    assert prefill(cache, "a", tokens) == 0
    assert prefill(cache, "b", tokens) == 0


def test_mode_none_takes_pages_of_any_size():
    """Requests pass multiples of the block size that end inside a page."""
    cache, tokens = HybridCache(StateBlockManager(20, 6, mode="none"), KVPageManager(40, PAGE)), list(range(30))
    assert prefill(cache, "a", tokens[:13]) == 0
    decode(cache, "a", tokens, 13)
    assert prefill(cache, "b", tokens) == 0


def test_prefixes_under_different_salts_never_match():
    cache, tokens = make(), list(range(30))
    assert [prefill(cache, n, tokens, salt=salt) for n, salt in enumerate([b"a", b"b", b"a", b""])] == [0, 0, 24, 0]


def test_requested_offsets_are_rounded_down():
    cache = make()
    assert cache.requested_offsets([0, 7, 8, 15, 31, 16, 40, 41, 99], 40) == (8, 16, 24, 40)
    assert make(mode="none").requested_offsets([8], 40) == ()


def test_the_interval_must_be_whole_blocks():
    with pytest.raises(ValueError, match="checkpoint_interval must be None or a multiple of 8, got 12"):
        make(checkpoint_interval=12)


def test_the_block_size_must_be_whole_pages():
    with pytest.raises(ValueError, match="block_size must be a multiple of the page size 3, got 8"):
        HybridCache(StateBlockManager(9, 8), KVPageManager(9, 3))


def test_the_granularity_divides_blocks_and_is_whole_pages():
    with pytest.raises(ValueError, match="granularity must be a divisor of block_size = 8, got 16"):
        make(granularity=16)
    with pytest.raises(ValueError, match="states must be with a granularity of pages of 4 tokens, got 2"):
        make(granularity=2)


@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_state_inside_a_block_is_copied_to_a_block_of_its_own_and_from_there(mode):
    cache, tokens = make(mode=mode, granularity=4), list(range(30))
    keep = cache.checkpoints(30, cache.requested_offsets([13], 30))
    assert keep.offsets == (12, 24)
    assert cache.chunk_end(0, 99, 99, 30, keep.stops(0)) == (8 if mode == "none" else 12)
    first = cache.allocate("a", 0, 0, 12, keep=keep)
    source, saved = first.save
    assert (first.load, source, dict(first.columns)[1]) == (None, source, source)
    assert saved not in dict(first.columns).values()
    assert cache.dispatched("a", tokens[:12]) == 12
    # A step that ends at no such place copies nothing, and the saved block is no one's.
    assert cache.allocate("a", 12, 12, 4).save is None
    assert saved not in cache.states.columns("a").values()
    cache.dispatched("a", tokens[:16])
    hit = cache.lookup([*tokens[:12], 99])
    assert (hit.length, hit.pages, hit.state.blocks, hit.miss) == (12, tuple(range(1, 4)), ((1, saved),), None)
    assert cache.cached_prefix(tokens).boundaries == (12, 16) if mode == "align" else (8, 12, 16)
    second = cache.allocate("b", 12, 12, 1, hit=hit, keep=cache.checkpoints(13))
    own = dict(second.columns)[1]
    assert second.load == (saved, own) != (own, own)
    # While the step is planned, the state that it copies is not evicted.
    assert not cache.states.pool.fits(cache.states.pool.num_available + 1)
    cache.free("b")
    assert cache.states.pool.find(HashChain(PAGE).at(tokens, 12)) == saved


def test_a_chunk_waits_until_there_is_a_block_for_the_state_that_it_leaves_inside_one():
    cache = make(num_blocks=4, granularity=4)
    for name in ("b", "c"):
        assert cache.allocate(name, 0, 0, 8) is not None
    assert cache.allocate("a", 0, 0, 12, keep=cache.checkpoints(30, (12,))) is None
    cache.free("b")
    assert cache.allocate("a", 0, 0, 12, keep=cache.checkpoints(30, (12,))).save is not None


def test_a_chunk_that_needs_no_new_block_for_itself_leaves_its_state_inside_a_block():
    cache, tokens = make(granularity=4), list(range(30))
    keep = cache.checkpoints(30, cache.requested_offsets([12], 30))
    assert cache.allocate("a", 0, 0, 9, keep=keep).save is None
    cache.dispatched("a", tokens[:9])
    last = cache.allocate("a", 9, 9, 3)
    assert (last.columns, last.pages, last.save[0]) == ([], [], cache.states.columns("a")[1])
    cache.dispatched("a", tokens[:12])
    assert cache.lookup([*tokens[:12], 99]).length == 12


@settings(deadline=None, max_examples=depth.examples(20, 60))
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2), st.integers(1, 40), st.integers(0, 5)), max_size=25))
def test_hits_are_true_prefixes_and_blocks_are_conserved(arrivals):
    """Requests share a few prefixes in small pools. An earlier request leaves whenever the pools are full."""
    cache, running, sent = make(num_blocks=8, num_pages=24), {}, []
    for number, (shared, family, suffix, budget) in enumerate(arrivals):
        tokens = [family] * shared + [10 + number] * suffix
        cached = prefill(cache, number, tokens, budget=1 + 4 * budget)
        while cached is None and running:
            sent.append(tokens)  # what a failed attempt had computed stays cached
            cache.free(running.popitem()[0])
            cached = prefill(cache, number, tokens, budget=1 + 4 * budget)
        cache.check()
        if cached is None:
            continue
        assert cached < len(tokens)
        assert cached == 0 or any(tokens[:cached] == other[:cached] for other in sent)
        running[number] = tokens
        sent.append(tokens)
    for name in list(running):
        cache.free(name)
    assert cache.states.pool.num_held == cache.kv.pool.num_held == 0


def test_each_evicted_state_and_page_is_counted_once():
    """A state counts as evicted whether its own pool needs the block or one of its pages goes."""
    evicted = []
    states = StateBlockManager(4, BLOCK, on_eviction=lambda: evicted.append("state"))
    kv = KVPageManager(7, PAGE, on_eviction=lambda: evicted.append("page"))
    cache = HybridCache(states, kv, check=True)
    prefill(cache, "a", list(range(9)))
    cache.free("a")
    assert (states.pool.num_cached, kv.pool.num_cached, evicted) == (1, 2, [])
    # Five pages: four are free, so the last page of the prefix goes, and the state with it.
    assert cache.allocate("b", 0, 0, 20) is not None
    assert evicted == ["page", "state"]
    cache.free("b")
    assert cache.allocate("c", 0, 0, 24) is not None
    assert evicted == ["page", "state", "page"]


@pytest.mark.parametrize("cached", [0, 1, 63, 64, 65, 128, 200])
def test_long_prompts_find_all_their_pages_and_hash_little_beyond_them(cached):
    tokens, states = list(range(4 * BLOCK * 100)), StateBlockManager(500, BLOCK)
    cache = HybridCache(states, KVPageManager(1000, PAGE))
    if cached:
        prefill(cache, "a", tokens[: cached * PAGE])
    chain = HashChain(PAGE)
    pages = cache.kv.lookup(tokens, chain)
    assert [cache.kv.pool.key_of(page) for page in pages] == chain.between((), 0, cached * PAGE)
    with pytest.raises(ValueError, match="at: tokens must be at least"):
        chain.at((), (cached // 64 * 64 + 64 + 1) * PAGE)


def test_requests_whose_prompts_begin_alike_share_what_was_hashed(monkeypatch):
    """A lookup of 64 pages takes a hash for the chain's root and one for each of two groups, if an earlier one was alike."""
    made, sha256 = [], hashlib.sha256
    monkeypatch.setattr(hashing.hashlib, "sha256", lambda data: made.append(data) or sha256(data))
    cache, tokens = make(), list(range(64 * PAGE + 1))
    counts = []
    for _ in range(2):
        made.clear()
        cache.lookup(tokens)
        counts.append(len(made))
    assert counts == [1 + 2 + 64, 1 + 2]


def test_requests_of_one_lookup_publish_their_own_pages():
    cache, prompt = make(60, 100), list(range(9))
    hit, texts = cache.lookup(prompt), {name: prompt + [100 + n] * 12 for n, name in enumerate("ab")}
    for name in texts:
        cache.allocate(name, 0, 0, 9, hit=hit)
        cache.dispatched(name, prompt)
        cache.commit(name, prompt, 9)
    for name, tokens in texts.items():
        cache.allocate(name, 9, 9, 7)
        cache.dispatched(name, tokens[:16])
        cache.commit(name, tokens[:16], 16)
    found = {name: cache.lookup(tokens) for name, tokens in texts.items()}
    assert [hit.length for hit in found.values()] == [16, 16]
    assert all(found[name].state.blocks[0] in cache.states.columns(name).items() for name in texts)
    assert found["a"].pages[-1] != found["b"].pages[-1]


def test_chains_of_other_blocks_are_refused():
    cache = make(60, 100)
    for chain in (HashChain(PAGE // 2), HashChain(3)):
        with pytest.raises(ValueError, match="lookup: chain must"):
            cache.lookup(list(range(20)), chain=chain)
    with pytest.raises(ValueError, match="lookup: chain must have blocks that divide"):
        cache.states.lookup(list(range(20)), chain=HashChain(3))
    with pytest.raises(ValueError, match="allocate: chain must be a chain of blocks of"):
        cache.kv.allocate("a", 4, chain=HashChain(3))


def test_no_tokens_are_below_one_block():
    cache = make(60, 100)
    assert (cache.lookup([]).length, cache.lookup([]).miss) == (0, "below one block")
    assert cache.cached_prefix([]).boundaries == ()
