"""Assigns KV pages to the positions of each request, for the attention layers of a hybrid model."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from mamba_align_jax import _values as values
from mamba_align_jax.cache.block_pool import BlockPool
from mamba_align_jax.cache.events import CacheLog
from mamba_align_jax.cache.hashing import HashChain

# A lookup hashes so many pages before it looks for them.
_PAGES_AT_ONCE = 64


@dataclass
class _PageHolder:
    chain: HashChain
    pages: list[int] = field(default_factory=list)
    num_published: int = 0
    # False after a reset of the cache: the request's pages must not become findable any more.
    shares: bool = True


class KVPageManager:
    """Manages pages of keys and values. One page id stands for a page in every attention layer."""

    def __init__(self, num_pages: int, page_size: int, *, on_eviction: Callable[[], object] = lambda: None) -> None:
        """Creates an empty cache.

        Args:
            num_pages: Size of the pool, page 0 included, which is never handed out.
            page_size: Tokens per page.
            on_eviction: Called without arguments once for each cached page that is evicted.

        Raises:
            ValueError: A size is no whole number, or too small.
        """
        self.page_size = values.integer("KVPageManager: page_size", page_size, 1)
        self.pool = BlockPool(num_pages, on_eviction=on_eviction)
        self._log: CacheLog | None = None
        self._requests: dict[Hashable, _PageHolder] = {}

    def report_to(self, log: CacheLog) -> None:
        """Reports each page to `log`, before the page is published and after it is lost. Call it once."""
        self._log = log
        self.pool.watch(lambda key, _: log.remove_page(key))

    def pages_for(self, num_tokens: int) -> int:
        """Returns how many pages `num_tokens` tokens need. The last page may be partly filled."""
        if type(num_tokens) is not int or num_tokens < 0:
            raise ValueError(f"allocate: num_tokens must be a whole number, at least 0, got {num_tokens!r}")
        return -(-num_tokens // self.page_size)

    def lookup(self, tokens: Sequence[int], chain: HashChain) -> list[int]:
        """Returns the cached pages of the longest cached prefix of `tokens`, in order. The pages are not held yet.

        Args:
            tokens: The request's tokens.
            chain: The hashes of these tokens in blocks of `page_size`.
        """
        values.tokens("lookup: tokens", tokens)
        self._check_chain("lookup", chain)
        pages: list[int] = []
        full = len(tokens) // self.page_size * self.page_size
        # Little is hashed beyond the first page that is not cached.
        for begin in range(0, full, self.page_size * _PAGES_AT_ONCE):
            keys = chain.between(tokens, begin, min(begin + self.page_size * _PAGES_AT_ONCE, full))
            found = self.pool.find_first(keys)
            pages += found
            if len(found) < len(keys):
                break
        return pages

    def holds(self, request: Hashable, num_tokens: int) -> bool:
        """True if the request has pages for its first `num_tokens` positions: `allocate` would give it none."""
        record = values.known(self._requests, request)
        if type(num_tokens) is not int or record is None:
            return self.pages_for(num_tokens) < 0
        return num_tokens <= len(record.pages) * self.page_size

    def fits(self, request: Hashable, num_tokens: int, hit: Sequence[int] = ()) -> bool:
        """True if `allocate` with the same arguments would succeed.

        Raises:
            ValueError: As for `allocate`.
        """
        self.pages_for(num_tokens)
        shared = ()
        if values.known(self._requests, request) is None:
            shared = hit
            self._check_hit(hit)
        return self.pool.fits(self._missing(request, num_tokens, len(shared)), shared)

    def allocate(
        self, request: Hashable, num_tokens: int, *, hit: Sequence[int] = (), chain: HashChain | None = None
    ) -> list[tuple[int, int]] | None:
        """Gives the request pages for its first `num_tokens` positions.

        Args:
            request: The request's name. An unknown request enters with the pages `hit` and the hashes `chain`.
            num_tokens: The number of positions, including those of this step.
            hit: The request's first pages, as `lookup` returned them in the same scheduling pass.
            chain: The chain that `lookup` was given.

        Returns:
            The (number, page) entries that are new in the request's row. None, with nothing changed, if the pool has
            too few pages.

        Raises:
            ValueError: `num_tokens` is no number of tokens, or a page of `hit` is not cached any more.
        """
        if not self.fits(request, num_tokens, hit):
            return None
        record = self._requests.get(request)
        shared = [] if record else list(hit)
        if chain is not None:
            self._check_chain("allocate", chain)
        if chain and self.pool.keys_of(shared) != chain.between((), 0, len(shared) * self.page_size):
            raise ValueError("allocate: hit must be what lookup returns now, got pages cached for other tokens")
        self.pool.hold_all(shared)
        fresh = self.pool.allocate(self._missing(request, num_tokens, len(shared))) or []
        if record is None:
            chain = (chain or HashChain(self.page_size)).owned_by(request, len(shared) * self.page_size)
            record = self._requests[request] = _PageHolder(chain, num_published=len(shared))
        first = len(record.pages)
        record.pages += shared + fresh
        return list(enumerate(record.pages[first:], start=first))

    def can_publish(self, request: Hashable, tokens: Sequence[int], end: int) -> bool:
        """True if `publish` with the same arguments would publish a page. It raises what that would raise."""
        record = values.known(self._requests, request)
        values.tokens("publish: tokens", tokens)
        if record is None:
            raise ValueError(f"publish: request must be one that holds pages, got {request!r}")
        if type(end) is not int or not 0 <= end <= len(tokens) or end // self.page_size > len(record.pages):
            held = min(len(tokens), len(record.pages) * self.page_size)
            raise ValueError(f"publish: end must be from 0 to {held} tokens of request {request!r}, got {end!r}")
        if not record.shares or end // self.page_size <= record.num_published:
            return False
        record.chain.at(tokens, end // self.page_size * self.page_size)
        return True

    def publish(self, request: Hashable, tokens: Sequence[int], end: int) -> None:
        """Makes the request's full pages of `tokens[:end]` findable.

        Raises:
            ValueError: The request is unknown, has no pages for so many tokens, or the tokens are no whole numbers.
        """
        if not self.can_publish(request, tokens, end):
            return
        record = self._requests[request]
        first, last = record.num_published, end // self.page_size
        keys = record.chain.between(tokens, first * self.page_size, last * self.page_size)
        for number, key in enumerate(keys, first):
            if self._log is not None and self.pool.find(key) is None:
                own = tuple(tokens[number * self.page_size : self._end(number)])
                self._log.store_page(record.chain, own, self._end(number))
            self.pool.publish(record.pages[number], key)
            record.num_published = number + 1

    def free(self, request: Hashable) -> None:
        """Releases all pages of a request. Published pages stay findable until eviction, which takes the last first."""
        record = values.known(self._requests, request)
        if record is not None:
            del self._requests[request]
            self.pool.release(record.pages[::-1])

    def vacate(self) -> None:
        """Frees every present request."""
        for request in list(self._requests):
            self.free(request)

    def reset(self) -> None:
        """Makes every page unfindable. Present requests keep their pages but never publish any again."""
        self.pool.reset()
        for record in self._requests.values():
            record.shares = False

    def check(self) -> None:
        """Raises AssertionError unless the pool accounts for every page and its holders are the present requests."""
        self.pool.check(Counter(page for record in self._requests.values() for page in record.pages))

    def _end(self, number: int) -> int:
        """The number of tokens up to the end of page `number`."""
        return (number + 1) * self.page_size

    def _check_chain(self, method: str, chain: HashChain) -> None:
        values.instance(f"{method}: chain", chain, HashChain)
        wanted = f"a chain of blocks of {self.page_size} tokens"
        values.require(chain.block_size == self.page_size, f"{method}: chain", wanted, chain.block_size)

    def _check_hit(self, hit: Sequence[int]) -> None:
        pages = values.members("allocate: hit", hit, "pages that lookup returned")
        keys = self.pool.keys_of(pages)
        if None in keys:
            gone = pages[keys.index(None)]
            raise ValueError(f"allocate: hit must be what lookup returns now, got page {gone!r}, which is not cached")

    def _missing(self, request: Hashable, num_tokens: int, shared: int) -> int:
        record = self._requests.get(request)
        return max(self.pages_for(num_tokens) - (len(record.pages) if record else shared), 0)
