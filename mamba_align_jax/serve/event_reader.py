"""Reads the cache events of one engine from its socket, without gaps and in their order."""

import time

import zmq

from mamba_align_jax import _values as values
from mamba_align_jax.cache.events import CacheCleared, CacheEvent
from mamba_align_jax.serve.event_stream import decode

# A replay socket that has been silent for so long is asked again. Each time it gets twice as long, up to the second number.
_PATIENCE_S, _LONGEST_PATIENCE_S = 1.0, 60.0


class EventReader:
    """Subscribes to one publisher, and asks its replay socket for what was published before and for what was lost.

    When the engine has started anew, what is read begins anew with `CacheCleared`. That is noticed by a number that is
    smaller than expected: not if the new engine has published as many batches as the old one before this reader is
    connected to it. One thread may use a reader.
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
        self._patience_s, self._ask_again_at = _PATIENCE_S, 0.0
        # The number of the next batch, the time of the last one, and whether the next one is a new engine's first.
        self._next, self._last_time, self._has_restarted = 0, 0.0, False
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
            self._next, self._has_restarted = 0, True
        if sequence > self._next and self._replay_endpoint is not None:
            self._ask(self._replay_endpoint)
            return self._read_again(end)
        return self._take(sequence, moment, events)

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
        self._ask_again_at = time.monotonic() + self._patience_s

    def _read_again(self, end: float) -> tuple[CacheEvent, ...]:
        """Returns the missing events that arrive in time. A later call goes on with the rest of the answer."""
        found: list[CacheEvent] = []
        while self._replay is not None:
            if not self._replay.poll(_milliseconds_to(min(end, self._ask_again_at))):
                if time.monotonic() >= self._ask_again_at:
                    # An answer may be long, and one that is given up is made in vain.
                    self._patience_s = min(2 * self._patience_s, _LONGEST_PATIENCE_S)
                    assert self._replay_endpoint is not None
                    self._ask(self._replay_endpoint)
                if time.monotonic() >= end:
                    break
                continue
            *_, number, payload = self._replay.recv_multipart()
            self._ask_again_at = time.monotonic() + self._patience_s
            sequence = int.from_bytes(number, "big", signed=True)
            if sequence < 0:
                self._replay.close(linger=0)
                self._replay, self._patience_s = None, _PATIENCE_S
            elif sequence >= self._next and payload:
                try:
                    moment, events = decode(payload)
                except ValueError:
                    assert self._replay_endpoint is not None
                    if not found:
                        self._next = sequence + 1
                        raise
                    # What came before is returned first. The next call meets this batch again.
                    self._ask(self._replay_endpoint)
                    break
                found += self._take(sequence, moment, events)
        return tuple(found)

    def _take(self, sequence: int, moment: float, events: tuple[CacheEvent, ...]) -> tuple[CacheEvent, ...]:
        """Records that a batch is read, and returns its events.

        After a gap that nobody fills, and after a restart, what is known has become wrong, so `CacheCleared` comes first.
        """
        is_wrong = sequence > self._next or self._has_restarted
        self._next, self._last_time, self._has_restarted = sequence + 1, moment, False
        return (CacheCleared(), *events) if is_wrong and events[:1] != (CacheCleared(),) else events


def _milliseconds_to(end: float) -> int:
    return max(0, round(1000 * (end - time.monotonic())))
