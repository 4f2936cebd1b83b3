"""How much of a training step's speed reaches whoever runs `rowstead train` on Parquet files?

M1 with the tables of this command (100,000 rows each on a CPU, 200,000 on a GPU, so that the checkpoint at the end is small) is
trained through `rowstead.train` on a log that the generator of `rowstead data synth m1` wrote, and its step alone is measured as in
benchmarks.step, before and after; on a CPU, whose speed drifts, several times in turn. `share_of_step` is the median of what training did over
the mean of the steps before and after it. The log is one file under several names: long enough, and as
large as the memory of the files that the system keeps, so that the disk plays no part. Both multiply in TF32 on a GPU.

`train_samples_per_s` leaves out the first 10 steps, in which kernels are compiled. `reader_cores_needed` is what `rowstead train`
works out for itself: the processor time of its reading threads for a sample, times the samples that the step alone could do in a
second; on a CPU beside the cores that train, and on a GPU by the time for which it was busy. `told` is what it said about it.

Rows whose log is `packed` read the same kind of log through `data.cache`; packing it takes part in no figure. Beside M1 there is on a GPU a
model with 26 one-hot features and 13 dense ones, whose steps are short. Keys: `packed_share_of_step_1600` and `packed_share_of_step_16384` (M1),
`packed_samples_per_s_one_hot`; on a CPU `packed_share_of_step_200`.

`read_samples_per_s` is what the reader does when nobody trains: its batches are dropped as they come. The first tenth is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

import rowstead
from benchmarks.embedding import Shape
from benchmarks.harness import OtherLoad, arguments, chosen, noise_of, publish
from benchmarks.production import read_shape
from benchmarks.step import (
    CPU_ROUNDS,
    GPU_ROUNDS,
    NUM_BATCHES,
    QUICK_ROUNDS,
    Model,
    Precision,
    of_recipe,
    seconds_alone,
    seconds_back_to_back,
    steps_of,
)
from benchmarks.timing import give_back_gpu_memory
from rowstead.data.open_log import open_sources
from rowstead.data.synth import write_parquet
from rowstead.records.usage import usable_cores
from rowstead.spec.data import DataSpec, ParquetSpec, SynthSpec
from rowstead.spec.parse import assign, parse
from rowstead.spec.run import RunSpec, read_recipe
from rowstead.training.build import build_model
from rowstead.training.progress import Callback
from rowstead.training.step import Stepper


class OneHot(Model):
    """26 features with one id each and 13 dense ones, as in Criteo's log."""

    def spec(self, precision: Precision = "fp32") -> RunSpec:
        changes = {
            "data.synth": {"num_train_samples": 1_048_576, "num_eval_samples": NUM_EVAL_SAMPLES, "num_ids": 1_000_000},
            "features": {
                "dense": [{"name": "dense_{i}", "repeat": 13}],
                "sparse": [{"name": "sparse_{i}", "repeat": self.shape.num_tables, "num_rows": self.shape.num_rows}],
            },
            "model.width": self.shape.width,
            "train": {"batch_size": self.shape.batch_size, "precision": precision},
        }
        return parse(RunSpec, assign(read_recipe(self.recipe), changes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is read and trained on."""

    num_rows: int
    """Of the file that is written."""
    num_names: int
    """Under which it is read."""
    shuffle_rows: int
    num_samples: int
    """Trained on with each model."""


SIZES = {
    "cpu": Size(num_rows=20_480, num_names=6, shuffle_rows=8_192, num_samples=120_000),
    "cuda": Size(num_rows=49_152, num_names=16, shuffle_rows=65_536, num_samples=2_400_000),
}
QUICK_SIZES = {
    "cpu": Size(num_rows=4_096, num_names=4, shuffle_rows=2_048, num_samples=12_000),
    "cuda": Size(num_rows=16_384, num_names=16, shuffle_rows=16_384, num_samples=800_000),
}
PACKED_SIZES = {
    "cpu": SIZES["cpu"],
    "cuda": Size(num_rows=49_152, num_names=32, shuffle_rows=65_536, num_samples=9_600_000),
}
ONE_HOT_SIZE = Size(num_rows=1_048_576, num_names=16, shuffle_rows=65_536, num_samples=60_000_000)
MODELS = {
    "cpu": [of_recipe("M1", "m1", num_rows=100_000, batch_size=200)],
    "cuda": [of_recipe(f"M1 {size}", "m1", num_rows=200_000, batch_size=size) for size in (1600, 16384)],
}
NUM_EVAL_SAMPLES = 2_000
ONE_HOT = OneHot(recipe="quickstart", shape=Shape("one-hot 16384", 26, 200_000, 16, 1, 16384))
TURNS = {"cpu": 5, "cuda": 1}
"""Of training, with the step alone before and after each."""


def write_log(folder: Path, size: Size, synth: SynthSpec) -> ParquetSpec:
    """A log in `folder`, the same training file under several names."""
    folder.mkdir(parents=True)
    log = dataclasses.replace(synth, num_train_samples=size.num_rows, num_eval_samples=NUM_EVAL_SAMPLES)
    write_parquet(log, folder)
    (written,) = folder.glob("train-*.parquet")
    for number in range(1, size.num_names):
        os.link(written, folder / f"train-{number:05}.parquet")
    return ParquetSpec(train=(f"{folder}/train-*.parquet",), eval=(f"{folder}/eval-*.parquet",), shuffle_rows=size.shuffle_rows)


def run_of(model: Model, log: DataSpec, device: str, num_samples: int) -> RunSpec:
    """What `rowstead train` is asked for."""
    spec = model.spec()
    num_steps = max(1, num_samples // model.shape.batch_size)
    return dataclasses.replace(
        spec,
        data=log,
        train=dataclasses.replace(spec.train, max_steps=num_steps, epochs=num_steps),
        device=device,  # type: ignore[arg-type]
    )


def step_samples_per_s(model: Model, device: str, quick: bool) -> float:
    """What the step alone does."""
    built = build_model(model.spec(), torch.device(device), trains=True)
    steps = {"rowstead": steps_of(Stepper(built, model.spec().train, total_steps=1_000_000))}
    if device == "cpu":
        seconds = seconds_alone(model, steps, QUICK_ROUNDS if quick else CPU_ROUNDS)
    else:
        batches = [model.draw(device) for _ in range(NUM_BATCHES)]
        seconds = seconds_back_to_back(steps, batches, QUICK_ROUNDS if quick else GPU_ROUNDS)
    return model.shape.batch_size / seconds["rowstead"]


def read_samples_per_s(run: RunSpec, num_samples: int) -> float:
    """What reading alone does, batches made where training wants them."""
    source = open_sources(run).train
    read = source.pin_memory().staged_batches if run.device == "cuda" else source.batches
    num_read, started, num_before = 0, time.perf_counter(), 0
    for epoch in itertools.count():
        with closing(read(run.train.batch_size, epoch=epoch)) as batches:
            for batch, _ in batches:
                num_read += batch.num_samples
                if not num_before and num_read >= num_samples // 10:
                    num_before, started = num_read, time.perf_counter()
                if num_read >= num_before + num_samples:
                    return (num_read - num_before) / (time.perf_counter() - started)
    raise AssertionError("epochs do not end")


class Listening(Callback):
    """Keeps what a run says about its reading."""

    told = ""

    def on_message(self, text: str) -> None:
        if text.startswith("reading held"):
            self.told = text


def measure(model: Model, log: DataSpec, device: str, options: Any, num_samples: int, folder: Path) -> dict[str, Any]:
    """The row of one model: trained from files, and its step alone."""
    listening, num_turns = Listening(), 1 if options.quick else TURNS[device]
    run = run_of(model, log, device, num_samples // num_turns)
    outcomes = []
    with OtherLoad() as others:
        steps = [step_samples_per_s(model, device, options.quick)]
        give_back_gpu_memory()
        read = read_samples_per_s(run, num_samples // 4)
        for turn in range(num_turns):
            outcomes.append(rowstead.train(run, out=folder / str(turn), callback=listening).outcome)
            give_back_gpu_memory()
            steps.append(step_samples_per_s(model, device, options.quick))
            give_back_gpu_memory()
    reading = outcomes[-1].reading
    speeds = [outcome.samples_per_s for outcome in outcomes if outcome.samples_per_s is not None]
    assert reading is not None
    trained, step = statistics.median(speeds), statistics.median(steps)
    shares = [2 * speed / sum(beside) for speed, beside in zip(speeds, itertools.pairwise(steps), strict=True)]
    row = {
        "shape": model.name,
        "log": "parquet" if log.cache is None else "packed",
        "batch_size": model.shape.batch_size,
        "num_steps": sum(outcome.position.step for outcome in outcomes),
        "train_samples_per_s": trained,
        "step_samples_per_s": step,
        "share_of_step": statistics.median(shares),
        "read_samples_per_s": read,
        "share_of_reading": trained / min(step, read),
        **reading.figures(),
        "num_cores": usable_cores(),
    }
    return row | ({"cores_used_by_others": others.cores} if device == "cpu" else {}) | {"told": listening.told}


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What holds for all rows from Parquet."""
    if not rows:
        return {}
    return {
        "train_share_of_step_min": min(row["share_of_step"] for row in rows),
        "train_share_of_reading_min": min(row["share_of_reading"] for row in rows),
        "reading_held_up_share_max": max(row["reading_held_up_share"] for row in rows),
        "reader_cores_needed_max": max(row["reader_cores_needed"] for row in rows),
    }


def packed_summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """A figure for each row from a packed log."""
    summary = {}
    for row in rows:
        if row["shape"] == ONE_HOT.name:
            summary["packed_samples_per_s_one_hot"] = row["train_samples_per_s"]
        else:
            summary[f"packed_share_of_step_{row['batch_size']}"] = row["share_of_step"]
    return summary


def main() -> None:
    options = arguments(__doc__, devices=("cpu", "cuda"), with_shapes=True).parse_args()
    device: str = options.device
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    m1 = read_shape("m1").data.synth
    assert m1 is not None
    sizes = QUICK_SIZES if options.quick else SIZES
    models = chosen([*MODELS[device], *([ONE_HOT] if device == "cuda" else [])], options, num_quick=1)
    production = [model for model in models if model is not ONE_HOT]
    packed = [((sizes if options.quick else PACKED_SIZES)[device], m1, production)]
    if ONE_HOT in models:
        one_hot = ONE_HOT.spec().data.synth
        assert one_hot is not None
        packed.append((ONE_HOT_SIZE, one_hot, [ONE_HOT]))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if production:
            log = DataSpec(parquet=write_log(root / "log", sizes[device], m1))
            for model in production:
                rows.append(measure(model, log, device, options, sizes[device].num_samples, root / f"run-{len(rows)}"))
        for size, synth, some in packed:
            if some:
                at = root / f"packed-{len(rows)}"
                log = DataSpec(parquet=write_log(at / "log", size, synth), cache=str(at / "pack"))
                open_sources(run_of(some[0], log, device, size.num_samples))  # packs
                for model in some:
                    rows.append(measure(model, log, device, options, size.num_samples, root / f"run-{len(rows)}"))
                shutil.rmtree(at)
    for row in rows:
        if row["told"]:
            print(f"{row['shape']}, {row['log']}: {row['told']}")
    summary = summary_of([row for row in rows if row["log"] == "parquet"])
    summary |= packed_summary_of([row for row in rows if row["log"] == "packed"])
    publish("reach", rows, summary | noise_of(rows), options, packages=("pyarrow", "triton"))


if __name__ == "__main__":
    main()
