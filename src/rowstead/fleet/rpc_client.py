"""RPC client: numbered requests with deadlines, resent until they are answered.

When a connection breaks, or the other machine is silent for some seconds, the client resolves the address again, since a
restarted server has another port, and resends all unanswered requests in order, with the same numbers.
"""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from rowstead.fleet.deduplication import WINDOW
from rowstead.fleet.keys import Keys, check_address, protect_client
from rowstead.fleet.sockets import configure, receive_frames, send_frames
from rowstead.fleet.wire import (
    DEFAULT_LIMITS,
    ERROR,
    REPLY,
    REQUEST,
    Buffer,
    Limits,
    Message,
    WireError,
    decode,
    decode_header,
    encode,
    size_of,
)
from rowstead.spec.errors import LostProcessError, RowsteadError

_RETRY_FIRST_S, _RETRY_LAST_S = 0.02, 1.0
_CONNECT_TIMEOUT_S = 2.0

_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_MONITORED_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED


class ServerUnavailable(LostProcessError):  # noqa: N818 - names what happened
    """A server did not answer in time."""


class RefusedError(RowsteadError):
    """A server answered with an error."""


class PendingReply:
    __slots__ = ("_client", "_outcome", "expires_s", "frames", "kind", "number")

    def __init__(self, client: Client, number: int, kind: str, frames: list[Buffer], expires_s: float) -> None:
        self._client = client
        self._outcome: Message | RowsteadError | None = None
        self.number = number
        self.kind = kind
        self.frames = frames
        """Kept for resending; they keep the request's tensors alive."""
        self.expires_s = expires_s
        """In terms of the client's `waited_s`."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return immediately."""
        while self._outcome is None and self._client._poll(0.0):
            pass
        return self._outcome is not None

    def wait(self) -> Message:
        """Block until the reply arrives. Raises `RefusedError`, or `ServerUnavailable` after the deadline."""
        if self._outcome is None:
            self._client._wait_until(lambda: self._outcome is not None)
        if isinstance(self._outcome, RowsteadError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def _complete(self, outcome: Message | RowsteadError) -> None:
        self.frames, self._outcome = [], outcome


class Client:
    """Client of one server, for one thread; several requests may be in flight.

    Tensors of a request must not change until it is answered: they are sent without a copy, possibly more than once. At most
    `max_in_flight` requests are unanswered; `start` blocks at that limit. A deadline counts only the time that this thread spends
    waiting in the client, not the time that it computes in between. The server runs a client's requests in order.
    """

    def __init__(
        self,
        address: Callable[[], str] | str,
        *,
        name: str,
        keys: Keys | None = None,
        deadline_s: float = 30.0,
        max_in_flight: int = 8,
        resend_after_s: float = 10.0,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """`resend_after_s`: after this long without any reply, doubling each time, a seemingly healthy connection is replaced.
        Servers may be slow, so it should be long."""
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, got {max_in_flight}")
        if isinstance(address, str):
            check_address(address, keys)
        self.name = name
        self.num_resent = 0
        self.num_bytes_sent = 0
        self.num_bytes_received = 0
        self.waited_s = 0.0
        """Seconds that this thread has waited for the server; deadlines are measured in it."""
        self.server_incarnation: int | None = None
        """Random id of the server that answered last."""
        self._find_address = (lambda: address) if isinstance(address, str) else address
        self._keys, self._limits, self._deadline_s, self._max_in_flight = keys, limits, deadline_s, max_in_flight
        self._incarnation = secrets.randbits(64)
        self._next_number = 0
        self._unanswered: dict[int, PendingReply] = {}
        """By number, oldest first."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._open_sockets: list[zmq.Socket[bytes]] = []
        self._finalizer = weakref.finalize(self, _close_sockets, self._context, self._open_sockets)
        """For a client that is never closed: collecting a context before its sockets blocks the garbage collector."""
        self._finalizer.atexit = False
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._retry_at_s: float | None = 0.0
        """When to reconnect, on the monotonic clock; None while connected or connecting."""
        self._retry_after_s = _RETRY_FIRST_S
        self._resend_at_s = 0.0
        """In terms of `waited_s`."""
        self._resend_first_s = self._resend_after_s = resend_after_s
        self._last_address = "an unknown address"
        self._problem = ""
        """Why there is no connection, as far as known."""

    def call(
        self, kind: str, facts: Mapping[str, Any] = {}, tensors: Sequence[Tensor] = (), *, deadline_s: float | None = None
    ) -> Message:
        """Send a request and wait for its reply."""
        return self.start(kind, facts, tensors, deadline_s=deadline_s).wait()

    def start(
        self, kind: str, facts: Mapping[str, Any] = {}, tensors: Sequence[Tensor] = (), *, deadline_s: float | None = None
    ) -> PendingReply:
        """Send a request and return immediately; blocks while `max_in_flight` requests are unanswered."""
        if self._context.closed:
            raise RuntimeError(f"the client {self.name} is closed")
        if not self._may_start():
            self._wait_until(self._may_start)
        number, self._next_number = self._next_number, self._next_number + 1
        frames = encode(
            Message(kind, dict(facts), list(tensors)),
            role=REQUEST,
            number=number,
            sender=self._incarnation,
            name=self.name,
            answered_below=next(iter(self._unanswered), number),
        )
        timeout_s = self._deadline_s if deadline_s is None else deadline_s
        pending = PendingReply(self, number, kind, frames, self.waited_s + timeout_s)
        if not self._unanswered:
            self._resend_at_s = self.waited_s + self._resend_after_s
        if self._socket is None and not self._unanswered:
            self._connect()
        self._unanswered[number] = pending
        if self._socket is not None:
            self._send(pending)
        return pending

    @property
    def num_in_flight(self) -> int:
        return len(self._unanswered)

    def close(self) -> None:
        """Close the connection; unanswered requests fail."""
        if self._context.closed:
            return
        self._disconnect()
        for pending in self._unanswered.values():
            pending._complete(ServerUnavailable(f"{self.name} was closed before `{pending.kind}` was answered"))
        self._unanswered.clear()
        self._finalizer.detach()
        self._context.term()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _may_start(self) -> bool:
        oldest = next(iter(self._unanswered), self._next_number)
        return len(self._unanswered) < self._max_in_flight and self._next_number - oldest < WINDOW

    def _wait_until(self, is_met: Callable[[], bool]) -> None:
        """Receive until a condition holds; requests past their deadline fail."""
        began_s = time.monotonic() - self.waited_s
        while not is_met():
            first_s = min([pending.expires_s for pending in self._unanswered.values()])
            self._poll(first_s - self.waited_s)
            self.waited_s = time.monotonic() - began_s
            if self.waited_s >= first_s:
                self._expire()

    def _poll(self, timeout_s: float) -> bool:
        """Receive for up to `timeout_s` and maintain the connection; returns whether anything arrived."""
        if self._context.closed:
            return False
        due_s = self._resend_at_s - self.waited_s if self._retry_at_s is None else self._retry_at_s - time.monotonic()
        # Rounded up: waiting a millisecond too long is better than spinning.
        ready = self._poller.poll(int(max(0.0, min(timeout_s, due_s)) * 1000 + 0.999))
        for socket, _ in ready:
            if socket is self._socket:
                self._receive(*receive_frames(self._socket, max_frames=1 + self._limits.num_tensors))
            elif socket is self._monitor:
                self._read_monitor()
        if not ready and due_s <= 0.0 and self._unanswered:
            self._resend()
        return bool(ready)

    def _receive(self, frames: Sequence[zmq.Frame], num_frames: int) -> None:
        self._retry_after_s = _RETRY_FIRST_S
        self._resend_after_s = self._resend_first_s
        self._resend_at_s = self.waited_s + self._resend_after_s
        self.num_bytes_received += sum(map(len, frames))
        first = frames[0].bytes
        try:
            header = decode_header(first, self._limits)
            if header.role not in (REPLY, ERROR) or len(frames) != num_frames:
                raise WireError("not a reply")
            message = decode(header, first, [frame.buffer for frame in frames[1:]])
        except WireError as error:
            # The peer is not our server, or has another version: no request to it can succeed.
            for pending in self._unanswered.values():
                pending._complete(RefusedError(f"{self._last_address} sent {self.name} an unreadable reply: {error}"))
            self._unanswered.clear()
            return
        self.server_incarnation = header.sender
        request = self._unanswered.pop(header.number, None)
        if request is None:  # answered twice, or expired
            return
        if header.role == ERROR:
            request._complete(RefusedError(str(message.facts.get("error", "refused"))))
        else:
            request._complete(message)

    def _read_monitor(self) -> None:
        assert self._monitor is not None
        event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._problem = ""
        elif event & _HANDSHAKE_FAILED:
            self._schedule_reconnect("it was reached, but keys or versions do not match")
        else:
            self._schedule_reconnect("there is no connection: it may have exited, see its log")

    def _schedule_reconnect(self, problem: str) -> None:
        if self._retry_at_s is None:
            self._problem = problem
            self._retry_at_s = time.monotonic() + self._retry_after_s
            self._retry_after_s = min(2 * self._retry_after_s, _RETRY_LAST_S)

    def _resend(self) -> None:
        """Reconnect to the server's current address and resend all unanswered requests, oldest first."""
        self._resend_after_s *= 2
        self._resend_at_s = self.waited_s + self._resend_after_s
        self._connect()
        if self._socket is not None:
            for pending in self._unanswered.values():
                self._send(pending)
            self.num_resent += len(self._unanswered)

    def _connect(self) -> None:
        self._disconnect()
        self._retry_at_s = None
        try:
            self._last_address = address = self._find_address()
        except RowsteadError as error:
            self._schedule_reconnect(str(error))
            return
        check_address(address, self._keys)
        socket = self._socket = self._context.socket(zmq.DEALER)
        self._open_sockets.append(socket)
        configure(socket, address, self._limits, max_queued=2 * self._max_in_flight)
        socket.linger = 0
        socket.reconnect_ivl = -1  # we reconnect ourselves, since the address may change
        socket.connect_timeout = int(_CONNECT_TIMEOUT_S * 1000)
        if self._keys is not None:
            protect_client(socket, self._keys)
        self._monitor = socket.get_monitor_socket(_MONITORED_EVENTS)
        self._open_sockets.append(self._monitor)
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        socket.connect(address)

    def _disconnect(self) -> None:
        if self._socket is None:
            return
        assert self._monitor is not None
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._open_sockets.clear()
        self._socket = self._monitor = None

    def _send(self, pending: PendingReply) -> None:
        assert self._socket is not None
        try:
            send_frames(self._socket, pending.frames)
        except zmq.Again:  # the connection has just broken
            self._schedule_reconnect("there is no connection: it may have exited, see its log")
            return
        self.num_bytes_sent += size_of(pending.frames)

    def _expire(self) -> None:
        for pending in [pending for pending in self._unanswered.values() if pending.expires_s <= self.waited_s]:
            del self._unanswered[pending.number]
            why = self._problem or "it is connected, so it may only be slow: allow more time"
            pending._complete(
                ServerUnavailable(
                    f"the server at {self._last_address} did not answer `{pending.kind}` of {self.name} in time; {why}"
                )
            )


def _close_sockets(context: zmq.Context[zmq.Socket[bytes]], sockets: Sequence[zmq.Socket[bytes]]) -> None:
    """Close the sockets of a client that was never closed."""
    for socket in sockets:
        socket.close(0)
    context.term()
