"""An engine for asyncio: a thread steps it, and every task reads the updates of its own request."""

import asyncio
import contextlib
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Self

from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.interrupts import ServiceThread, contained, failure
from mamba_align_jax.engine.running.engine import Engine
from mamba_align_jax.engine.scheduling.request import RequestUpdate
from mamba_align_jax.engine.text.grammar_state import GrammarState
from mamba_align_jax.engine.text.tokenizer import token_ids
from mamba_align_jax.errors import EngineDeadError

_LOG = logging.getLogger(__name__)


class _Stream:
    """The way of one request's updates from the engine's thread to the task that reads them.

    Only the event loop's thread calls its methods. Updates that are not read yet are one, so a task that reads slowly, or
    never, costs no more memory than its request's tokens.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.request_id: int | None = None  # known once the engine has the request; written by the engine's thread
        self.grammar: GrammarState | None = None  # kept, so that the engine's thread need not compile it
        self._update: RequestUpdate | None = None
        self._error: BaseException | None = None
        self._news = asyncio.Event()

    def put(self, update: RequestUpdate) -> None:
        """Adds an update to those that are not read yet."""
        self._update = self._update.followed_by(update) if self._update else update
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """Makes the reader raise an error after it has read what came before."""
        self._error = error
        self._news.set()

    async def get(self) -> RequestUpdate:
        """Waits for an update."""
        await self._news.wait()
        update, self._update = self._update, None
        if update is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._news.clear()
        return update


class AsyncEngine:
    """Serves requests of tasks, of any number of event loops, with one engine.

        async with AsyncEngine(engine) as serving:
            async for update in serving.generate("Once upon", SamplingParams(max_tokens=32)):
                print(update.text, end="")

    A thread steps the engine while there is work, and sleeps otherwise. Other threads may call the engine's own methods,
    `generate` among them, but not `step` and `step_outputs`, which would take the updates of these requests. If one calls
    `abort`, the task that reads the request gets the output as well.

    Attributes:
        engine: The engine.
        error: What ended the thread; None unless it was an error.
    """

    def __init__(self, engine: Engine) -> None:
        """Makes a server of one engine. `start`, or `async with`, starts its thread."""
        self.engine = engine
        self.error: BaseException | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Requests that the engine doesn't have yet, and those that it has, by their ids.
        self._coming: set[_Stream] = set()
        self._num_coming: Counter[str] = Counter()  # of requests, by tenant
        self._streams: dict[int, _Stream] = {}
        self._is_closing = False
        self._thread = ServiceThread(target=self._run, name="mamba-align engine", daemon=True)
        # Taken to add a request and to end the thread, so that no request comes after its end.
        self._door = threading.Lock()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs and takes requests."""
        return self._thread.is_alive() and not self._is_closing

    def start(self) -> None:
        """Starts the thread.

        Raises:
            RuntimeError: It was started before.
        """
        self._thread.start()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        await self.shutdown(drain=kind is None)

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestUpdate, None]:
        """Runs one request, and yields what is new of it.

        The last update has the output, and that has the error if one was raised on the request's account. A reader that
        is slower than the engine gets several steps' news in one update. If the task is cancelled, or the iterator is
        closed or dropped, the request is aborted and its blocks are freed.

        Args:
            prompt: The prompt, as text or token ids.
            params: How the request is sampled; None takes the defaults.

        Raises:
            ValueError: The request can never run: see `Engine.add_request`.
            QueueFullError: `max_waiting` requests wait already, or half as many of the tenant's while others wait.
            EngineDeadError: The thread has ended, or was never started.
        """
        stream, core = _Stream(), self.engine.core
        # Long texts and grammars take a while, in which other tasks run.
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(contained(self._encoded), prompt)
        if isinstance(params, SamplingParams) and params.grammar is not None:
            stream.grammar = core.grammars.known(params.grammar)
            if stream.grammar is None:
                compiling = core.masks.when_idle(params.tenant, contained(partial(core.grammars.check, params.grammar)))
                stream.grammar = await asyncio.wrap_future(compiling)
        request = core.checked(prompt, params)
        self._submit(stream, *request)
        try:
            while True:
                update = await stream.get()
                yield update
                if update.output is not None:
                    return
        finally:
            self._commands.put(partial(self._abort, stream))

    async def shutdown(self, *, drain: bool = True) -> None:
        """Ends the thread. It takes no more requests, and `generate` raises EngineDeadError from now on.

        Args:
            drain: Whether the requests that it has run to their ends. If not, they are aborted: their last updates have
                the `finish_reason` "abort". A second call without draining ends one that drains.
        """
        with self._door:
            self._is_closing = True
        self._commands.put(self._nothing if drain else self._abort_all)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def dismiss(self) -> None:
        """Makes all readers raise EngineDeadError at once. It may be called while `shutdown` waits for a long step."""
        error = EngineDeadError("the thread that steps the engine was told to stop")
        for stream in [*self._coming, *self._streams.values()]:
            with contextlib.suppress(RuntimeError):  # an event loop that is closed
                stream.loop.call_soon_threadsafe(stream.fail, error)

    def _encoded(self, prompt: str) -> Sequence[int]:
        (tokens,) = token_ids(self.engine.tokenizer, prompt)
        return tokens

    def _submit(self, stream: _Stream, prompt: tuple[int, ...], params: SamplingParams) -> None:
        with self._door:
            if not self.is_running:
                raise EngineDeadError("the thread that steps the engine does not run") from self.error
            # The engine checks again when the thread hands the request over, which may be a step later.
            self.engine.core.waiting.check_room(params.tenant, self._num_coming)
            self._coming.add(stream)
            self._num_coming[params.tenant] += 1
            self._commands.put(partial(self._add, stream, prompt, params))

    # What follows runs in the thread.

    def _run(self) -> None:
        error = None
        self.engine.core.updates.have_reader = True
        try:
            while self._obey():
                self._deliver(self.engine.step_outputs())
        except BaseException as raised:
            _LOG.error("the thread that steps the engine ends", exc_info=raised)
            self.error = error = raised
        with self._door:
            self._is_closing = True
        self._end_all(error)
        self.engine.core.updates.have_reader = False

    def _obey(self) -> bool:
        """Waits for work, and does what was asked. Returns whether there is a step to make; if not, the thread ends."""
        while True:
            with contextlib.suppress(Empty):
                while True:
                    self._commands.get_nowait()()
            if self._streams:
                return True
            if self._is_closing and self._commands.empty():
                return False
            self._commands.get()()

    @staticmethod
    def _nothing() -> None:
        """Wakes the thread."""

    def _add(self, stream: _Stream, prompt: tuple[int, ...], params: SamplingParams) -> None:
        with self._door:
            self._coming.discard(stream)
            self._num_coming[params.tenant] -= 1
            if not self._num_coming[params.tenant]:
                del self._num_coming[params.tenant]
        try:
            stream.request_id = self.engine.add_request(prompt, params)
        except BaseException as raised:
            self._post(stream.loop, partial(stream.fail, failure(raised)))
        else:
            self._streams[stream.request_id] = stream

    def _abort(self, stream: _Stream) -> None:
        if stream.request_id is not None and self._streams.pop(stream.request_id, None):
            self.engine.abort(stream.request_id)
            # If the request had ended already, no one reads its output.
            self.engine.core.outputs.pop(stream.request_id, None)

    def _abort_all(self) -> None:
        """Ends all requests. Their last updates come with the next step."""
        core = self.engine.core
        for request_id in self._streams:
            core.alone(core.abort, request_id, core.outputs)

    def _deliver(self, updates: Sequence[RequestUpdate]) -> None:
        """Hands a step's updates to the event loops, in one call for each."""
        by_loop = defaultdict(list)
        for update in updates:
            stream = self._streams.get(update.request_id)
            if stream is None:
                continue
            if update.output is not None:
                del self._streams[update.request_id]
            by_loop[stream.loop].append((stream, update))
        for loop, pairs in by_loop.items():
            self._post(loop, partial(_put_all, pairs))

    def _post(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(call)
        except RuntimeError:  # the event loop is closed, and its tasks with it
            for stream in [stream for stream in self._streams.values() if stream.loop is loop]:
                self._abort(stream)

    def _end_all(self, cause: BaseException | None) -> None:
        """Tells the readers of all requests that no update will come. None is left unless there was an error."""
        error = EngineDeadError(f"the thread that steps the engine has ended: {cause!r}")
        error.__cause__ = cause
        for stream in [*self._coming, *self._streams.values()]:
            with contextlib.suppress(BaseException):
                self._abort(stream)
            with contextlib.suppress(RuntimeError):
                stream.loop.call_soon_threadsafe(stream.fail, error)


def _put_all(pairs: Sequence[tuple[_Stream, RequestUpdate]]) -> None:
    for stream, update in pairs:
        stream.put(update)
