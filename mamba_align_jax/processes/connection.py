"""Messages between two processes over TCP: a name, JSON values and an array of words. A message is data, never code."""

import contextlib
import json
import socket
import struct
import threading
import time
from typing import Any, NamedTuple

import numpy as np

_LENGTHS = struct.Struct("!II")
# Bytes of the longest message that a process takes from one whose token it has not checked, and from the others.
FIRST_MESSAGE = 1024
_LONGEST = 2**30
# A host that is gone without a word is noticed after the first of these numbers of seconds, and then so many more as
# the product of the other two.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
NO_WORDS = np.zeros(0, np.int32)


class Message(NamedTuple):
    """One message.

    Attributes:
        name: What is said.
        values: Values that JSON can hold.
        words: int32 [words].
    """

    name: str
    values: list[Any]
    words: np.ndarray


class Connection:
    """A connection to another process. Several threads may send, and one may receive."""

    def __init__(self, connected: socket.socket) -> None:
        """Takes a connected socket, which `close` closes."""
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._file = connected.makefile("rb")
        self._lock = threading.Lock()

    def send(self, name: str, *values: Any, words: np.ndarray = NO_WORDS, timeout_s: float = -1) -> None:
        """Sends the fields of a `Message`, or raises an OSError if the connection is lost.

        `timeout_s` are the seconds to wait for a thread that is sending; -1 waits as long as it takes.
        """
        head, body = json.dumps([name, *values]).encode(), words.astype("<i4", copy=False).tobytes()
        message = _LENGTHS.pack(len(head), len(body)) + head + body
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError(f"another thread is sending for more than {timeout_s} s")
        try:
            self._socket.sendall(message)
        finally:
            self._lock.release()

    def receive(self, longest: int = _LONGEST, seconds: float | None = None) -> Message:
        """Waits for a message.

        Args:
            longest: The bytes that it has at most.
            seconds: Seconds in which all of it must have come; None waits as long as it takes. A number changes the time
                that `set_timeout` has set.

        Raises:
            OSError: The connection is lost, or the time is over.
            ValueError: What came is no message, or a longer one.
        """
        end = None if seconds is None else time.monotonic() + seconds
        lengths = _LENGTHS.unpack(self._read(_LENGTHS.size, end))
        if sum(lengths) > longest:
            raise ValueError(f"a message must have at most {longest} bytes, got {sum(lengths)}")
        head, body = (self._read(length, end) for length in lengths)
        try:
            said = json.loads(head)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a message must be JSON, got {head[:40]!r}") from error
        match said:
            case [str(name), *values]:
                return Message(name, values, np.frombuffer(body, "<i4").astype(np.int32, copy=False))
        raise ValueError(f"a message must be a list that begins with a name, got {head!r}")

    def _read(self, length: int, end: float | None) -> bytes:
        found = b"" if end is not None else self._file.read(length)
        while end is not None and len(found) < length:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError("a message did not come in time")
            self._socket.settimeout(left)
            part = self._file.read1(length - len(found))
            if not part:
                break
            found += part
        if len(found) < length:
            raise ConnectionResetError("the other process has closed the connection")
        return found

    def set_timeout(self, seconds: float | None) -> None:
        """Sets for how long one call may wait for the network; None is for ever."""
        self._socket.settimeout(seconds)

    def finish(self) -> None:
        """Says that nothing more will be sent. The other process can still read what was."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._file.close()
        self._socket.close()
