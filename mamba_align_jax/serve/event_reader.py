"""Reads the cache events of one engine from its socket, without gaps and in their order."""

import time

import zmq

from mamba_align_jax import _values as values
from mamba_align_jax.cache.events import CacheCleared, CacheEvent
from mamba_align_jax.serve.event_stream import decode

# A replay socket that has been silent for so long is asked again.
_PATIENCE_S = 1.0


class EventReader:
    """Subscribes to one publisher, and asks its replay socket for what was published before and for what was lost.

    When the engine has started anew, what is read begins anew with `CacheCleared`. One thread may use a reader.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        """Connects to a publisher, which may start later.

        Args:
            endpoint: Where it publishes.
            replay_endpoint: Where it sends again what was lost. Without one a gap is answered by `CacheCleared`, because
                what is known has become wrong.
            topic: Only messages whose topic begins with this are read.

        Raises:
            ValueError: An endpoint is no address.
        """
        self._context = zmq.Context()
        self._replay_endpoint = replay_endpoint
        # The socket on which an answer is awaited, and when it is asked again. It is None while nothing is missing.
        self._replay: zmq.Socket | None = None
        self._ask_again_at = 0.0
        # The number of the next batch, and the time of the last one.
        self._next, self._last_time = 0, 0.0
        try:
            self._socket = self._connect(zmq.SUB, endpoint)
            self._socket.subscribe(values.text("EventReader: topic", topic))
            if replay_endpoint is not None:
                self._ask(replay_endpoint)
        except BaseException:
            self.close()
            raise

    def read(self, timeout_s: float) -> tuple[CacheEvent, ...]:
        """Waits for events, and returns the next ones. It returns none when the time is over.

        Raises:
            ValueError: What was published are no batches of cache events.
        """
        timeout_s = values.number("read: timeout_s", timeout_s, 0, 1e6, "a number of seconds, at least 0")
        end = time.monotonic() + timeout_s
        if self._replay is not None:
            events = self._read_again(end)
            if events or self._replay is not None:
                return events
        if not self._socket.poll(_milliseconds_to(end)):
            return ()
        _, number, payload = self._socket.recv_multipart()
        sequence, (moment, events) = int.from_bytes(number, "big"), decode(payload)
        if sequence < self._next:
            if moment <= self._last_time:
                return ()  # It was sent again, and has been read.
            self._next = 0  # The publisher has started anew.
        if sequence > self._next:
            if self._replay_endpoint is not None:
                self._ask(self._replay_endpoint)
                return self._read_again(end)
            events = (CacheCleared(), *events) if self._next else events
        self._next, self._last_time = sequence + 1, moment
        return events

    def close(self) -> None:
        """Closes the sockets."""
        self._context.destroy(linger=0)

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket:
        try:
            socket = self._context.socket(kind)
            socket.set_hwm(100_000)
            socket.connect(values.text("EventReader: endpoint", endpoint))
        except zmq.ZMQError as error:
            raise ValueError(f"EventReader: endpoint must be a ZMQ address, got {endpoint!r}: {error}") from error
        return socket

    def _ask(self, endpoint: str) -> None:
        """Asks for all batches from the next one on. A socket of its own leaves no part of an earlier answer behind."""
        if self._replay is not None:
            self._replay.close(linger=0)
        self._replay = self._connect(zmq.DEALER, endpoint)
        self._replay.send_multipart([b"", self._next.to_bytes(8, "big")])
        self._ask_again_at = time.monotonic() + _PATIENCE_S

    def _read_again(self, end: float) -> tuple[CacheEvent, ...]:
        """Returns the missing events that arrive in time. A later call goes on with the rest of the answer."""
        found: list[CacheEvent] = []
        while self._replay is not None:
            if not self._replay.poll(_milliseconds_to(min(end, self._ask_again_at))):
                if time.monotonic() >= self._ask_again_at:
                    assert self._replay_endpoint is not None
                    self._ask(self._replay_endpoint)
                if time.monotonic() >= end:
                    break
                continue
            *_, number, payload = self._replay.recv_multipart()
            self._ask_again_at = time.monotonic() + _PATIENCE_S
            sequence = int.from_bytes(number, "big", signed=True)
            if sequence < 0:
                self._replay.close(linger=0)
                self._replay = None
            elif sequence >= self._next and payload:
                self._last_time, events = decode(payload)
                found += events
                self._next = sequence + 1
        return tuple(found)


def _milliseconds_to(end: float) -> int:
    return max(0, round(1000 * (end - time.monotonic())))
