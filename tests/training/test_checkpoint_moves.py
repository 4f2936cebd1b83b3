"""Rows that real stores have trained move through a checkpoint from any placement and number of processes to any other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.distributed.process_group import ProcessGroup, SingleProcess
from rowstead.distributed.sharded_store import ShardedStore
from rowstead.distributed.sharding import SHARDS, plan_shards
from rowstead.kernels.layout import Layout
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.train import TrainSpec
from rowstead.stores.backing import RamRows
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.groups import CacheGroup
from rowstead.stores.ssd import FileRows, initial_rows_of
from rowstead.training.checkpoint import load, save
from rowstead.training.checkpoint_increment import CheckpointChanges
from rowstead.training.saved_tensors import StoreTensors
from tests.distributed.thread_process_group import in_threads
from tests.stores.store_contract import KINDS, layouts, sparse_batches

LOCATIONS = ("device", "cached", "ssd")
Where = tuple[str, int, tuple[str, ...]]
"""Where rows are, over how many processes, and how each table is cut."""


def store_in(
    where: Where, layout: Layout, optimizer: SparseOptimizerSpec, process_group: ProcessGroup, folder: Path
) -> EmbeddingStore:
    location, world_size, cuts = where

    def make(local: Layout, rule: SparseOptimizerSpec | None) -> EmbeddingStore:
        if location == "device":
            return DeviceStore(local, rule)
        counts = {table.name: 2 for table in local.tables}

        def backing(group: CacheGroup) -> FileRows | RamRows:
            if location == "cached":
                return RamRows(group, seed=1)
            path = Path(tempfile.mkdtemp(dir=folder)) / "rows"
            return FileRows(path, group.num_rows, group.columns, initial=initial_rows_of(group, seed=1), direct=False)

        return CachedStore(local, rule, num_slots=counts, backing=backing)

    if world_size == 1:
        return make(layout, optimizer)
    shards = {table.name: cut for table, cut in zip(layout.tables, cuts, strict=True)}
    plan = plan_shards(layout, shards, world_size)  # type: ignore[arg-type]
    return ShardedStore(plan, optimizer, process_group, make)


@st.composite
def wheres(draw: st.DrawFn, layout: Layout) -> Where:
    cuts = tuple(draw(st.sampled_from(SHARDS)) for _ in layout.tables)
    return draw(st.sampled_from(LOCATIONS)), draw(st.integers(1, 3)), cuts


def ran(where: Where, work: Callable[[ProcessGroup], list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """What the first process of a job gives."""
    world_size = where[1]
    return work(SingleProcess()) if world_size == 1 else in_threads(world_size, work)[0]


def train(store: EmbeddingStore, sparse: Sparse, step: int) -> None:
    pooled = store.lookup(sparse)
    store.update(sparse, torch.sin(torch.arange(pooled.numel()).reshape(pooled.shape) + step), lr=0.1, step=step)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_trained_rows_move_from_anywhere_to_anywhere(kind: str, data: st.DataObject) -> None:
    layout = data.draw(layouts())
    optimizer = SparseOptimizerSpec(kind=kind)  # type: ignore[arg-type]
    here, there = data.draw(wheres(layout)), data.draw(wheres(layout))
    batches = [data.draw(sparse_batches(layout, weighted=False)) for _ in range(2)]
    spec = TrainSpec(full_checkpoint_every=2)
    with tempfile.TemporaryDirectory() as temporary:
        folder, scratch = Path(temporary, "checkpoints"), Path(temporary)

        def trained(process_group: ProcessGroup) -> list[dict[str, Tensor]]:
            """The state after each step, which a full and an incremental checkpoint hold."""
            store = store_in(here, layout, optimizer, process_group, scratch)
            changes = CheckpointChanges(spec, layout.tables)
            states = []
            for step, sparse in enumerate(batches, start=1):
                changes.mark(sparse)
                train(store, sparse, step)
                states.append({name: value.clone() for name, value in store.state().items()})
                increment = changes.next(folder, process_group)
                parts = store.parts()
                path = save(
                    folder, step, {}, {}, keep=2, shard_bytes=300, parts=parts, increment=increment, process_group=process_group
                )
                changes.saved(path, increment)
            return states

        def moved(process_group: ProcessGroup) -> list[dict[str, Tensor]]:
            store = store_in(there, layout, optimizer, process_group, scratch)
            states = []
            for step in (1, 2):
                store.load_state(StoreTensors(load(folder / f"step-{step:09d}", process_group=process_group).tensors))
                states.append({name: value.clone() for name, value in store.state().items()})
            return states

        before, after = ran(here, trained), ran(there, moved)
        for step, (one, other) in enumerate(zip(before, after, strict=True), start=1):
            assert one.keys() == other.keys()
            different = [name for name, value in one.items() if not torch.equal(value, other[name])]
            assert not different, (here, there, step)
