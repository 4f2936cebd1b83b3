"""Links between the roles of a local fleet that can be cut or slowed down: a relay on every server's Unix socket.

A server that binds its socket gets a relay in front of it: its socket is renamed, and one of ours takes its name. Bytes really pass through, and
a cut connection is really closed, as by a network. Clients that had connected before the socket was renamed are not behind the relay.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import stat
import threading
import time
from collections import deque
from pathlib import Path

REAL = "~"
"""At the end of the name of a server's own socket."""
LATENCY_S = 0.03
"""Of each piece of a slow link."""
SCAN_INTERVAL_S = 0.005
_PIECE_BYTES = 1 << 16
_MAX_QUEUED_BYTES = 4 << 20


class _End:
    """One connection of a pair: what was received for it, and when it may be sent."""

    def __init__(self, connection: socket.socket, server: str) -> None:
        self.socket, self.server = connection, server
        self.peer: _End
        self.queue: deque[tuple[float, bytes]] = deque()
        self.num_queued_bytes = 0
        self.is_at_end = False
        connection.setblocking(False)


class Links:
    """Relays of all servers whose sockets appear in folders of `parent`, in a thread, inside a `with`."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._listeners: dict[Path, tuple[int, socket.socket]] = {}
        """By path: the inode of our socket there, and it."""
        self._ends: set[_End] = set()
        self._cut_until: dict[str, float] = {}
        self._slow_until: dict[str, float] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self.num_bytes = 0
        """That have passed."""

    def __enter__(self) -> Links:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        for _, listener in self._listeners.values():
            listener.close()
        for end in list(self._ends):
            end.socket.close()

    def cut(self, server: str, duration_s: float) -> None:
        """Close the connections of a server, and refuse new ones for a while."""
        self._cut_until[server] = time.monotonic() + duration_s

    def slow_down(self, server: str, duration_s: float) -> None:
        """Delay what its clients and it send each other for a while."""
        self._slow_until[server] = time.monotonic() + duration_s

    def _run(self) -> None:
        scanned_s = 0.0
        while not self._closed.is_set():
            now = time.monotonic()
            if now > scanned_s + SCAN_INTERVAL_S:
                scanned_s = now
                self._scan()
                for end in list(self._ends):
                    if self._is_cut(end.server):
                        self._drop(end)
            with selectors.DefaultSelector() as selector:
                for _, listener in self._listeners.values():
                    selector.register(listener, selectors.EVENT_READ)
                for end in self._ends:
                    wants = 0
                    if not end.is_at_end and end.peer.num_queued_bytes < _MAX_QUEUED_BYTES:
                        wants |= selectors.EVENT_READ
                    if end.queue and end.queue[0][0] <= now:
                        wants |= selectors.EVENT_WRITE
                    if wants:
                        selector.register(end.socket, wants, end)
                for key, events in selector.select(SCAN_INTERVAL_S):
                    if key.data is None:
                        self._accept(key.fileobj)  # type: ignore[arg-type]
                        continue
                    if events & selectors.EVENT_READ and key.data in self._ends:
                        self._receive(key.data)
                    if events & selectors.EVENT_WRITE and key.data in self._ends:
                        self._send(key.data)

    def _scan(self) -> None:
        """Put a relay in front of the servers that have bound their sockets since the last time."""
        for path in self._parent.glob("*/*"):
            with contextlib.suppress(OSError):
                found = path.stat()
                if not stat.S_ISSOCK(found.st_mode) or path.name.endswith(REAL):
                    continue
                ours = self._listeners.get(path)
                if ours is not None and ours[0] == found.st_ino:
                    continue
                if ours is not None:
                    self._listeners.pop(path)[1].close()
                os.rename(path, f"{path}{REAL}")
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(str(path))
                listener.listen(64)
                listener.setblocking(False)
                self._listeners[path] = path.stat().st_ino, listener

    def _accept(self, listener: socket.socket) -> None:
        path = Path(listener.getsockname())
        try:
            client, _ = listener.accept()
        except OSError:
            return
        server = socket.socket(socket.AF_UNIX)
        try:
            if self._is_cut(path.name.rpartition("-")[0]):
                raise ConnectionRefusedError
            server.connect(f"{path}{REAL}")
        except OSError:
            client.close()
            server.close()
            return
        name = path.name.rpartition("-")[0]  # without the incarnation
        one, other = _End(client, name), _End(server, name)
        one.peer, other.peer = other, one
        self._ends |= {one, other}

    def _receive(self, end: _End) -> None:
        try:
            content = end.socket.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            content = b""
        if not content:
            end.is_at_end = True
            if not end.peer.queue:
                self._drop(end)
            return
        now = time.monotonic()
        latency_s = LATENCY_S if now < self._slow_until.get(end.server, 0.0) else 0.0
        earlier_s = end.peer.queue[-1][0] if end.peer.queue else 0.0
        end.peer.queue.append((max(now + latency_s, earlier_s), content))
        end.peer.num_queued_bytes += len(content)
        if not latency_s:
            self._send(end.peer)

    def _send(self, end: _End) -> None:
        now = time.monotonic()
        while end.queue and end.queue[0][0] <= now:
            due_s, content = end.queue[0]
            try:
                num_bytes = end.socket.send(content)
            except BlockingIOError:
                return
            except OSError:
                self._drop(end)
                return
            self.num_bytes += num_bytes
            end.num_queued_bytes -= num_bytes
            if num_bytes < len(content):
                end.queue[0] = due_s, content[num_bytes:]
                return
            end.queue.popleft()
        if end.peer.is_at_end and not end.queue:
            self._drop(end)

    def _drop(self, end: _End) -> None:
        for each in (end, end.peer):
            self._ends.discard(each)
            each.socket.close()

    def _is_cut(self, server: str) -> bool:
        return time.monotonic() < self._cut_until.get(server, 0.0)
