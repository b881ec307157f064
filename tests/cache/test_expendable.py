"""In mode "all" the states that mode "align" would not keep are found too, and never push out one that it would keep."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax.cache.checkpoints import Checkpoints
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.moving import Admission, all_entries
from mamba_align_jax.cache.state_blocks import StateBlockManager

BLOCK, PAGE = 4, 2


def make(num_blocks=40, mode="all", check=True, **options):
    return HybridCache(
        StateBlockManager(num_blocks, BLOCK, mode=mode), KVPageManager(600, PAGE), check=check, **options
    )


def prefill(cache, name, prompt, budget=100, at=(), keep=None):
    """Runs a prompt, and returns how many of its tokens were cached."""
    hit = first = cache.lookup(prompt)
    start = hit.length
    keep = keep or cache.checkpoints(len(prompt), cache.requested_offsets(at, len(prompt)), hit.junction)
    while start < len(prompt):
        end = cache.chunk_end(start, budget, budget, len(prompt), keep.stops(start))
        assert cache.allocate(name, start, start, end - start, hit=first, keep=keep) is not None
        cache.dispatched(name, prompt[:end])
        cache.commit(name, prompt[:end], end)
        start, first = end, None
    return hit.length


def decode(cache, name, tokens, start):
    for computed in range(start, len(tokens)):
        assert cache.allocate(name, computed, computed, 1) is not None
        cache.dispatched(name)
        cache.commit(name, tokens, computed + 1)


def end(cache, name):
    cache.free(name)
    cache.forget(name)
    cache.check()


def serve(cache, name, prompt, answer=(), **options):
    cached = prefill(cache, name, prompt, **options)
    decode(cache, name, [*prompt, *answer], len(prompt))
    end(cache, name)
    return cached


def ends(cache, tokens):
    """The boundaries of `tokens` that are cached and not expendable, and those that are expendable."""
    chain, pool = cache.lookup(tokens).state.chain, cache.states.pool
    keys = {at: chain.at(tokens, at) for at in range(BLOCK, len(tokens) + 1, BLOCK)}
    found = [at for at, key in keys.items() if pool.find(key) is not None]
    expendable = [at for at in found if keys[at] in pool.expendable_keys]
    return [at for at in found if at not in expendable], expendable


@pytest.mark.parametrize("budget", [100, 6])
def test_boundaries_without_a_reason_are_expendable(budget):
    cache = make(checkpoint_interval=3 * BLOCK)
    serve(cache, "a", list(range(31)), at=(9,), budget=budget)
    # 28 is the prompt's last cacheable boundary, 8 was asked for, 12 and 24 are multiples of the interval.
    assert ends(cache, list(range(31))) == ([8, 12, 24, 28], [4, 16, 20])


def test_boundary_that_decoding_passed_is_expendable_once_the_next_one_is_passed():
    cache, tokens = make(), list(range(40))
    prefill(cache, "a", tokens[:6])
    decode(cache, "a", tokens[:19], 6)
    assert ends(cache, tokens) == ([4, 16], [8, 12])
    # Another request that passes an expendable boundary while it decodes keeps it until it passes the next one.
    prefill(cache, "b", tokens[:6])
    decode(cache, "b", tokens[:9], 6)
    assert ends(cache, tokens) == ([4, 8, 16], [12])
    decode(cache, "b", tokens[:13], 9)
    assert ends(cache, tokens) == ([4, 12, 16], [8])
    # Both have passed 16 when the second one ends. The first one still keeps it.
    decode(cache, "b", tokens[:21], 13)
    assert ends(cache, tokens) == ([4, 16, 20], [8, 12])
    decode(cache, "a", tokens[:21], 19)
    assert ends(cache, tokens) == ([4, 20], [8, 12, 16])
    end(cache, "b")
    decode(cache, "a", tokens[:25], 21)
    assert ends(cache, tokens) == ([4, 20, 24], [8, 12, 16])


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_one_reason_is_enough(names):
    """Two requests compute the same boundaries at the same time. One of them keeps 12, and the other one passes it."""
    cache, tokens, lengths = make(), list(range(31)), {"a": 13, "b": 31}
    for name, length in lengths.items():
        cache.allocate(name, 0, 0, length, keep=cache.checkpoints(length))
    for name in names:
        cache.dispatched(name, tokens[: lengths[name]])
    assert ends(cache, tokens) == ([12, 28], [4, 8, 16, 20, 24])


def test_a_hit_is_expendable_no_more():
    cache, tokens = make(), list(range(31))
    serve(cache, "a", tokens)
    assert cache.lookup([*tokens[:17], 99]).length == 16
    assert ends(cache, tokens) == ([28], [4, 8, 12, 16, 20, 24])
    assert serve(cache, "b", [*tokens[:17], 99]) == 16
    assert ends(cache, tokens) == ([16, 28], [4, 8, 12, 20, 24])


def test_requested_boundaries_inside_a_hit_are_expendable_no_more():
    cache, tokens = make(), list(range(31))
    serve(cache, "a", tokens)
    assert serve(cache, "b", tokens, at=(9, 25)) == 28
    assert ends(cache, tokens) == ([8, 24, 28], [4, 12, 16, 20])


def test_requested_boundaries_inside_a_hit_outlive_the_allocation_for_their_request():
    cache, tokens = make(9), list(range(31))
    serve(cache, "a", tokens)
    # A block is free, and there are six expendable ones, of which 4 would go first.
    assert serve(cache, "b", [*tokens[:29], *range(50, 63)], at=(5,)) == 28
    assert 4 in ends(cache, tokens)[0]


@pytest.mark.parametrize("mode", ["align", "all"])
def test_requested_boundaries_inside_hits_outlive_older_states(mode):
    """The tools of a chat, which its turns ask for, stay cached for other chats while the chat goes on."""
    cache, tokens = make(8, mode), list(range(90))
    for turn in range(10):
        serve(cache, turn, tokens[: 13 + 8 * turn], at=(5,))
    assert cache.lookup([*tokens[:5], 99]).length == 4
    assert cache.lookup(tokens[:13]).length == 4, "older turns are evicted"


def test_offsets_that_are_no_boundaries_are_ignored():
    cache, tokens = make(), list(range(31))
    serve(cache, "a", tokens)
    prefill(cache, "b", tokens, keep=Checkpoints(offsets=(0, 3, 8, 30, 400)))
    assert ends(cache, tokens) == ([8, 28], [4, 12, 16, 20, 24])


def test_a_long_prompt_pushes_out_only_expendable_states():
    cache, prompts = make(20), [[n] * 13 for n in range(5)]
    for n, prompt in enumerate(prompts):
        serve(cache, n, prompt)
    long = list(range(100, 200))
    for n in range(3):
        serve(cache, "long", [n, *long], budget=8)
    assert [cache.lookup(prompt).length for prompt in prompts] == [12] * 5
    assert cache.states.pool.num_evictions > 60


def test_what_is_kept_is_evicted_once_nothing_else_is_left():
    """A prompt takes two of four blocks, and leaves one state."""
    cache = make(5)
    for n in range(5):
        serve(cache, n, [n] * 5)
    assert [cache.lookup([n] * 5).length for n in range(5)] == [0, 0, 4, 4, 4]


def test_preempted_request_still_rolls_its_boundary():
    cache, tokens = make(), list(range(40))
    prefill(cache, "a", tokens[:6])
    decode(cache, "a", tokens[:10], 6)
    cache.free("a")
    assert prefill(cache, "a", tokens[:11], keep=Checkpoints(offsets=(4,))) == 8
    assert ends(cache, tokens) == ([4, 8], [])
    decode(cache, "a", tokens[:13], 11)
    assert ends(cache, tokens) == ([4, 12], [8])


def test_resumed_request_keeps_the_last_boundary_that_it_computes_again():
    """The tokens that it had generated run as a chunk."""
    cache, tokens = make(), list(range(40))
    prefill(cache, "a", tokens[:23], keep=Checkpoints(offsets=(4,)))
    assert ends(cache, tokens) == ([4, 20], [8, 12, 16])
    decode(cache, "a", tokens[:25], 23)
    assert ends(cache, tokens) == ([4, 24], [8, 12, 16, 20])


@pytest.mark.parametrize("options", [dict(fold_length=8), dict(steps_in_flight=1)])
def test_boundary_that_is_published_after_a_newer_one_is_expendable(options):
    """A decode row passes 8. The chunk from 8 to 16 is published before the row's boundary is."""
    tokens, manager = list(range(40)), StateBlockManager(12, 8, mode="all", **options)
    manager.allocate("a", 0, 0, 7, keep=Checkpoints())
    manager.publish("a", tokens[:7])
    manager.release("a")
    manager.commit("a", tokens[:7])
    manager.allocate("a", 7, 7, 1)
    manager.release("a")
    if "fold_length" in options:
        manager.commit("a", tokens[:8])
    manager.allocate("a", 8, 8, 8)
    assert manager.publish("a", tokens[:16]) == 16
    manager.release("a")
    if "steps_in_flight" in options:
        assert manager.commit("a", tokens[:8]) == 8
    manager.commit("a", tokens[:16])
    chain = manager.lookup(tokens).chain
    assert manager.pool.keys == {chain.at(tokens, 8), chain.at(tokens, 16)}
    assert manager.pool.expendable_keys == {chain.at(tokens, 8)}
    manager.check()


def test_a_reset_leaves_no_expendable_keys():
    cache, tokens = make(), list(range(31))
    prefill(cache, "a", tokens)
    cache.reset_prefix_cache()
    assert (cache.states.pool.expendable_keys, ends(cache, tokens)) == (set(), ([], []))
    end(cache, "a")
    assert cache.states.pool.num_cached == 0


def test_imported_states_are_not_expendable():
    cache, other, tokens = make(), make(), list(range(31))
    serve(cache, "a", tokens, at=(8,))
    serve(other, "b", tokens[:13])
    assert ends(other, tokens) == ([12], [4, 8])
    entries = all_entries(cache)
    chain = cache.lookup(tokens).state.chain
    order = [next(at for at in range(4, 31, 4) if chain.at(tokens, at) == key) for key, _ in entries.states]
    assert order == [4, 12, 16, 20, 24, 8, 28], "a smaller cache takes the end of the list"
    admission = Admission(other, *([key for key, _ in part] for part in entries), is_prefix=False)
    assert ends(other, tokens) == ([12], [4, 8])
    admission.publish()
    other.check()
    assert ends(other, tokens) == ([4, 8, 12, 16, 20, 24, 28], [])


def test_a_withdrawn_import_changes_no_class():
    cache, tokens = make(), list(range(31))
    serve(cache, "a", tokens)
    before = ends(cache, tokens)
    Admission(cache, *([key for key, _ in part] for part in all_entries(cache)), is_prefix=False).withdraw()
    assert ends(cache, tokens) == before


@pytest.mark.parametrize("mode", ["align", "none"])
def test_other_modes_have_no_expendable_keys(mode):
    cache, tokens = make(mode=mode), list(range(40))
    for n in range(2):
        serve(cache, n, tokens[:31], tokens[31:])
        assert not cache.states.pool.expendable_keys


KINDS = st.sampled_from(["new", "again", "next turn"])
REQUESTS = st.lists(st.tuples(KINDS, st.integers(0, 9), st.integers(1, 20), st.integers(0, 12)), max_size=12)


@settings(max_examples=40, deadline=None)
@given(blocks=st.integers(3, 8), budget=st.sampled_from([4, 6, 13]), requests=REQUESTS)
def test_all_that_mode_align_keeps_is_found_in_mode_all_too(blocks, budget, requests):
    """Both modes serve the same requests. Mode "all" has more blocks by those that one chunk takes besides.

    That is true as long as requests hit the same boundaries in both. A hit that is longer in mode "all", because less was
    evicted there, leaves the boundary that mode "align" hits where it is in the order of eviction.
    """
    align, every, past = make(blocks, "align", False), make(blocks + -(-budget // BLOCK), "all", False), []
    for n, (kind, which, length, answered) in enumerate(requests):
        prompt, answer = past[which % len(past)] if past else ([], [])
        if kind == "next turn" and len(prompt) + len(answer) < 40:
            prompt, answer = prompt + answer + [n] * length, [100 + n] * answered
        elif kind == "new" or not past:
            prompt, answer = [n] * length, [100 + n] * answered
        past.append((prompt, answer))
        hits = [serve(cache, n, prompt, answer, budget=budget) for cache in (align, every)]
        if hits[0] != hits[1]:
            assert hits[0] < hits[1]
            return
        assert align.states.pool.keys <= every.states.pool.keys
