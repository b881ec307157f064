"""Failures of other servers in caches, hits and schedules, tried on the host alone: see docs/failures.md."""

import itertools

import depth
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.scheduling.request import Request
from mamba_align_jax.engine.scheduling.scheduler import Scheduler


def make(block=8, page=4, num_blocks=40, num_pages=80):
    return HybridCache(StateBlockManager(num_blocks, block), KVPageManager(num_pages, page))


def prefill(cache, tokens, budget=1000):
    """Runs one prompt to its first token. Returns how many of its tokens were cached."""
    scheduler, r = Scheduler(cache, 1, 1, budget), request(0, tokens, 1)
    scheduler.add(r)
    drain(scheduler)
    return r.num_cached


def step(scheduler):
    """Runs one step of a model that always samples token 1."""
    return finish(scheduler, scheduler.schedule())


def finish(scheduler, plan):
    scheduler.dispatched(plan)
    for row in plan.rows:
        scheduler.finished(row, [1] if row.samples else [])
        if len(row.request.generated) == row.request.params.max_tokens:
            scheduler.remove(row.request)
    return plan


def drain(scheduler, steps=500):
    """Runs all requests to their ends."""
    while steps and (scheduler.running or scheduler.waiting):
        step(scheduler)
        steps -= 1
    assert steps, "no progress"


def request(number, prompt, max_tokens=2):
    return Request(number, tuple(prompt), SamplingParams(max_tokens=max_tokens))


# Which states are found.


def test_a_limit_between_two_states_finds_the_one_before_it():
    """States are sparse, so a lookup that tries only the last block within the limit would find nothing."""
    manager = StateBlockManager(10, 16)
    tokens = list(range(100))
    for end in (32, 80):
        manager.allocate("a", 0 if end == 32 else 32, 0 if end == 32 else 32, 32 if end == 32 else 48)
        manager.commit("a", tokens[:end])
    found = {limit: manager.lookup(tokens, limit=limit).length for limit in (100, 81, 80, 79, 33, 32, 31)}
    assert found == {100: 80, 81: 80, 80: 80, 79: 32, 33: 32, 32: 32, 31: 0}


def test_the_hit_of_a_repeated_prompt_depends_on_its_length_alone():
    """It hits when it is sent for the second time, whatever the sizes of blocks, pages and chunks."""
    for (block, page), budget in itertools.product([(4, 4), (8, 4), (12, 3), (16, 1)], [16, 17, 40, 1000]):
        for length in range(1, 4 * block + 2):
            cache, tokens = make(block, page, 20, 80), list(range(length))
            wanted = (length - 1) // block * block
            assert [prefill(cache, tokens, budget) for _ in range(3)] == [0, wanted, wanted]


def test_a_shared_prefix_hits_wherever_it_and_the_suffixes_end():
    """The states of the first request may all lie in its own suffix, but the third request finds one."""
    for shared, suffix in itertools.product(range(8, 30), (1, 3, 8, 9, 20)):
        cache, prefix = make(), [0] * shared
        hits = [prefill(cache, prefix + [1 + n] * suffix) for n in range(3)]
        assert hits[2] == shared // 8 * 8
        assert hits[1] in (0, hits[2])


@settings(deadline=None, max_examples=depth.examples(15, 40))
@given(st.data())
def test_the_hit_of_a_repeated_prompt_does_not_depend_on_the_load(data):
    """The prompt runs alone or among others, first or last, in small or large chunks."""
    scheduler = Scheduler(make(num_blocks=60, num_pages=200), 3, 2, data.draw(st.integers(8, 40)))
    prompt = list(range(100, 100 + data.draw(st.integers(1, 40))))
    others = [[n] * data.draw(st.integers(1, 30)) for n in range(data.draw(st.integers(0, 4)))]
    first, again = request(0, prompt), request(1, prompt)
    queue = [first, *(request(2 + n, other, 5) for n, other in enumerate(others))]
    for r in data.draw(st.permutations(queue)):
        scheduler.add(r)
    drain(scheduler)
    for n, other in enumerate(others):
        scheduler.add(request(20 + n, other, 5))
    scheduler.add(again)
    drain(scheduler)
    assert again.num_cached == (len(prompt) - 1) // 8 * 8


# Which blocks are evicted.


def test_pages_are_evicted_from_the_end_of_a_prefix():
    """Other requests can still use its beginning. Without its first page all the others would be useless."""
    cache, tokens = make(block=4, num_pages=9), list(range(32))
    assert prefill(cache, tokens) == 0
    for left in range(8, -1, -1):
        hit = cache.lookup([*tokens, 0])
        assert max(hit.length, hit.junction) == 4 * left
        assert left == 0 or len(cache.kv.pool.allocate(1)) == 1


def test_a_hit_protects_only_its_own_state_from_eviction():
    """The states of an old conversation are evicted one by one, the oldest first, not all at once."""
    manager, tokens = StateBlockManager(6, 4), list(range(21))
    for end in (4, 8, 12, 16):
        manager.allocate("cold", end - 4, end - 4, 4)
        manager.release("cold")
        manager.commit("cold", tokens[:end])
    manager.free("cold")
    hit = manager.lookup(tokens[:9])
    assert hit.length == 8
    manager.allocate("again", 8, 8, 1, hit=hit)
    manager.free("again")
    held = lambda: [end for end in (4, 8, 12, 16) if manager.lookup(tokens[: end + 1]).length == end]
    left = []
    while held():
        manager.pool.allocate(1)
        left.append(held())
    assert left == [[4, 8, 12, 16], [8, 12, 16], [8, 16], [8], []]


# Which states are published.


def test_a_request_that_never_ran_publishes_nothing():
    scheduler = Scheduler(make(), 2, 2, 16)
    tokens = list(range(20))
    for planned in (False, True):
        first = request(0, tokens)
        scheduler.add(first)
        if planned:
            # It has blocks, but its step was never dispatched.
            assert scheduler.schedule().rows
        scheduler.remove(first)
        hit = scheduler.cache.lookup(tokens)
        assert (hit.length, hit.junction) == (0, 0)
        scheduler.cache.check()
        assert scheduler.cache.states.pool.num_held == scheduler.cache.kv.pool.num_held == 0


def test_a_boundary_belongs_to_the_step_that_passed_it():
    """Another step is planned before the first one's result is read, so the request itself has moved on."""
    manager, tokens = StateBlockManager(10, 4), list(range(12))
    manager.allocate("a", 0, 0, 3)
    manager.commit("a", tokens[:3])
    manager.allocate("a", 3, 3, 1)
    manager.allocate("a", 4, 4, 1)
    assert manager.commit("a", tokens[:4]) == 4
    assert manager.commit("a", tokens[:5]) == 0
    manager.allocate("a", 5, 5, 2)
    manager.allocate("a", 7, 7, 1)
    assert manager.commit("a", tokens[:7]) == 0
    assert manager.commit("a", tokens[:8]) == 8


def test_identical_prompts_in_one_pass_publish_one_block():
    """No request hits what another will write in the same pass. One copy stays findable, and the others become free."""
    scheduler, tokens = Scheduler(make(), 3, 3, 64), list(range(11))
    for n in range(3):
        scheduler.add(request(n, tokens))
    assert [(row.start, row.num_tokens) for row in step(scheduler).rows] == [(0, 8)] * 3
    found = scheduler.cache.states.lookup(tokens).blocks
    drain(scheduler)
    assert scheduler.cache.states.lookup(tokens).blocks == found
    assert scheduler.cache.states.pool.num_held == scheduler.cache.kv.pool.num_held == 0
    states, pages = scheduler.cache.states.pool, scheduler.cache.kv.pool
    for pool, cached in ((states, 1), (pages, 3)):
        taken = pool.allocate(pool.num_available - cached)
        assert pool.num_evictions == 0
        pool.check()
        pool.release(taken)


# Which request holds which block.


def test_a_column_is_released_after_the_dispatch_of_the_next_step():
    """The next step reads the state there. Only after its dispatch may another request get the block."""
    manager, tokens = StateBlockManager(10, 4), list(range(12))
    manager.allocate("a", 0, 0, 4)
    manager.release("a")
    manager.commit("a", tokens[:4])
    assert manager.columns("a").keys() == {0}
    manager.allocate("a", 4, 4, 1)
    assert manager.columns("a").keys() == {0, 1}
    manager.release("a")
    assert manager.columns("a").keys() == {1}


def test_blocks_of_rejected_drafts_are_used_by_the_next_step():
    manager = StateBlockManager(20, 4, 3)
    manager.allocate("a", 0, 0, 6)
    manager.commit("a", list(range(6)))
    assert [column for column, _ in manager.allocate("a", 6, 6, 4, 3)] == [2, 3, 4, 5]
    manager.release("a")
    manager.commit("a", list(range(7)))
    for computed, drafts in ((7, 0), (8, 1), (9, 2)):
        assert manager.allocate("a", computed, computed, 1 + drafts, drafts) == []
        manager.release("a")
        manager.commit("a", list(range(computed + 1)))


@settings(deadline=None, max_examples=depth.examples(20, 60))
@given(st.data())
def test_no_row_gets_a_block_that_another_row_of_its_step_reads(data):
    """The rows of a launch run in any order, so this would be a race whatever the order of the rows."""
    cache = make(num_blocks=data.draw(st.integers(4, 10)), num_pages=data.draw(st.integers(14, 30)))
    scheduler = Scheduler(cache, 3, 2, data.draw(st.integers(1, 40)))
    count = data.draw(st.integers(2, 8))
    for n in range(count):
        shared, own = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 12))
        scheduler.add(request(n, [7] * shared + [n] * own, data.draw(st.integers(1, 12))))
    rows = {}
    for _ in range(400):
        plan = scheduler.schedule()
        reads, new = [], []
        for row in plan.rows:
            if row.enters:
                rows[row.request.id] = {}, {}
            columns, held = rows[row.request.id]
            columns.update(row.allocation.columns)
            held.update(row.allocation.pages)
            live, filled = (row.start - 1) // 8, -(-row.start // 4)
            states, pages = {columns[live]} if row.start else set(), {held[n] for n in range(filled)}
            reads.append((states, pages))
            states = {block for column, block in row.allocation.columns if column != live}
            new.append((states, {page for number, page in row.allocation.pages if number >= filled}))
        for r, mine in enumerate(new):
            for other, theirs in enumerate(reads):
                assert other == r or not any(a & b for a, b in zip(mine, theirs, strict=True))
        if not plan.rows:
            break
        finish(scheduler, plan)
    assert not scheduler.running
    assert not scheduler.waiting


def test_the_output_of_a_resumed_request_is_chunked_like_a_prompt():
    """Its chunks end on boundaries. Otherwise a block's state would not be that of the tokens in its hash."""
    scheduler = Scheduler(make(num_pages=8), 2, 2, 64)
    requests = [request(n, [n] * 4, 16) for n in range(2)]
    for r in requests:
        scheduler.add(r)
    for _ in range(12):
        step(scheduler)
    assert scheduler.counters["preemptions"] == 1
    young, said = requests[1], len(requests[1].tokens)
    assert 8 < said < 16
    for pool in (scheduler.cache.states.pool, scheduler.cache.kv.pool):
        pool.release(pool.allocate(pool.num_available))  # evicts everything that is cached
    ends = []
    for _ in range(60):
        rows = [row for row in step(scheduler).rows if row.request is young]
        ends += [row.start + row.num_tokens for row in rows]
    assert ends[:2] == [8, said]
