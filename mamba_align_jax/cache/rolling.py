"""Rolling boundaries: each stays cached only until all of its requests, running or preempted, have passed the next one."""

from collections.abc import Container, Hashable, Iterable, Mapping

from mamba_align_jax import _values as values
from mamba_align_jax.cache.block_pool import ensure


class RollingBoundaries:
    """The keys of rolling boundaries, and the requests for which each is kept.

    Attributes:
        kept: The requests for which each key is kept.
        left: The rolling key of each request that was freed and may come back.
    """

    def __init__(self) -> None:
        self.kept: dict[bytes, set[Hashable]] = {}
        self.left: dict[Hashable, bytes] = {}

    def stay(self, key: bytes) -> None:
        """Records that a boundary does not roll any more, because it stays cached or is lost."""
        self.kept.pop(key, None)

    def roll(self, request: Hashable, key: bytes, is_new: bool) -> None:
        """Keeps a boundary for a request, if nothing has kept it until now or it is kept for others that roll it."""
        if is_new or key in self.kept:
            self.kept.setdefault(key, set()).add(request)

    def let_go(self, request: Hashable, key: bytes) -> bool:
        """Records that a request has moved past a boundary. Returns True if no other request still keeps it."""
        wanted_by = self.kept.get(key, set())
        if request not in wanted_by:
            return False
        wanted_by.discard(request)
        if not wanted_by:
            del self.kept[key]
        return not wanted_by

    def resume(self, request: Hashable, keys: Iterable[bytes | None]) -> bytes | None:
        """Returns the rolling key of a request that enters on the blocks of `keys`.

        A preempted request that hits its own rolling boundary continues to roll it. A hit on another request's rolling
        boundary makes that boundary stay, because it has proved useful.
        """
        for key in keys:
            if key in self.kept:
                if request in self.kept[key]:
                    del self.left[request]
                    return key
                del self.kept[key]
        self.forget(request)
        return None

    def forget(self, request: Hashable) -> None:
        """Records that a freed request will not return. The last boundary that it passed stays cached until eviction."""
        key = values.known(self.left, request)
        self.left.pop(request, None)
        if key is not None and request in self.kept.get(key, ()):
            del self.kept[key]

    def forget_all_but(self, staying: Container[Hashable]) -> None:
        """Forgets the freed requests that are not in `staying`."""
        for request in [request for request in self.left if request not in staying]:
            self.forget(request)

    def check(self, published: Container[bytes], running: Mapping[Hashable, bytes | None]) -> None:
        """Raises AssertionError unless every key is published and kept for requests that roll it.

        Args:
            published: The keys in the cache.
            running: The rolling key of each present request.
        """
        ensure(all(key in published for key in self.kept), "a rolling boundary is not published")
        ensure(all(self.kept.values()), "a rolling boundary is kept for no request")
        rolling = self.left | dict(running)
        kept = [(request, key) for key, requests in self.kept.items() for request in requests]
        ensure(all(rolling.get(r) == key for r, key in kept), "a boundary is kept for a request that does not roll it")
