"""Bytes of replies that clients have not read yet, by connection; a server with too many of them runs no further requests.

ZeroMQ bounds the number of messages to a client, not their bytes. It tells when it has passed a message on to the operating system.
"""

from __future__ import annotations

from collections import deque

import zmq

from rowstead.fleet.wire import Limits


class UnreadReplies:
    """Replies that ZeroMQ still holds, because a client does not read or the network is slower than the server. Not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._queues: dict[bytes, deque[tuple[int, zmq.MessageTracker]]] = {}
        """By route, oldest first."""
        self._bytes: dict[bytes, int] = {}
        self.num_bytes = 0

    def add(self, route: bytes, num_bytes: int, tracker: zmq.MessageTracker) -> None:
        self._queues.setdefault(route, deque()).append((num_bytes, tracker))
        self._bytes[route] = self._bytes.get(route, 0) + num_bytes
        self.num_bytes += num_bytes

    def may_run(self, route: bytes) -> bool:
        """Whether a request that came over `route` may run now.

        Clients that have read all their replies may use all of `Limits.unread_bytes`, the others half of it: so those that never read
        do not stop those that do.
        """
        own = self._remove_read(route)
        most = self._limits.unread_bytes // 2 if own else self._limits.unread_bytes
        if self.num_bytes >= most:
            for other in list(self._queues):
                self._remove_read(other)
        return own < self._limits.unread_bytes_per_client and self.num_bytes < most

    def _remove_read(self, route: bytes) -> int:
        """Forget the replies that were read; return the bytes of the others."""
        queue = self._queues.get(route)
        if queue is None:
            return 0
        while queue and queue[0][1].done:
            num_bytes, _ = queue.popleft()
            self._bytes[route] -= num_bytes
            self.num_bytes -= num_bytes
        if not queue:
            del self._queues[route], self._bytes[route]
            return 0
        return self._bytes[route]
