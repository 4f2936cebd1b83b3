"""Snapshots of tables in memory: rows as they were while threads train and read, in little memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.kernels.layout import layout_of
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores import snapshot as snapshots
from rowstead.stores.device import DeviceStore
from rowstead.stores.snapshot import Snapshot, copy_tensors
from rowstead.stores.state import StatePart

FEATURES = FeaturesSpec(sparse=(SparseFeatureSpec(name="a", num_rows=3000), SparseFeatureSpec(name="b", num_rows=40)))
LAYOUT = layout_of(FEATURES, tables_of(FEATURES, width=8))
ROWS_EACH = 64


def batch(seed: int, num_samples: int = 200) -> Sparse:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(table.num_rows, (num_samples,), generator=generator) for table in LAYOUT.tables]
    return Sparse(ids=torch.cat(ids), offsets=torch.arange(2 * num_samples + 1), num_features=2)


def train(store: DeviceStore, step: int) -> None:
    sparse = batch(step)
    store.update(sparse, torch.ones(sparse.num_samples, LAYOUT.total_width), lr=0.1, step=step)


def read_all(snapshot: Snapshot, threads: int) -> dict[str, Tensor]:
    """The whole state, read a few rows at a time by several threads."""
    found = {part.name: torch.empty(part.shape, dtype=part.dtype) for part in snapshot.parts}

    def read(part: StatePart, start: int) -> None:
        stop = min(start + ROWS_EACH, part.num_rows)
        found[part.name][start:stop] = part.read(start, stop)

    with ThreadPoolExecutor(threads) as pool:
        work = [(part, start) for part in snapshot.parts for start in range(0, part.num_rows, ROWS_EACH)]
        list(pool.map(read, *zip(*work, strict=True)))
    return found


@pytest.mark.parametrize("max_kept_bytes", [1, 4000, 1 << 20])
@pytest.mark.parametrize("num_trainers", [1, 3])
def test_rows_are_as_they_were_whatever_threads_train_meanwhile_and_however_few_rows_can_be_kept(
    max_kept_bytes: int, num_trainers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MIN_KEPT_BYTES", max_kept_bytes)
    monkeypatch.setattr(snapshots, "KEPT_SHARE", 0.0)
    store = DeviceStore(LAYOUT, SparseOptimizerSpec(kind="adam"))
    train(store, 1)
    before = {name: value.clone() for name, value in store.state().items()}
    snapshot = store.snapshot()
    assert snapshot is not None
    is_read = threading.Event()
    num_steps = []

    def train_on(first: int) -> None:
        step = first
        while not is_read.is_set():
            train(store, step := step + num_trainers)
            num_steps.append(step)

    with ThreadPoolExecutor(num_trainers) as pool:
        training = [pool.submit(train_on, index + 2) for index in range(num_trainers)]
        try:
            found = read_all(snapshot, threads=3)
        finally:
            is_read.set()
            snapshot.close()
        for each in training:
            each.result()
    assert num_steps
    assert all(torch.equal(found[name], value) for name, value in before.items())
    assert not all(torch.equal(store.state()[name], value) for name, value in before.items())


def test_closing_a_snapshot_ends_the_wait_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MIN_KEPT_BYTES", 1)
    monkeypatch.setattr(snapshots, "KEPT_SHARE", 0.0)
    store = DeviceStore(LAYOUT, SparseOptimizerSpec())
    snapshot = store.snapshot()
    assert snapshot is not None
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(train, store, 1)
        assert not step.done(), "nothing was read, and one row can be kept"
        snapshot.close()
        step.result(timeout=60)
    assert store.snapshot() is not None


def test_copies_keep_what_tensors_had() -> None:
    tensors = {"a.rows": torch.rand(5, 3), "a.sum": torch.rand(5, 1)}
    before = {name: value.clone() for name, value in tensors.items()}
    snapshot = copy_tensors(tensors)
    assert snapshot is not None
    for value in tensors.values():
        value.zero_()
    for part in snapshot.parts:
        assert torch.equal(part.read(1, 4), before[part.name][1:4])
        assert torch.equal(part.take(torch.tensor([0, 4])), before[part.name][[0, 4]])


def test_what_does_not_fit_in_memory_a_second_time_has_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "free_host_bytes", lambda: 100)
    assert copy_tensors({"a.rows": torch.rand(20, 1)}) is not None
    assert copy_tensors({"a.rows": torch.rand(20, 1), "b.rows": torch.rand(20, 1)}) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("spare_bytes", [0, 100, 1 << 20])
def test_copies_of_tables_on_a_gpu_are_there_or_in_system_memory(spare_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_spare_gpu_bytes", lambda device: spare_bytes)
    tensors = {"a.rows": torch.rand(50, 3, device="cuda"), "a.sum": torch.rand(20, 1, device="cuda")}
    before = {name: value.cpu() for name, value in tensors.items()}
    snapshot = copy_tensors(tensors)
    assert snapshot is not None
    for value in tensors.values():
        value.zero_()
    for part in snapshot.parts:
        assert torch.equal(part.read(1, 14), before[part.name][1:14])
        assert torch.equal(part.take(torch.tensor([0, 4])), before[part.name][[0, 4]])
