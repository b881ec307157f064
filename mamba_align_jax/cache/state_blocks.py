"""Which state block each column of each request has: the host's side of the block table's contract."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from mamba_align_jax.align.columns import blocks_per_request, column_of, last_boundary
from mamba_align_jax.cache.block_pool import BlockPool
from mamba_align_jax.cache.checkpoints import Checkpoints
from mamba_align_jax.cache.hashing import HashChain


@dataclass(frozen=True)
class Hit:
    """A cached prefix: `length` tokens, the (column, block) pairs that hold it, and the hashes it was looked up by."""

    length: int
    blocks: tuple[tuple[int, int], ...] = ()
    chain: HashChain | None = field(default=None, compare=False, repr=False)


@dataclass
class _Step:
    """One whose result the host has not read. `offered`: its boundary was published when it was dispatched."""

    num_tokens: int
    drafts: int
    offered: bool = False


@dataclass
class _Request:
    chain: HashChain
    committed: int
    keep: Checkpoints | None
    columns: dict[int, int] = field(default_factory=dict)
    in_flight: deque[_Step] = field(default_factory=deque)
    # Key of the newest boundary, if it is let go when the next one is passed.
    rolling: bytes | None = None
    # False once the cache was reset: what the request computed before it must not be found.
    shares: bool = True


class StateBlockManager:
    """State blocks of all groups, which share block ids: a column is one block for every recurrent layer.

    A step goes: `allocate`, dispatch, `release` and, for rows of known tokens, `publish`; `commit` once its result is read.
    Blocks are never moved between columns, and a column's block never changes while its request lives. Columns that a
    prefill chunk jumps over have none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_speculative_tokens: int = 0,
        *,
        mode: str = "align",
        steps_in_flight: int = 0,
        on_eviction: Callable[[], object] = lambda: None,
    ) -> None:
        """Creates an empty cache.

        Args:
            num_blocks: Size of the pool, NULL_BLOCK included.
            block_size: Tokens per column.
            num_speculative_tokens: The largest number of draft tokens in a step.
            mode: "align", or "none" for a cache that never publishes a state.
            steps_in_flight: How many steps may be dispatched while the result of an earlier one is unread.
            on_eviction: Called without arguments once for each cached state that is evicted.

        Raises:
            ValueError: An argument is out of range, or `num_blocks` is too small for one request.
        """
        if mode not in ("none", "align"):
            raise ValueError(f"StateBlockManager: mode must be 'none' or 'align', got {mode!r}")
        if num_speculative_tokens < 0:
            raise ValueError(f"StateBlockManager: num_speculative_tokens must be >= 0, got {num_speculative_tokens}")
        if mode == "align" and block_size < num_speculative_tokens + 1:
            raise ValueError(
                f"StateBlockManager: block_size must be at least {num_speculative_tokens + 1}, got {block_size}"
            )
        self.block_size = block_size
        self.num_speculative_tokens = num_speculative_tokens
        self.mode = mode
        least = 1 + self.blocks_needed(steps_in_flight)
        if num_blocks < least:
            raise ValueError(
                f"StateBlockManager: num_blocks must be at least {least} for one request, got {num_blocks}"
            )
        # Keys that stay only until all of these requests, running or to come back, have passed the next boundary.
        self._rolling: dict[bytes, set[Hashable]] = {}
        # The key that each of those to come back has in its name.
        self._left: dict[Hashable, bytes] = {}
        self.pool = BlockPool(
            num_blocks, on_lost=lambda key, evicted: self._rolling.pop(key, None), on_eviction=on_eviction
        )
        self._requests: dict[Hashable, _Request] = {}

    def blocks_needed(self, steps_in_flight: int = 0) -> int:
        """Blocks that a running request holds at most."""
        if self.mode == "none":
            return 1 + self.num_speculative_tokens
        return blocks_per_request(self.block_size, self.num_speculative_tokens, steps_in_flight)

    def lookup(
        self, tokens: Sequence[int], salt: bytes = b"", limit: int | None = None, chain: HashChain | None = None
    ) -> Hit:
        """The longest cached state that `tokens` continue, at least one of them left to compute. Holds nothing yet.

        Args:
            tokens: The request's tokens.
            salt: Only states committed under the same salt match.
            limit: Longest prefix of use, where another cache ends earlier.
            chain: Hashes of these tokens in blocks that divide `block_size`, instead of `salt`; the request goes on with it.
        """
        chain = chain or HashChain(self.block_size, salt)
        most = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        if self.mode == "none":
            return Hit(0, (), chain)
        # From the right: a state stands for all that came before it, so the longest one is enough.
        for column in range(most // self.block_size - 1, -1, -1):
            block = self.pool.find(chain.at(tokens, (column + 1) * self.block_size))
            if block is not None:
                return Hit((column + 1) * self.block_size, ((column, block),), chain)
        return Hit(0, (), chain)

    def fits(
        self,
        request: Hashable,
        min_computed: int,
        max_computed: int,
        q: int,
        drafts: int = 0,
        *,
        hit: Hit | None = None,
    ) -> bool:
        """Whether `allocate` would give the blocks."""
        held = self._held(request, hit)
        return self.pool.fits(len(self._missing(request, min_computed, max_computed, q, drafts, held)), held.values())

    def allocate(
        self,
        request: Hashable,
        min_computed: int,
        max_computed: int,
        q: int,
        drafts: int = 0,
        *,
        hit: Hit | None = None,
        keep: Checkpoints | None = None,
    ) -> list[tuple[int, int]] | None:
        """Gives the request a block in every column that a step of `q` tokens may write.

        Args:
            request: Any name; unknown ones enter.
            min_computed: Fewest computed tokens before the step that the host can't exclude.
            max_computed: Most of them; equal to `min_computed` once the last result is read.
            q: Tokens of the step, drafts included.
            drafts: Draft tokens among them.
            hit: What `lookup` found for an entering request, in this same scheduling pass.
            keep: Boundaries of an entering request that stay cached; None keeps all that a step ends on or passes.

        Returns:
            The (column, block) entries that are new in the request's row; None, and nothing changed, if the pool can't
            give them.
        """
        if not self.fits(request, min_computed, max_computed, q, drafts, hit=hit):
            return None
        held = self._held(request, hit)
        for block in held.values():
            self.pool.hold(block)
        missing = self._missing(request, min_computed, max_computed, q, drafts, held)
        entries = [*held.items(), *zip(missing, self.pool.allocate(len(missing)) or [], strict=True)]
        if request not in self._requests:
            hit = hit or Hit(0)
            record = _Request(hit.chain or HashChain(self.block_size), hit.length, keep)
            record.rolling = self._resume_rolling(request, list(held.values()))
            self._requests[request] = record
        record = self._requests[request]
        record.columns.update(entries)
        record.in_flight.append(_Step(q, drafts))
        return entries

    def publish(self, request: Hashable, tokens: Sequence[int]) -> dict[bytes, int]:
        """Offers the boundary that the newest step ends on, if it is one to keep. Call it once the step is dispatched.

        Args:
            request: One whose newest step ran known tokens: a prompt's, no drafts.
            tokens: Its tokens, up to the end of that step.

        Returns:
            The key that is new, and its block.
        """
        record = self._requests[request]
        record.in_flight[-1].offered = True
        if len(tokens) % self.block_size:
            return {}
        _, new = self._offer(request, record, tokens, len(tokens))
        return new

    def commit(self, request: Hashable, tokens: Sequence[int], computed: int | None = None) -> int:
        """Takes in the result of the request's oldest step in flight, and publishes a boundary that it kept.

        Args:
            request: One that has a step in flight.
            tokens: Its tokens.
            computed: How many of them have states that count now; None for all. A stop token inside the accepted drafts is
                the last that counts: boundaries behind it are not published.

        Returns:
            The boundary that is published now, in tokens; 0 for none.

        Raises:
            ValueError: the tokens can't be what the step left.
        """
        record = self._requests[request]
        if not record.in_flight:
            raise ValueError(f"commit: request {request!r} has no step in flight")
        step = record.in_flight[0]
        computed = len(tokens) if computed is None else computed
        certain = record.committed + step.num_tokens - step.drafts
        if not certain <= computed <= min(certain + step.drafts, len(tokens)):
            raise ValueError(
                f"commit: request {request!r} must have {certain} to {certain + step.drafts} computed tokens, "
                f"got {computed} of {len(tokens)}"
            )
        record.in_flight.popleft()
        record.committed = computed
        boundary = last_boundary(computed, self.block_size)
        if step.offered or boundary < certain or boundary == 0:
            return 0
        kept, _ = self._offer(request, record, tokens, boundary)
        return boundary if kept else 0

    def release(self, request: Hashable) -> None:
        """Lets go of columns that no step can read any more.

        Call it when a step with tokens of this request has been dispatched after `commit`: an idle request's live state may
        be in such a column.
        """
        record = self._requests[request]
        if self.mode == "none":
            return
        gone = [column for column in record.columns if column < record.committed // self.block_size]
        self.pool.release([record.columns.pop(column) for column in gone])

    def free(self, request: Hashable) -> None:
        """Takes back all that a request holds; published blocks stay findable until they are evicted.

        The last boundary that it passed is kept in its name: if it comes back there, it lets it go at the next one. Say
        `forget` as well of one that is over.
        """
        record = self._requests.pop(request, None)
        if record is not None:
            self.pool.release(list(record.columns.values()))
            if record.rolling is not None:
                self._left[request] = record.rolling

    def forget(self, request: Hashable) -> None:
        """A freed request never comes back: the last boundary that it passed is nobody's, and stays."""
        key = self._left.pop(request, None)
        if key is not None and request in self._rolling.get(key, ()):
            del self._rolling[key]

    def columns(self, request: Hashable) -> dict[int, int]:
        """The blocks a request holds, by column."""
        return dict(self._requests[request].columns)

    def holders(self, blocks: Iterable[int]) -> set[Hashable]:
        """Requests that hold one of `blocks`."""
        blocks = set(blocks)
        return {name for name, record in self._requests.items() if not blocks.isdisjoint(record.columns.values())}

    def reset(self) -> None:
        """Makes every state unfindable, and what present requests have and will have, for good."""
        self.pool.reset()
        for record in self._requests.values():
            record.shares, record.rolling = False, None

    def check(self) -> None:
        """Raises AssertionError unless the pool accounts for every block and its holders are the requests."""
        self.pool.check(Counter(block for record in self._requests.values() for block in record.columns.values()))
        assert self._rolling.keys() <= self.pool.keys, "a rolling boundary that is not published"
        names = self._requests.keys() | self._left.keys()
        assert names >= set().union(*self._rolling.values()), "a boundary rolls for a request that is over"

    def _held(self, request: Hashable, hit: Hit | None) -> dict[int, int]:
        return {} if hit is None or request in self._requests else dict(hit.blocks)

    def _missing(
        self, request: Hashable, min_computed: int, max_computed: int, q: int, drafts: int, held: dict[int, int]
    ) -> list[int]:
        if self.mode == "none":
            wanted = range(1 + self.num_speculative_tokens)
        else:
            # A verify row may save any boundary that it passes; other rows write their running column alone.
            first = min_computed // self.block_size if drafts else column_of(min_computed + q, self.block_size)
            last = column_of(max_computed + q, self.block_size) + (self.num_speculative_tokens if drafts else 0)
            wanted = range(first, last + 1)
        record = self._requests.get(request)
        return [column for column in wanted if column not in (record.columns if record else held)]

    def _offer(
        self, request: Hashable, record: _Request, tokens: Sequence[int], boundary: int
    ) -> tuple[bool, dict[bytes, int]]:
        """Whether the boundary is kept; its key if that is new, and the block."""
        stays = record.keep is None or record.keep.stays(boundary)
        rolls = record.keep is not None and record.keep.rolls(boundary)
        if self.mode == "none" or not record.shares or not (stays or rolls):
            return False, {}
        key, block = record.chain.at(tokens, boundary), record.columns[column_of(boundary, self.block_size)]
        new = self.pool.publish(block, key)
        if stays:
            self._rolling.pop(key, None)
        elif new or key in self._rolling:
            self._rolling.setdefault(key, set()).add(request)
        last, record.rolling = record.rolling, key if rolls else None
        if last is not None and last != record.rolling:
            self._let_go(request, last)
        return True, {key: block} if new else {}

    def _let_go(self, request: Hashable, key: bytes) -> None:
        """The request has passed a further boundary; others may still want this one."""
        wanted_by = self._rolling.get(key, set())
        if request in wanted_by:
            wanted_by.discard(request)
            if not wanted_by:
                self.pool.unpublish(key)

    def _resume_rolling(self, request: Hashable, blocks: Sequence[int]) -> bytes | None:
        """A hit on somebody's rolling boundary shows its use: it stays. A preempted request resumes its own."""
        for key in map(self.pool.key_of, blocks):
            if key in self._rolling:
                if request in self._rolling[key]:
                    del self._left[request]
                    return key
                del self._rolling[key]
        self.forget(request)
        return None
