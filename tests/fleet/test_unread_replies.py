"""Replies that clients do not read take bounded memory, by client and in all, and do not slow down those that read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
import zmq

from rowstead.fleet.deduplication import Caller
from rowstead.fleet.rpc_client import Client, RefusedError
from rowstead.fleet.rpc_server import Server
from rowstead.fleet.wire import REQUEST, Limits, Message, decode, decode_header, encode
from tests.fleet.sparse_servers import ADAGRAD, plain_layout, running, whole_tables
from tests.small_runs import wait_until

MIB = 1 << 20
REPLY_BYTES = 4 * MIB
LIMITS = Limits(unread_bytes_per_client=8 * MIB, unread_bytes=40 * MIB, kept_replies_bytes=4 * MIB)


class Rows:
    """Answers a short request by a long reply."""

    def __init__(self) -> None:
        self.num_calls: dict[str, int] = {}

    def __call__(self, message: Message, caller: Caller) -> Message:
        self.num_calls[caller.name] = self.num_calls.get(caller.name, 0) + 1
        return Message("rows", {}, [torch.full((REPLY_BYTES // 4,), float(message.facts.get("n", 0)))])


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def server(rows: Rows) -> Iterator[Server]:
    with Server({"rows": rows}, limits=LIMITS).start() as server:
        yield server


class Deaf:
    """A client that sends requests and reads no reply, until it does."""

    def __init__(self, address: str, number: int = 0) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = 1
        self.socket.connect(address)
        self._sender, self.name = 1000 + number, f"deaf-{number}"

    def send(self, kind: str, number: int, facts: dict[str, object], *tensors: torch.Tensor) -> None:
        message = Message(kind, facts, list(tensors))
        self.socket.send_multipart(encode(message, role=REQUEST, number=number, sender=self._sender, name=self.name))

    def read(self) -> Message:
        assert self.socket.poll(20_000), "no reply"
        frames = self.socket.recv_multipart(copy=False)
        return decode(decode_header(frames[0].bytes, Limits()), frames[0].bytes, [frame.buffer for frame in frames[1:]])

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@contextmanager
def deaf(server: Server, count: int) -> Iterator[list[Deaf]]:
    clients = [Deaf(server.address, number) for number in range(count)]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def test_a_client_that_does_not_read_is_held_at_its_limit_and_gets_every_reply_once_it_reads(
    server: Server, rows: Rows
) -> None:
    with deaf(server, 1) as (stranger,), Client(server.address, name="good") as good:
        for number in range(12):
            stranger.send("rows", number, {"n": number})
        for n in range(20):
            assert good.call("rows", {"n": n}).tensors[0][0] == n
        status = good.call("status").facts
        assert status["unread_replies_bytes"] <= LIMITS.unread_bytes_per_client + 2 * REPLY_BYTES
        assert rows.num_calls["deaf-0"] <= 6, "what it can have received itself, and the limit"
        assert [float(stranger.read().tensors[0][0]) for _ in range(12)] == list(range(12))
    assert rows.num_calls == {"deaf-0": 12, "good": 20}


def test_several_clients_that_do_not_read_stay_below_half_of_the_limit_in_all_and_one_that_reads_is_served(
    server: Server, rows: Rows
) -> None:
    with deaf(server, 4) as strangers, Client(server.address, name="good", deadline_s=20) as good:
        for number in range(12):
            for stranger in strangers:
                stranger.send("rows", number, {"n": number})
        for n in range(20):
            assert good.call("rows", {"n": n}).tensors[0][0] == n
            assert server.status()["unread_replies_bytes"] <= LIMITS.unread_bytes // 2 + 2 * (REPLY_BYTES + 4096)
        assert sum(rows.num_calls.values()) < 4 * 12 + 20
        for stranger in strangers:
            assert [float(stranger.read().tensors[0][0]) for _ in range(12)] == list(range(12))


def test_the_replies_of_a_client_that_disconnects_are_dropped(server: Server, rows: Rows) -> None:
    with deaf(server, 1) as (stranger,):
        for number in range(12):
            stranger.send("rows", number, {})
        wait_until(lambda: server.status()["unread_replies_bytes"] >= LIMITS.unread_bytes_per_client, what="unread replies")
        assert rows.num_calls["deaf-0"] < 12
    wait_until(lambda: rows.num_calls["deaf-0"] == 12, what="the requests that were held")


def test_a_client_that_sends_and_sends_without_reading_is_refused(server: Server) -> None:
    with deaf(server, 1) as (stranger,), Client(server.address, name="good") as good:
        for number in range(LIMITS.in_flight_per_client + 12):
            stranger.send("rows", number, {})
        wait_until(lambda: server.num_refused > 0, what="a refusal")
        assert good.call("rows", {"n": 1}).tensors[0][0] == 1


def test_a_short_request_for_a_reply_that_no_client_could_receive_is_refused_before_it_is_computed() -> None:
    layout = plain_layout(1000, width=64)
    with running(layout, ADAGRAD, whole_tables(layout, 1), dtype=torch.float32) as fleet, fleet.connect(0) as client:
        before_bytes = client.call("status").facts["rss_bytes"]
        no_ids = torch.zeros(0, dtype=torch.int64)
        for samples in (1 << 23, 1 << 24):
            with pytest.raises(RefusedError, match="fewer samples or rows"):
                client.call("lookup", {"samples": samples, "length": 0, "client": "me", "batch": 1}, [no_ids])
        with pytest.raises(RefusedError, match="fewer samples or rows"):
            client.call("read_rows", {"table": "t0", "part": "rows"}, [torch.zeros((1 << 22) + 1, dtype=torch.int32)])
        assert client.call("status").facts["rss_bytes"] < before_bytes + 100 * MIB


SERVE = """
import os, sys, torch
from rowstead.fleet.sparse_server import SparseServer
from rowstead.fleet.table_shard import TableShard
from tests.fleet.sparse_servers import ADAGRAD, plain_layout
torch.set_num_threads(1)
with SparseServer(TableShard(plain_layout(1000, width=8), ADAGRAD)) as server:
    print(server.address, flush=True)
    server.serve(lambda: os.getppid() == 1 or os.path.exists(sys.argv[1]))
"""


@pytest.mark.slow
def test_twelve_lookups_of_four_million_samples_with_unread_answers_do_not_fill_a_servers_memory(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    stop = tmp_path_factory.mktemp("stop") / "stop"
    reply_bytes = (1 << 22) * 8 * 4
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen([sys.executable, "-c", SERVE, stop], stdout=subprocess.PIPE, text=True))
        stack.callback(stop.touch)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        client = stack.enter_context(Client(address, name="good", deadline_s=60))
        before_bytes = client.call("status").facts["rss_bytes"]
        stranger = Deaf(address)
        stack.callback(stranger.close)
        for number in range(12):
            facts = {"samples": 1 << 22, "length": 0, "client": "deaf", "batch": 1}
            stranger.send("lookup", number, facts, torch.zeros(0, dtype=torch.int64))
        wait_until(lambda: client.call("status").facts["unread_replies_bytes"] >= 256 * MIB, what="unread replies")
        small = {"samples": 10, "length": 1, "client": "good", "batch": 1}
        for _ in range(100):
            client.call("lookup", small, [torch.zeros(10, dtype=torch.int64)])
        status = client.call("status").facts
        assert status["num_lookups"] - 100 <= 5
        assert status["rss_bytes"] - before_bytes < 256 * MIB + 3 * reply_bytes
