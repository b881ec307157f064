"""Assigns state blocks to the columns of each request. This is the host's side of the contract in design section 5."""

from collections import Counter
from collections.abc import Callable, Container, Hashable, Sequence

from mamba_align_jax import _values as values
from mamba_align_jax.align.columns import column_of, last_boundary
from mamba_align_jax.cache.block_pool import BlockPool
from mamba_align_jax.cache.checkpoints import Checkpoints
from mamba_align_jax.cache.column_rules import ColumnRules
from mamba_align_jax.cache.events import CacheLog
from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.rolling import RollingBoundaries
from mamba_align_jax.cache.steps import Copy, Holder, Step, chain_of, check_computed, check_hit, check_step
from mamba_align_jax.cache.steps import Hit as Hit


class StateBlockManager:
    """Manages the state blocks of all groups. One block id stands for a block in every recurrent layer.

    For each step of a request, call `allocate` before the step is dispatched and `release` right after. If the step ran
    only known tokens, call `publish` between the dispatch and `release`. Call `commit` when the step's result has been read.
    A column's block never changes while its request lives, and blocks are never moved between columns. Columns that a
    prefill chunk jumps over have no block, except in mode "all", where it leaves a state in each.

    Mode "all" publishes every boundary. Those that mode "align" would not keep are expendable: their blocks are evicted
    before all others. A boundary on which a request enters is expendable no more.

    With `fold_length`, that is under policy "deferred", `commit` leaves a boundary of a decode or verify row to the
    `release` after the request's next step, which writes its state. If none will come, call `fold_slots` where `unfolded`
    says so, and then `folded`, before `free`.

    With a `granularity` below the block size, requests also keep states inside blocks, at those multiples of it that
    `Checkpoints.offsets` names. Such a state lies in a block of its own, and `copies` says which ones the caller must copy:
    from there when a request enters, and to there when a chunk ends there.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_speculative_tokens: int = 0,
        *,
        mode: str = "align",
        steps_in_flight: int = 0,
        fold_length: int | None = None,
        granularity: int | None = None,
        on_eviction: Callable[[], object] = lambda: None,
    ) -> None:
        """Creates an empty cache.

        Args:
            num_blocks: Size of the pool, NULL_BLOCK included.
            block_size: Tokens per column.
            num_speculative_tokens: The largest number of draft tokens in a step.
            mode: "align", "all", or "none" for a cache that never publishes a state.
            steps_in_flight: How many steps may be dispatched while the result of an earlier one is unread.
            fold_length: Tokens of a fold group under policy "deferred"; None under the other policies.
            granularity: Tokens between positions at which a request may keep a state, a divisor of `block_size`. None is
                `block_size`. Less needs copies: see `copies`.
            on_eviction: Called without arguments once for each cached state that is evicted.

        Raises:
            ValueError: An argument is out of range, or `num_blocks` is too small for one request.
        """
        mode = values.choice("StateBlockManager: mode", mode, ("none", "align", "all"))
        num_blocks = values.integer("StateBlockManager: num_blocks", num_blocks)
        block_size = values.integer("StateBlockManager: block_size", block_size, 1)
        K = values.integer("StateBlockManager: num_speculative_tokens", num_speculative_tokens, 0)
        steps_in_flight = values.integer("StateBlockManager: steps_in_flight", steps_in_flight, 0)
        if mode != "none" and block_size < K + 1:
            raise ValueError(f"StateBlockManager: block_size must be at least {K + 1}, got {block_size}")
        self.block_size, self.num_speculative_tokens, self.mode = block_size, K, mode
        granularity = values.optional_integer("StateBlockManager: granularity", granularity, 1) or block_size
        divides = f"a divisor of block_size = {block_size}"
        values.require(block_size % granularity == 0, "StateBlockManager: granularity", divides, granularity)
        self.granularity = granularity
        self._rules = ColumnRules(block_size, K, mode, fold_length)
        least = 1 + self.blocks_needed(steps_in_flight)
        wanted = f"at least {least} for one request"
        values.require(num_blocks >= least, "StateBlockManager: num_blocks", wanted, num_blocks)
        self._rolling = RollingBoundaries()
        self.pool = BlockPool(num_blocks, lambda key, _: self._rolling.stay(key), on_eviction=on_eviction)
        self._requests: dict[Hashable, Holder] = {}
        self._log: CacheLog | None = None

    def report_to(self, log: CacheLog) -> None:
        """Reports each state to `log`, before the state is published and after it is lost. Call it once."""
        self._log = log
        self.pool.watch(lambda key, _: log.remove_state(key))

    def blocks_needed(self, steps_in_flight: int = 0) -> int:
        """Returns the largest number of blocks that a running request holds. In mode "all", chunks take more.

        While a step is planned that loads a state or saves one inside a block, a request holds one more.
        """
        keeps_inside = self.mode != "none" and self.granularity < self.block_size
        return self._rules.blocks_needed(steps_in_flight) + keeps_inside

    def lookup(
        self, tokens: Sequence[int], salt: bytes = b"", limit: int | None = None, chain: HashChain | None = None
    ) -> Hit:
        """Finds the longest cached state that `tokens` continue, and leaves at least one token. Nothing is held yet.

        Args:
            tokens: The request's tokens.
            salt: Only states that were published under the same salt match.
            limit: The longest prefix to look for, if another cache ends earlier.
            chain: The hashes of these tokens, to be used instead of `salt`. The size of the chain's blocks must divide
                `granularity`. The request continues this chain.
        """
        values.tokens("lookup: tokens", tokens)
        chain = chain_of(chain, self.granularity, salt)
        limit = values.optional_integer("lookup: limit", limit, 0)
        max_length = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        longest = 0 if self.mode == "none" else last_boundary(max_length, self.granularity)
        # From the right, because a state covers all tokens before it: the first one that is found is the longest.
        for end in range(longest, 0, -self.granularity):
            block = self.pool.find(chain.at(tokens, end))
            if block is not None:
                return Hit(end, ((column_of(end, self.block_size), block),), chain)
        return Hit(0, (), chain)

    def begin(
        self, request: Hashable, min_computed: int, max_computed: int, num_tokens: int, num_drafts: int = 0
    ) -> bool:
        """Does what `allocate` does, if the request has a block in every column that the step may write.

        Returns:
            False, with nothing changed, if it lacks one.
        """
        check_step(self.num_speculative_tokens, min_computed, max_computed, num_tokens, num_drafts)
        record = values.known(self._requests, request)
        if record is None:
            return False
        check_computed(record, min_computed, max_computed)
        wanted, columns = self._rules.columns(min_computed, max_computed, num_tokens, num_drafts), record.columns
        if wanted.start not in columns or not all(map(columns.__contains__, wanted[1:])):
            return False
        if self._saves(request, record.keep, max_computed + num_tokens, num_drafts):
            return False
        record.in_flight.append(Step(num_tokens, num_drafts))
        return True

    def fits(
        self,
        request: Hashable,
        min_computed: int,
        max_computed: int,
        num_tokens: int,
        num_drafts: int = 0,
        *,
        hit: Hit | None = None,
        keep: Checkpoints | None = None,
    ) -> bool:
        """True if `allocate` with the same arguments would succeed.

        Raises:
            ValueError: As for `allocate`.
        """
        check_step(self.num_speculative_tokens, min_computed, max_computed, num_tokens, num_drafts)
        check_computed(values.known(self._requests, request), min_computed, max_computed)
        values.instance("allocate: hit", hit, Hit, optional=True)
        values.instance("allocate: keep", keep, Checkpoints, optional=True)
        held = self._held(request, hit)
        check_hit(hit, held, self.pool, min_computed, max_computed)
        wanted = self._rules.columns(min_computed, max_computed, num_tokens, num_drafts)
        if len(wanted) >= self.pool.num_blocks:
            return False
        missing = self._missing(request, wanted, self._shared(hit, held, wanted))
        count = len(missing) + self._saves(request, keep, max_computed + num_tokens, num_drafts)
        return self.pool.fits(count, tuple(held.values()))

    def allocate(
        self,
        request: Hashable,
        min_computed: int,
        max_computed: int,
        num_tokens: int,
        num_drafts: int = 0,
        *,
        hit: Hit | None = None,
        keep: Checkpoints | None = None,
    ) -> list[tuple[int, int]] | None:
        """Gives the request a block in every column that a step may write.

        Args:
            request: The request's name. An unknown request enters.
            min_computed: The smallest number of tokens that may have been computed before the step, as far as the host
                knows.
            max_computed: The largest such number. It equals `min_computed` when every earlier result has been read.
            num_tokens: The number of tokens in the step, drafts included.
            num_drafts: How many of them are drafts.
            hit: What `lookup` returned in the same scheduling pass, if the request enters.
            keep: The positions that stay cached, if the request enters. None keeps every boundary that a step ends on
                or passes.

        Returns:
            The (column, block) entries that are new in the request's row. None, with nothing changed, if the pool has
            too few blocks.

        Raises:
            ValueError: The counts are no step's, or leave out what earlier steps may have computed, or `hit` is not what
                `lookup` would return now, or ends elsewhere than the computed tokens.
        """
        if not self.fits(request, min_computed, max_computed, num_tokens, num_drafts, hit=hit, keep=keep):
            return None
        held = self._held(request, hit)
        saves = self._saves(request, keep, max_computed + num_tokens, num_drafts)
        for block in held.values():
            self.pool.hold(block)
        if held and hit:
            self._keep_hit(hit, keep)
        wanted = self._rules.columns(min_computed, max_computed, num_tokens, num_drafts)
        shared = self._shared(hit, held, wanted)
        missing = self._missing(request, wanted, shared)
        fresh = self.pool.allocate(len(missing) + saves) or []
        entries = [*shared.items(), *zip(missing, fresh, strict=False)]
        if request not in self._requests:
            hit = hit or Hit(0)
            chain = HashChain(self.block_size) if hit.chain is None else hit.chain.owned_by(request, hit.length)
            rolling = self._rolling.resume(request, map(self.pool.key_of, held.values()))
            self._requests[request] = Holder(chain, hit.length, keep, rolling=rolling, newest=hit.length)
        record = self._requests[request]
        record.columns.update(entries)
        if held and not shared:
            record.load = next((block, record.columns[column]) for column, block in held.items())
        if saves:
            record.save = record.columns[wanted[-1]], fresh[-1]
        record.in_flight.append(Step(num_tokens, num_drafts))
        return entries

    def copies(self, request: Hashable) -> tuple[Copy | None, Copy | None]:
        """Returns the copies of states that the newest step needs: one before it and one after it, None for none.

        Until `release` is called, the request holds their blocks.

        Raises:
            ValueError: The request is unknown.
        """
        record = self._present("copies", request)
        return record.load, record.save

    def publish(self, request: Hashable, tokens: Sequence[int], *, is_prefill_row: bool = False) -> int:
        """Publishes the state at the end of the newest step, if the request keeps it. Call it after the dispatch.

        In mode "all" it publishes the boundaries inside the step as well.

        Args:
            request: A request whose newest step ran only known tokens: tokens of a prompt and no drafts.
            tokens: Its tokens up to the end of that step.
            is_prefill_row: False if a step of one token may have been a decode row. Under policy "deferred" that leaves its
                boundary to the request's next step, so nothing is published yet.

        Returns:
            The last boundary, in tokens, that is published now, the one that the step folds included. 0 if there is none.

        Raises:
            ValueError: The request is unknown or has no step in flight.
        """
        record = self._present("publish", request)
        values.tokens("publish: tokens", tokens)
        values.flag("publish: is_prefill_row", is_prefill_row)
        if not record.in_flight:
            raise ValueError(f"publish: request {request!r} has no step in flight")
        end = record.committed + sum(step.num_tokens - step.num_drafts for step in record.in_flight)
        if len(tokens) != end:
            wanted = f"must be those up to the end of its newest step, {end}, got {len(tokens)}"
            raise ValueError(f"publish: tokens of request {request!r} {wanted}")
        step = record.in_flight[-1]
        if self._rules.leaves_to_next_step(step) and not is_prefill_row:
            return 0
        folded = self.folded(request) if record.unfolded else 0  # this step has written its state
        before = end - step.num_tokens + step.num_drafts
        passed = [*self._rules.boundaries(before, end, end), *([end] if record.save else [])]
        if passed:
            record.chain.at(tokens, passed[-1])
        step.offered = True
        return max([at for at in passed if self._offer(request, record, tokens, at)[1]], default=folded)

    def commit(self, request: Hashable, tokens: Sequence[int], computed: int | None = None) -> int:
        """Records the result of the request's oldest step in flight.

        It publishes the boundary that the step passed, if its state is written. Under policy "deferred" the boundary waits
        for the request's next step.

        Args:
            request: A request that has a step in flight.
            tokens: Its tokens.
            computed: How many of the tokens count as computed now. None for all of them. If a stop token is among the
                accepted drafts, it is the last that counts, and boundaries after it are not published.

        Returns:
            The last boundary that the request keeps and whose state is written, in tokens, or 0 for none.

        Raises:
            ValueError: The request is unknown or has no step in flight, or the step cannot have left so many tokens.
        """
        record = self._present("commit", request)
        values.tokens("commit: tokens", tokens)
        if not record.in_flight:
            raise ValueError(f"commit: request {request!r} has no step in flight")
        step = record.in_flight[0]
        computed = len(tokens) if computed is None else computed
        certain = record.committed + step.num_tokens - step.num_drafts
        if type(computed) is not int or not certain <= computed <= min(certain + step.num_drafts, len(tokens)):
            raise ValueError(
                f"commit: request {request!r} must have {certain} to {certain + step.num_drafts} computed tokens, "
                f"got {computed!r} of {len(tokens)}"
            )
        passed = () if step.offered else self._rules.boundaries(record.committed, certain, computed)
        if passed:  # Tokens that can't be hashed raise before anything changes.
            record.chain.at(tokens, passed[-1])
        record.in_flight.popleft()
        record.committed = computed
        if passed and self._rules.leaves_to_next_step(step):
            record.unfolded = passed[-1] if record.shares else 0
            # The next step starts where this one has ended, at the boundary or after it.
            return self.folded(request) if record.in_flight and record.in_flight[0].dispatched else 0
        return max([at for at in passed if self._offer(request, record, tokens, at)[0]], default=0)

    def unfolded(self, request: Hashable) -> int:
        """Returns the boundary of a request whose state is not written yet and should be, in tokens; 0 for none."""
        record = values.known(self._requests, request)
        return 0 if record is None else record.unfolded

    def folded(self, request: Hashable) -> int:
        """Publishes the boundary that `unfolded` returns, because what writes its state was dispatched. Returns it, or 0.

        Raises:
            ValueError: The request is unknown.
        """
        record = self._present("folded", request)
        boundary, record.unfolded = record.unfolded, 0
        # `commit` has computed the hash.
        return boundary if boundary and self._offer(request, record, (), boundary)[0] else 0

    def release(self, request: Hashable) -> int:
        """Releases the columns that no later step can read.

        Call it after a step with tokens of this request was dispatched. Until then, a column that `commit` has moved
        past may still contain the state that the next step reads.

        Returns:
            The boundary, in tokens, that the step has folded and that is published now; 0 for none.

        Raises:
            ValueError: The request is unknown.
        """
        record = self._present("release", request)
        if self.mode == "none":
            return 0
        if record.in_flight:
            record.in_flight[-1].dispatched = True
        boundary = self.folded(request) if record.unfolded else 0
        first = self._rules.first_to_keep(record)
        gone = [column for column in record.columns if column < first]
        done = [record.columns.pop(column) for column in gone] + _copied(record)
        record.load = record.save = None
        if done:
            self.pool.release(done)
        return boundary

    def free(self, request: Hashable) -> None:
        """Releases all blocks of a request. Published blocks stay findable until they are evicted.

        The cache remembers the last boundary that the request passed. If the request returns and continues from there,
        it releases that boundary when it passes the next one. Call `forget` as well if the request will not return.
        """
        record = values.known(self._requests, request)
        if record is not None:
            del self._requests[request]
            self.pool.release([*record.columns.values(), *_copied(record)])
            if record.rolling is not None:
                self._rolling.left[request] = record.rolling

    def forget(self, request: Hashable) -> None:
        """Records that a freed request will not return. The last boundary that it passed stays cached until eviction."""
        self._rolling.forget(request)

    def vacate(self, staying: Container[Hashable]) -> None:
        """Frees every present request, and forgets those that are not in `staying`."""
        for request in list(self._requests):
            self.free(request)
        self._rolling.forget_all_but(staying)

    def columns(self, request: Hashable) -> dict[int, int]:
        """Returns the blocks that a request holds, by column.

        Raises:
            ValueError: The request is unknown.
        """
        return dict(self._present("columns", request).columns)

    def reset(self) -> None:
        """Makes every state unfindable. Present requests keep their blocks but never publish any again."""
        self.pool.reset()
        for record in self._requests.values():
            record.shares, record.rolling, record.unfolded = False, None, 0

    def check(self) -> None:
        """Raises AssertionError unless the pool accounts for every block and its holders are the present requests."""
        held = ([*record.columns.values(), *_copied(record)] for record in self._requests.values())
        self.pool.check(Counter(block for blocks in held for block in blocks))
        self._rolling.check(self.pool.keys, {request: record.rolling for request, record in self._requests.items()})

    def _present(self, method: str, request: Hashable) -> Holder:
        record = values.known(self._requests, request)
        if record is None:
            raise ValueError(f"{method}: request must be one that holds blocks, got {request!r}")
        return record

    def _held(self, request: Hashable, hit: Hit | None) -> dict[int, int]:
        return {} if values.known(self._requests, request) or hit is None else dict(hit.blocks)

    def _shared(self, hit: Hit | None, held: dict[int, int], wanted: range) -> dict[int, int]:
        """Returns the columns that a request which enters shares: none if its first step writes the one of its hit."""
        is_inside = hit is not None and hit.length % self.block_size > 0
        return {} if is_inside and wanted.start in held else held

    def _saves(self, request: Hashable, keep: Checkpoints | None, end: int, num_drafts: int) -> bool:
        """True if a step of a request that ends after `end` tokens leaves a state to be kept inside a block."""
        record = self._requests.get(request)
        keep, shares = (record.keep, record.shares) if record else (keep, True)
        is_inside = end % self.block_size > 0 and end % self.granularity == 0 and num_drafts == 0
        return is_inside and self.mode != "none" and shares and keep is not None and end in keep.offsets

    def _missing(self, request: Hashable, wanted: range, held: dict[int, int]) -> list[int]:
        record = self._requests.get(request)
        return [column for column in wanted if column not in (record.columns if record else held)]

    def _keep_hit(self, hit: Hit, keep: Checkpoints | None) -> None:
        """Makes the position at which a request enters not expendable, and marks it as recently used.

        The same holds for those before it that the request keeps.
        """
        ends = range(self.granularity, hit.length, self.granularity)
        inside = [at for at in keep.offsets if at in ends] if keep else []
        keys = [hit.chain.at((), at) for at in inside] if hit.chain else []
        for key in [*keys, *self.pool.keys_of([block for _, block in hit.blocks])]:
            if key is not None:
                self.pool.set_expendable(key, False)
                self.pool.use(key)

    def _offer(self, request: Hashable, record: Holder, tokens: Sequence[int], boundary: int) -> tuple[bool, bool]:
        """Publishes the state at a boundary, or at `save`, if the request keeps it.

        Returns whether it keeps it, and whether the key is new.
        """
        if not record.shares:
            return False, False
        # Where the result of a step is read after the next step was published, the request has passed the boundary.
        is_passed = boundary < record.newest
        stays = record.keep is None or record.keep.stays(boundary)
        rolls = not stays and not is_passed
        if not (stays or rolls or self.mode == "all"):
            return False, False
        key = record.chain.at(tokens, boundary)
        if boundary % self.block_size and record.save:
            block = record.save[1]
        else:
            block = record.columns[column_of(boundary, self.block_size)]
        if self._log is not None and self.pool.find(key) is None:
            self._log.store_state(key, boundary)
        new = self.pool.publish(block, key)
        if stays:
            self.pool.set_expendable(key, False)
            self._rolling.stay(key)
        elif rolls:
            self._rolling.roll(request, key, self.pool.set_expendable(key, False) or new)
        elif new:
            self.pool.set_expendable(key, True)
        if not is_passed:
            last, record.rolling, record.newest = record.rolling, key if rolls else None, boundary
            if last is not None and last != record.rolling and self._rolling.let_go(request, last):
                self._stop_keeping(last)
        return True, new

    def _stop_keeping(self, key: bytes) -> None:
        """Records that nothing keeps a boundary any more."""
        if self.mode == "all":
            self.pool.set_expendable(key, True)
        else:
            self.pool.unpublish(key)


def _copied(record: Holder) -> list[int]:
    """Returns the blocks that a request holds for copies, besides the blocks of its columns."""
    return [*([record.load[0]] if record.load else ()), *([record.save[1]] if record.save else ())]
