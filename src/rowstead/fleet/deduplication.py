"""Request deduplication: a request that arrives twice runs once. No sockets here.

A client numbers its requests and sends with each the number below which it has all replies. The server keeps only the replies
that may still be requested; above `Limits.kept_replies_bytes` it evicts the oldest, and a client that resends such a request gets
an error. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from rowstead.fleet.wire import Buffer, Header, Limits, size_of

WINDOW = 1024
"""A client never sends a number this far above one that it may still resend; both sides rely on it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that sent a request."""

    name: str
    incarnation: int
    """Random id of the client; a restarted client has another."""


class RequestVerdict(Enum):
    """What to do with a request."""

    RUN = "run"
    WAIT = "wait"
    """It is already running; its reply goes to the route of the latest request."""
    REPEAT = "repeat"
    """It has run; resend its reply."""
    EVICTED = "evicted"
    """It has run, but its reply was evicted."""
    STALE = "stale"
    """The client already has its reply."""
    TOO_MANY = "too many"


@dataclass(slots=True)
class _Request:
    route: bytes
    reply: list[Buffer] | None = None
    is_done: bool = False


@dataclass(slots=True)
class _Client:
    requests: dict[int, _Request] = field(default_factory=dict)
    answered_below: int = 0
    num_running: int = 0


class RequestDeduplicator:
    """Running requests, and replies that may be requested again, of all clients."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._clients: OrderedDict[int, _Client] = OrderedDict()
        """By incarnation, least recently seen first."""
        self._reply_bytes: OrderedDict[tuple[int, int], int] = OrderedDict()
        """Size of each kept reply by client and number, oldest first."""
        self.kept_replies_bytes = 0

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def admit(self, header: Header, route: bytes) -> tuple[RequestVerdict, list[Buffer] | None]:
        """Decide what to do with a request that arrived over `route`; for a repeated one, also return its reply."""
        client = self._clients.get(header.sender)
        if client is None:
            if not self._evict_client():
                return RequestVerdict.TOO_MANY, None
            client = self._clients[header.sender] = _Client()
        else:
            self._clients.move_to_end(header.sender)
        self._drop_acknowledged(header.sender, client, max(header.answered_below, header.number - WINDOW))
        if header.number < client.answered_below:
            return RequestVerdict.STALE, None
        if known := client.requests.get(header.number):
            known.route = route
            if not known.is_done:
                return RequestVerdict.WAIT, None
            return (RequestVerdict.EVICTED, None) if known.reply is None else (RequestVerdict.REPEAT, known.reply)
        if client.num_running >= self._limits.in_flight_per_client:
            return RequestVerdict.TOO_MANY, None
        client.requests[header.number] = _Request(route)
        client.num_running += 1
        return RequestVerdict.RUN, None

    def finish(self, sender: int, number: int, reply: list[Buffer]) -> bytes:
        """Record the reply to a running request; returns the route of its latest copy."""
        client = self._clients[sender]
        request = client.requests[number]
        assert not request.is_done, "a request has one reply"
        client.num_running -= 1
        request.is_done = True
        if number < client.answered_below:  # its client has given up
            del client.requests[number]
            return request.route
        request.reply = reply
        self._reply_bytes[sender, number] = size_of(reply)
        self.kept_replies_bytes += self._reply_bytes[sender, number]
        while self.kept_replies_bytes > self._limits.kept_replies_bytes and len(self._reply_bytes) > 1:
            (old_sender, old_number), num_bytes = self._reply_bytes.popitem(last=False)
            self.kept_replies_bytes -= num_bytes
            self._clients[old_sender].requests[old_number].reply = None
        return request.route

    def _drop_acknowledged(self, sender: int, client: _Client, answered_below: int) -> None:
        """Drop the replies that the client has received."""
        if answered_below <= client.answered_below:
            return
        client.answered_below = answered_below
        for number in [number for number, request in client.requests.items() if request.is_done and number < answered_below]:
            del client.requests[number]
            self.kept_replies_bytes -= self._reply_bytes.pop((sender, number), 0)

    def _evict_client(self) -> bool:
        """At the limit, drop the least recently seen client that has no running request; False if there is none."""
        if len(self._clients) < self._limits.num_clients:
            return True
        idle = next((sender for sender, client in self._clients.items() if not client.num_running), None)
        if idle is None:
            return False
        for number in self._clients.pop(idle).requests:
            self.kept_replies_bytes -= self._reply_bytes.pop((idle, number), 0)
        return True
