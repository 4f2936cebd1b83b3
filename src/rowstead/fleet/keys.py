"""Who may speak to whom: addresses of this machine freely, all others with keys that are made for one job."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from rowstead.spec.address import is_loopback
from rowstead.spec.errors import RowsteadError

_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[^:\[\]/]+):(?P<port>\d{1,5})")


@dataclass(frozen=True, kw_only=True)
class Keys:
    """CURVE keys of one job: servers prove that they are its servers, clients that they are its clients, and all is encrypted."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> Keys:
        """New keys, for one job."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(
            server_public=server_public.decode(),
            server_secret=server_secret.decode(),
            client_public=client_public.decode(),
            client_secret=client_secret.decode(),
        )

    def save(self, path: Path) -> None:
        """Write them to a file that only its owner can read. One that is there already is left alone and is an error."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise RowsteadError(f"{path}: there are keys already, of another job; remove the file if that has ended") from None
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Read what `save` wrote; refused where others can read it too."""
        try:
            with open(path) as file:
                mode = os.fstat(file.fileno()).st_mode
                content = json.load(file)
        except OSError as error:
            raise RowsteadError(f"{path}: no keys can be read ({error.strerror}); the head of the job makes them") from None
        except ValueError:
            raise RowsteadError(f"{path}: this is no file of keys") from None
        if mode & 0o077:
            raise RowsteadError(f"{path}: others can read these keys; run `chmod 600 {path}`, or better have new ones made")
        names = cls.__dataclass_fields__.keys()
        if not isinstance(content, dict) or content.keys() != names or not all(_is_key(content[name]) for name in names):
            raise RowsteadError(f"{path}: this is no file of keys")
        return cls(**content)


def check_address(address: str, keys: Keys | None) -> None:
    """Raise unless an address is well formed, and either of this machine or protected by keys."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise RowsteadError(f"{address!r} is no address: write tcp://HOST:PORT, such as tcp://127.0.0.1:0")
    if keys is None and not is_loopback(match["host"].strip("[]")):
        raise RowsteadError(
            f"{address} can be reached from other machines, and there are no keys: have keys made for this job "
            "(`Keys.generate()`; `rowstead train --fleet` does it), or stay on tcp://127.0.0.1"
        )


def protect_client(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Let a socket that is not connected yet speak only to the job's servers."""
    socket.curve_serverkey = keys.server_public.encode()
    socket.curve_publickey = keys.client_public.encode()
    socket.curve_secretkey = keys.client_secret.encode()


def protect_server(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Let a socket that is not bound yet speak only to clients that `ZapAuthenticator` lets in."""
    socket.curve_server = True
    socket.curve_secretkey = keys.server_secret.encode()
    socket.zap_domain = b"rowstead"  # so that nobody is let in where no gate answers


class ZapAuthenticator:
    """Lets the job's own clients in and nobody else: ZeroMQ asks it about each new connection (ZAP, RFC 27)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self._client_key = z85.decode(keys.client_public.encode())
        self.num_refused = 0

    def handle_request(self) -> None:
        """Decide about one connection; the socket has something to read."""
        version, number, *_, mechanism, credentials = self.socket.recv_multipart()
        is_ours = version == b"1.0" and mechanism == b"CURVE" and credentials == self._client_key
        self.num_refused += not is_ours
        status = (b"200", b"OK") if is_ours else (b"400", b"not a client of this job")
        self.socket.send_multipart([b"1.0", number, *status, b"", b""])


def _is_key(value: object) -> bool:
    if not isinstance(value, str) or len(value) != 40:
        return False
    try:
        return len(z85.decode(value.encode())) == 32
    except (KeyError, ValueError):
        return False
