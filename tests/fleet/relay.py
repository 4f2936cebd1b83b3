"""A faulty network: a TCP relay between clients and a server that can be cut or lose replies."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class Relay:
    """Forwards bytes between clients that connect to `address` and a server."""

    def __init__(self, server: str) -> None:
        self._server = _host_and_port(server)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.loses_replies = False
        """Whether replies of the server are discarded."""
        self.is_silent = False
        """Whether nothing is forwarded while connections stay open, like a pulled cable."""
        self.seen = bytearray()
        """All bytes forwarded."""
        self._pairs: dict[socket.socket, tuple[socket.socket, bool]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Break all connections; new ones can be made."""
        with self._lock:
            for end in list(self._pairs):
                self._drop(end)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.cut()
        self._listener.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            with self._lock, selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                if not self.is_silent:
                    for end in self._pairs:
                        selector.register(end, selectors.EVENT_READ)
                for key, _ in selector.select(timeout=0.002):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._pairs:
                        assert isinstance(key.fileobj, socket.socket)
                        self._pass(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._server, timeout=1)
        except OSError:
            client.close()
            return
        self._pairs |= {client: (server, False), server: (client, True)}

    def _pass(self, end: socket.socket) -> None:
        other, is_reply = self._pairs[end]
        try:
            content = end.recv(1 << 16)
            if not (is_reply and self.loses_replies):
                self.seen += content
                other.sendall(content)
        except OSError:
            content = b""
        if not content:
            self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        if end in self._pairs:
            other, _ = self._pairs.pop(end)
            self._pairs.pop(other, None)
            for each in (end, other):
                with contextlib.suppress(OSError):
                    each.close()


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)
