"""Keeps what a drafter on the host does wrong away from the requests: its drafts are only ever guesses."""

import logging
from collections.abc import Hashable, Sequence
from typing import Any

from mamba_align_jax import _values as values
from mamba_align_jax.engine.drafting.first_tokens import FirstTokens
from mamba_align_jax.engine.drafting.protocols import Drafter
from mamba_align_jax.engine.interrupts import failure

_LOG = logging.getLogger(__name__)


class GuardedDrafter:
    """A `Drafter` that gives on the valid drafts of another one, and survives that `forget` raises.

    The other one can read a request's tokens but not change them, and may keep them. If its `draft` raises, the exception
    ends the request that it drafts for.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        """Guards a drafter of a model with `vocab_size` tokens."""
        self._drafter, self._vocab_size = drafter, vocab_size

    def draft(self, request: Hashable, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Proposes the drafts before the first one that is no token of the vocabulary: see `Drafter`."""
        proposed = self._drafter.draft(request, FirstTokens(tokens), max_drafts)
        drafts: list[int] = []
        for draft in _listed(proposed)[:max_drafts]:
            if not values.is_integer(draft) or not 0 <= draft < self._vocab_size:
                _LOG.warning("a drafter proposed %.80r, which is no token: it is ignored", draft)
                break
            drafts.append(int(draft))
        return drafts

    def forget(self, request: Hashable) -> None:
        """Drops what the drafter keeps for a request: see `Drafter`."""
        try:
            self._drafter.forget(request)
        except BaseException as raised:
            failure(raised)
            _LOG.exception("a drafter could not forget request %r", request)


def _listed(proposed: Any) -> Sequence[Any]:
    """Returns proposed drafts as a list; none if they are no sequence."""
    if hasattr(proposed, "tolist"):
        proposed = proposed.tolist()
    if isinstance(proposed, Sequence) and not isinstance(proposed, str | bytes):
        return proposed
    _LOG.warning("a drafter proposed %.80r, which is no sequence of tokens: it is ignored", proposed)
    return ()
