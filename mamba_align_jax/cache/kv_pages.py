"""Which KV page holds which positions of each request, for the attention layers of a hybrid model."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from mamba_align_jax.cache.block_pool import BlockPool
from mamba_align_jax.cache.hashing import HashChain


@dataclass
class _Request:
    chain: HashChain
    pages: list[int] = field(default_factory=list)
    num_published: int = 0


class KVPageManager:
    """Pages of keys and values, all attention layers together. Full pages of committed tokens are findable."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """An empty cache over `num_pages` pages, the NULL page included."""
        self.page_size = page_size
        self.pool = BlockPool(num_pages)
        self._requests: dict[Hashable, _Request] = {}

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` fill, the last one perhaps in part."""
        return -(-num_tokens // self.page_size)

    def lookup(self, tokens: Sequence[int], salt: bytes = b"") -> list[int]:
        """Cached pages from the left, as many as match. Holds nothing yet."""
        pages = []
        for key in HashChain(self.page_size, salt).upto(tokens, len(tokens) // self.page_size):
            page = self.pool.find(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def allocate(
        self, request: Hashable, num_tokens: int, *, hit: Sequence[int] = (), salt: bytes = b""
    ) -> list[tuple[int, int]] | None:
        """Gives the request pages for its first `num_tokens` positions.

        Args:
            request: Any name; unknown ones enter, with the pages of `hit` and under `salt`.
            num_tokens: Positions, this step's included.
            hit: The first pages, as `lookup` found them in this same scheduling pass.
            salt: As for `lookup`.

        Returns:
            The (number, page) entries that are new in the request's row; None, and nothing changed, if the pool can't
            give them.
        """
        record = self._requests.get(request)
        shared = [] if record else list(hit)
        for page in shared:
            self.pool.hold(page)
        known = len(record.pages) if record else len(shared)
        fresh = self.pool.allocate(max(self.pages_for(num_tokens) - known, 0))
        if fresh is None:
            self.pool.release(shared)
            return None
        if record is None:
            record = self._requests[request] = _Request(HashChain(self.page_size, salt), num_published=len(shared))
        first = len(record.pages)
        record.pages += shared + fresh
        return list(enumerate(record.pages[first:], start=first))

    def take_back(self, request: Hashable, count: int) -> None:
        """Undoes an `allocate` that gave `count` entries; a request without pages leaves."""
        record = self._requests[request]
        keep = len(record.pages) - count
        self.pool.release(record.pages[keep:][::-1])
        del record.pages[keep:]
        if not record.pages:
            del self._requests[request]

    def commit(self, request: Hashable, tokens: Sequence[int]) -> None:
        """Publishes the full pages of `tokens`, all of them computed."""
        record = self._requests[request]
        full = len(tokens) // self.page_size
        for number in range(record.num_published, full):
            self.pool.publish(record.pages[number], record.chain.upto(tokens, number + 1)[number])
        record.num_published = max(record.num_published, full)

    def free(self, request: Hashable) -> None:
        """Forgets a request; published pages stay findable until they are evicted, the last ones first."""
        record = self._requests.pop(request, None)
        if record is not None:
            self.pool.release(record.pages[::-1])
