"""How fast does `rowstead train` train MLPerf's DLRM-DCNv2 with full tables from a packed log on one GPU?

The recipe `mlperf` has 26 tables of width 128, 104.5 GB of FP32 rows and their optimizer state, and 214 ids an example. A synthetic log of
that shape is packed once (`rowstead data pack`), and read as `data.cache` says; precision is BF16. Each figure is measured by a process of
its own, because the tables fill most of the GPU's memory.

`train_samples_per_s` is what `rowstead.train` did in the last steps of a run, from one logged step to another, epochs' ends included.
The run is ended there: its checkpoint would take a disk of more than 104 GB. `step_samples_per_s` is the step alone: the same Stepper
on batches of the same log that are in the GPU's memory, back to back. `joules_per_1000_samples` are the GPU's own while it trained, by its energy
counter, where pynvml is installed. `waiting_share` is the share of the time in which training waited for data.

On a CPU, and with `--quick`, tables and batches are small: that shows that it runs, and no more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import rowstead
from benchmarks.harness import arguments, publish
from benchmarks.step import GPU_ROUNDS, NUM_BATCHES, QUICK_ROUNDS, energy_counter, seconds_back_to_back, steps_of
from benchmarks.timing import seconds_as_called
from rowstead.data.open_log import open_sources, open_to_pack
from rowstead.data.pack import pack_log
from rowstead.spec.run import RunSpec, load_recipe
from rowstead.training.build import build_model
from rowstead.training.progress import Callback, Progress
from rowstead.training.step import Stepper

LOG_EVERY = 50
"""Training waits for all losses at a logged step: figures are taken there, from the first one on."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is written and trained on."""

    num_rows: int
    num_steps: dict[int, int]
    """For each batch size, the steps that count."""
    scale: float
    """Of the tables."""


FULL = Size(num_rows=8_294_400, num_steps={6912: 2000, 55296: 250}, scale=1.0)
QUICK_GPU = Size(num_rows=2_211_840, num_steps={6912: 500, 55296: 100}, scale=1.0)
SMALL = Size(num_rows=8_192, num_steps={64: LOG_EVERY, 128: LOG_EVERY}, scale=1e-5)


def spec_of(options: argparse.Namespace, size: Size, batch_size: int) -> RunSpec:
    """What `rowstead train mlperf --set …` would run."""
    steps = LOG_EVERY + size.num_steps[batch_size]
    return load_recipe(
        "mlperf",
        [
            f"data.synth.num_train_samples={size.num_rows}",
            "data.synth.num_eval_samples=1000",
            f"data.cache={options.folder}/pack",
            f"device={options.device}",
            f"scale={size.scale}",
            f"train.batch_size={batch_size}",
            "train.precision=bf16",
            f"train.max_steps={steps}",
            f"train.epochs={steps}",
            f"train.log_every={LOG_EVERY}",
        ],
    )


class Enough(Exception):  # noqa: N818
    """Ends a run that has been measured."""


@dataclass
class Stopwatch(Callback):
    """Time, samples and joules between two logged steps of a run, which it then ends."""

    last_step: int
    joules: Callable[[], float] | None
    taken: list[tuple[float, int, float]] = field(default_factory=list)
    waiting_share: float = 0.0

    def on_step(self, progress: Progress) -> None:
        if progress.step in (LOG_EVERY, self.last_step):
            joules = 0.0 if self.joules is None else self.joules()
            self.taken.append((time.perf_counter(), progress.num_samples, joules))
            self.waiting_share = progress.waiting_share
        if progress.step == self.last_step:
            raise Enough


def train_figures(spec: RunSpec, folder: Path, device: str) -> dict[str, Any]:
    """What a run does, as a user calls it."""
    assert spec.train.max_steps is not None
    stopwatch = Stopwatch(spec.train.max_steps, energy_counter() if device == "cuda" else None)
    started = time.perf_counter()
    with suppress(Enough):
        rowstead.train(spec, out=folder / f"run-{spec.train.batch_size}", callback=stopwatch)
    (start, before, joules_before), (stop, after, joules_after) = stopwatch.taken
    figures = {
        "num_samples": after - before,
        "train_samples_per_s": (after - before) / (stop - start),
        "waiting_share": stopwatch.waiting_share,
        "first_50_steps_s": start - started,
    }
    if stopwatch.joules is not None:
        figures["joules_per_1000_samples"] = 1e3 * (joules_after - joules_before) / (after - before)
    return figures


def step_figures(spec: RunSpec, device: str, rounds: int) -> dict[str, Any]:
    """What the step alone does, on batches of the same log."""
    with closing(open_sources(spec).train.staged_batches(spec.train.batch_size)) as staged:
        batches = [batch.to(device) for batch, _ in itertools.islice(staged, NUM_BATCHES)]
    stepper = Stepper(build_model(spec, torch.device(device), trains=True), spec.train, total_steps=1_000_000)
    step = steps_of(stepper)
    if device == "cuda":
        seconds = seconds_back_to_back({"step": step}, batches, rounds)["step"]
    else:
        seconds = min(seconds_as_called(lambda batch=batch: step(batch), device) for batch in batches)  # type: ignore[misc]
    return {"step_samples_per_s": spec.train.batch_size / seconds}


def measure_part(options: argparse.Namespace, size: Size) -> dict[str, Any]:
    """One figure, in the process that was started for it."""
    part, batch_size = options.part.split("-")
    spec = spec_of(options, size, int(batch_size))
    if part == "pack":
        started = time.perf_counter()
        pack_log(open_to_pack(spec), Path(options.folder) / "pack")
        return {"pack_samples_per_s": size.num_rows / (time.perf_counter() - started)}
    if part == "train":
        return train_figures(spec, Path(options.folder), options.device)
    return step_figures(spec, options.device, QUICK_ROUNDS if options.quick else GPU_ROUNDS)


def run_part(options: argparse.Namespace, part: str, folder: str) -> dict[str, Any]:
    """Measure one figure in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.mlperf", "--device", options.device, "--part", part, "--folder", folder]
    done = subprocess.run([*command, *(["--quick"] if options.quick else [])], stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = arguments(__doc__, devices=("cpu", "cuda"))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = SMALL if options.device == "cpu" else QUICK_GPU if options.quick else FULL
    if options.part is not None:
        print(json.dumps(measure_part(options, size)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        written = run_part(options, f"pack-{max(size.num_steps)}", folder)
        for batch_size in size.num_steps:
            figures = run_part(options, f"train-{batch_size}", folder) | run_part(options, f"step-{batch_size}", folder)
            share = figures["train_samples_per_s"] / figures["step_samples_per_s"]
            rows.append({"batch_size": batch_size, "precision": "bf16", **figures, "share_of_step": share})
    summary = {f"train_samples_per_s_{row['batch_size']}": row["train_samples_per_s"] for row in rows}
    summary |= {"share_of_step_min": min(row["share_of_step"] for row in rows), **written}
    publish("mlperf", rows, summary, options, packages=("pyarrow", "triton"))


if __name__ == "__main__":
    main()
