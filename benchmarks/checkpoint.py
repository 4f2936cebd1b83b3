"""How much smaller are incremental checkpoints than full ones, and what does it cost to know which rows were touched?

Tables are trained on a Criteo-like log: ids after a Zipf law under which 1 % of the rows take 90 % of the accesses. Between two
checkpoints each table is read a quarter as often as it has rows. For Criteo's largest tables, of some ten million ids and one id
an example, that is a checkpoint every 2.5 million examples. One checkpoint in ten is full; all the others hold the rows touched
since, so that the ninth is the largest of them. Each is written in the three formats. `exact` ones are read back and compared with
the tables, bit for bit. `touched_share` is that of the rows; bytes are those of all files, `full_over_…` how many times a full
checkpoint is larger; `…_s` is the time of a save, which a shared machine or disk makes longer.

`mark_ns_per_id` is what marking the rows of a batch costs, and `mark_over_store` the same over look-up + update of the batch: the
rest of a step would make the share smaller.

What do checkpoints cost while they are written beside training? A DLRM with 26 tables of 2 GB in all (12.5 GB on a GPU, where this is
all that is measured) is trained by the loop that `rowstead train` runs, on batches in memory. Intervals without and with a checkpoint
take turns: `speed_kept` is the time per step without over that with, everything included; `held_s` is how long training stood still
for a checkpoint, and `waited_s` how long steps waited because memory for rows was full. `written_over_disk` is the rate of writing
over what the same disk takes of as many bytes one after the other, synced, through the page cache or past it, whichever is faster.
`written_last_bytes_per_s` is the rate of the last checkpoint, for which training waits.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkpoint_beside
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
    return rows, summary


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
    parser = arguments(__doc__, devices=("cpu", "cuda"))
    parser.add_argument("--table-gb", type=float, help="tables that are trained while checkpoints are written, in GB")
    parser.add_argument("--interval", type=float, help="seconds from one checkpoint to the next")
    parser.add_argument("--pairs", type=int, help="intervals with a checkpoint, and as many without")
    parser.add_argument("--folder", type=Path, help="where to write; the system's temporary folder by default")
    parser.add_argument("--only-beside", action="store_true", help="leave out incremental checkpoints")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    summary: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.device == "cpu" and not options.only_beside:
            rows, summary = measure(QUICK if options.quick else SHAPE, Path(folder))
        size = checkpoint_beside.sizes(
            options.device, quick=options.quick, table_gb=options.table_gb, interval_s=options.interval, pairs=options.pairs
        )
        beside_rows, beside = checkpoint_beside.measure(size, options.device, Path(folder))
    rows, summary = [*rows, *beside_rows], {**summary, **beside}
    publish("checkpoint", rows, {**summary, **noise_of(rows)}, options)


if __name__ == "__main__":
    main()
