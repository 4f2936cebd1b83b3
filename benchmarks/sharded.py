"""Bytes on the wire and hidden communication of synchronous training: two processes, gloo over the loopback interface.

Each row trains one model with its tables cut in one way, on the same batches. Bytes are counted where they are handed to
torch.distributed, for both processes together; beside them stands what the loopback interface itself counted, with everybody
else's. The least possible for W processes, with 4 bytes an id, 1 byte for the length of a bag where lengths differ, e bytes a
number and D the width, is the sum over processes of

    table      4 (ids of tables elsewhere) + (their bags) + 2 e D (their bags that are not empty)
    row        over each other process: 4 (ids of its rows) + (bags) + 2 e D (bags with such an id)
    column     over each other process: 4 (ids) + (bags) + 2 e (its share of D) (bags that are not empty),
               and with row-wise Adagrad 2 (W - 1) / W e (distinct rows)
    replicate  2 (W - 1) / W e D (rows)
    dense      2 (W - 1) / W e (parameters)

Time in flight is from the start of an exchange to its end, added up over all exchanges; the hidden share of it is what a process
did not spend waiting.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import OtherLoad, arguments, chosen, noise_of, publish
from rowstead.data.batch import Batch, Sparse
from rowstead.distributed.launch import process_environment
from rowstead.distributed.process_group import ProcessGroup, TorchProcessGroup, TorchWork
from rowstead.distributed.sharded_store import ShardedStore
from rowstead.distributed.sharding import Shard, column_ranges, plan_shards, row_ranges
from rowstead.kernels.layout import Layout, layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.model import ModelSpec
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.train import TrainSpec
from rowstead.stores.device import DeviceStore
from rowstead.training.prefetch import prefetch_rows
from rowstead.training.sharded_step import WIRE_DTYPES
from rowstead.training.step import Stepper

WORLD = 2


@dataclass(frozen=True)
class Case:
    """One way to cut the tables."""

    name: str
    shards: tuple[Shard, ...]
    """Of one table after the other, over and over."""
    num_rows: int = 100_000
    mean_ids: float = 8.0
    """Ids of a bag; with 1 every bag has one."""
    wire: str = "fp32"
    num_features: int = 16
    width: int = 64
    batch_size: int = 4096

    @property
    def features(self) -> FeaturesSpec:
        sparse = SparseFeatureSpec(name="f{i}", repeat=self.num_features, num_rows=self.num_rows)
        return FeaturesSpec(dense=(DenseFeatureSpec(name="d{i}", repeat=64),), sparse=(sparse,))

    @property
    def layout(self) -> Layout:
        return layout_of(self.features, tables_of(self.features, width=self.width))

    @property
    def shards_by_name(self) -> dict[str, Shard]:
        return dict(zip((table.name for table in self.layout.tables), itertools.cycle(self.shards), strict=False))

    def draw(self, number: int) -> Batch:
        """A batch that depends on its number alone."""
        rng = torch.Generator().manual_seed(number)
        num_bags = self.num_features * self.batch_size
        if self.mean_ids == 1:
            lengths = torch.ones(num_bags, dtype=torch.int64)
        else:
            lengths = torch.poisson(torch.full((num_bags,), self.mean_ids), generator=rng).long()
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        drawn = torch.rand(int(offsets[-1]), generator=rng, dtype=torch.float64)
        ids = (self.num_rows * drawn**3).long()
        return Batch(
            dense=torch.rand(self.batch_size, 64, generator=rng),
            sparse=Sparse(ids=ids, offsets=offsets, num_features=self.num_features),
            labels=torch.randint(0, 2, (self.batch_size,), generator=rng).float(),
        )


CASES = (
    Case("table", ("table",)),
    Case("row", ("row",)),
    Case("column", ("column",)),
    Case("replicate", ("replicate",), num_rows=1_000),
    Case("mix", ("table", "row", "column", "replicate"), num_rows=2_000),
    Case("table, one id", ("table",), mean_ids=1),
    Case("row, one id", ("row",), mean_ids=1),
    Case("table, bf16", ("table",), wire="bf16"),
)


def least_bytes(case: Case, batch: Batch, num_parameters: int) -> float:
    """The least that all processes together can send for one step on `batch`; the formula is above."""
    layout, world_size = case.layout, WORLD
    element = 4 if case.wire == "fp32" else 2
    plan = plan_shards(layout, case.shards_by_name, world_size)
    sums = 2 * (world_size - 1) * element  # of all processes together, for each number that is added up
    total = float(sums * num_parameters)
    for place, table in enumerate(layout.tables):
        shard = plan.shards[place]
        if shard == "replicate":
            total += 2 * (world_size - 1) * 4 * table.num_elements
            continue
        if shard == "column":
            own = batch.sparse
            used = own.ids[own.offsets[place * case.batch_size] : own.offsets[(place + 1) * case.batch_size]]
            total += 2 * (world_size - 1) * 4 * used.unique().numel()
        for rank in range(world_size):
            sparse = batch.local_share(rank, world_size).sparse
            count = sparse.num_samples
            bounds = sparse.offsets[place * count : (place + 1) * count + 1]
            ids = sparse.ids[bounds[0] : bounds[-1]]
            bag_of = torch.repeat_interleave(torch.arange(count), bounds.diff())
            for owner in range(world_size):
                if owner == rank:
                    continue
                columns, asked = table.width, torch.ones_like(ids, dtype=torch.bool)
                if shard == "table":
                    asked &= any(piece.table == place for piece in plan.pieces[owner])
                elif shard == "row":
                    first, last = row_ranges(table.num_rows, world_size)[owner]
                    asked = (ids >= first) & (ids < last)
                else:
                    start, stop = column_ranges(table.width, world_size)[owner]
                    columns = stop - start
                if not asked.any():
                    continue
                lengths = torch.bincount(bag_of[asked], minlength=count)
                tells_lengths = bool((lengths != lengths[0]).any())
                total += 4 * int(asked.sum()) + tells_lengths * count
                total += 2 * element * columns * int((lengths > 0).sum())
    return total


@dataclass
class Traffic:
    """What one process has exchanged so far."""

    sent_bytes: int = 0
    """Sent to others; an all-reduce counts as what a ring all-reduce sends."""
    flight_s: float = 0.0
    """Sum over all collectives of the seconds between start and completion."""
    waited_s: float = 0.0
    """Seconds of these in which this process was blocked."""


class MeasuredProcessGroup(TorchProcessGroup):
    """Counts what this process sends, and how long its collectives take and are waited for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.traffic = Traffic()

    def start_all_reduce(self, tensor: Tensor) -> MeasuredWork:  # type: ignore[override]
        self.traffic.sent_bytes += 2 * (self.world_size - 1) * tensor.numel() * tensor.element_size() // self.world_size
        start_s = time.perf_counter()
        return MeasuredWork(super().start_all_reduce(tensor), self.traffic, start_s)

    def start_all_to_all(  # type: ignore[override]
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> MeasuredWork:
        self.traffic.sent_bytes += (sent.numel() - sent_sizes[self.rank]) * sent.element_size()
        start_s = time.perf_counter()
        return MeasuredWork(super().start_all_to_all(received, sent, received_sizes, sent_sizes), self.traffic, start_s)


class MeasuredWork:
    """A collective that is timed."""

    def __init__(self, work: TorchWork, traffic: Traffic, start_s: float) -> None:
        self._work, self._traffic, self._start_s = work, traffic, start_s
        self._ended_s: list[float] = []
        work.work.get_future().add_done_callback(lambda _: self._ended_s.append(time.perf_counter()))

    def wait(self) -> None:
        wait_s = time.perf_counter()
        self._work.wait()
        now_s = time.perf_counter()
        end_s = self._ended_s[0] if self._ended_s else now_s  # the callback may run a moment after the wait returns
        self._traffic.flight_s += max(end_s, self._start_s) - self._start_s
        self._traffic.waited_s += min(now_s, max(end_s, wait_s)) - wait_s


def worker(case: Case, num_steps: int, num_warmups: int) -> dict[str, Any] | None:
    """One process's part; the first returns what all measured."""
    torch.set_num_threads(1)
    process_group = MeasuredProcessGroup.join(torch.device("cpu"))
    stepper = _stepper(case, process_group)
    # Some more than are trained on: ids travel ahead, and those of as many batches have to be counted.
    whole = [case.draw(number) for number in range(num_warmups + num_steps + 4)]
    batches = [batch.local_share(process_group.rank, WORLD) for batch in whole]
    store = stepper.model.store
    items = ((batch, batch, {}) for batch in batches)
    seconds, others, loopback = [], OtherLoad(), 0
    for number, (_, batch, _) in enumerate(prefetch_rows(items, store), start=1):
        if number == num_warmups + 1:
            process_group.barrier()
            process_group.traffic = Traffic()
            others.__enter__()
            loopback = _loopback_bytes()
        start_s = time.perf_counter()
        stepper.step(batch, number)
        if number > num_warmups:
            seconds.append(time.perf_counter() - start_s)
        if number == num_warmups + num_steps:
            break
    traffic = dataclasses.asdict(process_group.traffic)
    process_group.barrier()
    loopback = _loopback_bytes() - loopback
    others.__exit__()
    told = process_group.gather(traffic)
    num_parameters = sum(parameter.numel() for parameter in stepper.model.net.parameters())
    process_group.close()
    if process_group.rank:
        return None
    measured = whole[num_warmups : num_warmups + num_steps]
    least = sum(least_bytes(case, batch, num_parameters) for batch in measured) / num_steps
    sent = sum(one["sent_bytes"] for one in told) / num_steps
    flight_s, waited_s = (sum(one[key] for one in told) for key in ("flight_s", "waited_s"))
    return {
        "sharding": case.name,
        "wire_bytes_per_step": sent,
        "least_bytes_per_step": least,
        "wire_bytes_over_least": sent / least,
        "loopback_bytes_per_step": loopback / num_steps,
        "communication_hidden_share": max(0.0, flight_s - waited_s) / flight_s,
        "flight_s_per_step": flight_s / num_steps / WORLD,
        "waited_s_per_step": waited_s / num_steps / WORLD,
        "step_s": statistics.median(seconds),
        "samples_per_s": case.batch_size / statistics.median(seconds),
        "cores_used_by_others": max(0.0, others.cores - 1),
    }


def _stepper(case: Case, process_group: ProcessGroup) -> Stepper:
    spec = TrainSpec(batch_size=case.batch_size, wire=case.wire)  # type: ignore[arg-type]

    def make(layout: Layout, optimizer: SparseOptimizerSpec | None) -> DeviceStore:
        return DeviceStore(layout, optimizer, check=False)

    wire = WIRE_DTYPES[case.wire]
    plan = plan_shards(case.layout, case.shards_by_name, process_group.world_size)
    store = ShardedStore(plan, spec.sparse_optimizer, process_group, make, wire=wire, check=False)
    torch.manual_seed(1)
    model = DLRM(ModelSpec(width=case.width, bottom=(512, 256), top=(512, 256)), case.features, store)
    return Stepper(model, spec, total_steps=10_000, process_group=process_group)


def _loopback_bytes() -> int:
    """What the loopback interface has sent since the system started."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0)


def measure(case: Case, num_steps: int, num_warmups: int) -> dict[str, Any]:
    """A row of the table, from processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.sharded", "--worker", case.name, str(num_steps), str(num_warmups)]
        processes = [
            subprocess.Popen(
                command, env=process_environment(rank, WORLD, Path(folder) / "rendezvous", 0), stdout=subprocess.PIPE, text=True
            )
            for rank in range(WORLD)
        ]
        try:
            said = [process.communicate(timeout=600)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            raise SystemExit(f"{case.name}: a process has failed, see above")
    row: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return row


def rows_of(cases: list[Case], *, quick: bool) -> Iterator[dict[str, Any]]:
    for case in cases:
        yield measure(case, *((5, 2) if quick else (40, 5)))


def main() -> None:
    if "--worker" in sys.argv:
        name, num_steps, num_warmups = sys.argv[-3:]
        row = worker(next(case for case in CASES if case.name == name), int(num_steps), int(num_warmups))
        if row is not None:
            print(json.dumps(row), flush=True)
        os._exit(0)
    options = arguments(__doc__, with_shapes=True).parse_args()
    rows = list(rows_of(chosen(CASES, options, num_quick=len(CASES)), quick=options.quick))
    flight = sum(row["flight_s_per_step"] for row in rows)
    waited = sum(row["waited_s_per_step"] for row in rows)
    summary = {
        "wire_bytes_over_least_max": max(row["wire_bytes_over_least"] for row in rows),
        "communication_hidden_share": max(0.0, flight - waited) / flight,
        **noise_of(rows),
    }
    publish("sharded", rows, summary, options)


if __name__ == "__main__":
    main()
