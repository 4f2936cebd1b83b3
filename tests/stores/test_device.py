"""The device store keeps the contract of every store, over each set of kernels.

Without a GPU the Triton kernels run in Triton's interpreter (tests/conftest.py turns it on); with one they are compiled.
"""

from __future__ import annotations

import pytest
import torch

from rowstead.data.batch import Sparse
from rowstead.kernels.layout import Layout, layout_of
from rowstead.spec.errors import CheckpointError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.run import Kernel
from rowstead.stores.device import DeviceStore
from tests.stores.store_contract import BriefStoreContract, HistoryContract, StoreContract

FEATURES = FeaturesSpec(sparse=(SparseFeatureSpec(name="a", num_rows=6), SparseFeatureSpec(name="b", num_rows=4)))
LAYOUT = layout_of(FEATURES, tables_of(FEATURES, width=3))


class TestDeviceStoreOverReferenceKernels(StoreContract):
    has_snapshots = True

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> DeviceStore:
        return DeviceStore(layout, optimizer, dtype=dtype, kernel="reference")


class TestDeviceStoreOverCpuKernels(HistoryContract):
    has_snapshots = True

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> DeviceStore:
        return DeviceStore(layout, optimizer, dtype=dtype, kernel="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run on it, below")
class TestDeviceStoreOverInterpretedGpuKernels(BriefStoreContract):
    has_snapshots = True

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> DeviceStore:
        return DeviceStore(layout, optimizer, dtype=dtype, kernel="gpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestDeviceStoreOnGpu(StoreContract):
    device = "cuda"
    has_snapshots = True

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> DeviceStore:
        return DeviceStore(layout, optimizer, dtype=dtype, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_initial_rows_are_the_same_on_every_device() -> None:
    here, there = (DeviceStore(LAYOUT, None, device=device).state() for device in ("cpu", "cuda"))
    assert torch.equal(here["a.rows"], there["a.rows"].cpu())


def test_initial_rows_depend_on_seed_and_table_alone() -> None:
    one, same, other = (DeviceStore(LAYOUT, None, seed=seed).state() for seed in (1, 1, 2))
    assert torch.equal(one["a.rows"], same["a.rows"])
    assert not torch.equal(one["a.rows"], other["a.rows"])
    assert not torch.equal(one["a.rows"][:4], one["b.rows"])
    assert one["a.rows"].abs().max() <= 6**-0.5
    wide = layout_of(FEATURES, tables_of(FEATURES, width=3)).tables[0]
    assert wide.num_elements == one["a.rows"].numel()


def test_initial_rows_are_even_between_their_bounds() -> None:
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="a", num_rows=10_000),))
    rows = DeviceStore(layout_of(features, tables_of(features, width=16)), None).state()["a.rows"] * 100
    counts = torch.histc(rows, bins=20, min=-1, max=1)
    assert counts.sum() == rows.numel()
    assert (counts / rows.numel() - 0.05).abs().max() < 0.002


def test_state_of_another_shape_is_refused_by_name() -> None:
    store = DeviceStore(LAYOUT, SparseOptimizerSpec())
    state = store.state() | {"b.rows": torch.zeros(5, 3)}
    with pytest.raises(CheckpointError, match=r"`b\.rows` is \(5, 3\)"):
        store.load_state(state)
    with pytest.raises(CheckpointError, match=r"no `a\.sum`"):
        store.load_state({name: value for name, value in store.state().items() if name != "a.sum"})


def test_tables_take_part_in_autograd_when_asked() -> None:
    store = DeviceStore(LAYOUT, None)
    assert not any(rows.requires_grad for rows in store.parameters())
    store.requires_grad_(True)
    sparse = Sparse(ids=torch.tensor([1, 1, 2]), offsets=torch.tensor([0, 2, 3]), num_features=2)
    store.lookup(sparse).sum().backward()
    assert store.weights[0].grad is not None
    assert store.weights[0].grad[1].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rows_start_as_the_fp32_ones_and_keep_their_format(kernel: Kernel, dtype: torch.dtype) -> None:
    optimizer = SparseOptimizerSpec(kind="adam")
    store = DeviceStore(LAYOUT, optimizer, dtype=dtype, kernel=kernel)
    for ours, full in zip(store.weights, DeviceStore(LAYOUT, optimizer).weights, strict=True):
        assert torch.equal(ours, full.to(dtype))
    sparse = Sparse(ids=torch.tensor([1, 2, 3]), offsets=torch.tensor([0, 2, 3]), num_features=2)
    pooled = store.lookup(sparse)
    assert pooled.dtype == torch.float32
    store.update(sparse, torch.ones_like(pooled), lr=0.1, step=1)
    state = store.state()
    assert state["a.rows"].dtype == dtype
    assert state["a.moment1"].dtype == torch.float32
    other = DeviceStore(LAYOUT, optimizer, dtype=dtype, kernel=kernel, seed=2)
    other.load_state(state)
    assert all(torch.equal(value, other.state()[name]) for name, value in state.items())
