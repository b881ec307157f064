"""One prefix cache over state blocks and KV pages: a hit is what both have, an allocation is both or neither."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from mamba_align_jax.align.columns import last_boundary
from mamba_align_jax.cache.checkpoints import Checkpoints, request_checkpoints, requested_offsets
from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.split import next_chunk_end
from mamba_align_jax.cache.state_blocks import Hit, StateBlockManager


@dataclass(frozen=True)
class HybridHit:
    """A cached prefix of `length` tokens.

    `junction` is a boundary up to which keys and values are cached but no state is: a branch point, worth a stop, so that
    the next request that shares this prefix finds one. 0 if there is none.

    `miss` says why the hit isn't the prompt's last cacheable boundary; None if it is:
    "below one block" (the prompt has none), "no checkpoint" (pages go further, but no state was kept there), "evicted" (it
    was cached, and isn't any more), "not identical" (nobody has sent the tokens that follow).
    """

    length: int
    state: Hit
    pages: tuple[int, ...] = ()
    junction: int = 0
    miss: str | None = None


@dataclass(frozen=True)
class Allocation:
    """Entries new in a request's rows: (column, block) and (number, page)."""

    columns: list[tuple[int, int]]
    pages: list[tuple[int, int]]


@dataclass(frozen=True)
class Published:
    """What a step's dispatch made findable: keys, and the blocks under them."""

    states: dict[bytes, int] = field(default_factory=dict)
    pages: dict[bytes, int] = field(default_factory=dict)


class HybridCache:
    """State blocks and KV pages of the requests of one engine.

    A step goes: `allocate`, dispatch, `dispatched`, and `commit` once its result is read; `withdraw` if it raises. A state's
    key is that of the last page before it, so that the two pools know of each other: a state is found only as long as its
    pages are, and is free at once when one is evicted.
    """

    def __init__(
        self,
        states: StateBlockManager,
        kv: KVPageManager,
        *,
        checkpoint_interval: int | None = None,
        check: bool = False,
    ) -> None:
        """A cache over two empty managers, which are its own from here on.

        Args:
            states: State blocks.
            kv: Pages of keys and values.
            checkpoint_interval: Every so many tokens a request's state stays cached; None for nowhere in particular.
            check: Whether `check` runs after every change, for debugging.

        Raises:
            ValueError: sizes don't divide each other.
        """
        if states.mode == "align" and states.block_size % kv.page_size:
            raise ValueError(
                f"HybridCache: block_size must be a multiple of the page size {kv.page_size}, got {states.block_size}"
            )
        if checkpoint_interval is not None and (checkpoint_interval < 1 or checkpoint_interval % states.block_size):
            raise ValueError(
                f"HybridCache: checkpoint_interval must be None or a multiple of {states.block_size}, "
                f"got {checkpoint_interval}"
            )
        self.states = states
        self.kv = kv
        self.checkpoint_interval = checkpoint_interval
        self._check = check
        # Pages are evicted from a prefix's end: the first that goes is the one that the prefix's last state is named by.
        kv.pool.on_lost = lambda key, evicted: states.pool.unpublish(key, evicted=evicted)

    def lookup(self, tokens: Sequence[int], salt: bytes = b"", chain: HashChain | None = None) -> HybridHit:
        """The longest prefix whose pages and state are cached; a state never extends it beyond the pages.

        Args:
            tokens: The request's tokens.
            salt: Only what was computed under the same salt matches.
            chain: Instead of `salt`, the hashes of an earlier lookup (`HybridHit.state.chain`), of these tokens or fewer.
        """
        chain = chain or HashChain(self.kv.page_size, salt)
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

    def requested_offsets(self, wanted: Iterable[int], prompt: int) -> tuple[int, ...]:
        """The boundaries that a caller's offsets into a prompt of so many tokens mean; none where nothing is cached."""
        return () if self.states.mode == "none" else requested_offsets(wanted, prompt, self.states.block_size)

    def checkpoints(self, prompt: int, requested: Sequence[int] = (), junction: int = 0) -> Checkpoints:
        """What a request with a prompt of so many tokens keeps: see `request_checkpoints`."""
        return request_checkpoints(
            prompt,
            self.states.block_size,
            requested=requested,
            junction=junction,
            interval=self.checkpoint_interval,
        )

    def chunk_end(self, start: int, budget: int, most: int, prompt: int, stops: Iterable[int] = ()) -> int:
        """`next_chunk_end` in this cache's mode, with `budget` of a step's `most` tokens left; 0 = wait for the next step.

        A budget that others have eaten into never ends a chunk inside a block if a whole one would not.
        """
        if self.states.mode == "none":
            return min(start + budget, prompt) if budget > 0 else 0
        size, stops = self.states.block_size, tuple(stops)
        end = next_chunk_end(start, start + budget, prompt, size, stops)
        inside = end < prompt and end % size != 0
        return 0 if inside and next_chunk_end(start, start + most, prompt, size, stops) != end else end

    def allocate(
        self,
        request: Hashable,
        min_computed: int,
        max_computed: int,
        q: int,
        drafts: int = 0,
        *,
        hit: HybridHit | None = None,
        keep: Checkpoints | None = None,
    ) -> Allocation | None:
        """What a step of `q` tokens needs; None, and nothing changed or evicted, if one of the pools can't give it.

        An unknown request enters, on the prefix that `hit` found in this same scheduling pass, and keeps the boundaries of
        `keep` (None: all that its steps end on or pass). Nothing is published here.
        """
        hit = hit or HybridHit(0, Hit(0, (), HashChain(self.kv.page_size)))
        if not self.kv.fits(request, max_computed + q, hit.pages) or not self.states.fits(
            request, min_computed, max_computed, q, drafts, hit=hit.state
        ):
            return None
        # Pages first: what they evict may be the pages of states, which are then free.
        pages = self.kv.allocate(request, max_computed + q, hit=hit.pages, chain=hit.state.chain)
        columns = self.states.allocate(request, min_computed, max_computed, q, drafts, hit=hit.state, keep=keep)
        assert pages is not None
        assert columns is not None
        self._changed()
        return Allocation(columns, pages)

    def dispatched(self, request: Hashable, tokens: Sequence[int] | None = None) -> Published:
        """The request's newest step is on its way: see `StateBlockManager.release` for what goes.

        Args:
            request: One that has a step in flight.
            tokens: For a prompt's row, its tokens up to the end of that step. What they fill is offered now, since whoever
                reads it comes later on the device; None leaves that to `commit`.
        """
        self.states.release(request)
        published = Published()
        if tokens is not None and self.states.mode != "none":
            pages = self.kv.publish(request, tokens, len(tokens))
            published = Published(self.states.publish(request, tokens), pages)
        self._changed()
        return published

    def commit(self, request: Hashable, tokens: Sequence[int], computed: int) -> int:
        """Takes in a step's result: `tokens[:computed]` count now. Returns the boundary that is published by it."""
        boundary = self.states.commit(request, tokens, computed)
        if self.states.mode != "none":
            self.kv.publish(request, tokens, computed)
        self._changed()
        return boundary

    def withdraw(self, published: Published) -> set[Hashable]:
        """The step raised: what its dispatch published is found no more. Blocks stay with whoever holds them.

        Returns:
            Requests that hold some of it: its own, and those that came upon it meanwhile. What they compute is worth
            nothing, and their steps have failed too, coming later on the device: withdraw those, and free the requests.
        """
        for key in published.states:
            self.states.pool.unpublish(key)
        for key in published.pages:
            self.kv.pool.unpublish(key)
        self._changed()
        return self.states.holders(published.states.values()) | self.kv.holders(published.pages.values())

    def free(self, request: Hashable) -> None:
        """Takes back all that a request holds, which may come back: see `StateBlockManager.free`."""
        self.states.free(request)
        self.kv.free(request)
        self._changed()

    def forget(self, request: Hashable) -> None:
        """A freed request is over, finished or aborted: see `StateBlockManager.forget`."""
        self.states.forget(request)
        self._changed()

    def reset_prefix_cache(self) -> None:
        """Forgets everything cached. Present requests go on with what they hold, but never share what they compute."""
        self.states.reset()
        self.kv.reset()
        self._changed()

    def check(self) -> None:
        """Raises AssertionError unless both pools account for every block, and every state's pages are cached."""
        self.states.check()
        self.kv.check()
        assert self.states.pool.keys <= self.kv.pool.keys, "a state without its pages"

    def _changed(self) -> None:
        if self._check:
            self.check()

    def _why(self, tokens: Sequence[int], chain: HashChain, length: int, branch: int, paged: int) -> str | None:
        size = self.states.block_size
        last = last_boundary(len(tokens) - 1, size)
        if last == 0:
            return "below one block"
        if length == last:
            return None
        if any(self.states.pool.was_evicted(chain.at(tokens, end)) for end in range(length + size, last + 1, size)):
            return "evicted"
        if branch > length:
            return "no checkpoint"
        return "evicted" if self.kv.pool.was_evicted(chain.at(tokens, paged + self.kv.page_size)) else "not identical"
