"""RPC server: each request runs exactly once, whatever the network does, and all queues are bounded."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import psutil
import zmq

from rowstead.fleet.deduplication import Caller, RequestDeduplicator, RequestVerdict
from rowstead.fleet.keys import Keys, ZapAuthenticator, check_address, protect_server
from rowstead.fleet.local_sockets import UNIX_SOCKET, open_socket_folder, socket_address
from rowstead.fleet.sockets import configure, receive_frames, send_frames, send_tracked
from rowstead.fleet.unread_replies import UnreadReplies
from rowstead.fleet.wire import (
    COPY_BELOW_BYTES,
    DEFAULT_LIMITS,
    ERROR,
    REPLY,
    REQUEST,
    Buffer,
    Header,
    Limits,
    Message,
    WireError,
    decode,
    decode_header,
    encode,
    number_of,
    size_of,
)
from rowstead.spec.errors import RowsteadError

_log = logging.getLogger("rowstead.fleet")
_POLL_MS = 100
"""How often an idle server checks whether to stop."""
_HELD_POLL_MS = 5
"""The same of a server whose clients have to read replies before it continues."""
_ServerT = TypeVar("_ServerT", bound="Server")


class DeferredReply:
    """A reply that is completed later, once, from any thread; for example when all trainers have entered a round."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcome: Message | Exception | None = None
        self._sender: Callable[[Message | Exception], None] | None = None

    def send(self, outcome: Message | Exception) -> None:
        """Send the reply; the client raises an exception's text as a `RefusedError`."""
        with self._lock:
            assert self._outcome is None, "a request has one reply"
            self._outcome = outcome
            sender = self._sender
        if sender is not None:
            sender(outcome)

    def set_sender(self, sender: Callable[[Message | Exception], None]) -> None:
        """Called by the server: how to send the reply; sends it now if it is already there."""
        with self._lock:
            self._sender = sender
            outcome = self._outcome
        if outcome is not None:
            sender(outcome)


Handler = Callable[[Message, Caller], Message | DeferredReply]
"""Handles a request. A `RowsteadError` that it raises is sent to the client; tensors of its reply must not change later."""


class Server:
    """Dispatches requests to handlers by their kind.

    One thread receives, runs the handlers and sends; the requests of a client run in order. One that returned a `DeferredReply` may be
    answered from another thread. The server answers the kind `status` itself; `status` adds fields to that reply.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        address: str | None = None,
        keys: Keys | None = None,
        limits: Limits = DEFAULT_LIMITS,
        name: str = "server",
        status: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Without an `address` it listens on a Unix socket in a folder of its own, which only this user can enter."""
        self._folder = contextlib.ExitStack()
        if address is None:
            address = socket_address(self._folder.enter_context(open_socket_folder()), "server")
        check_address(address, keys)
        self.name = name
        self.incarnation = secrets.randbits(64)
        self.num_requests = 0
        """Requests that have run."""
        self.num_repeated = 0
        """Repeated requests, which did not run again."""
        self.num_bytes_received = 0
        self.num_bytes_sent = 0
        self.waiting_s = 0.0
        """Seconds that the server was idle."""
        self._num_refused = 0
        self._handlers = {**handlers, "status": self._answer_status}
        self._status = status
        self._limits = limits
        self._deduplicator = RequestDeduplicator(limits)
        self._unread = UnreadReplies(limits)
        self._held: dict[bytes, deque[tuple[Header, Message]]] = {}
        """Requests by route that wait until replies have been read."""
        self._held_bytes = 0
        self._outbox: deque[tuple[Header, list[Buffer]]] = deque()
        self._serving = threading.Lock()
        self._loop_thread: int | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._process = psutil.Process()
        self._started_s = time.monotonic()
        self._wake, self._waker = sockets.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = None if keys is None else ZapAuthenticator(self._context, keys)
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._bind(address, keys)
        except BaseException:
            self.close()
            raise

    def _bind(self, address: str, keys: Keys | None) -> None:
        router = self._router
        # A client has fewer requests in flight than this, so its queue is never full.
        configure(router, address, self._limits, max_queued=2 * self._limits.in_flight_per_client)
        router.linger = 1000
        if keys is not None:
            protect_server(router, keys)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            hint = "" if address.startswith(UNIX_SOCKET) else ". Port 0 chooses a free port"
            raise RowsteadError(f"cannot listen on {address}: {error}{hint}") from None
        self.address: str = router.getsockopt_string(zmq.LAST_ENDPOINT)
        """The address that clients connect to, with the actual port."""

    @property
    def num_refused(self) -> int:
        """Invalid messages, and connections without a valid key."""
        return self._num_refused + (0 if self._authenticator is None else self._authenticator.num_refused)

    def start(self: _ServerT) -> _ServerT:
        """Serve in a new thread until `close`."""
        assert self._thread is None, "the server is already running"
        self._thread = threading.Thread(target=self.serve, name=f"rowstead-{self.name}", daemon=True)
        self._thread.start()
        return self

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve in this thread until `until()`, which is polled several times a second, or `close`."""
        with self._serving:
            self._loop_thread = threading.get_ident()
            try:
                self._poll_loop(until)
            finally:
                self._loop_thread = None
                self._send_replies()

    def close(self) -> None:
        """Stop after the running request has been answered; idempotent."""
        if self._context.closed:
            return
        assert self._loop_thread != threading.get_ident(), "a handler cannot close its server"
        self._closing = True
        self._notify()
        if self._thread is not None:
            self._thread.join()
        with self._serving:
            self._router.close()
        if self._authenticator is not None:
            self._authenticator.socket.close()
        self._context.term()
        self._folder.close()
        self._wake.close()
        self._waker.close()

    def __enter__(self: _ServerT) -> _ServerT:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _poll_loop(self, until: Callable[[], bool]) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        if self._authenticator is not None:
            poller.register(self._authenticator.socket, zmq.POLLIN)
        wake_fd = self._wake.fileno()
        while not self._closing and not until():
            before_s = time.perf_counter()
            ready = poller.poll(_HELD_POLL_MS if self._held else _POLL_MS)
            self.waiting_s += time.perf_counter() - before_s
            for source, _ in ready:
                if source is self._router:
                    self._receive(*receive_frames(self._router, max_frames=2 + self._limits.num_tensors))
                elif source == wake_fd:
                    with contextlib.suppress(BlockingIOError):
                        self._wake.recv(4096)
                elif self._authenticator is not None:
                    self._authenticator.handle_request()
            self._send_replies()
            if self._held:
                self._run_held()

    def _receive(self, frames: list[zmq.Frame], num_frames: int) -> None:
        """Run, repeat or refuse a request; the first frame is the route back."""
        route = frames.pop(0).bytes
        self.num_bytes_received += sum(map(len, frames))
        first = frames[0].bytes if frames and len(frames[0]) <= self._limits.first_frame_bytes else b""
        try:
            header = decode_header(first, self._limits)
            if header.role != REQUEST:
                raise WireError("not a request")
            if len(frames) + 1 != num_frames:
                raise WireError(f"the message has {num_frames - 2:,} tensors; the limit is {self._limits.num_tensors:,}")
            message = decode(header, first, [frame.buffer for frame in frames[1:]])
            if header.kind not in self._handlers:
                raise WireError(f"unknown request `{header.kind}`; known: {', '.join(sorted(self._handlers))}")
        except WireError as error:
            self._num_refused += 1
            if (number := number_of(first)) is not None:
                self._send(route, self._encode(number, error))
            return
        verdict, reply = self._deduplicator.admit(header, route)
        if verdict is RequestVerdict.RUN:
            if route not in self._held and self._unread.may_run(route):
                self._run(header, message)
            else:
                self._hold(route, header, message)
            return
        self.num_repeated += verdict is not RequestVerdict.TOO_MANY
        if verdict is RequestVerdict.REPEAT:
            assert reply is not None
            if self._unread.may_run(route):  # or it is resent once more
                self._send(route, reply)
        elif verdict is RequestVerdict.EVICTED:
            problem = f"`{header.kind}` of {header.name} has run, but its reply is no longer kept"
            self._send(route, self._encode(header.number, RowsteadError(problem)))
        elif verdict is RequestVerdict.TOO_MANY:
            self._num_refused += 1
            problem = f"{header.name} has too many requests in flight, or {self.name} too many clients; send fewer at a time"
            self._send(route, self._encode(header.number, RowsteadError(problem)))

    def _hold(self, route: bytes, header: Header, message: Message) -> None:
        """Keep a request until its client has read earlier replies, or refuse it if there are too many of those."""
        held = self._held.setdefault(route, deque())
        if len(held) < self._limits.in_flight_per_client and self._held_bytes < self._limits.unread_bytes_per_client:
            held.append((header, message))
            self._held_bytes += header.facts_bytes + header.tensors_bytes
            return
        self._num_refused += 1
        problem = f"{header.name} does not read the replies of {self.name}: read them before sending more requests"
        self._queue_reply(header, RowsteadError(problem))

    def _run_held(self) -> None:
        for route, held in list(self._held.items()):
            while held and self._unread.may_run(route):
                header, message = held.popleft()
                self._held_bytes -= header.facts_bytes + header.tensors_bytes
                self._run(header, message)
                self._send_replies()
            if not held:
                del self._held[route]

    def _run(self, header: Header, message: Message) -> None:
        self.num_requests += 1
        outcome: Message | DeferredReply | Exception
        try:
            outcome = self._handlers[header.kind](message, Caller(header.name, header.sender))
        except RowsteadError as error:
            outcome = error
        except Exception as error:
            _log.exception("%s failed at `%s` of %s", self.name, header.kind, header.name)
            outcome = RowsteadError(f"{self.name} failed at `{header.kind}`: {type(error).__name__}: {error}")
        if isinstance(outcome, DeferredReply):
            outcome.set_sender(lambda reply: self._queue_reply(header, reply))
        else:
            self._queue_reply(header, outcome)

    def _queue_reply(self, header: Header, outcome: Message | Exception) -> None:
        """Pass a reply to the thread that sends; callable from any thread."""
        try:
            frames = self._encode(header.number, outcome)
        except Exception as error:  # such as facts that are not JSON
            _log.exception("%s cannot send its reply to `%s`", self.name, header.kind)
            problem = RowsteadError(f"{self.name} cannot send its reply to `{header.kind}`: {type(error).__name__}: {error}")
            frames = self._encode(header.number, problem)
        self._outbox.append((header, frames))
        self._notify()

    def _notify(self) -> None:
        if threading.get_ident() != self._loop_thread:
            with contextlib.suppress(BlockingIOError, OSError):  # full: it wakes up anyway; closed: it has stopped
                self._waker.send(b"\0")

    def _send_replies(self) -> None:
        while self._outbox:
            header, frames = self._outbox.popleft()
            self._send(self._deduplicator.finish(header.sender, header.number, frames), frames)

    def _encode(self, number: int, outcome: Message | Exception) -> list[Buffer]:
        role = REPLY
        if isinstance(outcome, Exception):
            role, outcome = ERROR, Message("error", {"error": str(outcome)[:4000]})
        return encode(outcome, role=role, number=number, sender=self.incarnation, name=self.name)

    def _send(self, route: bytes, frames: list[Buffer]) -> None:
        # ZeroMQ drops messages to a client that is gone or does not read; a live client resends its request.
        num_bytes = size_of(frames)
        if num_bytes < COPY_BELOW_BYTES:
            send_frames(self._router, [route, *frames])
        else:
            self._unread.add(route, num_bytes, send_tracked(self._router, [route, *frames]))
        self.num_bytes_sent += num_bytes

    def _answer_status(self, message: Message, caller: Caller) -> Message:
        return Message("status", self.status())

    def status(self) -> dict[str, Any]:
        """Return figures of the server since it started."""
        with self._process.oneshot():
            times, rss_bytes = self._process.cpu_times(), self._process.memory_info().rss
        return {
            "name": self.name,
            "num_requests": self.num_requests,
            "num_repeated": self.num_repeated,
            "num_refused": self.num_refused,
            "num_clients": self._deduplicator.num_clients,
            "waiting_s": self.waiting_s,
            "up_s": time.monotonic() - self._started_s,
            "cpu_s": times.user + times.system,
            "rss_bytes": rss_bytes,
            "num_bytes_received": self.num_bytes_received,
            "num_bytes_sent": self.num_bytes_sent,
            "unread_replies_bytes": self._unread.num_bytes,
            "kept_replies_bytes": self._deduplicator.kept_replies_bytes,
            **self._status(),
        }
