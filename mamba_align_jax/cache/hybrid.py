"""A prefix cache over state blocks and KV pages. A hit needs both, and an allocation gives both or neither."""

from bisect import bisect_left
from collections.abc import Collection, Container, Hashable, Sequence

from mamba_align_jax import _values as values
from mamba_align_jax.align.columns import last_boundary
from mamba_align_jax.cache.block_pool import ensure
from mamba_align_jax.cache.checkpoints import Checkpoints, request_checkpoints, requested_offsets
from mamba_align_jax.cache.events import CacheLog
from mamba_align_jax.cache.found import Allocation as Allocation
from mamba_align_jax.cache.found import CachedPrefix as CachedPrefix
from mamba_align_jax.cache.found import HybridHit as HybridHit
from mamba_align_jax.cache.hashing import HashChain, HashMemo
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.split import aligned_end, next_chunk_end
from mamba_align_jax.cache.state_blocks import Hit, StateBlockManager
from mamba_align_jax.cache.steps import chain_of, check_step

# What most decode steps need.
_NOTHING = Allocation((), ())


class HybridCache:
    """Manages the state blocks and KV pages of the requests of one engine.

    For each step, call `allocate` before dispatching it, `dispatched` right after, and `commit` when its result has
    been read. A step that fails before its dispatch has published nothing: call `free` and `forget` for its requests. After
    a step that fails later, what it has published is not there, or the pools are lost: create new pools and a new cache.

    A state has the same key as the last page before it. When that page is evicted, the state's block becomes free at
    once.
    """

    def __init__(
        self,
        states: StateBlockManager,
        kv: KVPageManager,
        *,
        checkpoint_interval: int | None = None,
        check: bool = False,
        log: CacheLog | None = None,
    ) -> None:
        """Creates a cache over two empty managers. No one else may use them afterwards.

        Args:
            states: Manages the state blocks.
            kv: Manages the pages of keys and values.
            checkpoint_interval: Tokens between boundaries at which every request's state stays cached, or None.
            check: True to run `check` after every change, for debugging.
            log: Is told of every page and state that is published or lost; None if no one listens.

        Raises:
            ValueError: The block size is not a multiple of the page size, or the interval is not one of the block size.
        """
        values.require(isinstance(states, StateBlockManager), "HybridCache: states", "a StateBlockManager", states)
        values.require(isinstance(kv, KVPageManager), "HybridCache: kv", "a KVPageManager", kv)
        values.flag("HybridCache: check", check)
        values.instance("HybridCache: log", log, CacheLog, optional=True)
        interval, size = checkpoint_interval, states.block_size
        fits, wanted = states.mode == "none" or size % kv.page_size == 0, f"a multiple of the page size {kv.page_size}"
        values.require(fits, "HybridCache: block_size", wanted, size)
        fits, wanted = states.granularity % kv.page_size == 0, f"with a granularity of pages of {kv.page_size} tokens"
        values.require(states.mode == "none" or fits, "HybridCache: states", wanted, states.granularity)
        fits = interval is None or (values.is_integer(interval) and interval >= 1 and interval % size == 0)
        values.require(fits, "HybridCache: checkpoint_interval", f"None or a multiple of {size}", interval)
        self.states = states
        self.kv = kv
        self.checkpoint_interval = checkpoint_interval
        self._check, self._memo = check, HashMemo()
        # The pages of a prefix are evicted from its end, so the first page to go has the key of the prefix's last
        # state.
        kv.pool.watch(lambda key, evicted: states.pool.unpublish(key, evicted=evicted))
        self.log = log
        if log is not None:
            # The pool of pages tells its log last, so a state that goes with its page is reported before the page.
            states.report_to(log)
            kv.report_to(log)

    def lookup(self, tokens: Sequence[int], salt: bytes = b"", chain: HashChain | None = None) -> HybridHit:
        """Finds the longest prefix of `tokens` whose pages and state are cached. Nothing is held yet.

        Args:
            tokens: The request's tokens.
            salt: Only what was published under the same salt matches.
            chain: The hashes of an earlier lookup of these tokens (`HybridHit.state.chain`), to be used instead of
                `salt`.
        """
        chain = chain_of(chain, self.kv.page_size, salt, self._memo)
        values.tokens("lookup: tokens", tokens)
        if self.states.mode == "none":
            return HybridHit(0, Hit(0, (), chain))
        pages = self.kv.lookup(tokens, chain)
        paged = len(pages) * self.kv.page_size
        state = self.states.lookup(tokens, limit=paged, chain=chain)
        branch = last_boundary(min(paged, len(tokens) - 1), self.states.block_size)
        return HybridHit(
            length=state.length,
            state=state,
            pages=tuple(pages[: state.length // self.kv.page_size]),
            junction=branch if branch > state.length else 0,
            miss=self._why(tokens, chain, state.length, branch, paged),
        )

    def no_hit(self, why: str, salt: bytes = b"", chain: HashChain | None = None) -> HybridHit:
        """Returns what a request enters with that must compute all its tokens, and says why.

        Args:
            why: Becomes the hit's `miss`, unless the mode is "none".
            salt: What the request publishes is published under this salt.
            chain: The hashes of an earlier lookup of its tokens, to be used instead of `salt`.
        """
        chain = chain or HashChain(self.kv.page_size, salt, self._memo)
        return HybridHit(0, Hit(0, (), chain), miss=None if self.states.mode == "none" else why)

    def requested_offsets(self, wanted: Collection[int], prompt: int) -> tuple[int, ...]:
        """Rounds the offsets `wanted` into a prompt of `prompt` tokens down to positions at which a state may be kept.

        These are multiples of the granularity of `states`. Returns none in mode "none".
        """
        return () if self.states.mode == "none" else requested_offsets(wanted, prompt, self.states.granularity)

    def checkpoints(self, prompt: int, requested: Sequence[int] = (), junction: int = 0) -> Checkpoints:
        """Returns what a request with a prompt of `prompt` tokens keeps: see `request_checkpoints`.

        In mode "all" its other boundaries stay cached, too, but are expendable.
        """
        size, interval = self.states.block_size, self.checkpoint_interval
        return request_checkpoints(prompt, size, requested=requested, junction=junction, interval=interval)

    def chunk_end(
        self, start: int, budget: int, max_num_batched_tokens: int, prompt: int, stops: Collection[int] = ()
    ) -> int:
        """Returns the end of the next prefill chunk, or 0 if the request should wait for the next step.

        The chunk does not end inside a block merely because other rows of the step have used up a part of the budget. In
        mode "all" it stops at none of the boundaries inside it, because it keeps them, but at stops inside blocks. In mode
        "none" it takes the whole budget.

        Args:
            start: The first position to compute.
            budget: How many of the step's tokens are left.
            max_num_batched_tokens: The budget of a whole step.
            prompt: The number of tokens known so far.
            stops: Positions at which a chunk should end: see `next_chunk_end`.
        """
        start, budget = values.integer("chunk_end: start", start, 0), values.integer("chunk_end: budget", budget)
        prompt = values.integer("chunk_end: prompt", prompt, 0)
        max_num_batched_tokens = values.integer("chunk_end: max_num_batched_tokens", max_num_batched_tokens, 1)
        size, mode, granularity = self.states.block_size, self.states.mode, self.states.granularity
        if budget <= 0:
            return 0

        def end_by(budget: int) -> int:
            if mode == "align":
                return next_chunk_end(start, start + budget, prompt, size, stops, granularity)
            end = min(start + budget, prompt)
            inside = [at for at in stops if start < at <= end and at % size and at % granularity == 0]
            if mode == "all" and inside:
                return min(inside)
            return end if mode == "none" else aligned_end(start, end, prompt, size)

        end = end_by(budget)
        is_inside = mode != "none" and end < prompt and end % size != 0
        return 0 if is_inside and end_by(max_num_batched_tokens) != end else end

    def shorter_end(self, request: Hashable, start: int, end: int, hit: HybridHit | None = None) -> int:
        """Returns where a prefill chunk from `start` to `end` may end instead if `allocate` has no blocks for it.

        In mode "all" a chunk needs a block for each boundary inside it, so a shorter one needs fewer. It gives them back
        after its dispatch. It would not give back pages, so it is not shortened where those are too few.

        Args:
            request: The request's name. An unknown request enters.
            start: The first position to compute.
            end: The end of the chunk that doesn't fit.
            hit: As for `allocate`.

        Returns:
            The last boundary before `end` for which there are blocks; 0 if there is none.
        """
        state, pages = (hit.state, hit.pages) if hit else (None, ())
        if self.states.mode != "all" or not self.kv.fits(request, end, pages):
            return 0
        size = self.states.block_size
        ends = range((start // size + 1) * size, end, size)
        lacks = lambda at: not self.states.fits(request, start, start, at - start, hit=state)
        count = bisect_left(ends, True, key=lacks)
        return ends[count - 1] if count else 0

    def allocate(
        self,
        request: Hashable,
        min_computed: int,
        max_computed: int,
        num_tokens: int,
        num_drafts: int = 0,
        *,
        hit: HybridHit | None = None,
        keep: Checkpoints | None = None,
    ) -> Allocation | None:
        """Gives the request the state blocks and KV pages that a step needs. Publishes nothing.

        Args:
            request: The request's name. An unknown request enters.
            min_computed: The smallest number of tokens that may have been computed before the step, as far as the host
                knows.
            max_computed: The largest such number.
            num_tokens: The number of tokens in the step, drafts included.
            num_drafts: How many of them are drafts.
            hit: What `lookup` returned in the same scheduling pass, if the request enters.
            keep: The positions that stay cached, if the request enters. None keeps every boundary that its steps end
                on or pass.

        Returns:
            The new entries of the request's rows. None, with nothing changed or evicted, if a pool has too few blocks.

        Raises:
            ValueError: The counts are no step's, or `hit` is not what `lookup` would return now.
        """
        step = request, min_computed, max_computed, num_tokens, num_drafts
        check_step(self.states.num_speculative_tokens, *step[1:])
        end = max_computed + num_tokens
        if self.kv.holds(request, end) and self.states.begin(*step):
            return _NOTHING
        values.instance("allocate: hit", hit, HybridHit, optional=True)
        values.instance("allocate: keep", keep, Checkpoints, optional=True)
        hit = hit or HybridHit(0, Hit(0, (), HashChain(self.kv.page_size)))
        if not self.kv.fits(request, end, hit.pages) or not self.states.fits(*step, hit=hit.state, keep=keep):
            return None
        # Pages first: when a page is evicted, the state with the same key becomes free.
        pages = self.kv.allocate(request, end, hit=hit.pages, chain=hit.state.chain)
        columns = self.states.allocate(*step, hit=hit.state, keep=keep)
        assert pages is not None
        assert columns is not None
        self._changed()
        return Allocation(columns, pages, *self.states.copies(request))

    def dispatched(self, request: Hashable, tokens: Sequence[int] | None = None) -> int:
        """Records that the request's newest step was dispatched, and releases the columns that no later step can read.

        Args:
            request: A request whose newest step was dispatched just now.
            tokens: For a prefill row, the request's tokens up to the end of that step. The pages and the boundary that they
                fill are published now, because any step that reads them runs later on the device. None for a decode or
                verify row, also if its token is the last one of a prompt. `commit` publishes its pages and its boundary.
                Under policy "deferred" the call of `dispatched` for the request's next step publishes the boundary.

        Returns:
            The last boundary, in tokens, that is published now: one of this step whose key is new in the cache, or under
            policy "deferred" the boundary that this step folds. 0 if there is none.
        """
        boundary = 0
        if tokens is not None and self.states.mode != "none":
            values.tokens("dispatched: tokens", tokens)
            # What can't be published raises before anything changes.
            fills_pages = self.kv.can_publish(request, tokens, len(tokens))
            boundary = self.states.publish(request, tokens, is_prefill_row=True)
            if fills_pages:
                self.kv.publish(request, tokens, len(tokens))
        folded = self.states.release(request)
        self._changed()
        return max(boundary, folded)

    def unfolded(self, request: Hashable) -> int:
        """Returns the boundary of a request that must be folded before it leaves: see `StateBlockManager.unfolded`."""
        return self.states.unfolded(request)

    def folded(self, request: Hashable) -> int:
        """Publishes the boundary that `unfolded` returned, after its fold was dispatched: see `StateBlockManager.folded`.

        Returns:
            The boundary, in tokens, or 0 if there is none.
        """
        boundary = self.states.folded(request)
        self._changed()
        return boundary

    def commit(self, request: Hashable, tokens: Sequence[int], computed: int) -> int:
        """Records the result of the request's oldest step in flight, and publishes what the step filled.

        Args:
            request: A request that has a step in flight.
            tokens: Its tokens.
            computed: How many of the tokens count as computed now.

        Returns:
            The last boundary that the request keeps and whose state is written, in tokens, or 0 for none.

        Raises:
            ValueError: The request has no step in flight, or the step cannot have left so many tokens.
        """
        fills_pages = self.states.mode != "none" and self.kv.can_publish(request, tokens, computed)
        boundary = self.states.commit(request, tokens, computed)
        if fills_pages:
            self.kv.publish(request, tokens, computed)
        self._changed()
        return boundary

    def free(self, request: Hashable) -> None:
        """Releases all blocks and pages of a request that may return: see `StateBlockManager.free`."""
        self.states.free(request)
        self.kv.free(request)
        self._changed()

    def forget(self, request: Hashable) -> None:
        """Records that a freed request has finished or was aborted: see `StateBlockManager.forget`."""
        self.states.forget(request)
        self._changed()

    def reset_prefix_cache(self) -> None:
        """Makes everything unfindable. Present requests keep their blocks but never publish any again."""
        self.states.reset()
        self.kv.reset()
        if self.log is not None:
            self.log.restart()
        self._changed()

    def vacate(self, staying: Container[Hashable]) -> None:
        """Releases all blocks and pages that requests hold, wherever an earlier call was cut off. What is cached stays.

        Args:
            staying: The requests that may return. All others are forgotten.

        Raises:
            AssertionError: The cache doesn't account for every block, because a call was cut off in the middle of a
                change. It can't be used again.
        """
        self.states.vacate(staying)
        self.kv.vacate()
        self.check()
        if self.states.pool.num_held or self.kv.pool.num_held:
            raise AssertionError("blocks are held, but no request is present")

    def cached_prefix(self, tokens: Sequence[int], salt: bytes = b"") -> CachedPrefix:
        """Returns what is cached of `tokens`, for people to look at. It changes nothing: see `lookup`."""
        hit, granularity = self.lookup(tokens, salt), self.states.granularity
        chain = hit.state.chain
        if chain is None or self.states.mode == "none":
            return CachedPrefix(0, 0, (), hit.miss)
        ends = range(granularity, len(tokens) + 1, granularity)
        return CachedPrefix(
            num_tokens=hit.length,
            num_paged_tokens=len(self.kv.lookup(tokens, chain)) * self.kv.page_size,
            boundaries=tuple(end for end in ends if self.states.pool.find(chain.at(tokens, end)) is not None),
            miss=hit.miss,
        )

    def check(self) -> None:
        """Raises AssertionError unless both pools account for every block and each cached state has its last page."""
        self.states.check()
        self.kv.check()
        ensure(self.states.pool.keys <= self.kv.pool.keys, "a cached state has no pages")

    def _changed(self) -> None:
        if self._check:
            self.check()

    def _why(self, tokens: Sequence[int], chain: HashChain, length: int, branch: int, paged: int) -> str | None:
        granularity = self.states.granularity
        last = last_boundary(len(tokens) - 1, self.states.block_size)
        if length and length >= last:
            return None
        if last <= 0:
            return "below one block"
        ends = range(length + granularity, last + 1, granularity)
        if any(self.states.pool.was_evicted(chain.at(tokens, end)) for end in ends):
            return "evicted"
        if branch > length:
            # In mode "all" each of these pages was published with a state.
            return "evicted" if self.states.mode == "all" else "no checkpoint"
        return "evicted" if self.kv.pool.was_evicted(chain.at(tokens, paged + self.kv.page_size)) else "not identical"
