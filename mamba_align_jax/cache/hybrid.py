"""One prefix cache over state blocks and KV pages: a hit is what both have, an allocation is both or neither."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.split import next_chunk_end
from mamba_align_jax.cache.state_blocks import Hit, StateBlockManager


@dataclass(frozen=True)
class HybridHit:
    """A cached prefix of `length` tokens.

    `junction` is a boundary up to which keys and values are cached but no state is: a branch point, worth a stop, so that
    the next request that shares this prefix finds one. 0 if there is none.
    """

    length: int
    state: Hit
    pages: tuple[int, ...] = ()
    junction: int = 0


@dataclass(frozen=True)
class Allocation:
    """Entries new in a request's rows: (column, block) and (number, page)."""

    columns: list[tuple[int, int]]
    pages: list[tuple[int, int]]


class HybridCache:
    """State blocks and KV pages of the requests of one engine."""

    def __init__(self, states: StateBlockManager, kv: KVPageManager) -> None:
        if states.mode == "align" and states.block_size % kv.page_size:
            raise ValueError(
                f"HybridCache: block_size must be a multiple of the page size {kv.page_size}, got {states.block_size}"
            )
        self.states = states
        self.kv = kv

    def lookup(self, tokens: Sequence[int], salt: bytes = b"") -> HybridHit:
        """The longest prefix whose pages and state are cached; a state never extends it beyond the pages."""
        if self.states.mode == "none":
            return HybridHit(0, Hit(0, (), salt))
        pages = self.kv.lookup(tokens, salt)
        paged = len(pages) * self.kv.page_size
        state = self.states.lookup(tokens, salt, limit=paged)
        branch = min(paged, len(tokens) - 1) // self.states.block_size * self.states.block_size
        return HybridHit(
            length=state.length,
            state=state,
            pages=tuple(pages[: state.length // self.kv.page_size]),
            junction=branch if branch > state.length else 0,
        )

    def chunk_end(self, start: int, budget: int, most: int, prompt: int, stops: Iterable[int] = ()) -> int:
        """`next_chunk_end` in this cache's mode, with `budget` of a step's `most` tokens left; 0 = wait for the next step.

        A budget that others have eaten into never ends a chunk inside a block if a whole one would not: which boundaries
        are kept must not depend on the load.
        """
        if self.states.mode == "none":
            return min(start + budget, prompt) if budget > 0 else 0
        size = self.states.block_size
        end = next_chunk_end(start, start + budget, prompt, size, stops)
        inside = end < prompt and end % size != 0
        return 0 if inside and next_chunk_end(start, start + most, prompt, size, stops) != end else end

    def allocate(
        self, request: Hashable, nc_lo: int, nc_hi: int, q: int, drafts: int = 0, *, hit: HybridHit | None = None
    ) -> Allocation | None:
        """What a step of `q` tokens needs; None, and nothing changed, if one of the pools can't give it."""
        hit = hit or HybridHit(0, Hit(0))
        pages = self.kv.allocate(request, nc_hi + q, hit=hit.pages, salt=hit.state.salt)
        if pages is None:
            return None
        columns = self.states.allocate(request, nc_lo, nc_hi, q, drafts, hit=hit.state)
        if columns is None:
            self.kv.take_back(request, len(pages))
            return None
        return Allocation(columns, pages)

    def commit(self, request: Hashable, tokens: Sequence[int]) -> None:
        """Takes in a step's result: `tokens` are computed now."""
        self.states.commit(request, tokens)
        if self.states.mode != "none":
            self.kv.commit(request, tokens)

    def release(self, request: Hashable) -> None:
        """Lets go of state columns that no step can read any more: see `StateBlockManager.release`."""
        self.states.release(request)

    def free(self, request: Hashable) -> None:
        """Forgets a finished, aborted or preempted request."""
        self.states.free(request)
        self.kv.free(request)

    def check(self) -> None:
        """Raises AssertionError unless both pools account for every block."""
        self.states.pool.check()
        self.kv.pool.check()
