"""Rows in system memory keep the contract of every store, behind a GPU and, where there is none, behind the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from rowstead.data.batch import Sparse
from rowstead.kernels.layout import Layout, layout_of
from rowstead.spec.errors import DataError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.backing import RamRows
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.host import HostStore
from tests.stores.store_contract import StoreContract

FEATURES = FeaturesSpec(
    sparse=(SparseFeatureSpec(name="a", num_rows=6), SparseFeatureSpec(name="b", num_rows=4, width=5, pooling="mean"))
)
LAYOUT = layout_of(FEATURES, tables_of(FEATURES, width=3))
SPARSE = Sparse(ids=torch.tensor([1, 1, 2, 3, 3]), offsets=torch.tensor([0, 2, 3, 5, 5]), num_features=2)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))]


class TestHostStore(StoreContract):
    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> HostStore:
        return HostStore(DeviceStore(layout, optimizer, dtype=dtype), self.device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestHostStoreOfAGpu(TestHostStore):
    device = "cuda"


def made(kind: str, optimizer: SparseOptimizerSpec | None, device: str) -> Any:
    if kind == "cached":
        num_slots, backing = {"a": 1, "b": 1}, partial(RamRows, seed=1, device=device)
        return CachedStore(LAYOUT, optimizer, num_slots=num_slots, backing=backing, device=device)
    return HostStore(DeviceStore(LAYOUT, optimizer), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["host", "cached"])
def test_prefetched_batches_end_at_the_weights_of_a_device_store(kind: str, device: str) -> None:
    optimizer = SparseOptimizerSpec(kind="adam")
    store, plain = made(kind, optimizer, device), DeviceStore(LAYOUT, optimizer)
    batches = [Sparse(ids=(SPARSE.ids + k) % 4, offsets=SPARSE.offsets, num_features=2) for k in range(5)]
    there = [batch.to(device) for batch in batches]
    for batch in there[:2]:
        store.prefetch(batch)
    for step, (batch, here) in enumerate(zip(there, batches, strict=True), start=1):
        store.update(batch, store.lookup(batch) + 1, lr=0.1, step=step)
        plain.update(here, plain.lookup(here) + 1, lr=0.1, step=step)
        if step + 1 < len(there):
            store.prefetch(there[step + 1])
    for name, value in plain.state().items():
        torch.testing.assert_close(store.state()[name].cpu(), value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["host", "cached"])
def test_rows_stay_where_they_are_when_the_model_is_moved_or_converted(kind: str) -> None:
    model = torch.nn.Sequential(made(kind, SparseOptimizerSpec(), "cpu"), torch.nn.Linear(2, 2)).double()
    assert model[1].weight.dtype == torch.float64
    assert model[0].state()["a.rows"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["host", "cached"])
def test_a_batch_that_does_not_fit_is_refused(kind: str) -> None:
    store = made(kind, SparseOptimizerSpec(), "cpu")
    with pytest.raises(DataError, match="is outside its table"):
        store.lookup(Sparse(ids=SPARSE.ids + 4, offsets=SPARSE.offsets, num_features=2))
    with pytest.raises(DataError, match="the gradient is"):
        store.update(SPARSE, torch.ones(2, 3), lr=0.1, step=1)


@pytest.mark.parametrize("kind", ["host", "cached"])
def test_what_loading_changes_is_seen_by_the_next_update(kind: str) -> None:
    store, plain = made(kind, SparseOptimizerSpec(), "cpu"), DeviceStore(LAYOUT, SparseOptimizerSpec())
    changed = {name: value + 1 for name, value in plain.state().items()}
    grad = store.lookup(SPARSE)
    store.load_state(changed)
    plain.load_state(changed)
    for one in (store, plain):
        one.update(SPARSE, grad, lr=0.1, step=1)
    assert all(torch.equal(value, store.state()[name]) for name, value in plain.state().items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_what_fails_in_the_background_is_raised_by_the_next_call() -> None:
    store = HostStore(DeviceStore(LAYOUT, None), "cuda")
    batch = SPARSE.to("cuda")
    store.update(batch, torch.ones(2, 8, device="cuda"), lr=0.1, step=1)
    with pytest.raises(AssertionError, match="made for look-ups only"):
        store.rows("a", torch.tensor([0]))
