"""What processes of this machine take that ask each other and share its cores, as a fleet's do: `python -m rowstead.study.calibration.requests` is one.

A sparse server in a process of its own is asked for look-ups and updates of batches of several sizes. What that takes more than the same
work on tables in this process is fitted by the number of messages, ids and bytes. Between any two requests other memory passes through the
caches, as it does in a step: requests one right after the other take half as long. Letters: B examples, D width.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rowstead.data.batch import Sparse
from rowstead.kernels.layout import Layout, layout_of
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.sharing import MessageCost
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.device import DeviceStore
from rowstead.study.calibration.clock import FLUSH_BYTES
from rowstead.study.calibration.fit import nonnegative_least_squares
from rowstead.study.calibration.hardware import threads
from rowstead.study.calibration.machine_speed import MachineSpeed

NUM_ROWS = 10_000
NUM_BATCHES = 12
"""Of each kind, over and over."""
WARM_STEPS, TURN_STEPS, LEAST_TURNS = 3, 6, 5
"""Before anything counts; of each of two ways in turn; and how many of these."""
CALLS = 3
"""Requests of a step: a look-up, an update, and one that waits until both are done."""
TRANSFER_BYTES = (1 << 10, 1 << 20, 1 << 22)
NUM_TRANSFERS, NUM_EMPTY = 24, 100
AVERAGED_PARAMETERS = (1 << 16, 1 << 20)
"""Dense parameters of which two trainers would keep an average."""
CROWDED_ROUNDS, CROWDED_REFERENCES = 3, 10


@dataclass(frozen=True)
class RequestLoad:
    """Batches of one size."""

    num_tables: int
    num_ids: int
    """Of a bag."""
    batch_size: int
    width: int

    @property
    def layout(self) -> Layout:
        features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f{i}", repeat=self.num_tables, num_rows=NUM_ROWS),))
        return layout_of(features, tables_of(features, width=self.width))

    @property
    def num_bytes(self) -> int:
        """Of the pooled vectors of a batch."""
        return self.num_tables * self.batch_size * self.width * 4

    def batches(self) -> list[Sparse]:
        """Ids drawn evenly, so that rows of a batch hardly repeat."""
        rng, num_bags = torch.Generator().manual_seed(1), self.num_tables * self.batch_size
        offsets = torch.arange(num_bags + 1) * self.num_ids
        many = torch.randint(0, NUM_ROWS, (NUM_BATCHES, num_bags * self.num_ids), generator=rng, dtype=torch.int32)
        return [Sparse(ids=ids, offsets=offsets, num_features=self.num_tables) for ids in many]


SIZES = (
    RequestLoad(8, 1, 32, 16),
    RequestLoad(16, 12, 256, 16),
    RequestLoad(24, 1, 512, 64),
    RequestLoad(48, 4, 256, 32),
    RequestLoad(8, 6, 512, 128),
)


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What `spec/sharing.py` has of messages, and of cores that are all busy."""

    asking: MessageCost
    answering: MessageCost
    waiting_s: float
    handing: MessageCost
    averaging: MessageCost
    crowding: float


def request_costs(speed: MachineSpeed, *, is_short: bool = False) -> Requests | None:
    """Ask a process beside this one; absent where it cannot be started, or ZeroMQ is not there. Times are brought to the standard pace."""
    try:
        from rowstead.fleet.rpc_client import Client
    except ImportError:
        return None
    sizes = SIZES[:3] if is_short else SIZES
    seconds = 0.05 if is_short else 0.6
    num_threads = torch.get_num_threads()
    with _start_server(num_threads) as addresses, contextlib.ExitStack() as stack, threads(1):
        if addresses is None:
            return None
        other = stack.enter_context(Client(addresses[-1], name="measure"))
        taken = [
            _measure_load(size, address, other, speed, num_threads, seconds)
            for size, address in zip(sizes, addresses, strict=False)
        ]
        before = _measure_slowdown(speed, num_threads)
        handing, waiting_s = _measure_transfers(other), _measure_waiting_s(other)
        averaging = _measure_averaging(other, addresses[len(SIZES) : -1])
        at = (before + _measure_slowdown(speed, num_threads)) / 2
        crowding = _measure_crowding(other)
    terms = np.array([[CALLS, size.num_tables * size.num_ids * size.batch_size, 2.0 * size.num_bytes] for size in sizes])
    asking = _fit_cost(terms, [one.asking_s for one in taken])
    both = _fit_cost(terms, [one.cores_s for one in taken])
    return Requests(
        asking=asking,
        answering=_subtract(both, asking),
        waiting_s=waiting_s / at,
        handing=_divide(handing, at),
        averaging=_divide(averaging, at),
        crowding=crowding,
    )


@functools.cache
def _flush_buffer() -> torch.Tensor:
    """Once for all: memory that comes and goes would change what other memory costs."""
    return torch.zeros(FLUSH_BYTES // 4)


class _CpuTimer:
    """Processor time of this thread and of this process for some blocks, before each of which other memory passes through the caches."""

    def __init__(self) -> None:
        self.thread_s = self.process_s = 0.0
        self.wall_s = 0.0
        """Of the last one."""

    def __enter__(self) -> None:
        _flush_buffer().add_(1)
        self._began = time.thread_time(), time.process_time(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        thread_s, process_s, wall_s = self._began
        self.thread_s += time.thread_time() - thread_s
        self.process_s += time.process_time() - process_s
        self.wall_s = time.perf_counter() - wall_s


@dataclass(frozen=True)
class _RequestTime:
    """Of one batch's look-up and update, at the standard pace and besides its rows."""

    asking_s: float
    """Of the thread that asks."""
    cores_s: float
    """Of all threads of both processes."""


def _measure_load(
    size: RequestLoad, address: str, other: Any, speed: MachineSpeed, num_threads: int, seconds: float
) -> _RequestTime:
    """Take both ways in turn."""
    from rowstead.fleet.partition import partition_tables
    from rowstead.fleet.remote_store import RemoteStore
    from rowstead.fleet.rpc_client import Client

    layout, optimizer, batches = size.layout, SparseOptimizerSpec(), size.batches()
    grad = torch.full((size.batch_size, size.num_tables * size.width), 1e-3)
    local = DeviceStore(layout, optimizer, check=False)
    partition = partition_tables(layout.tables, 1)
    remote = RemoteStore(layout, optimizer, partition, lambda number: Client(address, name="asker"), check=False)
    rows_s: list[float] = []
    asking_s: list[float] = []
    cores_s: list[float] = []
    step = 0

    def some(store: EmbeddingStore, count: int, settle: Callable[[], Any]) -> _CpuTimer:
        nonlocal step
        used = _CpuTimer()
        for _ in range(count):
            step += 1
            batch = batches[step % NUM_BATCHES]
            with used:
                store.lookup(batch)
            with used:
                store.update(batch, grad, lr=0.01, step=step)
                settle()
        return used

    some(local, WARM_STEPS, lambda: None)
    some(remote, WARM_STEPS, remote.flush)
    end = time.perf_counter() + seconds
    while len(rows_s) < LEAST_TURNS or time.perf_counter() < end:
        alone = some(local, TURN_STEPS, lambda: None)
        there_s = other.call("cpu").facts["cpu_s"]
        used = some(remote, TURN_STEPS, remote.flush)
        there_s = other.call("cpu").facts["cpu_s"] - there_s
        standard = TURN_STEPS * _measure_slowdown(speed, num_threads)
        rows_s.append(alone.thread_s / standard)
        asking_s.append(used.thread_s / standard)
        cores_s.append((used.process_s + there_s) / standard)
    remote.close()
    return _RequestTime(
        asking_s=statistics.median(asking_s), cores_s=max(0.0, statistics.median(cores_s) - statistics.median(rows_s))
    )


def _measure_slowdown(speed: MachineSpeed, num_threads: int) -> float:
    """How many times as long as at the standard pace the machine takes just now."""
    with threads(num_threads):
        return speed.slowdown([speed.time_reference()])


def _measure_waiting_s(other: Any) -> float:
    """What an empty request takes longer than all threads of both ends are at work for it."""
    there_s, used, walls_s = other.call("cpu").facts["cpu_s"], _CpuTimer(), []
    for _ in range(NUM_EMPTY):
        with used:
            other.call("hand", {"num_bytes": 0})
        walls_s.append(used.wall_s)
    cores_s = (used.process_s + other.call("cpu").facts["cpu_s"] - there_s) / NUM_EMPTY
    return max(0.0, statistics.median(walls_s) - cores_s)


def _measure_transfers(other: Any) -> MessageCost:
    """Answers that the server has in memory already."""
    asked = {size: functools.partial(other.call, "hand", {"num_bytes": size}) for size in TRANSFER_BYTES}
    return _fit_bytes({size: _cores_s(other, call) for size, call in asked.items()})


def _measure_averaging(other: Any, addresses: Sequence[str]) -> MessageCost:
    """Exchanges of a trainer with the centre, by the bytes of its parameters: it sends them, and adds what comes back."""
    from rowstead.fleet.dense_server import DenseServerClient
    from rowstead.fleet.rpc_client import Client

    taken_s: dict[int, float] = {}
    for size, address in zip(AVERAGED_PARAMETERS, addresses, strict=True):
        centre, parameters = DenseServerClient(Client(address, name="trainer-0")), torch.rand(size)
        centre.join(parameters)

        def exchange(centre: DenseServerClient = centre, parameters: torch.Tensor = parameters) -> None:
            parameters.add_(centre.elastic_average(parameters.clone(), 0.5))

        taken_s[4 * size] = _cores_s(other, exchange)
        centre.close()
    return _fit_bytes(taken_s)


def _cores_s(other: Any, call: Callable[[], Any]) -> float:
    """Processor time of a call, by all threads of both processes."""
    call()
    there_s, used = other.call("cpu").facts["cpu_s"], _CpuTimer()
    for _ in range(NUM_TRANSFERS):
        with used:
            call()
    return float(used.process_s + other.call("cpu").facts["cpu_s"] - there_s) / NUM_TRANSFERS


def _fit_bytes(taken_s: dict[int, float]) -> MessageCost:
    return _fit_cost(np.array([[1.0, 0.0, num_bytes] for num_bytes in taken_s]), list(taken_s.values()))


def _divide(one: MessageCost, times: float) -> MessageCost:
    """What was taken while the machine took so many times as long as at the standard pace."""
    return MessageCost(call_s=one.call_s / times, id_s=one.id_s / times, byte_s=one.byte_s / times)


def _measure_crowding(other: Any) -> float:
    """Processor time of one thread's beats while the other cores are busy, over that while they are idle."""
    speed, ratios = MachineSpeed(), []

    def cpu_s() -> float:
        start = time.thread_time()
        speed.time_reference()
        return time.thread_time() - start

    for _ in range(CROWDED_ROUNDS):
        idle_s = statistics.median(cpu_s() for _ in range(CROWDED_REFERENCES))
        other.call("busy", {"is_so": True})
        crowded_s = statistics.median(cpu_s() for _ in range(CROWDED_REFERENCES))
        other.call("busy", {"is_so": False})
        ratios.append(crowded_s / idle_s)
    return max(1.0, statistics.median(ratios))


def _fit_cost(terms: Any, taken_s: Sequence[float]) -> MessageCost:
    """Least squares of shares, without negative numbers."""
    taken = np.maximum(taken_s, 1e-7)
    call_s, id_s, byte_s = nonnegative_least_squares(terms / taken[:, None], np.ones(len(taken)))
    return MessageCost(call_s=float(call_s), id_s=float(id_s), byte_s=float(byte_s))


def _subtract(whole: MessageCost, part: MessageCost) -> MessageCost:
    """What is left of a cost, nothing where it is less."""
    return MessageCost(
        call_s=max(0.0, whole.call_s - part.call_s),
        id_s=max(0.0, whole.id_s - part.id_s),
        byte_s=max(0.0, whole.byte_s - part.byte_s),
    )


# The other process


@contextlib.contextmanager
def _start_server(num_threads: int) -> Iterator[list[str] | None]:
    """The addresses of the other process: a sparse server for each size, a dense one for each, and what else it answers; none where it
    does not come."""
    command = [sys.executable, "-m", "rowstead.study.calibration.requests", str(num_threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            yield json.loads(said) if said else None
        finally:
            process.kill()


def main() -> None:
    """Serve until whoever started this is gone."""
    from rowstead.distributed.sharding import piece_layout
    from rowstead.fleet.dense_server import DenseServerProcess
    from rowstead.fleet.partition import partition_tables
    from rowstead.fleet.rpc_server import Server
    from rowstead.fleet.sparse_server import SparseServer
    from rowstead.fleet.table_shard import TableShard
    from rowstead.fleet.wire import Message

    torch.set_num_threads(1)
    busy = threading.Event()
    payloads = {num_bytes: torch.zeros(num_bytes // 4) for num_bytes in (0, *TRANSFER_BYTES)}

    def report_cpu(message: Message, caller: Any) -> Message:
        return Message("cpu", {"cpu_s": time.process_time()})

    def hand(message: Message, caller: Any) -> Message:
        return Message("hand", {}, [payloads[int(message.facts["num_bytes"])]])

    def set_busy(message: Message, caller: Any) -> Message:
        (busy.set if message.facts["is_so"] else busy.clear)()
        return Message("busy")

    def keep_busy() -> None:
        busy.wait()
        speed = MachineSpeed(standard_s=1.0)
        while True:
            busy.wait()
            speed.time_reference()

    for _ in range(int(sys.argv[1]) - 1):  # of cores, all but that of whoever measures
        threading.Thread(target=keep_busy, daemon=True).start()
    servers: list[SparseServer | DenseServerProcess] = []
    for number, size in enumerate(SIZES):
        layout = size.layout
        pieces = partition_tables(layout.tables, 1).pieces_of(layout, 0)
        kept = TableShard(piece_layout(layout, pieces), SparseOptimizerSpec())
        servers.append(SparseServer(kept, name=f"sparse-{number}").start())
    servers += [DenseServerProcess(name=f"dense-{number}").start() for number in range(len(AVERAGED_PARAMETERS))]
    with Server({"cpu": report_cpu, "hand": hand, "busy": set_busy}, name="measured").start() as server:
        print(json.dumps([*(one.address for one in servers), server.address]), flush=True)
        sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
