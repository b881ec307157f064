"""What is new of each request since the caller last looked."""

import itertools
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from mamba_align_jax.engine.scheduling.request import Request, RequestOutput, RequestUpdate


class _Shown(NamedTuple):
    """How much of a request is in its updates so far."""

    num_tokens: int = 0
    num_characters: int = 0


class Updates:
    """Makes updates of requests, each with what is in no earlier update of its request.

    An update is either taken by a caller or stays here: an interrupt loses none, because what was shown is noted in the
    line that stores the update. An engine whose caller never asks for updates makes none.

    Attributes:
        have_reader: Whether someone waits for the last update of every request, whoever aborts the request.
    """

    def __init__(self) -> None:
        """Makes a record of no requests."""
        self.have_reader = False
        self._shown: dict[int, _Shown] = {}
        self._ready: dict[int, RequestUpdate] = {}
        self._numbers = itertools.count()

    def shows_all(self, request: Request) -> bool:
        """Whether all tokens of a request are in its updates."""
        return self._shown.get(request.id, _Shown()).num_tokens == len(request.tokens) - len(request.prompt)

    def add(self, request: Request) -> None:
        """Makes an update of a request that runs. Its text has been read."""
        shown = self._shown.get(request.id, _Shown())
        text = request.text.shown if request.text else None
        now = _Shown(len(request.tokens) - len(request.prompt), len(text or ""))
        update = RequestUpdate(
            request_id=request.id,
            token_ids=tuple(request.tokens[len(request.prompt) + shown.num_tokens :]),
            text=None if text is None else text[shown.num_characters :],
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs[shown.num_tokens :]),
            prompt_logprobs=request.known_prompt_logprobs if shown.num_tokens == 0 else None,
            num_cached_tokens=request.num_cached,
            cache_miss=request.cache_miss,
        )
        number = next(self._numbers)
        # One line without a call, so that no interrupt comes between.
        self._shown[request.id], self._ready[number] = now, update

    def last(self, outputs: Mapping[int, RequestOutput]) -> dict[int, RequestUpdate]:
        """Returns the last update of each request that has ended, by its id. It may be asked for again."""
        updates = {}
        for request_id, output in list(outputs.items()):
            shown = self._shown.get(request_id, _Shown())
            updates[request_id] = RequestUpdate(
                request_id=request_id,
                token_ids=output.token_ids[shown.num_tokens :],
                text=None if output.text is None else output.text[shown.num_characters :],
                logprobs=None if output.logprobs is None else output.logprobs[shown.num_tokens :],
                prompt_logprobs=output.prompt_logprobs if shown.num_tokens == 0 else None,
                num_cached_tokens=output.num_cached_tokens,
                cache_miss=output.cache_miss,
                output=output,
            )
        return updates

    def forget_all_but(self, *known: Container[int]) -> None:
        """Forgets what was shown of requests that are in none of `known`."""
        gone = [request_id for request_id in self._shown if not any(request_id in ids for ids in known)]
        for request_id in gone:
            del self._shown[request_id]

    def take(self) -> Iterable[RequestUpdate]:
        """Returns an iterator that takes the updates that are ready. No Python code runs while it is consumed."""
        return filter(None, map(self._ready.pop, tuple(self._ready), itertools.repeat(None)))
