"""Predicted bytes are those that a run sends, reads and writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.distributed.process_group import Work
from rowstead.distributed.sharded_store import ShardedStore
from rowstead.distributed.sharding import plan_shards
from rowstead.kernels.layout import layout_of
from rowstead.plan.caching import build_cache_models
from rowstead.plan.predict import predict
from rowstead.plan.setup import CachedTable, Setup
from rowstead.plan.work import step_work
from rowstead.spec.catalogue import load_machine, load_software
from rowstead.spec.parse import parse
from rowstead.spec.run import RunSpec
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.ssd import FileRows
from rowstead.study.calibration.steady_state import SampledBatches, run_to_steady_state
from rowstead.study.calibration.steps import Shape
from tests.distributed.thread_process_group import ThreadProcessGroup, in_threads

NUM_FEATURES, NUM_IDS, NUM_ROWS, WIDTH, BATCH = 3, 4, 2_000, 16, 60


class CountingGroup(ThreadProcessGroup):
    """Counts the bytes of numbers that it sends to others."""

    num_bytes = 0.0

    @classmethod
    def of(cls, group: ThreadProcessGroup) -> CountingGroup:
        return cls(group.rank, group.world_size, group._shown, group._meeting)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Work:
        if sent.is_floating_point():
            self.num_bytes += sent.element_size() * (sum(sent_sizes) - sent_sizes[self.rank])
        return super().start_all_to_all(received, sent, received_sizes, sent_sizes)

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> None:
        if tensor.is_floating_point():  # a ring sends each number twice, but for one share
            self.num_bytes += 2 * tensor.element_size() * tensor.numel() * (self.world_size - 1) / self.world_size
        super().all_reduce(tensor, op=op)


def spec_of(**train: Any) -> RunSpec:
    plain = {
        "name": "small",
        "data": {"synth": {"num_dense": 4, "num_sparse": NUM_FEATURES, "num_ids": NUM_ROWS, "mean_ids": NUM_IDS, "skew": 0.0}},
        "features": {
            "dense": [{"name": "dense_{i}", "repeat": 4}],
            "sparse": [{"name": "sparse_{i}", "repeat": NUM_FEATURES, "num_rows": NUM_ROWS, "hash": "modulo"}],
        },
        "model": {"width": WIDTH, "bottom": [8], "top": [8]},
        "train": {"batch_size": BATCH, "sparse_optimizer": {"kind": "rowwise_adagrad"}, **train},
    }
    return parse(RunSpec, plain)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", ["table", "row", "column", "replicate"])
def test_processes_exchange_as_many_bytes_as_predicted(shard: Any, wire: Any, world_size: int) -> None:
    spec = spec_of(wire=wire)
    layout = layout_of(spec.features, spec.tables)
    shards = {table.name: shard for table in layout.tables}
    rng = np.random.default_rng(1)
    batches = [
        Sparse(
            ids=torch.from_numpy(rng.integers(0, NUM_ROWS, NUM_FEATURES * BATCH * NUM_IDS)),
            offsets=torch.arange(NUM_FEATURES * BATCH + 1) * NUM_IDS,
            num_features=NUM_FEATURES,
        )
        for _ in range(world_size)
    ]

    def work(group: ThreadProcessGroup) -> float:
        counting = CountingGroup.of(group)
        store = ShardedStore(
            plan_shards(layout, shards, world_size),
            spec.train.sparse_optimizer,
            counting,
            lambda local, rule: DeviceStore(local, rule),
            dtype=torch.float32,
            wire={"fp32": None, "bf16": torch.bfloat16}[wire],
        )
        counting.num_bytes = 0.0
        pooled = store.lookup(batches[group.rank])
        store.update(batches[group.rank], torch.ones_like(pooled), lr=0.1, step=1)
        store.rows("sparse_0", torch.arange(1))  # waits for the update
        return counting.num_bytes

    machine = load_machine("dgx-h100")
    setup = Setup(
        placement="device", batch_size=BATCH, num_devices=world_size, wire=wire, shards=tuple(shards.items()), has_input=False
    )
    node = predict(step_work(spec), machine, load_software("rowstead"), setup).trainer
    share = (world_size - 1) / world_size
    in_tables = 2 * BATCH * node.exchanged_bytes * share
    in_tables += 2 * (node.reduced_bytes - node.work.num_parameters * node.wire_bytes) * share
    assert sum(in_threads(world_size, work)) / world_size == pytest.approx(in_tables, rel=0.02)


SMALL = Shape(num_dense=4, num_sparse=2, batch_size=64, num_rows=8_000, width=32, mean_ids=4, skew=0.8, bottom=(8,), top=(8,))


@pytest.mark.parametrize("share", [0.3, 0.1])
def test_a_file_reads_and_writes_as_many_bytes_as_predicted(share: float, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    rule = {"*": {"where": "ssd", "cache_fraction": share}}
    steps = run_to_steady_state(
        SMALL, cpu, placement=rule, kept_share=share, folder=tmp_path, drawn=SampledBatches.of(SMALL, cpu)
    )
    try:
        store = steps.stepper.model.store
        assert isinstance(store, CachedStore)
        (file,) = store.backings
        assert isinstance(file, FileRows)
        for _ in steps.take(200):  # until cleaning is steady too
            pass
        before, count = dataclasses.replace(file.counts), 200
        for _ in steps.take(count):
            pass
        after = file.counts
    finally:
        steps.close()
    work = step_work(SMALL.spec("cpu"))
    behind = tuple(CachedTable(table=table.name, cache_fraction=share, where="ssd") for table in work.tables)
    (group,) = build_cache_models(work.tables, Setup(placement="ssd", batch_size=SMALL.batch_size, behind=behind))
    predicted = group.file_io(group.missing_rows)
    assert (after.reads - before.reads) / count == pytest.approx(predicted.num_reads, rel=0.25)
    assert (after.bytes_read - before.bytes_read) / count == pytest.approx(predicted.read_bytes, rel=0.25)
    assert (after.bytes_written - before.bytes_written) / count == pytest.approx(predicted.written_bytes, rel=0.35)
