"""Which KV page holds which positions of each request, for the attention layers of a hybrid model."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from mamba_align_jax.cache.block_pool import BlockPool
from mamba_align_jax.cache.hashing import HashChain


@dataclass
class _Request:
    chain: HashChain
    pages: list[int] = field(default_factory=list)
    num_published: int = 0
    # False once the cache was reset: what the request computed before it must not be found.
    shares: bool = True


class KVPageManager:
    """Pages of keys and values, all attention layers together."""

    def __init__(self, num_pages: int, page_size: int, *, on_eviction: Callable[[], object] = lambda: None) -> None:
        """Creates an empty cache.

        Args:
            num_pages: Size of the pool, page 0 included, which is never handed out.
            page_size: Tokens per page.
            on_eviction: Called without arguments once for each cached page that is evicted.
        """
        self.page_size = page_size
        self.pool = BlockPool(num_pages, on_eviction=on_eviction)
        self._requests: dict[Hashable, _Request] = {}

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` fill, the last one perhaps in part."""
        return -(-num_tokens // self.page_size)

    def lookup(self, tokens: Sequence[int], chain: HashChain) -> list[int]:
        """Cached pages from the left, as many as match. Holds nothing yet."""
        pages = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self.pool.find(chain.at(tokens, end))
            if page is None:
                break
            pages.append(page)
        return pages

    def fits(self, request: Hashable, num_tokens: int, hit: Sequence[int] = ()) -> bool:
        """Whether `allocate` would give them."""
        shared = () if request in self._requests else hit
        return self.pool.fits(self._missing(request, num_tokens, len(shared)), shared)

    def allocate(
        self, request: Hashable, num_tokens: int, *, hit: Sequence[int] = (), chain: HashChain | None = None
    ) -> list[tuple[int, int]] | None:
        """Gives the request pages for its first `num_tokens` positions.

        Args:
            request: Any name; unknown ones enter, with the pages of `hit` and the hashes of `chain`.
            num_tokens: Positions, this step's included.
            hit: The first pages, as `lookup` found them in this same scheduling pass.
            chain: As for `lookup`.

        Returns:
            The (number, page) entries that are new in the request's row; None, and nothing changed, if the pool can't
            give them.
        """
        if not self.fits(request, num_tokens, hit):
            return None
        record = self._requests.get(request)
        shared = [] if record else list(hit)
        for page in shared:
            self.pool.hold(page)
        fresh = self.pool.allocate(self._missing(request, num_tokens, len(shared))) or []
        if record is None:
            chain = chain or HashChain(self.page_size)
            record = self._requests[request] = _Request(chain, num_published=len(shared))
        first = len(record.pages)
        record.pages += shared + fresh
        return list(enumerate(record.pages[first:], start=first))

    def publish(self, request: Hashable, tokens: Sequence[int], end: int) -> dict[bytes, int]:
        """Makes the full pages of `tokens[:end]` findable; returns the keys that are new, and their pages."""
        record = self._requests[request]
        new = {}
        for number in range(record.num_published, end // self.page_size if record.shares else 0):
            key = record.chain.at(tokens, (number + 1) * self.page_size)
            if self.pool.publish(record.pages[number], key):
                new[key] = record.pages[number]
            record.num_published = number + 1
        return new

    def free(self, request: Hashable) -> None:
        """Forgets a request; published pages stay findable until they are evicted, the last ones first."""
        record = self._requests.pop(request, None)
        if record is not None:
            self.pool.release(record.pages[::-1])

    def holders(self, pages: Iterable[int]) -> set[Hashable]:
        """Requests that hold one of `pages`."""
        pages = set(pages)
        return {name for name, record in self._requests.items() if not pages.isdisjoint(record.pages)}

    def reset(self) -> None:
        """Makes every page unfindable, and what present requests have and will have, for good."""
        self.pool.reset()
        for record in self._requests.values():
            record.shares = False

    def check(self) -> None:
        """Raises AssertionError unless the pool accounts for every page and its holders are the requests."""
        self.pool.check(Counter(page for record in self._requests.values() for page in record.pages))

    def _missing(self, request: Hashable, num_tokens: int, shared: int) -> int:
        record = self._requests.get(request)
        return max(self.pages_for(num_tokens) - (len(record.pages) if record else shared), 0)
