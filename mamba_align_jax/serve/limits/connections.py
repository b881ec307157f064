"""Connections that are bounded in number, in the size and time of a call's head, and in the time of a client that stalls."""

import asyncio
import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from mamba_align_jax.serve.limits.hosts import Hosts
from mamba_align_jax.serve.refusals import Refusal, to_json
from mamba_align_jax.serve.settings import Limits

_LOG = logging.getLogger(__name__)
# What asks whether the process lives is answered however many calls run.
PROBES = frozenset(("/health", "/ready", "/metrics"))
# Connections that are open besides those that `Limits.connections` calls may use: for probes, and for those that are told
# that there are too many.
RESERVED = 32
# Connections that may wait to be accepted. All of them may be accepted in one turn of the event loop.
BACKLOG = 128
# Descriptors that are left for files, and for the pipes of other processes.
_SPARE = 64
_LINGER_S = 2  # for the rest of a call that was answered
_LAST_CALL_S = 0.25  # for calls that are on their way when the server is told to stop


def max_connections(wanted: int) -> int:
    """Returns how many connections may have calls at once: as many as wanted, or what the process' descriptors allow."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    room = max(1, limit - len(os.listdir("/dev/fd")) - RESERVED - BACKLOG - _SPARE)
    if room < wanted:
        _LOG.warning("at most %d connections can have calls at once, because `ulimit -n` is %d", room, limit)
    return min(wanted, room)


class _Parser(httptools.HttpRequestParser):
    """Parses calls. One that asks for another protocol is a call like any other, and so it has its body.

    httptools takes whatever follows the head of such a call for the other protocol. A server need not change protocols, and
    this one never does.
    """

    def __init__(self, protocol: "GuardedProtocol") -> None:
        super().__init__(protocol)
        self._protocol = protocol
        # As in uvicorn's own parser: what follows a call that is the last one of its connection is no error.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        """Parses what has arrived, or raises an HttpParserError if it is no HTTP."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            head = self._protocol.head_without_upgrade()
            # A parser that has seen the end of a connection's last call would pass over what follows.
            again = self._protocol.parser = _Parser(self._protocol)
            again.feed_data(head)
            again.feed_data(data[upgrade.args[0] :])


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits of ours: it has none on what comes before and after a body, nor on unread answers.

    A connection without a call gives way to a new one when there are many, and the first to do so is the one that has been
    without a call for the longest time. So does one that asks a probe whose answer it does not read.

    A call that is sent before the one before it was answered ends the connection. uvicorn would let it wait, and would then
    no longer notice that the client of the call that runs has left.
    """

    def __init__(
        self,
        limits: Limits,
        hosts: Hosts,
        num_calls: int,
        on_refusal: Callable[[int, str | None], object],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Takes the limits, the hosts that calls may name, and what uvicorn gives to its own protocol.

        `num_calls` is how many connections may have calls at once: see `max_connections`. `on_refusal` is told each
        refusal's status and code.
        """
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._limits, self._hosts, self._num_calls, self._on_refusal = limits, hosts, num_calls, on_refusal
        # The event loop has one time for all that it accepts at once.
        self._idle_since = time.monotonic_ns()
        self._head_bytes = 0
        self._is_in_body = False
        self._is_refused = False
        self._is_last = False
        self._is_stopping = False
        self._has_given_way = False
        self._asks_probe = False
        # It runs while a head is awaited, and while the rest of a body is whose call was refused already.
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection. If there are many, another one gives way, or this one is refused if all have calls."""
        super().connection_made(transport)
        if not self._has_room():
            self._refuse(_too_many())
            return
        own = transport.get_extra_info("socket")
        if own is not None and hasattr(socket, "TCP_USER_TIMEOUT") and own.family in (socket.AF_INET, socket.AF_INET6):
            # The system ends a connection whose client acknowledges nothing for so long, even after the last write.
            milliseconds = min(max(int(1000 * self._limits.send_s), 1), 2**31 - 1)  # 0 would be no limit
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads a part of a call. The head must be complete in time, and not too long."""
        if self.transport.is_closing():
            return
        if self._is_between_calls() and self._head_timer is None:
            self._await_head()
        is_rest = self._is_between_calls() and self._is_in_body
        # A head that comes in one piece may be no longer than one that comes in many.
        while data and not self.transport.is_closing():
            room = self._limits.head_bytes - self._head_bytes
            if room <= 0:
                message = f"a call's head must have at most {self._limits.head_bytes} bytes"
                self._refuse(Refusal(431, message, code="head_too_large"))
                return
            part, data = data[:room], data[room:]
            self._head_bytes += len(part)
            super().data_received(part)
        if not self._is_between_calls():
            self._head_timer = _stopped(self._head_timer)
        elif is_rest and not self._is_in_body:
            self._head_timer = _stopped(self._head_timer)
            self._await_next_call()

    def on_message_begin(self) -> None:
        """Takes note that a call begins, which must not be before the one before it was answered."""
        if not self._is_between_calls():
            raise ValueError("a call began before the one before it was answered")  # It ends in send_400_response.
        super().on_message_begin()

    def head_without_upgrade(self) -> bytes:
        """Returns the head that has just been parsed, without the header that asks for another protocol."""
        first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = (b"%s: %s" % header for header in self.headers if header[0] != b"upgrade")
        return b"\r\n".join((first, *kept, b"", b""))

    def on_headers_complete(self) -> None:
        """Takes note that a head is complete."""
        self._head_bytes = 0
        if self._is_parsed_again():
            return
        self._is_in_body = True
        try:
            self._check_head()
        except Refusal as refusal:
            self._refuse(refusal)
            return
        super().on_headers_complete()
        self.cycle.transport = _Lingering(self)  # type: ignore[assignment]
        if self._is_stopping and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Takes a part of a body. What comes between two parts, or after the last one, counts like a head."""
        self._head_bytes = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Takes note that a call is complete."""
        self._head_bytes = 0
        if self._is_parsed_again():
            return
        self._is_in_body = False
        if self._is_last:
            self.transport.close()
        if not self._is_refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Takes note that a call was answered."""
        self._idle_since = time.monotonic_ns()
        super().on_response_complete()

    @property
    def _all(self) -> "set[GuardedProtocol]":
        """All connections of the server."""
        return cast("set[GuardedProtocol]", self.connections)

    def _has_room(self) -> bool:
        """Whether this connection may be open. If there are many, another one is closed."""
        most = self._num_calls + RESERVED
        if len(self.connections) <= most:
            return True
        others = [one for one in self._all if one is not self and not one._has_given_way]
        if len(others) < most:
            return True
        idle = [one for one in others if one._is_between_calls() or one._asks_probe]
        if not idle:
            return False
        # Those go last whose answer is still being sent, even if they are to be closed after it. A probe is answered at
        # once, so one that has not ended has an answer that its client does not read.
        sends = lambda one: not one._is_between_calls() or one.transport.get_write_buffer_size() > 0
        oldest = min(idle, key=lambda one: (sends(one), one._idle_since))
        oldest._has_given_way = True
        oldest.transport.abort()
        return True

    def _check_head(self) -> None:
        """Raises a Refusal of the call whose head is complete, unless it asks whether the process lives.

        Its host may be unknown, or as many connections as allowed have calls already.
        """
        path = self.url.partition(b"?")[0].decode("latin-1")
        self._asks_probe = path in PROBES
        if self._asks_probe:
            return
        self._hosts.check(self.headers)
        if len(self.connections) > self._num_calls:
            busy = sum(not one._is_between_calls() for one in self._all)
            if busy >= self._num_calls:
                raise _too_many()

    def close_after_body(self) -> None:
        """Closes the connection after the rest of its last call, or soon.

        The system would tell a client that is still sending of an error, and drop the answer that it has not read yet.
        """
        if self._is_in_body:
            self._is_last = True
            self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP."""
        self._refuse(Refusal(400, msg, code="no_http"))

    def shutdown(self) -> None:
        """Ends the connection after its call. One without a call is closed soon, and not at once.

        What has arrived and was not read would make the system reset the connection instead of closing it.
        """
        self._is_stopping = True
        if self._is_between_calls():
            self.loop.call_later(_LAST_CALL_S, self._close_between_calls)
        else:
            self.cycle.keep_alive = False

    def _close_between_calls(self) -> None:
        if self._is_between_calls() and not self._is_last:
            self.transport.close()

    def pause_writing(self) -> None:
        """Gives a client that reads more slowly than it is answered a while to catch up."""
        super().pause_writing()
        self._await_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Takes note that the client has caught up."""
        self._send_timer = _stopped(self._send_timer)
        super().resume_writing()

    def _await_reader(self, num_unread: int) -> None:
        self._send_timer = self.loop.call_later(self._limits.send_s, self._reader_is_late, num_unread)

    def _reader_is_late(self, num_unread: int) -> None:
        """Ends the connection of a client that has read nothing, but not of one that reads a long answer slowly."""
        num_left = self.transport.get_write_buffer_size()
        if num_left < num_unread:
            self._await_reader(num_left)
        else:
            self.transport.abort()

    def _is_parsed_again(self) -> bool:
        """Whether the head that is complete asks for another protocol, and is parsed again without that wish."""
        # CONNECT asks for another one by its name. Its target is no address of this server.
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _is_between_calls(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.receive_s, self._head_is_late)

    def _await_next_call(self) -> None:
        """Starts uvicorn's timer, which any read stops, as uvicorn does after an answer."""
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _head_is_late(self) -> None:
        if self._is_in_body:
            self.transport.close()  # Its call was answered already.
        elif not self.transport.is_closing():
            message = f"a call's head must arrive within {self._limits.receive_s:g} s"
            self._refuse(Refusal(408, message, code="head_timeout"))

    def _refuse(self, refusal: Refusal) -> None:
        """Answers without a call, unless the answer to one is under way, and closes the connection."""
        self._is_refused = True
        self._stop_timers()
        if not self._is_between_calls():
            self.transport.close()
            return
        body = to_json(refusal.content)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._on_refusal(refusal.status, refusal.code)
        self.transport.write(STATUS_LINE[refusal.status] + head + body)
        self.close_after_body()

    def _stop_timers(self) -> None:
        self._head_timer, self._send_timer = _stopped(self._head_timer), _stopped(self._send_timer)


class _Lingering:
    """A connection's transport, for a call: what closes it lets the client finish its call first."""

    def __init__(self, protocol: GuardedProtocol) -> None:
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol.transport, name)

    def close(self) -> None:
        self._protocol.close_after_body()


def _too_many() -> Refusal:
    return Refusal(503, "too many connections are open", code="too_many_connections")


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
