"""Which requests of which client have been seen, so that one that comes twice runs once. No sockets here.

A client numbers its requests and says with each below which number it has all answers. So the server keeps the answers that may
still be asked for, and no more; should they take too many bytes, the oldest lose their content, and a client that asks for one of
those is told so. Used by one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from rowstead.fleet.wire import Buffer, Header, Limits, size_of

WINDOW = 1024
"""A client never sends a number this far above one that it may still send again; both sides count on it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    name: str
    incarnation: int
    """Drawn by chance when that client was made: a client that was started again has another."""


class RequestVerdict(Enum):
    """What to do with a request."""

    RUN = "run"
    WAIT = "wait"
    """It is running already; its answer goes to whoever asked last."""
    REPEAT = "repeat"
    """It has run; its answer is at hand."""
    EVICTED = "evicted"
    """It has run, but its answer is no longer kept."""
    STALE = "stale"
    """Nobody waits for it."""
    TOO_MANY = "too many"


@dataclass(slots=True)
class _Request:
    route: bytes
    answer: list[Buffer] | None = None
    is_done: bool = False


@dataclass(slots=True)
class _Client:
    requests: dict[int, _Request] = field(default_factory=dict)
    answered_below: int = 0
    num_running: int = 0


class RequestDeduplicator:
    """Requests that run, and answers that may be asked for again, of all clients."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._clients: OrderedDict[int, _Client] = OrderedDict()
        """By incarnation; the one not heard of for longest comes first."""
        self._reply_bytes: OrderedDict[tuple[int, int], int] = OrderedDict()
        """Bytes of each answer that is kept, by client and number; the oldest first."""
        self.remembered_bytes = 0
        self.num_running = 0

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def admit(self, header: Header, route: bytes) -> tuple[RequestVerdict, list[Buffer] | None]:
        """What to do with a request that came over `route`, and its answer where it has been given before."""
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
            return (RequestVerdict.EVICTED, None) if known.answer is None else (RequestVerdict.REPEAT, known.answer)
        if client.num_running >= self._limits.in_flight_per_client:
            return RequestVerdict.TOO_MANY, None
        client.requests[header.number] = _Request(route)
        client.num_running += 1
        self.num_running += 1
        return RequestVerdict.RUN, None

    def finish(self, sender: int, number: int, answer: list[Buffer]) -> bytes:
        """Keep the answer to a request that was to be run; returns the route on which it was asked for last."""
        client = self._clients[sender]
        request = client.requests[number]
        assert not request.is_done, "a request is answered once"
        client.num_running -= 1
        self.num_running -= 1
        request.is_done = True
        if number < client.answered_below:  # its client has given up on it
            del client.requests[number]
            return request.route
        request.answer = answer
        self._reply_bytes[sender, number] = size_of(answer)
        self.remembered_bytes += self._reply_bytes[sender, number]
        while self.remembered_bytes > self._limits.remembered_bytes and len(self._reply_bytes) > 1:
            (old_sender, old_number), num_bytes = self._reply_bytes.popitem(last=False)
            self.remembered_bytes -= num_bytes
            self._clients[old_sender].requests[old_number].answer = None
        return request.route

    def _drop_acknowledged(self, sender: int, client: _Client, answered_below: int) -> None:
        """Drop what the client will not ask for again."""
        if answered_below <= client.answered_below:
            return
        client.answered_below = answered_below
        for number in [number for number, request in client.requests.items() if request.is_done and number < answered_below]:
            del client.requests[number]
            self.remembered_bytes -= self._reply_bytes.pop((sender, number), 0)

    def _evict_client(self) -> bool:
        """Forget the client not heard of for longest, where there are as many as may be; one whose requests run stays."""
        if len(self._clients) < self._limits.num_clients:
            return True
        idle = next((sender for sender, client in self._clients.items() if not client.num_running), None)
        if idle is None:
            return False
        for number in self._clients.pop(idle).requests:
            self.remembered_bytes -= self._reply_bytes.pop((idle, number), 0)
        return True
