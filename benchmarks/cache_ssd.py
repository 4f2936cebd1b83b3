"""The half of `benchmarks.cache` that runs on a CPU: rows on SSD behind a cache in RAM."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.harness import OtherLoad, chosen, noise_of, publish
from benchmarks.skews import CriteoLike, criteo_like_exponent
from benchmarks.step import Model
from rowstead.data.batch import Batch
from rowstead.kernels.cpu import disk
from rowstead.kernels.cpu.memory import address_of
from rowstead.kernels.layout import layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.scratch import allocate_aligned
from rowstead.stores.ssd import FileRows, initial_rows_of
from rowstead.training.step import Stepper

SHAPES = (CriteoLike("M1", 30, 500_000, 64, 28, 200),)
QUICK_SHAPES = (CriteoLike("M1", 30, 50_000, 64, 28, 200),)
CACHED = 0.1
"""Share of the rows that are in RAM."""
ROUNDS, QUICK_ROUNDS = 5, 3
STEPS, EDGE = 30, 3
"""Steps of a round that count, and those before and after them."""
WARMING_STEPS, QUICK_WARMING_STEPS = 200, 50
"""Steps before anything is timed, for a cache as it is long after the start."""
WARMING_IDS = 1 << 18
"""About how many rows come into the cache at a time when it is filled."""
READS, DEPTHS = 40_000, (64, 128, 256, 512)
"""Random reads of a round, for each number in flight."""

Work = Callable[[EmbeddingStore, Batch, int], Any]
"""Takes the store, a batch and the number of the step."""


@dataclass(frozen=True)
class Round:
    """What some steps took."""

    seconds: float
    """Of one step."""
    misses: float = 0.0
    """Rows read from disk, and below bytes, for each step."""
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    bytes_cleaned: float = 0.0
    device_read_bytes: float = 0.0


def prefetched(store: EmbeddingStore, batches: Sequence[Batch], ahead: int) -> Iterator[Batch]:
    """Each batch after the store has heard of the next ones."""
    coming: deque[Batch] = deque()
    for batch in batches:
        store.prefetch(batch.sparse)
        coming.append(batch)
        if len(coming) > ahead:
            yield coming.popleft()
    yield from coming


def timed(work: Work, store: EmbeddingStore, rows: FileRows | None, batches: Sequence[Batch], number: int) -> Round:
    """Train on batches, the first and last EDGE of which do not count."""

    def facts() -> np.ndarray[Any, Any]:
        counts = rows.counts if rows else None
        told = (
            (0, 0, 0, 0)
            if counts is None
            else (counts.rows_read, counts.bytes_read, counts.bytes_written, counts.bytes_cleaned)
        )
        return np.array([time.perf_counter(), *told, psutil.Process().io_counters().read_bytes], np.float64)

    before = after = facts()
    for index, batch in enumerate(prefetched(store, batches, store.batches_ahead)):
        if index == EDGE:
            before = facts()
        if index == len(batches) - EDGE:
            after = facts()
        work(store, batch, number + index)
    return Round(*((after - before) / (len(batches) - 2 * EDGE)).tolist())


def tables_work(grad: torch.Tensor) -> Work:
    """Look-up and update alone, with a gradient that does not depend on the look-up."""

    def work(store: EmbeddingStore, batch: Batch, number: int) -> None:
        store.lookup(batch.sparse)
        store.update(batch.sparse, grad, lr=0.01, step=number)

    return work


def step_work(model: Model) -> Work:
    """The whole training step, by a net for each store."""
    spec, steppers = model.spec(), {}

    def work(store: EmbeddingStore, batch: Batch, number: int) -> None:
        if id(store) not in steppers:
            torch.manual_seed(1)
            steppers[id(store)] = Stepper(DLRM(spec.model, spec.features, store), spec.train, total_steps=1_000_000)
        steppers[id(store)].start(batch, number)

    return work


def random_reads_per_s(rows: FileRows, depth: int) -> float:
    """Reads of one record each, in no order, by a queue of `depth`; nothing is done with what was read."""
    queue, sector, size = disk.ReadQueue(depth), rows.file.sector, rows.record_bytes
    starts = rows.starts_on_disk(
        torch.randint(0, rows.num_rows, (READS,))
    )  # what was never written is not read from the device
    first, last = starts // sector * sector, -(-(starts + size) // sector) * sector
    reads, slot_bytes = np.stack([first, last - first], axis=1), int((last - first).max())
    memory, none = allocate_aligned(depth * slot_bytes), np.zeros(0, np.int64)
    begin = time.perf_counter()
    firsts = np.zeros(len(reads) + 1, np.int64)
    outcome = disk.read_queued(queue, rows.file.fd, address_of(memory), slot_bytes, reads, firsts, *[none] * 6)
    seconds = time.perf_counter() - begin
    queue.close()
    assert outcome == disk.OK, outcome
    return len(reads) / seconds


def ssd_store(model: Model, folder: str, ram: DeviceStore) -> tuple[CachedStore, FileRows]:
    """The same tables on disk, every row of them, behind a cache."""
    spec = model.spec()
    layout = layout_of(spec.features, spec.tables)
    path, opened = Path(folder) / "benchmark-cache.rows", []

    def backing(group: Any) -> FileRows:
        opened.append(FileRows(path, group.num_rows, group.columns, initial=initial_rows_of(group, seed=spec.seed)))
        return opened[0]

    num_slots = {table.name: int(table.num_rows * CACHED) for table in layout.tables}
    store = CachedStore(layout, spec.train.sparse_optimizer, num_slots=num_slots, backing=backing, seed=spec.seed)
    (rows,) = opened
    if not rows.file.direct:
        rows.close()
        raise SystemExit(f"`{folder}` has no direct I/O, so the page cache would hide the disk: name another by `--folder`")
    first = 0
    for values, state in zip(ram.weights, ram.row_states, strict=True):
        rows.write(torch.arange(first, first + len(values)), [values.detach(), *state.values()])
        first += len(values)
    return store, rows


def warm(store: CachedStore, shape: CriteoLike, work: Work, model: Model, num_steps: int) -> None:
    """Fill the cache with the hottest rows, the coldest of them first, and train for a while."""
    at_a_time = max(1, WARMING_IDS // shape.num_tables)
    borders = [*range(0, int(shape.num_rows * CACHED), at_a_time), int(shape.num_rows * CACHED)]
    for first, last in reversed(list(pairwise(borders))):
        store.lookup(shape.of_ranks(first, last, "cpu"))
    for start in range(0, num_steps, STEPS):
        batches = [model.draw("cpu") for _ in range(STEPS)]
        for index, batch in enumerate(prefetched(store, batches, store.batches_ahead)):
            work(store, batch, start + index + 1)


def measure(shape: CriteoLike, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each work."""
    needs_bytes, free_bytes = int(1.3 * shape.table_bytes) + (2 << 30), psutil.virtual_memory().available
    if needs_bytes > free_bytes:
        raise SystemExit(f"{shape.name} needs {needs_bytes:.2g} bytes of memory, and {free_bytes:.2g} are free")
    model = Model(recipe="m1", shape=shape)
    spec = model.spec()
    works = {
        "tables": tables_work(torch.randn(shape.batch_size, shape.num_tables * shape.width) * 1e-3),
        "step": step_work(model),
    }
    ram = DeviceStore(layout_of(spec.features, spec.tables), spec.train.sparse_optimizer, seed=spec.seed)
    store, rows = ssd_store(model, options.folder, ram)
    try:
        warm(store, shape, works["tables"], model, QUICK_WARMING_STEPS if options.quick else WARMING_STEPS)
        rounds: dict[tuple[str, str], list[Round]] = {}
        reads: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
        number = 1_000
        with OtherLoad() as others:
            for _ in range(QUICK_ROUNDS if options.quick else ROUNDS):
                for name, work in works.items():
                    batches = [model.draw("cpu") for _ in range(STEPS + 2 * EDGE)]
                    rounds.setdefault((name, "ram"), []).append(timed(work, ram, None, batches, number))
                    for depth in DEPTHS:
                        reads[depth].append(random_reads_per_s(rows, depth))
                    rounds.setdefault((name, "ssd"), []).append(timed(work, store, rows, batches, number))
                    number += len(batches)
    finally:
        store.close()
    depth, reads_per_s = max(((depth, statistics.median(rates)) for depth, rates in reads.items()), key=lambda pair: pair[1])
    disk_facts = {"reads_per_s": reads_per_s, "reads_in_flight": depth, "cores_used_by_others": others.cores}
    return [row_of(shape, name, rounds[name, "ram"], rounds[name, "ssd"], disk_facts) for name in works]


def row_of(
    shape: CriteoLike, work: str, ram: Sequence[Round], ssd: Sequence[Round], disk_facts: dict[str, float]
) -> dict[str, Any]:
    """Medians of rounds, and how near to what is possible they come."""

    def median(rounds: Sequence[Round], figure: str) -> float:
        return statistics.median(getattr(each, figure) for each in rounds)

    misses = median(ssd, "misses")
    disk_s, ram_s, ssd_s = misses / disk_facts["reads_per_s"], median(ram, "seconds"), median(ssd, "seconds")
    return {
        "shape": shape.name,
        "work": work,
        "rows_a_table": shape.num_rows,
        "table_gb": shape.table_bytes / 1e9,
        "zipf_exponent": criteo_like_exponent(shape.num_rows),
        "ram_ms": 1e3 * ram_s,
        "disk_ms": 1e3 * disk_s,
        "ssd_ms": 1e3 * ssd_s,
        "samples_per_s": shape.batch_size / ssd_s,
        "ssd_over_possible": max(ram_s, disk_s) / ssd_s,
        "misses_a_step": misses,
        "bytes_read_a_step": median(ssd, "bytes_read"),
        "bytes_written_a_step": median(ssd, "bytes_written"),
        "bytes_cleaned_a_step": median(ssd, "bytes_cleaned"),
        "device_read_share": sum(each.device_read_bytes for each in ssd)
        / sum(each.bytes_read + each.bytes_cleaned for each in ssd),
        **disk_facts,
    }


def run(options: argparse.Namespace) -> None:
    """Measure, print, and save where asked to."""
    rows = [row for shape in chosen(QUICK_SHAPES if options.quick else SHAPES, options) for row in measure(shape, options)]
    summary = {
        "ssd_over_possible": min(row["ssd_over_possible"] for row in rows),
        "device_read_share_min": min(row["device_read_share"] for row in rows),
    }
    publish("cache", rows, summary | noise_of(rows), options)
