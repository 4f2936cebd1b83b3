"""Part of `benchmarks.checkpoint`: what training loses while checkpoints are written beside it, and how fast they are written."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import OtherLoad
from benchmarks.skews import CriteoLike
from rowstead.data.batch import Batch
from rowstead.data.source import Batches, Cursor, Source
from rowstead.spec.parse import parse
from rowstead.spec.phases import Phase
from rowstead.spec.run import RunSpec
from rowstead.stores.scratch import allocate_aligned
from rowstead.training.build import build_model
from rowstead.training.checkpoint import checkpoints_in
from rowstead.training.device import set_threads
from rowstead.training.loop import Loop
from rowstead.training.progress import Callback, Position, Progress, RunReporter
from rowstead.training.step import Stepper

NUM_TABLES, WIDTH, NUM_DENSE = 26, 128, 13
ROW_BYTES = 4 * (WIDTH + 1)
"""FP32 rows with row-wise Adagrad."""


@dataclass(frozen=True)
class Beside:
    """Sizes of one measurement."""

    table_bytes: float
    batch_size: int
    num_batches: int
    """Batches in memory, which are trained on in turn."""
    interval_s: float
    """From one checkpoint to the next; as long without one is the baseline."""
    pairs: int


def sizes(device: str, *, quick: bool, table_gb: float | None, interval_s: float | None, pairs: int | None) -> Beside:
    on_gpu = device == "cuda"
    default = Beside(12.5e9, 8192, 32, 60, 2) if on_gpu else Beside(2e9, 512, 400, 60, 1)
    if quick:
        default = Beside(default.table_bytes / 20, default.batch_size, 20, 5, 1)
    return Beside(
        table_gb * 1e9 if table_gb is not None else default.table_bytes,
        default.batch_size,
        default.num_batches,
        interval_s or default.interval_s,
        pairs or default.pairs,
    )


class BatchesInMemory(Source):
    """The same batches again and again, without end."""

    num_samples = 1 << 60

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def batches(
        self, batch_size: int, *, epoch: int = 0, rank: int = 0, world_size: int = 1, cursor: Cursor | None = None
    ) -> Batches:
        for batch in itertools.cycle(self._batches):
            yield batch, {}

    def pin_memory(self) -> Source:
        return BatchesInMemory([batch.pin_memory() for batch in self._batches])


class _Clock(Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ended: dict[int, float] = {}
        self.stop_at = float("inf")

    def on_step(self, progress: Progress) -> None:
        self.ended[progress.step] = time.perf_counter()

    def is_over(self) -> bool:
        return time.perf_counter() > self.stop_at

    def on_message(self, text: str) -> None:
        print(text, flush=True)


def measure(size: Beside, device: str, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row for each interval, with or without a checkpoint, and what they come to."""
    num_rows = int(size.table_bytes / NUM_TABLES / ROW_BYTES)
    spec = _spec(size, num_rows, checkpoint_every=None)
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    with set_threads(spec.threads):
        stepper = Stepper(build_model(spec, where, trains=True), spec.train, total_steps=1 << 60)
        shape = CriteoLike("criteo-like", NUM_TABLES, num_rows, WIDTH, 1, size.batch_size)
        source = BatchesInMemory([_batch(shape) for _ in range(size.num_batches)])
        if device == "cuda":
            torch.cuda.empty_cache()
        _run(spec, stepper, source, where, folder, Position(), for_s=max(2.0, size.interval_s / 6))  # compiles and captures
        clock, _ = _run(spec, stepper, source, where, folder, Position(), for_s=max(1.0, size.interval_s / 6))
        each = max(1, round(size.interval_s * len(clock.ended) / (max(clock.ended.values()) - min(clock.ended.values()))))
        held_before = stepper.timers.totals_s().get(Phase.CHECKPOINT, 0.0)
        spec = _spec(size, num_rows, checkpoint_every=2 * each)
        with OtherLoad() as others:
            first, last = each, (2 * size.pairs + 1) * each
            clock, events = _run(spec, stepper, source, where, folder / "run", Position(step=first), last_step=last)
    rows = []
    for number in range(1, 2 * size.pairs + 1):
        start = max(number * each, first + 1)
        spent_s = clock.ended[(number + 1) * each] - clock.ended[start]
        rows.append(
            {
                "interval": number,
                "checkpoint": "written" if number % 2 == 0 else "none",
                "step_ms": 1e3 * spent_s / ((number + 1) * each - start),
                "slowest_step_ms": 1e3
                * max(clock.ended[step + 1] - clock.ended[step] for step in range(start, (number + 1) * each)),
                "cores_used_by_others": others.cores,
            }
        )
    step_ms = {
        kind: statistics.median(row["step_ms"] for row in rows if row["checkpoint"] == kind) for kind in ("none", "written")
    }
    newest = checkpoints_in(folder / "run" / "checkpoints")[-1]
    saved_bytes = sum(file.stat().st_size for file in newest.iterdir())
    beside = events[: size.pairs]
    write_s = statistics.median(event["write_s"] for event in beside)
    held_s = stepper.timers.totals_s()[Phase.CHECKPOINT] - held_before - events[-1]["write_s"]
    shutil.rmtree(folder / "run")
    disk = disk_bytes_per_s(folder / "disk", saved_bytes)
    return rows, {
        "checkpoint_bytes": saved_bytes,
        "speed_kept": step_ms["none"] / step_ms["written"],
        "held_s": max(0.0, held_s) / size.pairs,
        "waited_s": statistics.median(event["waited_s"] for event in beside),
        "write_s": write_s,
        "written_bytes_per_s": saved_bytes / write_s,
        "written_last_bytes_per_s": saved_bytes / events[-1]["write_s"],
        **{f"disk_{kind}_bytes_per_s": rate for kind, rate in disk.items()},
        "written_over_disk": saved_bytes / write_s / max(disk.values()),
    }


def _spec(size: Beside, num_rows: int, *, checkpoint_every: int | None) -> RunSpec:
    counted = {"num_train_samples": 1000, "num_eval_samples": 1000, "num_dense": NUM_DENSE, "num_sparse": NUM_TABLES}
    return parse(
        RunSpec,
        {
            "name": "checkpoint",
            "data": {"synth": {**counted, "num_ids": 1000}},
            "features": {
                "dense": [{"name": "dense_{i}", "repeat": NUM_DENSE}],
                "sparse": [{"name": "sparse_{i}", "repeat": NUM_TABLES, "num_rows": num_rows}],
            },
            "model": {"width": WIDTH, "bottom": [512, 256], "top": [512, 256]},
            "train": {
                "batch_size": size.batch_size,
                "checkpoint_every": checkpoint_every,
                "keep_checkpoints": 1,
                "log_every": 100,
            },
        },
    )


def _batch(shape: CriteoLike) -> Batch:
    labels = (torch.rand(shape.batch_size) < 0.25).float()
    return Batch(dense=torch.rand(shape.batch_size, NUM_DENSE), sparse=shape.draw("cpu"), labels=labels)


def _run(
    spec: RunSpec, stepper: Stepper, source: Source, device: torch.device, folder: Path, position: Position,
    *, for_s: float = float("inf"), last_step: int | None = None,
) -> tuple[_Clock, list[dict[str, Any]]]:  # fmt: skip
    """Train by the loop that `rowstead train` runs; when each step ended, and the events of checkpoints."""
    folder.mkdir(exist_ok=True)
    clock = _Clock()
    reporter = RunReporter(folder, clock, log_every=100)
    sources: Any = SimpleNamespace(train=source, eval=source, test=None)
    loop = Loop(
        spec, stepper, sources, device=device, folder=folder, facts={}, reporter=reporter, position=position,
        stop_requested=lambda: clock.is_over() or position.step == last_step,
    )  # fmt: skip
    clock.stop_at = time.perf_counter() + for_s
    if last_step is None:
        loop.save = lambda **_: None  # type: ignore[method-assign]  # not of the warm-up
    loop.run()
    reporter.close()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return clock, [event for event in events if event["kind"] == "checkpoint"]


def disk_bytes_per_s(path: Path, num_bytes: int) -> dict[str, float]:
    """What the disk takes one after the other, synced: through the page cache, and past it."""
    memory = allocate_aligned(16 << 20)
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), dtype=np.uint8)
    rates = {}
    for kind, flag in (("cached", 0), ("direct", getattr(os, "O_DIRECT", 0))):
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag)
        except OSError:
            continue  # no direct I/O here
        started, done = time.perf_counter(), 0
        while done < num_bytes:
            done += os.write(file, memory.data)
        os.fsync(file)
        rates[kind] = done / (time.perf_counter() - started)
        os.close(file)
        path.unlink()
    return rates
