"""StateBlockManager agrees with a device that stores in each block the tokens whose state it holds."""

import random

import depth
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mamba_align_jax.cache.checkpoints import Checkpoints, request_checkpoints
from mamba_align_jax.cache.split import next_chunk_end
from mamba_align_jax.cache.state_blocks import Hit, StateBlockManager


class Request:
    def __init__(self, tokens, computed, salt):
        self.tokens, self.prompt, self.computed, self.salt = tokens, len(tokens), computed, salt
        self.row, self.column, self.accepted = {}, None, 1


class Machine(RuleBasedStateMachine):
    """Random requests. Few different tokens make shared prefixes, and a small pool makes evictions."""

    block_size, K, num_blocks, mode = 4, 2, 14, "align"

    def __init__(self):
        super().__init__()
        self.manager = StateBlockManager(self.num_blocks, self.block_size, self.K, mode=self.mode)
        self.requests, self.contents, self.number = {}, {}, 0

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.requests)))

    def run(self, name, q, drafts, accepted, hit=None):
        """Runs one step of one request as the device does."""
        request, bs = self.requests[name], self.block_size
        entries = self.manager.allocate(name, request.computed, request.computed, q, drafts, hit=hit)
        if entries is None:
            return False
        before = dict(request.row)
        assert not before.keys() & {c for c, _ in entries}, "an entry changed while its request lived"
        request.row.update(entries)
        held = set(self.manager.columns(name).values())
        if request.computed:
            if hit:
                request.column = (hit.length - 1) // bs
            block = request.row[request.column + request.accepted - 1]
            assert block in held, "reads a block that was released"
            assert self.contents[block] == tuple(request.tokens[: request.computed])
        current = -(-(request.computed + q) // bs) - 1
        certain = request.computed + q - drafts
        for t in range(1 + drafts):
            assert request.row[current + t] in held
            self.contents[request.row[current + t]] = tuple(request.tokens[: certain + t])
        interior = self.interior(request.computed, q, drafts)
        for inside in interior:
            assert request.row[inside // bs - 1] in held
            self.contents[request.row[inside // bs - 1]] = tuple(request.tokens[:inside])
        new = certain + accepted - 1
        boundary = new // bs * bs
        request.column, request.accepted = current, accepted
        if boundary >= certain:
            target = request.row[boundary // bs - 1]
            assert target in held
            self.contents[target] = self.contents[request.row[current + boundary - certain]]
            if boundary // bs - 1 == current:
                request.accepted = 1
        publishes = self.mode == "all" and drafts == 0 and isinstance(name, int) and name % 2
        if publishes:
            self.manager.publish(name, request.tokens[:certain])
        self.manager.release(name)
        request.computed = new
        published = self.manager.commit(name, request.tokens, new)
        assert published in (0, boundary)
        if publishes:
            assert min(self.manager.columns(name)) >= current, "a column that no later step reads is still held"
        for inside in interior:
            assert self.manager.lookup(request.tokens[: inside + 1], request.salt).length == inside
        return True

    def interior(self, computed, q, drafts):
        """The boundaries inside a step whose states stay."""
        inside = range(computed + 1, computed + q) if self.mode == "all" and not drafts else ()
        return [end for end in inside if end % self.block_size == 0]

    def chunk_end(self, start, budget, prompt):
        if self.mode == "all":
            return min(start + budget, prompt)
        return next_chunk_end(start, start + budget, prompt, self.block_size)

    @rule(data=st.data(), length=st.integers(1, 30), salt=st.sampled_from([b"", b"tenant"]))
    def start(self, data, length, salt):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        if data.draw(st.booleans()):
            tokens = [0] * (length // 2) + tokens[length // 2 :]
        hit = self.manager.lookup(tokens, salt)
        assert hit.length < len(tokens)
        for column, block in hit.blocks:
            assert column == hit.length // self.block_size - 1
            assert self.contents[block] == tuple(tokens[: hit.length]), "the cached state is another prefix's"
        name = self.number
        self.number += 1
        self.requests[name] = Request(tokens, hit.length, salt)
        end = self.chunk_end(hit.length, data.draw(st.integers(1, 16)), length)
        before = self.manager.pool.num_available
        if not self.run(name, end - hit.length, 0, 1, hit):
            assert self.manager.pool.num_available == before, "a refused request changed the pool"
            del self.requests[name]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), budget=st.integers(1, 16))
    def step(self, data, budget):
        name = self.pick(data)
        request = self.requests[name]
        if request.computed < request.prompt:
            end = self.chunk_end(request.computed, budget, request.prompt)
            self.run(name, end - request.computed, 0, 1)
            return
        drafts = data.draw(st.integers(0, self.K))
        accepted = data.draw(st.integers(1, drafts + 1))
        missing = max(request.computed + 1 + drafts - len(request.tokens), 0)
        request.tokens = request.tokens + data.draw(st.lists(st.integers(0, 1), min_size=missing, max_size=missing))
        if not self.run(name, 1 + drafts, drafts, accepted):
            return
        request.tokens = request.tokens[: request.computed]
        request.prompt = min(request.prompt, request.computed)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data):
        name = self.pick(data)
        self.manager.free(name)
        del self.requests[name]

    @invariant()
    def conserved(self):
        self.manager.pool.check()
        rows = [block for name in self.requests for block in self.manager.columns(name).values()]
        assert self.manager.pool.num_held == len(set(rows))
        for name in self.requests:
            chunk = 16 // self.block_size if self.mode == "all" else 0
            assert len(self.manager.columns(name)) <= self.manager.blocks_needed() + chunk + 1


class WithoutDrafts(Machine):
    block_size, K, num_blocks = 3, 0, 8


class OneBlockWindows(Machine):
    block_size, K, num_blocks = 4, 3, 20


class EveryBoundary(Machine):
    """Chunks end anywhere, and every boundary that they pass is found."""

    num_blocks, mode = 18, "all"


for machine in (Machine, WithoutDrafts, OneBlockWindows, EveryBoundary):
    machine.TestCase.settings = settings(
        max_examples=depth.examples(quick=20, full=60), stateful_step_count=40, deadline=None
    )
TestStateBlocks = Machine.TestCase
TestWithoutDrafts = WithoutDrafts.TestCase
TestOneBlockWindows = OneBlockWindows.TestCase
TestEveryBoundary = EveryBoundary.TestCase


def test_a_prompt_is_found_again_up_to_its_last_boundary():
    manager = StateBlockManager(10, 4)
    tokens = list(range(11))
    assert manager.lookup(tokens) == Hit(0)
    assert manager.allocate("a", 0, 0, 8) == [(1, 1)]  # the chunk jumps over column 0, which gets no block
    assert manager.commit("a", tokens[:8]) == 8
    assert manager.allocate("a", 8, 8, 3) == [(2, 2)]
    manager.release("a")
    assert manager.commit("a", tokens) == 0
    assert manager.columns("a") == {2: 2}
    assert manager.lookup(tokens) == Hit(8, ((1, 1),))
    assert manager.lookup(tokens[:8]).length == 0, "one token must be left to compute"
    assert manager.lookup(tokens, b"other").length == 0
    assert manager.lookup([0, *tokens]).length == 0
    manager.free("a")
    assert manager.lookup(tokens) == Hit(8, ((1, 1),))


def test_mode_all_finds_every_boundary_and_holds_only_the_running_column():
    manager = StateBlockManager(10, 4, mode="all")
    tokens = list(range(19))
    assert manager.allocate("a", 0, 0, 10) == [(0, 1), (1, 2), (2, 3)]
    assert manager.publish("a", tokens[:10]) == 8
    manager.release("a")
    assert manager.columns("a") == {2: 3}, "the running column, which the next chunk reads"
    assert manager.lookup(tokens[:9]) == Hit(8, ((1, 2),))
    assert manager.lookup(tokens[:8]) == Hit(4, ((0, 1),))
    # The result of the first chunk is unread. The second one starts inside a block.
    assert manager.allocate("a", 10, 10, 9) == [(3, 4), (4, 5)]
    assert manager.publish("a", tokens) == 16
    manager.release("a")
    assert manager.columns("a") == {4: 5}
    assert [manager.commit("a", tokens[:end]) for end in (10, 19)] == [0, 0]
    assert [manager.lookup(tokens[:end]).length for end in (5, 13, 17)] == [4, 12, 16]


def test_mode_all_publishes_the_boundaries_inside_a_step_that_was_not_offered():
    manager = StateBlockManager(10, 4, mode="all")
    tokens = list(range(14))
    manager.allocate("a", 0, 0, 13)
    manager.release("a")
    assert manager.lookup(tokens).length == 0
    assert manager.columns("a").keys() == {0, 1, 2, 3}
    assert manager.commit("a", tokens[:13]) == 12
    assert [manager.lookup(tokens[:end]).length for end in (5, 9, 13)] == [4, 8, 12]


def test_the_least_recently_used_state_is_evicted():
    manager = StateBlockManager(5, 4)
    prompts = [[n] * 5 for n in range(3)]
    for n, prompt in enumerate(prompts):
        manager.allocate(n, 0, 0, 4)
        manager.commit(n, prompt[:4])
    for n in (1, 0, 2):
        manager.free(n)
    manager.allocate("again", 4, 4, 1, hit=manager.lookup(prompts[1]))  # used again, so no longer the oldest
    manager.allocate("new", 0, 0, 4)
    assert [manager.lookup(prompt).length for prompt in prompts] == [0, 4, 4]


@pytest.mark.parametrize(("block_size", "K"), [(2, 1), (4, 3), (8, 7), (4, 2), (3, 2), (5, 2), (64, 3), (1, 0)])
def test_blocks_needed_is_enough_for_one_request(block_size, K):
    """The smallest allowed pool is enough, however many drafts are accepted."""
    rng = random.Random(0)
    for _ in range(30):
        manager = StateBlockManager(1 + StateBlockManager(99, block_size, K).blocks_needed(), block_size, K)
        nc = rng.randint(1, block_size)
        tokens = list(range(nc + 60 * (K + 1)))
        assert manager.allocate("a", 0, 0, nc) is not None
        manager.commit("a", tokens[:nc])
        for _ in range(40):
            drafts = rng.choice([0, K, K])
            assert manager.allocate("a", nc, nc, 1 + drafts, drafts) is not None
            manager.release("a")
            nc += rng.choice([1, 1 + drafts, rng.randint(1, 1 + drafts)])
            manager.commit("a", tokens[:nc])


def test_a_pool_without_a_block_for_copies_is_refused():
    with pytest.raises(ValueError, match="num_blocks must be at least 4 for one request, got 3"):
        StateBlockManager(3, 8, granularity=4)
    assert StateBlockManager(4, 8, granularity=4).pool.num_blocks == 4


@pytest.mark.parametrize(
    ("block_size", "L", "K"), [(8, 8, 3), (16, 8, 3), (64, 16, 7), (16, 16, 7), (1, 1, 0), (6, 3, 1)]
)
@pytest.mark.parametrize("lag", [0, 1])
def test_blocks_needed_is_enough_for_one_deferred_request(block_size, L, K, lag):
    """The smallest allowed pool is enough, also with a chunk in flight, however many drafts are accepted."""
    rng = random.Random(0)
    needed = StateBlockManager(99, block_size, K, fold_length=L).blocks_needed(lag)
    for _ in range(30):
        manager = StateBlockManager(1 + needed, block_size, K, fold_length=L, steps_in_flight=lag)
        tokens = list(range(4 * block_size + 100 * (K + 1)))
        low = high = 0
        pending = []
        for end in (block_size, 3 * block_size, 3 * block_size + rng.randrange(block_size)):
            if end > high:
                assert manager.allocate("a", high, high, end - high) is not None
                manager.publish("a", tokens[:end])
                manager.release("a")
                low, high = end, end
                pending.append(end)
        for end in pending[: len(pending) - lag]:
            manager.commit("a", tokens[:end])
        pending = pending[len(pending) - lag :]
        for _ in range(40):
            drafts = rng.choice([0, K, K])
            assert manager.allocate("a", low, high, 1 + drafts, drafts) is not None
            manager.release("a")
            done = (pending[-1] if pending else low) + rng.choice([1, 1 + drafts, rng.randint(1, 1 + drafts)])
            pending.append(done)
            while len(pending) > lag:
                first = pending.pop(0)
                manager.commit("a", tokens[:first])
                known = first
            low, high = (known, known) if not pending else (known + len(pending), known + len(pending) * (1 + K))


def test_a_deferred_boundary_is_published_after_the_next_step_and_only_then():
    manager, tokens = StateBlockManager(10, 4, 1, fold_length=4), list(range(20))
    manager.allocate("a", 0, 0, 3)
    assert manager.publish("a", tokens[:3]) == 0
    manager.release("a")
    assert manager.commit("a", tokens[:3]) == 0
    assert manager.allocate("a", 3, 3, 2, 1) == [(1, 2)]
    assert manager.release("a") == 0
    assert manager.commit("a", tokens[:5]) == 0
    assert manager.unfolded("a") == 4
    assert manager.lookup(tokens).length == 0
    # The next step starts at 5 tokens and folds the boundary 4. The state there is read until the boundary 8 is folded.
    manager.allocate("a", 5, 5, 2, 1)
    assert manager.release("a") == 4
    assert manager.unfolded("a") == 0
    assert manager.lookup(tokens) == Hit(4, ((0, 1),))
    assert manager.columns("a").keys() == {0, 1}
    assert manager.commit("a", tokens[:7]) == 0
    # Without another step, a fold without tokens writes the boundary.
    manager.allocate("a", 7, 7, 1)
    assert manager.release("a") == 0
    assert manager.commit("a", tokens[:8]) == 0
    assert manager.unfolded("a") == 8
    assert manager.folded("a") == 8
    assert manager.lookup(tokens).length == 8
    manager.free("a")
    assert manager.unfolded("a") == 0


def test_a_deferred_boundary_is_published_at_once_if_the_next_step_is_in_flight():
    manager, tokens = StateBlockManager(10, 4, 1, fold_length=4, steps_in_flight=1), list(range(20))
    manager.allocate("a", 0, 0, 3)
    manager.publish("a", tokens[:3])
    manager.release("a")
    manager.allocate("a", 3, 3, 2, 1)
    manager.release("a")
    manager.allocate("a", 4, 5, 2, 1)
    manager.release("a")
    assert manager.commit("a", tokens[:3]) == 0
    assert manager.commit("a", tokens[:5]) == 4
    assert manager.lookup(tokens).length == 4


def test_deferred_boundaries_are_lost_with_a_reset():
    manager, tokens = StateBlockManager(10, 4, 1, fold_length=4), list(range(20))
    for end, drafts in ((3, 0), (5, 1)):
        manager.allocate("a", max(end - 2, 0), max(end - 2, 0), end if drafts == 0 else 2, drafts)
        manager.release("a")
        manager.commit("a", tokens[:end])
    assert manager.unfolded("a") == 4
    manager.reset()
    assert manager.unfolded("a") == 0
    assert manager.folded("a") == 0


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("fold_length must divide block_size = 4 under policy 'deferred', got 3", dict(fold_length=3)),
        (
            "fold_length must be more than 2 \\* num_speculative_tokens = 4 under policy 'deferred', got 4",
            dict(fold_length=4, num_speculative_tokens=2),
        ),
        ("fold_length must be at least 1, got 0", dict(fold_length=0)),
    ],
)
def test_bad_fold_lengths_are_named(message, options):
    with pytest.raises(ValueError, match=message):
        StateBlockManager(10, 4, **options)


def test_boundaries_after_a_stop_token_are_not_published():
    manager = StateBlockManager(10, 4, 2)
    manager.allocate("a", 0, 0, 7)
    manager.commit("a", list(range(7)))
    manager.allocate("a", 7, 7, 3, 2)
    # The device accepted ten tokens, but the host stops at nine. Boundary 8 is published, and none after it.
    assert manager.commit("a", list(range(9))) == 8


def test_allocation_is_all_or_nothing():
    manager = StateBlockManager(6, 4, 2)
    assert len(manager.allocate("a", 0, 0, 4)) == 1
    assert len(manager.allocate("a", 4, 4, 3, 2)) == 3
    assert manager.pool.num_available == 1
    assert manager.allocate("b", 0, 0, 4) is not None
    assert manager.allocate("c", 0, 0, 4) is None
    with pytest.raises(ValueError, match="columns: request must be one that holds blocks, got 'c'"):
        manager.columns("c")


def test_mode_none_holds_one_window_and_caches_nothing():
    manager = StateBlockManager(4, 4, 2, mode="none")
    assert manager.allocate("a", 0, 0, 9) == [(0, 1), (1, 2), (2, 3)]
    assert manager.commit("a", list(range(9))) == 0
    manager.release("a")
    assert manager.allocate("a", 9, 9, 3, 2) == []
    manager.free("a")
    assert manager.lookup(list(range(20))).length == 0
    assert manager.pool.num_available == 3


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="block_size must be at least 4, got 3"):
        StateBlockManager(10, 3, 3)
    with pytest.raises(ValueError, match="num_blocks must be at least 3 for one request, got 2"):
        StateBlockManager(2, 4)
    with pytest.raises(ValueError, match=r"mode must be one of \('none', 'align', 'all'\), got 'some'"):
        StateBlockManager(10, 4, mode="some")
    manager = StateBlockManager(10, 4)
    manager.allocate("a", 0, 0, 3)
    with pytest.raises(ValueError, match="'a' must have 3 to 3 computed tokens, got 2"):
        manager.commit("a", [0, 1])
    with pytest.raises(ValueError, match="got 3 of 2"):
        manager.commit("a", [0, 1], 3)
    manager.commit("a", [0, 1, 2])
    with pytest.raises(ValueError, match="no step in flight"):
        manager.commit("a", [0, 1, 2])


def test_requests_that_enter_on_one_lookup_publish_their_own_tokens():
    """Two choices of a prompt enter on one hit and then differ, whether something was cached or not."""
    for cached in (False, True):
        manager, prompt = StateBlockManager(12, 8), list(range(9))
        if cached:
            manager.allocate("first", 0, 0, 8)
            manager.commit("first", prompt[:8])
            manager.free("first")
        hit, texts = manager.lookup(prompt), {name: prompt + [100 + n] * 20 for n, name in enumerate("abc")}
        assert hit.length == 8 * cached
        for name in texts:
            manager.allocate(name, hit.length, hit.length, 8, hit=hit)
            manager.release(name)
            manager.commit(name, texts[name][: hit.length + 8])
        for name, tokens in texts.items():
            end = hit.length + 8
            manager.allocate(name, end, end, 8)
            manager.release(name)
            manager.commit(name, tokens[: end + 8])
        for name, tokens in texts.items():
            assert manager.lookup(tokens).blocks == tuple(manager.columns(name).items())[-1:]


@pytest.mark.parametrize("computed", [(0, 0), (8, 9), (9, 9)])
def test_a_request_enters_where_its_hit_ends(computed):
    manager = StateBlockManager(12, 8)
    manager.allocate("a", 0, 0, 8)
    manager.commit("a", [1] * 8)
    hit = manager.lookup([1] * 9)
    low, high = computed
    message = f"min_computed and max_computed must be hit.length = 8 for a request that enters, got {low} and {high}"
    with pytest.raises(ValueError, match=message):
        manager.allocate("b", *computed, 8, hit=hit)
    manager.check()
    assert manager.allocate("b", 8, 8, 8, hit=hit) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("counts", [(3, 6), (4, 5), (5, 7), (0, 0)])
@pytest.mark.parametrize("call", ["allocate", "fits", "begin"])
def test_counts_cover_what_earlier_steps_may_have_computed(call, counts):
    manager = StateBlockManager(12, 8, 2)
    manager.allocate("a", 0, 0, 3)
    manager.commit("a", [1] * 3)
    manager.allocate("a", 3, 3, 3, 2)  # leaves 4 to 6 computed tokens
    low, high = counts
    if low <= 4 and high >= 6:
        assert getattr(manager, call)("a", *counts, 3, 2) is not None
        return
    message = (
        f"a step after 4 to 6 computed tokens must have min_computed <= 4 and max_computed >= 6, got {low} and {high}"
    )
    with pytest.raises(ValueError, match=message):
        getattr(manager, call)("a", *counts, 3, 2)
    manager.commit("a", [1] * 6)
    assert manager.allocate("a", 6, 6, 3, 2) is not None


def test_steps_without_tokens_are_refused():
    manager = StateBlockManager(12, 8)
    manager.allocate("a", 0, 0, 8)
    manager.release("a")
    manager.commit("a", [1] * 8)
    for request in "ab":
        with pytest.raises(ValueError, match=r"allocate: a step must have .* fewer than its tokens, .*num_tokens = 0"):
            manager.allocate(request, 8, 8, 0)
    assert manager.columns("a") == {0: 1}


@pytest.mark.parametrize("name", ["min_computed", "max_computed", "num_tokens", "num_drafts"])
@pytest.mark.parametrize("count", [np.int32(1), 1.0, True, None])
def test_counts_of_other_types_are_refused_by_name(name, count):
    manager = StateBlockManager(12, 8, 1)
    counts = dict(min_computed=0, max_computed=1, num_tokens=2, num_drafts=1)
    kind = type(count).__name__
    with pytest.raises(ValueError, match=rf"allocate: {name} must be an int of Python, got .* of type {kind}"):
        manager.allocate("a", **counts | {name: count})
    assert manager.allocate("a", **counts) == [(0, 1), (1, 2)]


def test_a_known_token_that_ran_as_a_decode_row_is_not_published_before_its_fold():
    """A prompt's tail of one token may be a decode row. Under policy "deferred" it writes no state."""
    tokens = list(range(40))
    manager = StateBlockManager(12, 16, 1, fold_length=8)
    manager.allocate("a", 0, 0, 15)
    assert manager.publish("a", tokens[:15]) == 0
    manager.release("a")
    manager.commit("a", tokens[:15])
    manager.allocate("a", 15, 15, 1)
    assert manager.publish("a", tokens[:16]) == 0
    assert manager.release("a") == 0
    assert manager.commit("a", tokens[:16]) == 0
    assert manager.lookup(tokens).length == 0
    assert manager.unfolded("a") == 16
    # The next step folds it.
    manager.allocate("a", 16, 16, 1)
    manager.publish("a", tokens[:17])
    assert manager.release("a") == 16
    assert manager.lookup(tokens).length == 16
    # A row that enters on the boundary reads its base until the group is complete.
    manager.allocate("b", 16, 16, 1, hit=manager.lookup(tokens[:17]))
    manager.publish("b", tokens[:17])
    manager.release("b")
    manager.commit("b", tokens[:17])
    assert 0 in manager.columns("b")


def test_a_passed_boundary_does_not_take_the_place_of_a_newer_one():
    """A decode row passes 8. The chunk from 8 to 16 is published before the row's boundary is."""
    tokens, keep = list(range(40)), request_checkpoints(4, 8)
    folds, reads_late = StateBlockManager(12, 8, fold_length=8), StateBlockManager(12, 8, steps_in_flight=1)
    for manager in (folds, reads_late):
        manager.allocate("a", 0, 0, 7, keep=keep)
        manager.publish("a", tokens[:7])
        manager.release("a")
        manager.commit("a", tokens[:7])
        manager.allocate("a", 7, 7, 1)
        manager.release("a")
        if manager is folds:
            manager.commit("a", tokens[:8])
            assert manager.unfolded("a") == 8
        manager.allocate("a", 8, 8, 8)
        assert manager.publish("a", tokens[:16]) == 16
        manager.release("a")
        if manager is reads_late:
            assert manager.commit("a", tokens[:8]) == 0
        manager.commit("a", tokens[:16])
        assert manager.lookup(tokens).length == 16
        manager.check()


def test_a_boundary_that_stays_leaves_a_newer_one_cached():
    tokens, keep = list(range(40)), Checkpoints(offsets=(8,))
    manager = StateBlockManager(12, 8, steps_in_flight=1)
    manager.allocate("a", 0, 0, 7, keep=keep)
    manager.release("a")
    manager.commit("a", tokens[:7])
    manager.allocate("a", 7, 7, 1)
    manager.release("a")
    manager.allocate("a", 8, 8, 8)
    manager.publish("a", tokens[:16])
    manager.release("a")
    assert manager.commit("a", tokens[:8]) == 8
    assert (manager.lookup(tokens).length, manager.lookup(tokens, limit=8).length) == (16, 8)
