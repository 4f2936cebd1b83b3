"""How much smaller are incremental checkpoints than full ones, and what does it cost to know which rows were touched?

Tables are trained on a Criteo-like log: ids after a Zipf law under which 1 % of the rows take 90 % of the accesses. Between two
checkpoints each table is read a quarter as often as it has rows. For Criteo's largest tables, of some ten million ids and one id
an example, that is a checkpoint every 2.5 million examples. One checkpoint in ten is full; all the others hold the rows touched
since, so that the ninth is the largest of them. Each is written in the three formats. `exact` ones are read back and compared with
the tables, bit for bit. `touched_share` is that of the rows; bytes are those of all files, `full_over_…` how many times a full
checkpoint is larger; `…_s` is the time of a save, which a shared machine or disk makes longer.

`mark_ns_per_id` is what marking the rows of a batch costs, and `mark_over_store` the same over look-up + update of the batch: the
rest of a step would make the share smaller.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import OtherLoad, arguments, noise_of, publish
from benchmarks.skews import CriteoLike
from rowstead.distributed.process_group import SingleProcess
from rowstead.kernels.layout import layout_of
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.train import CheckpointFormat, TrainSpec
from rowstead.stores.device import DeviceStore
from rowstead.training.checkpoint import load, save
from rowstead.training.checkpoint_increment import CheckpointChanges

SHAPE = CriteoLike("criteo-like", num_tables=4, num_rows=500_000, width=32, num_ids=1, batch_size=2048)
QUICK = dataclasses.replace(SHAPE, num_tables=2, num_rows=50_000, batch_size=512)
FULL_EVERY = 10
READS_A_ROW = 0.25
"""Accesses of a table between two checkpoints, over its rows."""
FORMATS: tuple[CheckpointFormat, ...] = ("exact", "fp16", "int8")


class Run:
    """Tables in training, and the time that marking their rows takes."""

    def __init__(self, shape: CriteoLike) -> None:
        self.shape = shape
        features = tuple(SparseFeatureSpec(name=f"t{i}", num_rows=shape.num_rows) for i in range(shape.num_tables))
        spec = FeaturesSpec(sparse=features)
        self.store = DeviceStore(layout_of(spec, tables_of(spec, width=shape.width)), SparseOptimizerSpec(), check=False)
        self.changes = CheckpointChanges(TrainSpec(full_checkpoint_every=FULL_EVERY), self.store.tables)
        self.mark_s: list[float] = []
        self.store_s: list[float] = []

    def train(self, num_steps: int) -> None:
        grad = torch.randn(self.shape.batch_size, self.shape.num_tables * self.shape.width)
        for _ in range(num_steps):
            sparse = self.shape.draw("cpu")
            times = [time.perf_counter()]
            self.changes.mark(sparse)
            times.append(time.perf_counter())
            self.store.lookup(sparse)
            self.store.update(sparse, grad, lr=0.01, step=1)
            times.append(time.perf_counter())
            self.mark_s.append(times[1] - times[0])
            self.store_s.append(times[2] - times[1])


def measure(shape: CriteoLike, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row for each checkpoint from one full one to the next, and what they come to."""
    torch.manual_seed(1)  # so that sizes come out the same each time
    run, num_steps = Run(shape), int(READS_A_ROW * shape.num_rows / shape.num_ids / shape.batch_size)
    run.train(2)
    path, full_s = _saved(run, folder, 0, None)
    run.changes.saved(path, None)
    full_bytes = _bytes_in(path)
    rows: list[dict[str, Any]] = []
    for number in range(1, FULL_EVERY):
        with OtherLoad() as others:
            run.train(num_steps)
            increment = run.changes.next(folder, SingleProcess())
            assert increment is not None
            touched = sum(rows_of.count for rows_of in increment.touched.values())
            row: dict[str, Any] = {"increment": number, "touched_share": touched / (shape.num_rows * shape.num_tables)}
            for index, encoding in enumerate(FORMATS):
                of_format = dataclasses.replace(increment, encoding=encoding)
                path, row[f"{encoding}_s"] = _saved(run, folder, 3 * number + index, of_format)
                row[f"{encoding}_bytes"] = _bytes_in(path)
                row[f"full_over_{encoding}"] = full_bytes / row[f"{encoding}_bytes"]
                if encoding == "exact":
                    _check(run, path)
            run.changes.saved(path, increment)
        rows.append({**row, "cores_used_by_others": others.cores})
    mark_s, store_s = sorted(run.mark_s)[len(run.mark_s) // 2], sorted(run.store_s)[len(run.store_s) // 2]
    summary = {f"full_over_{encoding}_min": min(row[f"full_over_{encoding}"] for row in rows) for encoding in FORMATS}
    summary |= {
        "full_bytes": full_bytes,
        "full_s": full_s,
        "mark_ns_per_id": 1e9 * mark_s / (shape.num_tables * shape.batch_size * shape.num_ids),
        "mark_over_store": mark_s / store_s,
    }
    return rows, {**summary, **noise_of(rows)}


def _saved(run: Run, folder: Path, step: int, increment: Any) -> tuple[Path, float]:
    start = time.perf_counter()
    path = save(folder, step, {}, {}, keep=2, parts=run.store.parts(), increment=increment)
    return path, time.perf_counter() - start


def _check(run: Run, path: Path) -> None:
    saved = load(path).tensors
    for name, value in run.store.state().items():
        assert torch.equal(saved[f"store.{name}"], value), f"{name} came back changed"


def _bytes_in(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def main() -> None:
    options = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, summary = measure(QUICK if options.quick else SHAPE, Path(folder))
    publish("checkpoint", rows, summary, options)


if __name__ == "__main__":
    main()
