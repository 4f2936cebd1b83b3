"""Who may connect: Unix sockets are protected by the mode of their folder, TCP ports by CURVE keys generated for the job."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from rowstead.fleet.local_sockets import UNIX_SOCKET, check_socket_path
from rowstead.spec.errors import RowsteadError

_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[^:\[\]/]+):(?P<port>\d{1,5})")


@dataclass(frozen=True, kw_only=True)
class Keys:
    """CURVE keys of one job, which authenticate its servers and clients and encrypt all traffic."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> Keys:
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(
            server_public=server_public.decode(),
            server_secret=server_secret.decode(),
            client_public=client_public.decode(),
            client_secret=client_secret.decode(),
        )

    def save(self, path: Path) -> None:
        """Write the keys to a file with mode 0600; raises if the file exists."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise RowsteadError(
                f"{path} already exists, with the keys of another job; remove it if that job has ended"
            ) from None
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Read keys written by `save`; raises if other users can read the file."""
        try:
            with open(path) as file:
                mode = os.fstat(file.fileno()).st_mode
                content = json.load(file)
        except OSError as error:
            raise RowsteadError(
                f"{path}: cannot read the keys ({error.strerror}); the job's coordinator creates them"
            ) from None
        except ValueError:
            raise RowsteadError(f"{path} is not a key file") from None
        if mode & 0o077:
            raise RowsteadError(f"{path}: other users can read these keys; run `chmod 600 {path}`, or better generate new keys")
        names = cls.__dataclass_fields__.keys()
        if not isinstance(content, dict) or content.keys() != names or not all(_is_key(content[name]) for name in names):
            raise RowsteadError(f"{path} is not a key file")
        return cls(**content)


def check_address(address: str, keys: Keys | None) -> None:
    """Raise unless an address is well formed and other users cannot connect to it: TCP needs keys, also on loopback."""
    if address.startswith(UNIX_SOCKET):
        check_socket_path(address)
        return
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise RowsteadError(f"invalid address {address!r}: write tcp://HOST:PORT, such as tcp://127.0.0.1:0")
    if keys is None:
        raise RowsteadError(
            f"{address} can be reached by other users and needs keys: generate keys for this job (`Keys.generate()`; "
            "`rowstead train --fleet manual` does it), or leave out the address to use a private Unix socket"
        )


def protect_client(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Restrict an unconnected socket to the job's servers."""
    socket.curve_serverkey = keys.server_public.encode()
    socket.curve_publickey = keys.client_public.encode()
    socket.curve_secretkey = keys.client_secret.encode()


def protect_server(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Restrict an unbound socket to clients that `ZapAuthenticator` accepts."""
    socket.curve_server = True
    socket.curve_secretkey = keys.server_secret.encode()
    socket.zap_domain = b"rowstead"  # without an authenticator, every client is refused


class ZapAuthenticator:
    """Accepts only the job's own clients: ZeroMQ asks it about each new connection (ZAP, RFC 27)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self._client_key = z85.decode(keys.client_public.encode())
        self.num_refused = 0

    def handle_request(self) -> None:
        """Accept or refuse one connection; call when the socket is readable."""
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
