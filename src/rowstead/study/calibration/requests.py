"""Measures requests between processes that share the cores of this machine, as the roles of a fleet do.

A sparse server in another process (`python -m rowstead.study.calibration.requests`) answers look-ups and updates of batches of several sizes.
The extra time over the same work on local tables is fitted by the number of messages, ids and bytes. The caches are flushed between
requests, as they are in a step: back-to-back requests take half as long. Letters: B examples, D width.
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
from rowstead.study.calibration.hardware import use_threads
from rowstead.study.calibration.machine_speed import MachineSpeed

NUM_ROWS = 10_000
NUM_BATCHES = 12
"""Batches of each size, used cyclically."""
WARM_STEPS, TURN_STEPS, LEAST_TURNS = 3, 6, 5
"""Warm-up steps; steps per turn, local and remote alternately; the least number of turns."""
CALLS = 3
"""Requests per step: a look-up, an update, and a flush that waits for both."""
TRANSFER_BYTES = (1 << 10, 1 << 20, 1 << 22)
NUM_TRANSFERS, NUM_EMPTY = 24, 100
AVERAGED_PARAMETERS = (1 << 16, 1 << 20)
"""Numbers of dense parameters that trainers average."""
CROWDED_ROUNDS, CROWDED_REFERENCES = 3, 10


@dataclass(frozen=True)
class RequestLoad:
    """The size of the batches of one measurement."""

    num_tables: int
    num_ids: int
    """Ids per bag."""
    batch_size: int
    width: int

    @property
    def layout(self) -> Layout:
        features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f{i}", repeat=self.num_tables, num_rows=NUM_ROWS),))
        return layout_of(features, tables_of(features, width=self.width))

    @property
    def num_bytes(self) -> int:
        """Bytes of the pooled vectors of a batch."""
        return self.num_tables * self.batch_size * self.width * 4

    def batches(self) -> list[Sparse]:
        """Draw ids uniformly, so that rows hardly repeat within a batch."""
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
    """The message and crowding fields of `spec/sharing.py`."""

    asking: MessageCost
    answering: MessageCost
    waiting_s: float
    handing: MessageCost
    averaging: MessageCost
    crowding: float


def measure_requests(speed: MachineSpeed, *, is_short: bool = False) -> Requests | None:
    """Measure requests to another process, normalised to standard machine speed; None if it cannot start or ZeroMQ is missing."""
    try:
        from rowstead.fleet.rpc_client import Client
    except ImportError:
        return None
    sizes = SIZES[:3] if is_short else SIZES
    seconds = 0.05 if is_short else 0.6
    num_threads = torch.get_num_threads()
    with _start_server(num_threads) as addresses, contextlib.ExitStack() as stack, use_threads(1):
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
    """Return the memory that flushes the caches; allocated once, as repeated allocations would change the cost of others."""
    return torch.zeros(FLUSH_BYTES // 4)


class _CpuTimer:
    """Context manager that flushes the caches, then adds up CPU time of this thread and this process."""

    def __init__(self) -> None:
        self.thread_s = self.process_s = 0.0
        self.wall_s = 0.0
        """Wall time of the last block."""

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
    """CPU time of one batch's look-up and update at standard machine speed, beyond the work on its rows."""

    asking_s: float
    """The client thread."""
    cores_s: float
    """All threads of both processes."""


def _measure_load(
    size: RequestLoad, address: str, other: Any, speed: MachineSpeed, num_threads: int, seconds: float
) -> _RequestTime:
    """Measure local and remote steps alternately."""
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

    def take_steps(store: EmbeddingStore, count: int, flush: Callable[[], Any]) -> _CpuTimer:
        nonlocal step
        used = _CpuTimer()
        for _ in range(count):
            step += 1
            batch = batches[step % NUM_BATCHES]
            with used:
                store.lookup(batch)
            with used:
                store.update(batch, grad, lr=0.01, step=step)
                flush()
        return used

    take_steps(local, WARM_STEPS, lambda: None)
    take_steps(remote, WARM_STEPS, remote.flush)
    end = time.perf_counter() + seconds
    while len(rows_s) < LEAST_TURNS or time.perf_counter() < end:
        used_locally = take_steps(local, TURN_STEPS, lambda: None)
        there_s = other.call("cpu").facts["cpu_s"]
        used = take_steps(remote, TURN_STEPS, remote.flush)
        there_s = other.call("cpu").facts["cpu_s"] - there_s
        standard = TURN_STEPS * _measure_slowdown(speed, num_threads)
        rows_s.append(used_locally.thread_s / standard)
        asking_s.append(used.thread_s / standard)
        cores_s.append((used.process_s + there_s) / standard)
    remote.close()
    return _RequestTime(
        asking_s=statistics.median(asking_s), cores_s=max(0.0, statistics.median(cores_s) - statistics.median(rows_s))
    )


def _measure_slowdown(speed: MachineSpeed, num_threads: int) -> float:
    """Return the current slowdown of the machine."""
    with use_threads(num_threads):
        return speed.slowdown([speed.time_reference()])


def _measure_waiting_s(other: Any) -> float:
    """Return the wall time of an empty request beyond the CPU time of both processes."""
    there_s, used, walls_s = other.call("cpu").facts["cpu_s"], _CpuTimer(), []
    for _ in range(NUM_EMPTY):
        with used:
            other.call("transfer", {"num_bytes": 0})
        walls_s.append(used.wall_s)
    cores_s = (used.process_s + other.call("cpu").facts["cpu_s"] - there_s) / NUM_EMPTY
    return max(0.0, statistics.median(walls_s) - cores_s)


def _measure_transfers(other: Any) -> MessageCost:
    """Measure replies that the server has ready in memory."""
    asked = {size: functools.partial(other.call, "transfer", {"num_bytes": size}) for size in TRANSFER_BYTES}
    return _fit_bytes({size: _cores_s(other, call) for size, call in asked.items()})


def _measure_averaging(other: Any, addresses: Sequence[str]) -> MessageCost:
    """Measure elastic averaging with a dense server by parameter bytes: send the parameters, add the reply."""
    from rowstead.fleet.dense_client import DenseServerClient
    from rowstead.fleet.rpc_client import Client

    taken_s: dict[int, float] = {}
    for size, address in zip(AVERAGED_PARAMETERS, addresses, strict=True):
        dense_server, parameters = DenseServerClient([Client(address, name="trainer-0")]), torch.rand(size)
        dense_server.join(parameters)

        def exchange(dense_server: DenseServerClient = dense_server, parameters: torch.Tensor = parameters) -> None:
            parameters.add_(dense_server.elastic_average(parameters.clone(), 0.5))

        taken_s[4 * size] = _cores_s(other, exchange)
        dense_server.close()
    return _fit_bytes(taken_s)


def _cores_s(other: Any, call: Callable[[], Any]) -> float:
    """Return the CPU time of a call over all threads of both processes."""
    call()
    there_s, used = other.call("cpu").facts["cpu_s"], _CpuTimer()
    for _ in range(NUM_TRANSFERS):
        with used:
            call()
    return float(used.process_s + other.call("cpu").facts["cpu_s"] - there_s) / NUM_TRANSFERS


def _fit_bytes(taken_s: dict[int, float]) -> MessageCost:
    return _fit_cost(np.array([[1.0, 0.0, num_bytes] for num_bytes in taken_s]), list(taken_s.values()))


def _divide(one: MessageCost, times: float) -> MessageCost:
    """Normalise a cost measured at this slowdown."""
    return MessageCost(call_s=one.call_s / times, id_s=one.id_s / times, byte_s=one.byte_s / times)


def _measure_crowding(other: Any) -> float:
    """Return the CPU time of one-thread reference work with busy other cores over that with idle ones."""
    speed, ratios = MachineSpeed(), []

    def cpu_s() -> float:
        start = time.thread_time()
        speed.time_reference()
        return time.thread_time() - start

    for _ in range(CROWDED_ROUNDS):
        idle_s = statistics.median(cpu_s() for _ in range(CROWDED_REFERENCES))
        other.call("busy", {"is_busy": True})
        crowded_s = statistics.median(cpu_s() for _ in range(CROWDED_REFERENCES))
        other.call("busy", {"is_busy": False})
        ratios.append(crowded_s / idle_s)
    return max(1.0, statistics.median(ratios))


def _fit_cost(terms: Any, taken_s: Sequence[float]) -> MessageCost:
    """Non-negative least squares of relative errors."""
    taken = np.maximum(taken_s, 1e-7)
    call_s, id_s, byte_s = nonnegative_least_squares(terms / taken[:, None], np.ones(len(taken)))
    return MessageCost(call_s=float(call_s), id_s=float(id_s), byte_s=float(byte_s))


def _subtract(whole: MessageCost, part: MessageCost) -> MessageCost:
    """Subtract a cost, clipped at 0."""
    return MessageCost(
        call_s=max(0.0, whole.call_s - part.call_s),
        id_s=max(0.0, whole.id_s - part.id_s),
        byte_s=max(0.0, whole.byte_s - part.byte_s),
    )


# The other process


@contextlib.contextmanager
def _start_server(num_threads: int) -> Iterator[list[str] | None]:
    """Start the other process and yield its addresses: a sparse server per load, a dense server per parameter count, and a control server.

    Yields None if the process does not start.
    """
    command = [sys.executable, "-m", "rowstead.study.calibration.requests", str(num_threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield json.loads(line) if line else None
        finally:
            process.kill()


def main() -> None:
    """Serve until the parent process closes stdin."""
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

    def transfer(message: Message, caller: Any) -> Message:
        return Message("transfer", {}, [payloads[int(message.facts["num_bytes"])]])

    def set_busy(message: Message, caller: Any) -> Message:
        (busy.set if message.facts["is_busy"] else busy.clear)()
        return Message("busy")

    def keep_busy() -> None:
        busy.wait()
        speed = MachineSpeed(standard_s=1.0)
        while True:
            busy.wait()
            speed.time_reference()

    for _ in range(int(sys.argv[1]) - 1):  # one per core but that of the client
        threading.Thread(target=keep_busy, daemon=True).start()
    servers: list[SparseServer | DenseServerProcess] = []
    for number, size in enumerate(SIZES):
        layout = size.layout
        pieces = partition_tables(layout.tables, 1).pieces_of(layout, 0)
        kept = TableShard(piece_layout(layout, pieces), SparseOptimizerSpec())
        servers.append(SparseServer(kept, name=f"sparse-{number}").start())
    servers += [DenseServerProcess(name=f"dense-{number}").start() for number in range(len(AVERAGED_PARAMETERS))]
    with Server({"cpu": report_cpu, "transfer": transfer, "busy": set_busy}, name="measured").start() as server:
        print(json.dumps([*(one.address for one in servers), server.address]), flush=True)
        sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
