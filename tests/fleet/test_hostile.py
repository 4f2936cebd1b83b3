"""Invalid or oversized messages and clients without a key get an error or nothing; the server stays up and correct."""

from __future__ import annotations

import dataclasses
import random
import struct
import time
from collections.abc import Iterator

import pytest
import torch
import zmq

from rowstead.fleet.deduplication import Caller
from rowstead.fleet.keys import Keys, protect_client
from rowstead.fleet.rpc_client import Client, ServerUnavailable
from rowstead.fleet.rpc_server import Server
from rowstead.fleet.wire import ERROR, HEADER_BYTES, REQUEST, VERSION, Limits, Message, decode, decode_header, encode
from tests.fleet.relay import Relay, connect

LIMITS = Limits(facts_bytes=1 << 16, num_tensors=8, frame_bytes=1 << 20, message_bytes=4 << 20)
NUM_BAD = 10_000


class Table:
    """A table that only good requests may touch."""

    def __init__(self) -> None:
        self.rows = torch.zeros(10)
        self.callers: list[str] = []

    def __call__(self, message: Message, caller: Caller) -> Message:
        self.callers.append(caller.name)
        self.rows += message.tensors[0]
        return Message("rows-of-table", {"sum": float(self.rows.sum())}, [self.rows.clone()])


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def server(table: Table) -> Iterator[Server]:
    with Server({"add": table}, limits=LIMITS).start() as server:
        yield server


class Stranger:
    """A bare ZeroMQ socket that sends arbitrary frames."""

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.address = address
        if keys is not None:
            protect_client(self.socket, keys)

    def __enter__(self) -> Stranger:
        self.socket.connect(self.address)
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._context.term()

    def answers(self) -> list[str]:
        """Return the texts of the errors received."""
        texts = []
        while self.socket.poll(0):
            first = self.socket.recv_multipart()[0]
            header = decode_header(first, LIMITS)
            assert header.role == ERROR
            texts.append(decode(header, first, []).facts["error"])
        return texts


def good(number: int) -> list[bytes]:
    message = Message("add", {"lr": 0.5, "table": "users"}, [torch.ones(10), torch.arange(5)])
    return [bytes(frame) for frame in encode(message, role=REQUEST, number=number, sender=66, name="stranger")]


def damaged(chance: random.Random) -> list[bytes]:
    """Return a damaged request."""
    frames = good(chance.randrange(1 << 20))
    header = bytearray(frames[0])
    match chance.randrange(13):
        case 0:  # noise
            return [chance.randbytes(chance.randrange(300)) for _ in range(chance.randrange(1, 5))]
        case 1:  # truncated, in the header or after it
            return [bytes(header[: chance.randrange(len(header))]), *frames[1:]]
        case 2:  # another version
            struct.pack_into("<H", header, 4, chance.choice([0, VERSION - 1, VERSION + 1, 65535]))
        case 3:  # facts longer than sent, or than allowed
            struct.pack_into("<I", header, 32, chance.choice([0, 1, 1000, LIMITS.facts_bytes + 1, 2**32 - 1]))
        case 4:  # another number of tensors
            struct.pack_into("<I", header, 36, chance.choice([0, 1, 3, 100, 2**32 - 1]))
        case 5:  # other bytes of tensors
            struct.pack_into("<Q", header, 40, chance.choice([0, 81, LIMITS.message_bytes + 1, 2**64 - 1]))
        case 6:  # a tensor too many, too few, too long or too short
            return chance.choice(
                [[*frames, b"more"], frames[:-1], [*frames[:-1], frames[-1] + b"x"], [*frames[:-1], frames[-1][:-1]]]
            )
        case 7:  # an invalid dtype or number of dimensions
            header[HEADER_BYTES + chance.randrange(2)] = chance.randrange(11, 256)
        case 8:  # an enormous shape
            struct.pack_into("<Q", header, HEADER_BYTES + 2, chance.choice([0, 11, 2**32, 2**63, 2**64 - 1]))
        case 9:  # facts that are not an object
            facts = chance.choice([b"[1,2]", b"{", b'{"a":', b"[" * 5000, b"null", b"\xff" * 9, b'{"a":1}garbage', b"9" * 5000])
            struct.pack_into("<I", header, 32, len(facts))
            return [bytes(header[: HEADER_BYTES + 20]) + facts, *frames[1:]]
        case 10:  # a role other than request
            header[6] = chance.choice([0, 2, 3, 200])
        case 11:  # an unknown kind, or one that is not a word
            header[48:52] = chance.choice([b"drop", b"\xff\xfe\xfd\xfc", b"\0\0\0\0", b"a\nb\0"])
        case _:  # far more frames than any message has
            return [*frames, *[b""] * chance.randrange(1, 200)]
    return [bytes(header), *frames[1:]]


def test_ten_thousand_bad_messages_change_nothing_and_each_good_one_between_them_is_right(server: Server, table: Table) -> None:
    chance = random.Random(1)
    num_errors = 0
    with Client(server.address, name="good") as client:
        for start in range(0, NUM_BAD, 1000):
            with Stranger(server.address) as stranger:
                for sent in range(start, start + 1000):
                    stranger.socket.send_multipart(damaged(chance))
                    if sent % 50 == 0:  # all that this stranger has sent is read before what it sends next
                        num_errors += len(stranger.answers())
                _wait_for(server, sent + 1)
                num_errors += len(stranger.answers())
            answer = client.call("add", {}, [torch.ones(10)])
            assert answer.facts["sum"] == 10 * (start // 1000 + 1)
            assert bool((answer.tensors[0] == start // 1000 + 1).all())
    assert set(table.callers) == {"good"}
    assert server.num_refused == NUM_BAD
    assert num_errors > NUM_BAD / 4, "a sender whose request number is readable gets an error"


def _wait_for(server: Server, num_refused: int) -> None:
    until_s = time.monotonic() + 60
    while server.num_refused < num_refused:
        assert time.monotonic() < until_s, f"{server.num_refused} of {num_refused} were refused"
        time.sleep(0.002)


def test_damage_at_every_byte_of_a_request_is_survived(server: Server) -> None:
    frames = good(7)
    with Stranger(server.address) as stranger, Client(server.address, name="good") as client:
        for at in range(len(frames[0])):
            stranger.socket.send_multipart([frames[0][:at], *frames[1:]])
        _wait_for(server, len(frames[0]))
        assert client.call("add", {}, [torch.ones(10)]).facts["sum"] == 10


def test_bytes_that_are_not_even_zeromq_are_dropped(server: Server) -> None:
    chance = random.Random(2)
    for _ in range(100):
        with connect(server.address) as raw:
            greeting = b"\xff" + bytes(8) + b"\x7f\x03" if chance.random() < 0.5 else b""
            raw.sendall(greeting + chance.randbytes(chance.randrange(1, 2000)))
    with Client(server.address, name="good") as client:
        assert client.call("add", {}, [torch.ones(10)]).facts["sum"] == 10


def test_the_sender_of_a_frame_over_the_limit_is_disconnected(server: Server, table: Table) -> None:
    with Client(server.address, name="good") as client:
        client.call("add", {}, [torch.ones(10)])
        with Stranger(server.address) as stranger:
            stranger.socket.reconnect_ivl = -1
            events = stranger.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            try:
                stranger.socket.send_multipart([*good(0)[:1], bytes(LIMITS.frame_bytes + 1)])
                assert events.poll(10_000), "it was not disconnected"
            finally:
                stranger.socket.disable_monitor()
                events.close()
        assert client.call("add", {}, [torch.ones(10)]).facts["sum"] == 20
    assert set(table.callers) == {"good"}


def test_a_frame_length_without_data_neither_blocks_nor_allocates(server: Server) -> None:
    """A raw ZMTP connection sends the length of a frame just below the limit many times, and none of the data."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
    ready = b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
    with Client(server.address, name="good") as client:
        opened = []
        for _ in range(50):
            raw = connect(server.address)
            raw.sendall(
                greeting + ready.replace(b"\x26", bytes([len(ready) - 2])) + b"\x02" + struct.pack(">Q", LIMITS.frame_bytes - 1)
            )
            opened.append(raw)
        assert client.call("add", {}, [torch.ones(10)]).facts["sum"] == 10
        for raw in opened:
            raw.close()
        assert client.call("add", {}, [torch.ones(10)]).facts["sum"] == 20


def test_a_client_that_sends_and_never_reads_does_not_block_others(server: Server) -> None:
    with Stranger(server.address) as stranger, Client(server.address, name="good") as client:
        for number in range(500):
            stranger.socket.send_multipart(good(number))
        before = client.call("add", {}, [torch.zeros(10)]).facts["sum"]
        assert client.call("add", {}, [torch.ones(10)]).facts["sum"] >= before + 10
        assert server.status()["kept_replies_bytes"] <= LIMITS.kept_replies_bytes


def protected(keys: Keys, table: Table) -> Server:
    return Server({"add": table}, address="tcp://127.0.0.1:0", keys=keys, limits=LIMITS).start()


OTHERS = Keys.generate()


@pytest.mark.parametrize("knows", ["nothing", "the server's public key", "another server's key"])
def test_a_client_without_the_key_cannot_connect_and_learns_nothing(table: Table, knows: str) -> None:
    keys = Keys.generate()
    theirs = {
        "nothing": OTHERS,
        "the server's public key": dataclasses.replace(OTHERS, server_public=keys.server_public),
        "another server's key": dataclasses.replace(keys, server_public=OTHERS.server_public),
    }[knows]
    with (
        protected(keys, table) as server,
        Relay(server.address) as relay,
        Client(server.address, name="good", keys=keys) as ours,
    ):
        with (
            Client(relay.address, name="stranger", keys=theirs, deadline_s=0.5) as client,
            pytest.raises(ServerUnavailable, match="in time") as error,
        ):
            client.call("add", {}, [torch.ones(10)])
        assert "rows-of-table" not in str(error.value)
        assert ours.call("add", {}, [torch.ones(10)]).facts["sum"] == 10
        if knows == "the server's public key":
            assert server.num_refused > 0
            assert "keys or versions do not match" in str(error.value)
    assert table.callers == ["good"]
    assert b"rows-of-table" not in relay.seen


def test_a_local_user_without_keys_cannot_reach_a_port_on_loopback(table: Table) -> None:
    """Without encryption, as anyone may try who finds the port: what it sends is not read, and nothing is sent to it."""
    keys = Keys.generate()
    with (
        protected(keys, table) as server,
        Relay(server.address) as relay,
        Client(server.address, name="good", keys=keys) as ours,
        Stranger(relay.address) as stranger,
    ):
        for number in range(10):
            stranger.socket.send_multipart(good(number))
        assert ours.call("add", {}, [torch.ones(10)]).facts["sum"] == 10
        assert not stranger.socket.poll(500)
    assert table.callers == ["good"]
    assert b"rows-of-table" not in relay.seen


def test_traffic_with_keys_is_encrypted(table: Table) -> None:
    keys, secret = Keys.generate(), torch.full((1000,), 12345.678)
    for given, address, is_readable in ((None, None, True), (keys, "tcp://127.0.0.1:0", False)):
        with (
            Server({"add": Table()}, address=address, keys=given).start() as server,
            Relay(server.address) as relay,
            Client(relay.address, name="trainer-0", keys=given) as client,
        ):
            client.call("add", {"table": "users"}, [secret[:10], secret])
            for plain in (b"users", b"trainer-0", secret.numpy().tobytes()[:64]):
                assert (plain in relay.seen) is is_readable


def test_a_server_of_another_job_is_refused(table: Table) -> None:
    """A server without our keys cannot pass for ours, so no gradient and no row is sent to it."""
    keys = Keys.generate()
    with (
        protected(OTHERS, table) as server,
        Client(server.address, name="me", keys=keys, deadline_s=0.5) as client,
        pytest.raises(ServerUnavailable),
    ):
        client.call("add", {}, [torch.ones(10)])
    assert table.callers == []


def test_bad_messages_of_a_client_with_keys_are_refused_too(table: Table) -> None:
    keys, chance = Keys.generate(), random.Random(3)
    with protected(keys, table) as server, Client(server.address, name="good", keys=keys) as client:
        with Stranger(server.address, keys) as stranger:
            for _ in range(300):
                stranger.socket.send_multipart(damaged(chance))
            _wait_for(server, 300)
        assert client.call("add", {}, [torch.ones(10)]).facts["sum"] == 10
    assert table.callers == ["good"]
