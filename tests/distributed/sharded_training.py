"""Trains one small model in FP64 under several shards, alone or as one process of a job: what tests of processes start.

`python -m tests.distributed.sharded_training FOLDER SETTINGS`, with the environment of `rowstead.distributed.launch`: SETTINGS is JSON, a list of what
`trained` takes. The first process leaves the weights of each in FOLDER, with the losses.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rowstead.data.batch import Batch
from rowstead.data.open_log import open_sources
from rowstead.data.source import Source
from rowstead.distributed.launch import process_environment
from rowstead.distributed.process_group import ProcessGroup, SingleProcess, TorchProcessGroup
from rowstead.distributed.sharded_store import ShardedStore
from rowstead.distributed.sharding import plan_shards
from rowstead.kernels.layout import Layout, layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.spec.parse import override, parse
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.run import RunSpec
from rowstead.stores.backing import RamRows
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.histories import HistoryLayout, HistoryStore
from rowstead.training.sharded_step import WIRE_DTYPES
from rowstead.training.step import Stepper
from tests.small_runs import small_plain

Settings = dict[str, Any]
"""`shards` of the tables, `changes` to the recipe, `num_steps`, `dtype`, `device`, and `store`: `device` or `cached`."""


def spec_of(settings: Settings) -> RunSpec:
    """Features of one and of several ids, one table shared by two, means and sums, examples of different weight."""
    plain = small_plain()
    plain["data"]["synth"] |= {"num_train_samples": 1500, "num_sparse": 5}
    plain["features"]["tables"] = [{"name": "shared", "num_rows": 40}]
    plain["features"]["sparse"] = [
        {"name": "one", "column": "sparse_0", "num_rows": 30, "max_ids": 1},
        {"name": "left", "column": "sparse_1", "table": "shared"},
        {"name": "right", "column": "sparse_2", "table": "shared", "pooling": "mean"},
        {"name": "mean", "column": "sparse_3", "num_rows": 3, "pooling": "mean"},
        {"name": "large", "column": "sparse_4", "num_rows": 101},
    ]
    plain["train"]["epochs"] = 10
    return parse(RunSpec, override(plain, settings.get("changes", [])))


def trained(settings: Settings, process_group: ProcessGroup) -> dict[str, Tensor]:
    """Weights after some steps, and `losses`; a lone process has an ordinary store."""
    spec, dtype = spec_of(settings), getattr(torch, settings.get("dtype", "float64"))
    sources = open_sources(spec)
    layout = layout_of(spec.features, spec.tables)
    optimizer = spec.train.sparse_optimizer

    device = torch.device(settings.get("device", "cpu"))

    def make(local: Layout, rule: SparseOptimizerSpec | None) -> DeviceStore | CachedStore:
        if settings.get("store") == "cached":
            slots = {table.name: 1 + table.num_rows // 3 for table in local.tables}
            backing = partial(RamRows, seed=spec.seed, device=device)
            return CachedStore(local, rule, num_slots=slots, backing=backing, seed=spec.seed, dtype=dtype, device=device)
        return DeviceStore(local, rule, seed=spec.seed, dtype=dtype, device=device)

    def build(own: Layout) -> EmbeddingStore:
        if isinstance(process_group, SingleProcess):
            return make(own, optimizer)
        shards, wire = settings["shards"], WIRE_DTYPES[spec.train.wire]
        shards = {table.name: shards if isinstance(shards, str) else shards[table.name] for table in own.tables}
        plan = plan_shards(own, shards, process_group.world_size)
        return ShardedStore(plan, optimizer, process_group, make, dtype=dtype, device=device, wire=wire)

    parts = HistoryLayout(layout)
    store = HistoryStore(parts, [build(one) for one in parts.stores]) if layout.is_history else build(layout)
    torch.manual_seed(1)
    model = DLRM(spec.model, spec.features, store).to(device, dtype)
    stepper = Stepper(model, spec.train, total_steps=10_000, process_group=process_group)
    source = sources.train.map(_weigh).local_share(process_group.rank, process_group.world_size)
    losses = []
    num_steps = settings.get("num_steps", 100)
    batches = [batch.to(device) for _, batch in zip(range(num_steps), _batches(source, spec, dtype), strict=False)]
    for number, batch in enumerate(batches, start=1):
        if number < len(batches):
            store.prefetch(batches[number].sparse)
        losses.append(stepper.step(batch, number))
    return {
        **{name: value.cpu() for name, value in stepper.state().items()},
        "losses": torch.tensor(losses, dtype=torch.float64),
    }


def _batches(source: Source, spec: RunSpec, dtype: torch.dtype) -> Iterator[Batch]:
    """Epoch after epoch, in the type of the model."""
    for epoch in range(spec.train.epochs):
        for batch, _ in source.batches(spec.train.batch_size, epoch=epoch):
            assert batch.labels is not None
            assert batch.weights is not None
            labels, weights = batch.labels.to(dtype), batch.weights.to(dtype)
            yield dataclasses.replace(batch, dense=batch.dense.to(dtype), labels=labels, weights=weights)


def _weigh(batch: Batch) -> Batch:
    """Weight each example by its first dense value; every seventh has weight 0."""
    weights = 0.5 + batch.dense[:, 0].abs()
    weights[::7] = 0
    return dataclasses.replace(batch, weights=weights)


def in_processes(
    world_size: int, settings: list[Settings], folder: Path, *, is_staged: bool = False
) -> list[dict[str, Tensor]]:
    """What the first of `world_size` processes has of each of the settings."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "tests.distributed.sharded_training",
        str(folder),
        json.dumps(settings),
        str(int(is_staged)),
    ]
    processes = [
        subprocess.Popen(
            command, env=process_environment(rank, world_size, folder / "rendezvous", 0), stderr=subprocess.PIPE, text=True
        )
        for rank in range(world_size)
    ]
    try:
        said = [process.communicate(timeout=800)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(said)
    return [load_file(folder / f"{place}.safetensors") for place in range(len(settings))]


def main() -> None:
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    device = torch.device(settings[0].get("device", "cpu"), 0)
    process_group = TorchProcessGroup.join(device, is_staged=sys.argv[3] == "1")
    for place, one in enumerate(settings):
        weights = trained(one, process_group)
        if process_group.rank == 0:
            save_file({name: value.contiguous() for name, value in weights.items()}, folder / f"{place}.safetensors")
    process_group.close()
    os._exit(0)


if __name__ == "__main__":
    main()
