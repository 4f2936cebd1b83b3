"""What does it cost that rows are in another process? A remote look-up + update against the local kernels plus a bare ZeroMQ echo.

python -m benchmarks.exchange [--quick] [--json]

Contenders take turns on the same batches, each from one thread of one process to others of this machine:

    remote     look-up and update of a RemoteStore with staleness 0, rows in sparse servers, over Unix sockets
    keyed      the same over TCP on loopback with keys, as roles on several machines have them: encrypted
    kernel     look-up and update of a DeviceStore with the same tables in this process
    echo       ZeroMQ sockets over TCP and nothing else: for each look-up and each update as many bytes go to a bare process, and as many come
               back, as RemoteStore's clients have counted for it
    unix_echo  the same over Unix sockets

`keys_over_plain` is keyed / remote: what keys would cost the roles of one machine, which therefore use Unix sockets.

Each look-up and each update is timed by itself, until it is answered, and before each of them other memory goes through the caches of this
process, as the network does in a step. `over_kernel_plus_echo` is remote / (kernel + echo), of medians: below 1.3 is the aim, which was set
when all of it was over TCP; `over_kernel_plus_unix_echo` is the same with the faster echo. Latencies are of
these look-ups, from the call to the pooled vectors. `in_a_row_over_kernel_plus_echo` is the same of batches one right after another: then
kernels find in the caches what the last batch left there, which neither a step nor a server's kernels do that were waiting for a message.

Every process has one thread for its kernels. A round trip of a request without content, `empty_…`, shows what the wire itself adds to ZeroMQ.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zmq

from benchmarks.harness import OtherLoad, alternate, arguments, chosen, noise_of, publish
from rowstead.data.batch import Sparse
from rowstead.distributed.sharding import piece_layout
from rowstead.fleet.build import KEYS_FILE
from rowstead.fleet.keys import Keys
from rowstead.fleet.local_sockets import open_socket_folder, socket_address
from rowstead.fleet.partition import Partition, partition_tables
from rowstead.fleet.remote_store import RemoteStore
from rowstead.fleet.rpc_client import Client
from rowstead.fleet.sparse_server import SparseServer
from rowstead.fleet.table_shard import TableShard
from rowstead.kernels.layout import Layout, layout_of
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.device import DeviceStore
from rowstead.study.calibration.clock import FLUSH_BYTES

BATCHES_A_TURN = 10
"""One right after another."""
APART_A_TURN = 3
"""One by one, for each turn of those."""
WARM_BATCHES = 5

OnBatch = Callable[[Sparse], Any]


@dataclass(frozen=True)
class Shape:
    """Tables, batches, and over how many servers."""

    name: str
    num_tables: int
    num_rows: int
    num_ids: int
    batch_size: int
    num_servers: int = 1
    width: int = 64

    @property
    def layout(self) -> Layout:
        features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f{i}", repeat=self.num_tables, num_rows=self.num_rows),))
        return layout_of(features, tables_of(features, width=self.width))

    @property
    def partition(self) -> Partition:
        return partition_tables(self.layout.tables, self.num_servers)

    def draw(self, rng: torch.Generator) -> Sparse:
        """A batch of fresh ids, the low ones more often."""
        num_bags = self.num_tables * self.batch_size
        drawn = torch.rand(num_bags * self.num_ids, generator=rng, dtype=torch.float64)
        offsets = torch.arange(num_bags + 1) * self.num_ids
        return Sparse(ids=(self.num_rows * drawn**3).long(), offsets=offsets, num_features=self.num_tables)


SHAPES = (
    Shape("M1", 30, 100_000, 28, 200),
    Shape("M1-one-id", 30, 100_000, 1, 200),
    Shape("M1-batch-1600", 30, 100_000, 28, 1600),
    Shape("M1-2-servers", 30, 100_000, 28, 200, num_servers=2),
)


@dataclass(frozen=True)
class Exchange:
    """Bytes that one request takes to each server, and its answer back."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


class Echo:
    """Bare sockets to processes that send as many bytes as they are told."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.DEALER) for _ in addresses]
        for socket, address in zip(self._sockets, addresses, strict=True):
            socket.linger = 0
            socket.connect(address)
        self._content = bytes(64 << 20)

    def exchange(self, what: Exchange) -> None:
        """Send to all, then hear from all."""
        content = memoryview(self._content)
        for socket, sent, received in zip(self._sockets, what.sent, what.received, strict=True):
            socket.send(b"%d" % received, zmq.SNDMORE)
            socket.send(content[:sent], copy=sent < 1 << 16)
        for socket in self._sockets:
            socket.recv(copy=False)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()


def serve_echo(address: str) -> None:
    """Answer each message with as many bytes as it asks for, until killed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(address)
    print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    content = memoryview(bytes(64 << 20))
    while True:
        route, wanted, _ = socket.recv_multipart(copy=False)
        num_bytes = int(wanted.bytes)
        socket.send(route.bytes, zmq.SNDMORE)
        socket.send(content[:num_bytes], copy=num_bytes < 1 << 16)


def serve_rows(shape: Shape, number: int, folder: Path) -> None:
    """Keep one server's share of the tables, until whoever started this is gone; with and without keys, by the same rows."""
    torch.set_num_threads(1)
    parent = os.getppid()
    layout = shape.layout
    kept = TableShard(piece_layout(layout, shape.partition.pieces_of(layout, number)), SparseOptimizerSpec())
    name = f"sparse-{number}"
    plain = SparseServer(kept, name=name, address=socket_address(folder, name))
    with SparseServer(kept, name=name, address="tcp://127.0.0.1:0", keys=Keys.load(folder / KEYS_FILE)).start() as keyed:
        print(plain.address, keyed.address, flush=True)
        plain.serve(lambda: os.getppid() != parent)


@contextmanager
def started(*options: object) -> Iterator[list[str]]:
    """Another process of this benchmark, by the addresses that it prints."""
    command = [sys.executable, "-m", "benchmarks.exchange", *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()
        finally:
            process.kill()


def measure(shape: Shape, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    rng = torch.Generator().manual_seed(1)
    optimizer = SparseOptimizerSpec()
    grad = torch.randn(shape.batch_size, shape.num_tables * shape.width, generator=rng)
    batches = [shape.draw(rng) for _ in range(4 * BATCHES_A_TURN)]
    local = DeviceStore(shape.layout, optimizer, check=False)
    with ExitStack() as stack:
        folder, keys = stack.enter_context(open_socket_folder()), Keys.generate()
        keys.save(folder / KEYS_FILE)
        numbers = range(shape.num_servers)
        servers = [stack.enter_context(started("--serve", SHAPES.index(shape), number, folder)) for number in numbers]

        def start_echo(*addresses: str) -> Echo:
            echo = Echo([stack.enter_context(started("--echo", address))[0] for address in addresses])
            stack.callback(echo.close)
            return echo

        echo = start_echo(*["tcp://127.0.0.1:0" for _ in numbers])
        unix_echo = start_echo(*[socket_address(folder, f"echo-{number}") for number in numbers])
        clients: list[Client] = []

        def connect(number: int) -> Client:
            clients.append(Client(servers[number][0], name=f"trainer-{len(clients)}"))
            return clients[-1]

        def connect_with_keys(number: int) -> Client:
            return Client(servers[number][1], name=f"keyed-{number}", keys=keys)

        remote = RemoteStore(shape.layout, optimizer, shape.partition, connect, check=False)
        stack.callback(remote.close)
        keyed = RemoteStore(shape.layout, optimizer, shape.partition, connect_with_keys, check=False)
        stack.callback(keyed.close)
        turns = {name: _Turns(batches) for name in ("remote", "kernel", "echo")}

        def ask() -> None:
            for step, batch in turns["remote"].next():
                remote.lookup(batch)
                remote.update(batch, grad, lr=0.01, step=step)
            remote.flush()

        def compute() -> None:
            for step, batch in turns["kernel"].next():
                local.lookup(batch)
                local.update(batch, grad, lr=0.01, step=step)

        lookup, update = _exchanges(remote, clients, batches[0], grad)

        def shout() -> None:
            for _ in turns["echo"].next():
                echo.exchange(lookup)
                echo.exchange(update)

        def train(store: RemoteStore | DeviceStore, batch: Sparse) -> None:
            store.update(batch, grad, lr=0.01, step=1)
            if isinstance(store, RemoteStore):
                store.wait()

        one_by_one: dict[str, tuple[OnBatch, OnBatch]] = {
            "remote": (remote.lookup, partial(train, remote)),
            "keyed": (keyed.lookup, partial(train, keyed)),
            "kernel": (local.lookup, partial(train, local)),
            "echo": (lambda _: echo.exchange(lookup), lambda _: echo.exchange(update)),
            "unix_echo": (lambda _: unix_echo.exchange(lookup), lambda _: unix_echo.exchange(update)),
        }
        nothing = Exchange((150,) * len(servers), (150,) * len(servers))
        with OtherLoad() as others:
            apart = _apart(one_by_one, batches, APART_A_TURN * repeats)
            in_a_row = alternate({"remote": ask, "kernel": compute, "echo": shout}, repeats=repeats, warmups=3)
            empty = alternate(
                {
                    "ours": partial(clients[0].call, "flush", {"client": "none", "sent": 0}),
                    "echo": partial(echo.exchange, nothing),
                },
                repeats=20 * repeats,
                warmups=20,
            )
    times_s = {name: statistics.median(map(sum, pairs)) for name, pairs in apart.items()}
    row_s = {name: statistics.median(each) for name, each in in_a_row.items()}
    lookups_s = sorted(lookup_s for lookup_s, _ in apart["remote"])
    return {
        "shape": shape.name,
        "remote_s": times_s["remote"],
        "keyed_s": times_s["keyed"],
        "kernel_s": times_s["kernel"],
        "echo_s": times_s["echo"],
        "unix_echo_s": times_s["unix_echo"],
        "over_kernel_plus_echo": times_s["remote"] / (times_s["kernel"] + times_s["echo"]),
        "over_kernel_plus_unix_echo": times_s["remote"] / (times_s["kernel"] + times_s["unix_echo"]),
        "keys_over_plain": times_s["keyed"] / times_s["remote"],
        "in_a_row_over_kernel_plus_echo": row_s["remote"] / (row_s["kernel"] + row_s["echo"]),
        "latency_p50_s": _quantile(lookups_s, 0.5),
        "latency_p99_s": _quantile(lookups_s, 0.99),
        "bytes_per_step": sum(sum(each.sent) + sum(each.received) for each in (lookup, update)),
        "empty_s": statistics.median(empty["ours"]),
        "empty_echo_s": statistics.median(empty["echo"]),
        "cores_used_by_others": max(0.0, others.cores - 1),  # our servers are others, one at work at a time
    }


def _apart(
    contenders: Mapping[str, tuple[OnBatch, OnBatch]], batches: Sequence[Sparse], num_batches: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each look-up and of each update, caches used by others before every one; a different contender begins each time."""
    passing, names = torch.zeros(FLUSH_BYTES // 4), list(contenders)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}

    def seconds(call: OnBatch, batch: Sparse) -> float:
        passing.add_(1)
        start_s = time.perf_counter()
        call(batch)
        return time.perf_counter() - start_s

    for turn in range(WARM_BATCHES + num_batches):
        batch = batches[turn % len(batches)]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            lookup, update = contenders[name]
            taken = seconds(lookup, batch), seconds(update, batch)
            if turn >= WARM_BATCHES:
                found[name].append(taken)
    return found


class _Turns:
    """Some batches after the other, over and over, numbered from 1."""

    def __init__(self, batches: Sequence[Sparse]) -> None:
        self._batches = batches
        self._num_done = 0

    def next(self) -> Iterator[tuple[int, Sparse]]:
        for _ in range(BATCHES_A_TURN):
            self._num_done += 1
            yield self._num_done, self._batches[self._num_done % len(self._batches)]


def _exchanges(remote: RemoteStore, clients: list[Client], batch: Sparse, grad: torch.Tensor) -> tuple[Exchange, Exchange]:
    """What one look-up and one update put on the wire, by the clients' own count."""
    remote.lookup(batch)
    remote.update(batch, grad, lr=0.01, step=1)
    remote.flush()

    def counted(action: Callable[[], Any]) -> Exchange:
        before = [(client.num_bytes_sent, client.num_bytes_received) for client in clients]
        action()
        after = [(client.num_bytes_sent, client.num_bytes_received) for client in clients]
        sent, received = (tuple(after[i][way] - before[i][way] for i in range(len(clients))) for way in (0, 1))
        return Exchange(sent, received)

    settled = counted(remote.flush)
    lookup = counted(lambda: remote.lookup(batch))
    update = counted(lambda: (remote.update(batch, grad, lr=0.01, step=2), remote.flush()))
    less = [
        tuple(one - other for one, other in zip(*ways, strict=True))
        for ways in ((update.sent, settled.sent), (update.received, settled.received))
    ]
    return lookup, Exchange(*less)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = arguments(__doc__, with_shapes=True)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        serve_echo(options.echo)
    if options.serve:
        shape, number, folder = options.serve
        serve_rows(SHAPES[int(shape)], int(number), Path(folder))
        return
    torch.set_num_threads(1)
    rows = [measure(shape, 5 if options.quick else 30) for shape in chosen(SHAPES, options)]
    summary = {
        "lookup_update_over_kernel_plus_echo": max(row["over_kernel_plus_echo"] for row in rows),
        "in_a_row_over_kernel_plus_echo": max(row["in_a_row_over_kernel_plus_echo"] for row in rows),
        "over_kernel_plus_unix_echo": max(row["over_kernel_plus_unix_echo"] for row in rows),
        "keys_over_plain": max(row["keys_over_plain"] for row in rows),
        "latency_p50_s": rows[0]["latency_p50_s"],
        "latency_p99_s": rows[0]["latency_p99_s"],
        **noise_of(rows),
    }
    publish("exchange", rows, summary, options, packages=("pyzmq",))


if __name__ == "__main__":
    main()
