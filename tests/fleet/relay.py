"""A faulty network: a relay between clients and a server, by TCP or by Unix sockets as the server is, that can be cut or lose replies."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading

from rowstead.fleet.local_sockets import UNIX_SOCKET, open_socket_folder, socket_address


class Relay:
    """Forwards bytes between clients that connect to `address` and a server."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._folder = contextlib.ExitStack()
        if server.startswith(UNIX_SOCKET):
            self.address = socket_address(self._folder.enter_context(open_socket_folder()), "relay")
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self.address.removeprefix(UNIX_SOCKET))
            self._listener.listen()
        else:
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
        self._folder.close()

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
            server = connect(self._server, timeout_s=1)
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


def connect(address: str, *, timeout_s: float = 10) -> socket.socket:
    """A plain connection to the address of a server, without ZeroMQ."""
    if not address.startswith(UNIX_SOCKET):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(address.removeprefix(UNIX_SOCKET))
    except OSError:
        connection.close()
        raise
    return connection
