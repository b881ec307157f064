"""Which state block each column of each request has: the host's side of the block table's contract."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from mamba_align_jax.align.columns import blocks_per_request, column_of, last_boundary
from mamba_align_jax.cache.block_pool import BlockPool
from mamba_align_jax.cache.hashing import HashChain


@dataclass(frozen=True)
class Hit:
    """A cached prefix: `length` tokens, and the (column, block) pairs that hold it."""

    length: int
    blocks: tuple[tuple[int, int], ...] = ()
    salt: bytes = b""


@dataclass
class _Request:
    chain: HashChain
    committed: int
    columns: dict[int, int] = field(default_factory=dict)
    # Tokens and drafts of the steps whose results the host has not read.
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)


class StateBlockManager:
    """State blocks of one group. A step goes: `allocate`, dispatch, `release`; and `commit` once its result is read.

    Blocks are never moved between columns, and a column's block never changes while its request lives. Columns that a
    prefill chunk jumps over have none.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_speculative_tokens: int = 0, *, mode: str = "align"
    ) -> None:
        """An empty cache over a pool of `num_blocks`, NULL_BLOCK included.

        Raises:
            ValueError: an argument is out of range, or not one request fits.
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
        if num_blocks < 1 + self.blocks_needed():
            raise ValueError(
                f"StateBlockManager: num_blocks must be at least {1 + self.blocks_needed()} for one request, "
                f"got {num_blocks}"
            )
        self.pool = BlockPool(num_blocks)
        self._requests: dict[Hashable, _Request] = {}

    def blocks_needed(self, steps_in_flight: int = 0) -> int:
        """Blocks that a running request holds at most."""
        if self.mode == "none":
            return 1 + self.num_speculative_tokens
        return blocks_per_request(self.block_size, self.num_speculative_tokens, steps_in_flight)

    def lookup(self, tokens: Sequence[int], salt: bytes = b"", limit: int | None = None) -> Hit:
        """The longest cached state that `tokens` continue, at least one of them left to compute. Holds nothing yet.

        Args:
            tokens: The request's tokens.
            salt: Only states committed under the same salt match.
            limit: Longest prefix of use, where another cache ends earlier.
        """
        most = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        if self.mode == "none" or most < self.block_size:
            return Hit(0, (), salt)
        keys = HashChain(self.block_size, salt).upto(tokens, most // self.block_size)
        # From the right: a state stands for all that came before it, so the longest one is enough.
        for column in range(len(keys) - 1, -1, -1):
            block = self.pool.find(keys[column])
            if block is not None:
                return Hit((column + 1) * self.block_size, ((column, block),), salt)
        return Hit(0, (), salt)

    def allocate(
        self, request: Hashable, nc_lo: int, nc_hi: int, q: int, drafts: int = 0, *, hit: Hit | None = None
    ) -> list[tuple[int, int]] | None:
        """Gives the request a block in every column that a step of `q` tokens may write.

        Args:
            request: Any name; unknown ones enter.
            nc_lo: Fewest computed tokens before the step that the host can't exclude.
            nc_hi: Most of them; equal to `nc_lo` once the last result is read.
            q: Tokens of the step, drafts included.
            drafts: Draft tokens among them.
            hit: What `lookup` found for an entering request, in this same scheduling pass.

        Returns:
            The (column, block) entries that are new in the request's row; None, and nothing changed, if the pool can't
            give them.
        """
        entering = request not in self._requests
        if entering:
            hit = hit or Hit(0)
            record = _Request(HashChain(self.block_size, hit.salt), hit.length)
        else:
            record, hit = self._requests[request], None
        if self.mode == "none":
            wanted = range(1 + self.num_speculative_tokens)
        else:
            # A verify row may save any boundary that it passes; other rows write their running column alone.
            first = nc_lo // self.block_size if drafts else column_of(nc_lo + q, self.block_size)
            last = column_of(nc_hi + q, self.block_size) + (self.num_speculative_tokens if drafts else 0)
            wanted = range(first, last + 1)
        held = [] if hit is None else list(hit.blocks)
        for _, block in held:
            self.pool.hold(block)
        taken = {column for column, _ in held} | record.columns.keys()
        missing = [column for column in wanted if column not in taken]
        blocks = self.pool.allocate(len(missing))
        if blocks is None:
            self.pool.release([block for _, block in held])
            return None
        entries = held + list(zip(missing, blocks, strict=True))
        record.columns.update(entries)
        record.in_flight.append((q, drafts))
        self._requests[request] = record
        return entries

    def commit(self, request: Hashable, tokens: Sequence[int]) -> int:
        """Takes in the result of the request's oldest step in flight, and publishes a boundary that it kept.

        Args:
            request: One that has a step in flight.
            tokens: Its tokens whose states count now. A stop token inside the accepted drafts shortens them: boundaries
                behind it are not published.

        Returns:
            The boundary that is published now, in tokens; 0 for none.

        Raises:
            ValueError: the tokens can't be what the step left.
        """
        record = self._requests[request]
        if not record.in_flight:
            raise ValueError(f"commit: request {request!r} has no step in flight")
        q, drafts = record.in_flight[0]
        certain, computed = record.committed + q - drafts, len(tokens)
        if not certain <= computed <= certain + drafts:
            raise ValueError(
                f"commit: request {request!r} must have {certain} to {certain + drafts} computed tokens, got {computed}"
            )
        record.in_flight.popleft()
        record.committed = computed
        boundary = last_boundary(computed, self.block_size)
        if self.mode == "none" or boundary < certain or boundary == 0:
            return 0
        column = column_of(boundary, self.block_size)
        self.pool.publish(record.columns[column], record.chain.upto(tokens, column + 1)[column])
        return boundary

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
        """Forgets a finished, aborted or preempted request; published blocks stay findable until they are evicted."""
        record = self._requests.pop(request, None)
        if record is not None:
            self.pool.release(list(record.columns.values()))

    def columns(self, request: Hashable) -> dict[int, int]:
        """The blocks a request holds, by column."""
        return dict(self._requests[request].columns)
