"""A batch that does not fit its tables is refused, and named, before a kernel follows it into memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowstead.data.batch import Sparse, check_batch
from rowstead.kernels import check
from rowstead.kernels.check import check_gradient, check_sparse
from rowstead.kernels.layout import Layout, layout_of
from rowstead.spec.errors import DataError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, TableSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.device import DeviceStore
from tests.stores.store_contract import layouts, sparse_batches

FEATURES = FeaturesSpec(
    sparse=(
        SparseFeatureSpec(name="a", num_rows=6),
        SparseFeatureSpec(name="b", table="shared"),
        SparseFeatureSpec(name="c", table="shared"),
    ),
    tables=(TableSpec(name="shared", num_rows=4),),
)
LAYOUT = layout_of(FEATURES, tables_of(FEATURES, width=3))
IDS = [5, 0, 3, 3, 1]
OFFSETS = [0, 2, 2, 3, 3, 4, 5]
"""Three features of two examples: a [5, 0] and [], b [3] and [], c [3] and [1]."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))]


def ids_of(*changes: tuple[int, int], dtype: torch.dtype = torch.int64) -> Tensor:
    ids = torch.tensor(IDS, dtype=dtype)
    for index, value in changes:
        ids[index] = value
    return ids


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_outside_their_table_are_named_with_feature_and_example(dtype: torch.dtype, device: str) -> None:
    offsets = torch.tensor(OFFSETS, device=device)
    check_sparse(LAYOUT, ids_of(dtype=dtype).to(device), offsets)
    for index, value, says in (
        (0, 6, r"id 6 of example 0, feature 0 \(table `a`\) is outside its table, whose rows are 0 to 5"),
        (2, 4, r"id 4 of example 0, feature 1 \(table `shared`\) is outside its table, whose rows are 0 to 3"),
        (4, -1, r"id -1 of example 1, feature 2 \(table `shared`\)"),
        (4, torch.iinfo(dtype).min, r"id -\d+ of example 1, feature 2"),
        (1, torch.iinfo(dtype).max, r"id \d+ of example 0, feature 0"),
    ):
        with pytest.raises(DataError, match=says):
            check_sparse(LAYOUT, ids_of((index, value), dtype=dtype).to(device), offsets)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        ([1, 2, 2, 3, 3, 4, 5], "offsets must start at 0, got 1"),
        ([0, 2, 1, 3, 3, 4, 5], r"offsets must not fall, but go from 2 to 1 at example 1, feature 0 \(table `a`\)"),
        ([0, 2, 2, 3, 9, 4, 5], r"offsets must not fall, but go from 9 to 4 at example 0, feature 2"),
        ([0, 2, 2, 3, 3, 4, 6], "offsets must end at the number of ids, 5, got 6"),
        ([0, 2, 2, 3, 3, 4, 4], "offsets must end at the number of ids, 5, got 4"),
        ([0, 2**62, -(2**63), -(2**62), 3, 4, 5], "offsets must not fall"),  # differences that wrap around look like rises
        ([0, 2, 2, 3, 3, 4], r"there are 6 offsets, and 3 features of B examples need 3 \* B \+ 1"),
        ([], "there are 0 offsets"),
    ],
)
def test_offsets_that_lead_nowhere_are_refused(offsets: list[int], says: str, device: str) -> None:
    with pytest.raises(DataError, match=says):
        check_sparse(LAYOUT, ids_of().to(device), torch.tensor(offsets, dtype=torch.int64, device=device))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ids": torch.tensor([5.0])}, "ids must be int32 or int64, got float32"),
        ({"ids": torch.tensor([5], dtype=torch.int16)}, "ids must be int32 or int64, got int16"),
        ({"ids": torch.tensor([IDS])}, r"ids must have one dimension, got \[1, 5\]"),
        ({"ids": torch.tensor([[5, 0], [0, 0], [3, 0], [3, 0], [1, 0]])[:, 0]}, r"ids must be contiguous"),
        ({"offsets": torch.tensor(OFFSETS, dtype=torch.int32)}, "offsets must be int64, got int32"),
        ({"weights": torch.ones(4)}, "there are 4 weights for 5 ids"),
        ({"weights": torch.ones(5, dtype=torch.int64)}, "weights must be floating point, got int64"),
        ({"weights": torch.ones(5, device="meta")}, "weights are on meta, but must be on cpu"),
        ({"device": torch.device("meta")}, "ids are on cpu, but must be on meta"),
        ({"num_features": 2}, "the batch has 2 features, and the tables are read by 3"),
    ],
)
def test_dtypes_shapes_and_devices_that_do_not_fit_are_refused(change: dict, says: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(DataError, match=says):
        check_sparse(**{"layout": LAYOUT, "ids": ids_of(), "offsets": torch.tensor(OFFSETS), **change})


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_no_examples_fits(device: str) -> None:
    check_sparse(LAYOUT, torch.empty(0, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device))
    with pytest.raises(DataError, match="offsets must end at the number of ids, 1, got 0"):
        check_sparse(LAYOUT, torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device))


def fits_by_hand(layout: Layout, ids: list[int], offsets: list[int], num_samples: int) -> bool:
    """What the check says, one id at a time."""
    if offsets[0] != 0 or offsets[-1] != len(ids) or any(np.diff(offsets) < 0):
        return False
    for bag in range(len(offsets) - 1):
        num_rows = layout.tables[layout.table_of[bag // num_samples]].num_rows
        if not all(0 <= row < num_rows for row in ids[offsets[bag] : offsets[bag + 1]]):
            return False
    return True


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_all_ways_to_check_agree_with_one_id_at_a_time(data: st.DataObject) -> None:
    from rowstead.kernels.gpu.check import fits

    layout = data.draw(layouts())
    sparse = data.draw(sparse_batches(layout, weighted=False))
    ids, offsets = sparse.ids.clone(), sparse.offsets.clone()
    for tensor in (ids, offsets):
        if tensor.numel() and data.draw(st.booleans()):
            tensor[data.draw(st.integers(0, tensor.numel() - 1))] = data.draw(st.integers(-3, 14))
    wanted = fits_by_hand(layout, ids.tolist(), offsets.tolist(), sparse.num_samples)
    assert check._fits_numba(layout, ids, offsets, sparse.num_samples) == wanted
    assert check._fits_torch(layout, ids, offsets, sparse.num_samples) == wanted
    assert fits(layout, ids.to(DEVICE), offsets.to(DEVICE)) == wanted
    if wanted:
        check_sparse(layout, ids, offsets)
    else:
        with pytest.raises(DataError):
            check_sparse(layout, ids, offsets)


def test_a_gradient_of_another_shape_is_refused() -> None:
    offsets = torch.tensor(OFFSETS)
    check_gradient(LAYOUT, offsets, torch.zeros(2, 9))
    with pytest.raises(DataError, match=r"the gradient is \[2, 8\], and the look-up of this batch returned \[2, 9\]"):
        check_gradient(LAYOUT, offsets, torch.zeros(2, 8))
    with pytest.raises(DataError, match="the gradient is on meta and the batch on cpu"):
        check_gradient(LAYOUT, offsets, torch.zeros(2, 9, device="meta"))


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_a_store_refuses_such_batches_and_changes_nothing(kernel: str) -> None:
    store = DeviceStore(LAYOUT, SparseOptimizerSpec(), kernel=kernel)  # type: ignore[arg-type]
    before = {name: value.clone() for name, value in store.state().items()}
    bad = Sparse(ids=ids_of((2, 4)), offsets=torch.tensor(OFFSETS), num_features=3)
    good = Sparse(ids=ids_of(), offsets=torch.tensor(OFFSETS), num_features=3)
    with pytest.raises(DataError, match="id 4"):
        store.lookup(bad)
    with pytest.raises(DataError, match="id 4"):
        store.update(bad, torch.ones(2, 9), lr=0.1, step=1)
    with pytest.raises(DataError, match="the gradient is"):
        store.update(good, torch.ones(2, 3), lr=0.1, step=1)
    assert all(torch.equal(value, before[name]) for name, value in store.state().items())


def test_a_batch_is_checked_once_for_each_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("rowstead.data.batch.check_sparse", lambda layout, *args, **kwargs: seen.append(layout))
    batch = check_batch(Sparse(ids=ids_of(), offsets=torch.tensor(OFFSETS), num_features=3), LAYOUT)
    store = DeviceStore(LAYOUT, SparseOptimizerSpec())
    store.update(batch.to("cpu"), store.lookup(batch), lr=0.1, step=1)
    assert seen == [LAYOUT]
    other = layout_of(FEATURES, tables_of(FEATURES, width=3))
    assert check_batch(batch, other).checked_for is other
    assert seen == [LAYOUT, other]


def test_a_store_that_is_told_not_to_check_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("checked")

    monkeypatch.setattr("rowstead.data.batch.check_sparse", fail)
    good = Sparse(ids=ids_of(), offsets=torch.tensor(OFFSETS), num_features=3)
    store = DeviceStore(LAYOUT, SparseOptimizerSpec(), check=False)
    before = store.lookup(good)
    store.update(good, before, lr=0.1, step=1)
    assert not torch.equal(store.lookup(good), before)
