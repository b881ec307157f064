"""Reads the cache events of one engine from its socket, without gaps and in their order."""

import math
import time

import zmq

from mamba_align_jax import _values as values
from mamba_align_jax.cache.events import CacheCleared, CacheEvent
from mamba_align_jax.errors import FieldError
from mamba_align_jax.serve.events.stream import decode

# A replay socket is asked again if nothing was heard for so long, then for twice as long, up to the second number.
_PATIENCE_S, _LONGEST_PATIENCE_S = 1.0, 60.0


class EventReader:
    """Subscribes to one publisher, and asks its replay socket for what was published before and for what was lost.

    When the connection was lost or the engine has started anew, what is read begins anew with `CacheCleared`. One thread
    may use a reader.
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
        # The socket on which an answer is awaited, or None, and when the next question is asked if nothing is heard.
        self._replay: zmq.Socket | None = None
        self._patience_s, self._ask_again_at = _PATIENCE_S, math.inf
        # The number of the next batch, the time of the last one, and whether the next one may be another engine's.
        self._next, self._last_time, self._has_restarted = 0, 0.0, False
        try:
            self._socket = self._context.socket(zmq.SUB)
            self._disconnections = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._connect(self._socket, "endpoint", endpoint)
            self._socket.subscribe(values.text("EventReader: topic", topic))
            self._ask()
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
        while True:
            self._socket.poll(0)  # ZMQ renews the subscription at a new publisher while the socket is in use.
            if self._is_disconnected():
                self._start_anew()
            if self._replay is not None:
                events = self._read_again(end)
                if events or self._replay is not None:
                    return events
            if self._socket.poll(self._milliseconds_to(end)):
                break
            self._ask_if_silent()
            if time.monotonic() >= end:
                return ()
        _, number, payload = self._socket.recv_multipart()
        sequence, (moment, events) = int.from_bytes(number, "big"), decode(payload)
        # Between the look above and this batch, another engine may have taken the place of the one that is known.
        if self._is_disconnected():
            self._start_anew()
            return self._read_again(end)  # this batch may be of either engine
        if sequence < self._next and moment > self._last_time:
            self._start_anew()
        elif sequence < self._next:
            return ()  # It was sent again, and has been read.
        elif sequence > self._next:
            self._ask()
        return self._take(sequence, moment, events) if self._replay is None else self._read_again(end)

    def close(self) -> None:
        """Closes the sockets."""
        self._context.destroy(linger=0)

    def _is_disconnected(self) -> bool:
        """Whether the publisher has gone since the last call. Another one may have its place now.

        What it had sent and was not read is dropped, because its numbers could be taken for those of the other one.
        """
        found = False
        while self._disconnections.poll(0):
            self._disconnections.recv_multipart()
            found = True
        while found and self._socket.poll(0):
            self._socket.recv_multipart()
        return found

    def _start_anew(self) -> None:
        """Reads from the first batch on, and clears what was known before."""
        self._next, self._has_restarted = 0, True
        self._ask()

    def _connect(self, socket: zmq.Socket, name: str, endpoint: str) -> None:
        """Connects a socket to the address that the argument `name` has."""
        name = f"EventReader: {name}"
        try:
            socket.set_hwm(100_000)
            socket.connect(values.text(name, endpoint))
        except zmq.ZMQError as error:
            raise FieldError(name, "a ZMQ address", f"{values.shown(endpoint)}: {error}") from error

    def _ask(self) -> None:
        """Asks the replay socket, if there is one, for all batches from the next one on.

        Each question has a socket of its own, so that no part of an earlier answer is taken for a part of this one.
        """
        if self._replay_endpoint is None:
            return
        if self._replay is not None:
            self._replay.close(linger=0)
        self._replay = self._context.socket(zmq.DEALER)
        self._connect(self._replay, "replay_endpoint", self._replay_endpoint)
        self._replay.send_multipart([b"", self._next.to_bytes(8, "big")])
        self._ask_again_at = time.monotonic() + self._patience_s

    def _ask_if_silent(self) -> None:
        """Asks again if nothing was heard for some time.

        An answer may have been lost, and so may the last batch, or all that came before the subscription had arrived.
        """
        if time.monotonic() >= self._ask_again_at:
            # An answer that takes long would be given up for ever if patience did not grow.
            self._patience_s = min(2 * self._patience_s, _LONGEST_PATIENCE_S)
            self._ask()

    def _read_again(self, end: float) -> tuple[CacheEvent, ...]:
        """Returns the missing events that arrive in time. A later call goes on with the rest of the answer."""
        found: list[CacheEvent] = []
        while self._replay is not None:
            if not self._replay.poll(self._milliseconds_to(end)):
                self._ask_if_silent()
                if time.monotonic() >= end:
                    break
                continue
            *_, number, payload = self._replay.recv_multipart()
            self._ask_again_at = time.monotonic() + self._patience_s
            sequence = int.from_bytes(number, "big", signed=True)
            if sequence < 0:
                self._replay.close(linger=0)
                self._replay = None
            elif sequence >= self._next and payload:
                try:
                    moment, events = decode(payload)
                except ValueError:
                    if not found:
                        self._next = sequence + 1
                        raise
                    # What came before is returned first. The next call meets this batch again.
                    self._ask()
                    break
                found += self._take(sequence, moment, events)
        return tuple(found)

    def _take(self, sequence: int, moment: float, events: tuple[CacheEvent, ...]) -> tuple[CacheEvent, ...]:
        """Records that a batch is read, and returns its events.

        After a gap that nobody fills, and after a restart, what is known has become wrong, so `CacheCleared` comes first.
        """
        is_wrong = sequence > self._next or self._has_restarted
        self._next, self._last_time, self._has_restarted = sequence + 1, moment, False
        self._patience_s = _PATIENCE_S
        if self._replay_endpoint is not None:
            self._ask_again_at = time.monotonic() + self._patience_s
        return (CacheCleared(), *events) if is_wrong and events[:1] != (CacheCleared(),) else events

    def _milliseconds_to(self, end: float) -> int:
        """Returns how long to wait for a message: until `end`, or until the replay socket is to be asked again."""
        return max(0, math.ceil(1000 * (min(end, self._ask_again_at) - time.monotonic())))
