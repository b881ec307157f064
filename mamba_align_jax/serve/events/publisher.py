"""Publishes cache events on a ZMQ socket, and sends again what a reader has missed, in vLLM's protocol.

A message has three parts: the topic, a sequence number of 8 bytes (big-endian), and a batch. A reader that finds a gap, or
has just begun, sends an empty part and the first number that it lacks from a DEALER socket to the replay socket. It gets
an empty part and three such parts for each batch from there on. The last answer has the number -1 and no batch.
"""

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable

import zmq

from mamba_align_jax import _values as values
from mamba_align_jax.cache.events import CacheCleared, CacheEvent, PageRemoved, PageStored, StateRemoved, StateStored
from mamba_align_jax.errors import FieldError
from mamba_align_jax.serve.events.stream import encode

_LOG = logging.getLogger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 1000
# What is done for the replay between two batches that are published: requests that are taken, and batches of one answer.
_REQUESTS, _SHARE = 16, 64
# Readers that may wait for an answer, and bytes of a request's frame. A request has 8.
_READERS, _FRAME_BYTES = 256, 2**10


class EventPublisher:
    """Sends batches of events in their order, by a thread of its own, so that an engine never waits for a reader.

    Replay is complete however late a reader comes: the batches that are too old to be kept are replaced by one that says
    what was cached after them.

    Attributes:
        endpoint: Where the socket is, with the number of a port that the system chose.
        replay_endpoint: The same of the replay socket, or None.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        states: bool,
        connect: bool = False,
        topic: str = "",
        max_batches: int = 10_000,
    ) -> None:
        """Opens the sockets and starts the thread.

        Args:
            endpoint: The ZMQ address at which readers connect. "tcp://*:5557" is a port of all network interfaces,
                "tcp://127.0.0.1:*" a free port of this machine alone.
            replay_endpoint: The address at which batches can be asked for again; None for none.
            connect: Whether the reader listens at `endpoint`, and this publisher connects to it.
            states: Whether the events of states are sent too. A reader that knows only vLLM's kinds may fail at them.
            topic: The first part of each message.
            max_batches: How many batches are kept as they were.

        Raises:
            ValueError: An address can't be opened, or an argument is of another type.
        """
        self._topic = values.text("EventPublisher: topic", topic).encode()
        self._states = values.flag("EventPublisher: states", states)
        self._max_batches = values.integer("EventPublisher: max_batches", max_batches, 1)
        self._context, self._replay = zmq.Context(), None
        try:
            is_bound = not values.flag("EventPublisher: connect", connect)
            self._socket, self.endpoint = self._open(zmq.PUB, "endpoint", endpoint, is_bound)
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self._replay, self.replay_endpoint = self._open(zmq.ROUTER, "replay_endpoint", replay_endpoint, True)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._queue: queue.SimpleQueue[tuple[float, tuple[CacheEvent, ...]] | None] = queue.SimpleQueue()
        self._kept: deque[tuple[int, bytes, tuple[CacheEvent, ...]]] = deque()
        self._image, self._sequence = _Image(), 0
        # The readers that wait for an answer, in their turn, and the first number that each lacks.
        self._asked: dict[bytes, int] = {}
        self._thread = threading.Thread(target=self._run, name="cache-events", daemon=True)
        self._thread.start()

    def publish(self, events: tuple[CacheEvent, ...]) -> None:
        """Queues events, which are sent in one batch. It never waits. Any thread may call it."""
        self._queue.put((time.time(), events))

    def close(self) -> None:
        """Sends what is queued, at most for a second, and closes the sockets."""
        self._queue.put(None)
        self._thread.join()

    def _open(self, kind: int, name: str, endpoint: str, is_bound: bool) -> tuple[zmq.Socket, str]:
        """Opens a socket at the address that the argument `name` has. Returns the socket and where it is."""
        values.text(f"EventPublisher: {name}", endpoint)
        socket = self._context.socket(kind)
        try:
            # A reader that is slow loses old batches only after so many, and asks for them again.
            socket.set_hwm(100_000)
            socket.set(zmq.MAXMSGSIZE, _FRAME_BYTES)
            (socket.bind if is_bound else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            got = f"{values.shown(endpoint)}: {error}"
            raise FieldError(f"EventPublisher: {name}", "a ZMQ address that is free", got) from error
        return socket, socket.get_string(zmq.LAST_ENDPOINT) if is_bound else endpoint

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._patience())
                if item is None:
                    break
                self._send(*item)
            except queue.Empty:
                pass
            except Exception:
                _LOG.exception("a batch of cache events could not be sent")
            try:
                self._answer()
            except Exception:
                _LOG.exception("cache events could not be sent again")
        self._context.destroy(linger=_LINGER_MS)

    def _patience(self) -> float | None:
        """Returns how long to wait for a batch: for ever without a replay, and not at all while a reader waits."""
        if self._replay is None:
            return None
        return 0.0 if self._asked else 0.1

    def _send(self, moment: float, events: tuple[CacheEvent, ...]) -> None:
        payload = encode(moment, events, states=self._states)
        if payload is None:
            return
        self._kept.append((self._sequence, payload, events))
        self._socket.send_multipart([self._topic, self._sequence.to_bytes(8, "big"), payload])
        self._sequence += 1
        if len(self._kept) > self._max_batches:
            self._image.apply(self._kept.popleft()[2])

    def _answer(self) -> None:
        """Sends a reader's next share of what it has asked for. Events that are published go between the shares."""
        if self._replay is None:
            return
        for _ in range(_REQUESTS):
            if not self._replay.poll(0):
                break
            name, *rest = self._replay.recv_multipart()
            if len(rest) != 2 or rest[0] or len(rest[1]) != 8:
                _LOG.warning("a reader of cache events asked for something else than a sequence number")
            elif len(self._asked) < _READERS or name in self._asked:
                # A reader that asks again is answered anew.
                self._asked[name] = int.from_bytes(rest[1], "big")
        if not self._asked:
            return
        name = next(iter(self._asked))
        start = self._asked.pop(name)
        first = self._kept[0][0] if self._kept else 0
        place = min(max(0, start - first), len(self._kept))
        batches = [(number, payload) for number, payload, _ in itertools.islice(self._kept, place, place + _SHARE)]
        if start < first:
            payload = encode(time.time(), self._image.events(), states=self._states)
            batches.insert(0, (first - 1, payload or b""))
        for number, payload in batches:
            self._replay.send_multipart([name, b"", self._topic, number.to_bytes(8, "big"), payload])
        following = batches[-1][0] + 1 if batches else start
        if following < self._sequence:
            self._asked[name] = following  # at the end of the queue
        else:
            self._replay.send_multipart([name, b"", b"", _END, b""])


class _Image:
    """What is cached after the events that were applied, as events."""

    def __init__(self) -> None:
        self._pages: dict[int, PageStored] = {}
        self._states: dict[int, StateStored] = {}

    def apply(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            match event:
                case PageStored():
                    # A parent is always stored before its children, so it comes before them.
                    self._pages[event.block_hash] = event
                case PageRemoved():
                    self._pages.pop(event.block_hash, None)
                case StateStored():
                    self._states[event.block_hash] = event
                case StateRemoved():
                    self._states.pop(event.block_hash, None)
                case _:
                    self._pages.clear()
                    self._states.clear()

    def events(self) -> list[CacheEvent]:
        return [CacheCleared(), *self._pages.values(), *self._states.values()]
