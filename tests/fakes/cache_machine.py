"""A hypothesis state machine of a hybrid cache and its model in plain Python."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import StateBlockManager

BLOCK, PAGE, K, LONGEST, LONGEST_CHUNK = 4, 2, 2, 36, 14
STAYS = None


@dataclass
class Request:
    """A request. `row`: blocks by column. `pending`: (tokens, drafts, accepted) of its step in progress."""

    tokens: list
    prompt: int
    at: tuple
    computed: int = 0
    prefill_end: int = 0
    keep: object = None
    junction: int = 0
    row: dict = field(default_factory=dict)
    column: int = -1
    accepted: int = 1
    pending: tuple | None = None
    dispatched: bool = False
    copies: tuple = (None, None)
    shares: bool = True
    rolling: tuple | None = None
    left: tuple | None = None


class Machine(RuleBasedStateMachine):
    num_blocks, num_pages, interval, evicts, mode, grain = 12, 34, None, True, "align", BLOCK

    def __init__(self):
        super().__init__()
        states = StateBlockManager(self.num_blocks, BLOCK, K, mode=self.mode, granularity=self.grain)
        kv = KVPageManager(self.num_pages, PAGE)
        self.cache = HybridCache(states, kv, checkpoint_interval=self.interval, check=True)
        self.running, self.preempted, self.in_flight, self.number = {}, {}, [], 0
        # What can be found: prefixes with a state, and the requests that keep them; prefixes whose last page is cached.
        self.states, self.pages, self.contents = {}, set(), {}
        # Mode "all" finds these, too. `states` is what mode "align" would keep.
        self.expendable = set()
        self.key_of, self.evictions = {}, [0, 0]

    # The model.

    def wanted(self, r, boundary):
        asked = {offset - offset % self.grain for offset in r.at if offset <= r.prompt}
        periodic = self.interval is not None and boundary % self.interval == 0
        return boundary in asked | {(r.prompt - 1) // BLOCK * BLOCK, r.junction} or periodic

    def passed(self, r, start, certain):
        """The positions at which a chunk leaves states that may be kept."""
        ends = range(start + 1, certain + 1) if self.mode == "all" else (certain,)
        inside = [certain] if certain % BLOCK and self.wanted(r, certain) and r.shares else []
        return [end for end in ends if end % BLOCK == 0] + inside

    def keep_state(self, name, r, boundary):
        """Returns whether the boundary is kept, and whether its prefix is new."""
        prefix = tuple(r.tokens[:boundary])
        if boundary == 0 or not r.shares:
            return False, False
        is_new = prefix not in self.states and prefix not in self.expendable
        self.expendable.discard(prefix)
        before, r.rolling = r.rolling, None
        if self.wanted(r, boundary):
            self.states[prefix] = STAYS
        else:
            r.rolling = prefix
            if self.states.setdefault(prefix, set()) is not STAYS:
                self.states[prefix].add(name)
        if before is not None and before != r.rolling and self.states.get(before) is not STAYS:
            self.states.get(before, set()).discard(name)
            if not self.states.get(before, True):
                del self.states[before]
                if self.mode == "all":
                    self.expendable.add(before)
        return True, is_new

    def keep_pages(self, r, count):
        for end in range(PAGE, count + 1, PAGE) if r.shares else ():
            self.pages.add(tuple(r.tokens[:end]))

    def longest(self, tokens):
        """Returns the number of tokens whose pages are found, and the position of the hit."""
        paged = 0
        while paged + PAGE <= len(tokens) and tuple(tokens[: paged + PAGE]) in self.pages:
            paged += PAGE
        ends = range(self.grain, min(paged, len(tokens) - 1) + 1, self.grain)
        found = lambda end: tuple(tokens[:end]) in self.states or tuple(tokens[:end]) in self.expendable
        return paged, max(filter(found, ends), default=0)

    # Scheduling.

    def enter(self, name, r, data):
        paged, length = self.longest(r.tokens)
        hit = self.cache.lookup(r.tokens)
        assert hit.length == length
        branch = min(paged, len(r.tokens) - 1) // BLOCK * BLOCK
        assert hit.junction == (branch if branch > length else 0)
        last = (len(r.tokens) - 1) // BLOCK * BLOCK
        missing = {"evicted", "no checkpoint"} if self.mode == "align" else {"evicted"}
        is_whole = length >= last and length > 0
        allowed = {None} if is_whole else {"below one block"} if last == 0 else missing
        if branch <= length < last:
            allowed = {"evicted", "not identical"}
        assert hit.miss in allowed
        assert hit.miss != "evicted" or any(self.evictions)
        for _, block in hit.state.blocks:
            assert self.contents[block] == tuple(r.tokens[:length]), "the cached state is another prefix's"
        if r.keep is None:
            r.junction = hit.junction
            r.keep = self.cache.checkpoints(r.prompt, self.cache.requested_offsets(r.at, r.prompt), hit.junction)
        r.computed, r.prefill_end = length, len(r.tokens)
        pools = self.cache.states.pool, self.cache.kv.pool
        before = [(pool.num_available, pool.keys) for pool in pools]
        if not self.schedule(name, r, data, hit):
            assert before == [(pool.num_available, pool.keys) for pool in pools], "a refusal changed something"
            return False
        prefix = tuple(r.tokens[:length])
        r.column = (length - 1) // BLOCK
        for end in range(self.grain, length + 1, self.grain):
            # The request has found a use for these states.
            if prefix[:end] in self.expendable and (end == length or self.wanted(r, end)):
                self.expendable.remove(prefix[:end])
                self.states[prefix[:end]] = STAYS
        if length and self.states.get(prefix) is not STAYS:
            # A state that another request hits stays. A request that hits its own rolling state continues to roll it.
            if name in self.states.get(prefix, {name}):
                r.rolling = prefix
            else:
                self.states[prefix] = STAYS
        if r.left != r.rolling:
            self.keep_for_good(name, r.left)
        self.running[name] = r
        return True

    def schedule(self, name, r, data, hit=None):
        if r.computed < r.prefill_end:
            budget = data.draw(st.integers(1, LONGEST_CHUNK))
            end = self.cache.chunk_end(r.computed, budget, budget, r.prefill_end, r.keep.stops(r.computed))
            pending = end - r.computed, 0, 1
        else:
            drafts = data.draw(st.integers(0, K))
            r.tokens += data.draw(st.lists(st.integers(0, 1), min_size=drafts, max_size=drafts))
            pending = 1 + drafts, drafts, data.draw(st.integers(1, 1 + drafts))
        entries = self.cache.allocate(name, r.computed, r.computed, *pending[:2], hit=hit, keep=r.keep)
        if entries is None:
            del r.tokens[len(r.tokens) - pending[1] :]
            return False
        assert not r.row.keys() & dict(entries.columns).keys(), "an entry changed while its request lived"
        r.row.update(entries.columns)
        inside = hit is not None and hit.length % BLOCK
        assert (entries.load is not None) <= bool(inside)
        if inside:
            # The request may write the block of the column in which it enters, but never that of the cached state.
            source, own = entries.load
            assert (source,) == tuple(block for _, block in hit.state.blocks)
            assert r.row[(hit.length - 1) // BLOCK] == own
        end = r.computed + pending[0]
        saves = not pending[1] and end % BLOCK and self.wanted(r, end) and r.shares
        assert (entries.save is not None) == bool(saves)
        r.pending, r.dispatched, r.copies = pending, False, (entries.load, entries.save)
        return True

    def pick(self, data, condition):
        return data.draw(st.sampled_from([name for name, r in self.running.items() if condition(r)]))

    @rule(data=st.data(), length=st.integers(1, 22), shared=st.integers(0, 20))
    def start(self, data, length, shared):
        tail = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        tokens = [0] * min(shared, length) + tail[shared:]
        at = tuple(data.draw(st.lists(st.integers(0, 24), max_size=2)))
        self.number += 1
        self.enter(self.number, Request(tokens, length, at), data)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def continue_a_conversation(self, data):
        r = self.running[self.pick(data, lambda r: True)]
        tokens = [*r.tokens[: r.computed + 1], *data.draw(st.lists(st.integers(0, 1), max_size=3))]
        self.number += 1
        self.enter(self.number, Request(tokens, len(tokens), ()), data)

    @precondition(lambda self: self.preempted)
    @rule(data=st.data())
    def resume(self, data):
        name = data.draw(st.sampled_from(sorted(self.preempted)))
        if self.enter(name, self.preempted[name], data):
            del self.preempted[name]

    @precondition(lambda self: any(r.pending is None for r in self.running.values()))
    @rule(data=st.data())
    def go_on(self, data):
        name = self.pick(data, lambda r: r.pending is None)
        if len(self.running[name].tokens) + 1 + K > LONGEST:
            self.leave(name, preempted=False)
        else:
            self.schedule(name, self.running[name], data)

    @precondition(lambda self: any(r.pending and not r.dispatched for r in self.running.values()))
    @rule(data=st.data())
    def dispatch(self, data):
        name = self.pick(data, lambda r: r.pending and not r.dispatched)
        r = self.running[name]
        held = set(self.cache.states.columns(name).values())
        for source, own in [r.copies[0]] if r.copies[0] else []:
            assert own in held
            self.contents[own] = self.contents[source]
        if r.computed:
            block = r.row[r.column + r.accepted - 1]
            assert block in held, "reads a block that was released"
            assert self.contents[block] == tuple(r.tokens[: r.computed])
        q, drafts, accepted = r.pending
        current, certain = -(-(r.computed + q) // BLOCK) - 1, r.computed + q - drafts
        for t in range(1 + drafts):
            self.contents[r.row[current + t]] = tuple(r.tokens[: certain + t])
        computed = certain + accepted - 1
        boundary = computed // BLOCK * BLOCK
        r.column, r.accepted, r.dispatched = current, accepted, True
        if boundary >= max(certain, 1):
            self.contents[r.row[boundary // BLOCK - 1]] = tuple(r.tokens[:boundary])
            r.accepted = 1 if boundary // BLOCK - 1 == current else accepted
        is_prefill_row = r.computed < r.prefill_end
        passed = self.passed(r, r.computed, certain) if is_prefill_row else []
        for end in passed:
            self.contents[r.row[(end - 1) // BLOCK]] = tuple(r.tokens[:end])
        if r.copies[1]:
            source, saved = r.copies[1]
            assert source == r.row[current]
            self.contents[saved] = self.contents[source]
        published = self.cache.dispatched(name, r.tokens[:certain] if is_prefill_row else None)
        if is_prefill_row:
            self.keep_pages(r, certain)
        assert published == max([end for end in passed if self.keep_state(name, r, end)[1]], default=0)
        self.in_flight.append(name)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def commit(self, data):
        name = self.in_flight.pop(0)
        r = self.running.get(name)
        if r is None or not r.dispatched:
            return
        q, drafts, accepted = r.pending
        decoding, certain = r.computed >= r.prefill_end, r.computed + q - drafts
        r.computed = certain + accepted - 1
        boundary, is_kept = r.computed // BLOCK * BLOCK, False
        published = self.cache.commit(name, r.tokens, r.computed)
        self.keep_pages(r, r.computed)
        if decoding and boundary >= certain:
            is_kept, _ = self.keep_state(name, r, boundary)
        assert published == (boundary if is_kept else 0)
        if r.computed >= r.prefill_end:
            r.tokens = [*r.tokens[: r.computed], data.draw(st.integers(0, 1))]
        r.pending, r.dispatched = None, False

    def leave(self, name, preempted):
        r = self.running.pop(name)
        self.in_flight = [other for other in self.in_flight if other != name]
        self.cache.free(name)
        self.assert_last_boundary_is_left(r)
        if preempted:
            tokens = r.tokens[: max(r.computed + 1, r.prefill_end)]
            self.preempted[name] = Request(tokens, r.prompt, r.at, keep=r.keep, junction=r.junction, left=r.rolling)
        else:
            self.cache.forget(name)
            self.keep_for_good(name, r.rolling)

    def assert_last_boundary_is_left(self, r):
        """A request that leaves anywhere leaves the state of the last boundary that it has computed, also in a prompt."""
        in_chunk = r.dispatched and r.computed < r.prefill_end
        computed = r.computed + (r.pending[0] if in_chunk else 0)
        if r.shares and not self.evicts:
            found = self.cache.lookup([*r.tokens[:computed], 9]).length
            assert computed // BLOCK * BLOCK <= found < computed // BLOCK * BLOCK + BLOCK
            assert found % BLOCK == 0 or self.grain < BLOCK

    def keep_for_good(self, name, prefix):
        """The request `name` will not pass `prefix` again, so it will not release that state."""
        if name in (self.states.get(prefix) or ()):
            self.states[prefix] = STAYS

    @precondition(lambda self: self.preempted)
    @rule(data=st.data())
    def end_while_it_waits(self, data):
        name = data.draw(st.sampled_from(sorted(self.preempted)))
        self.cache.forget(name)
        self.keep_for_good(name, self.preempted.pop(name).left)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), preempted=st.booleans())
    def end(self, data, preempted):
        self.leave(self.pick(data, lambda r: True), preempted)

    @precondition(lambda self: any(r.pending and not r.dispatched for r in self.running.values()))
    @rule(preempted=st.booleans())
    def fail_before_dispatch(self, preempted):
        """The requests of a step that was never dispatched leave. Nothing that the step should write is found."""
        for name in [name for name, r in self.running.items() if r.pending and not r.dispatched]:
            self.leave(name, preempted)

    @rule()
    def reset(self):
        self.cache.reset_prefix_cache()
        self.states.clear()
        self.expendable.clear()
        self.pages.clear()
        for r in self.running.values():
            r.shares, r.rolling = False, None
        self.evictions[0] += 1

    # What must hold.

    def key(self, prefix):
        if prefix not in self.key_of:
            self.key_of[prefix] = HashChain(PAGE).at(prefix, len(prefix))
        return self.key_of[prefix]

    @invariant()
    def found_is_what_the_model_keeps_less_what_was_evicted(self):
        states, kv = self.cache.states.pool, self.cache.kv.pool
        for number, (pool, models) in enumerate(((states, (self.states, self.expendable)), (kv, (self.pages,)))):
            known = {*self.states, *self.expendable, *self.pages}
            found = {prefix for prefix in known if pool.find(self.key(prefix)) is not None}
            kept = set().union(*models)
            evicted = kept - found
            assert all(pool.was_evicted(self.key(prefix)) for prefix in evicted), "lost, but not evicted"
            assert self.evicts or not evicted
            assert found <= kept, "found, but not kept"
            assert len(pool.keys) == len(found), "found under an unknown key"
            self.evictions[number] += len(evicted)
            # A state that goes with its page had to go.
            if any(prefix in self.states and kv.find(self.key(prefix)) is not None for prefix in evicted):
                unheld = [key for key in states.expendable_keys if states.find(key) not in states._holders]
                assert not unheld, "a state was evicted that a request keeps, although an expendable one was cached"
            for model in models:
                for prefix in evicted.intersection(model):
                    model.discard(prefix) if isinstance(model, set) else model.pop(prefix)
        assert states.expendable_keys == {self.key(prefix) for prefix in self.expendable}
        for prefix in [*self.states, *self.expendable]:
            assert all(prefix[:end] in self.pages for end in range(PAGE, len(prefix) + 1, PAGE))
        assert all(len(prefix) == PAGE or prefix[:-PAGE] in self.pages for prefix in self.pages)

    @invariant()
    def conserved(self):
        for pool in (self.cache.states.pool, self.cache.kv.pool):
            assert len(pool._free) + pool.num_cached + pool.num_held == pool.num_blocks - 1
        for name in self.running:
            inside = -(-LONGEST_CHUNK // BLOCK) if self.mode == "all" else 0
            assert len(self.cache.states.columns(name)) <= self.cache.states.blocks_needed() + 1 + inside
