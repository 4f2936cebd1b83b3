"""Stores that share the tables between them keep the contract of one store."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rowstead.data.batch import Sparse
from rowstead.kernels.layout import Layout, layout_of
from rowstead.spec.errors import DataError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, TableSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.backing import RamRows
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.groups import CacheGroup
from rowstead.stores.host import HostStore
from rowstead.stores.mixed import MixedStore, select_tables
from rowstead.stores.ssd import FileRows, initial_rows_of
from tests.stores.store_contract import StoreContract

FEATURES = FeaturesSpec(
    sparse=(
        SparseFeatureSpec(name="a", table="shared"),
        SparseFeatureSpec(name="b", num_rows=4, width=2),
        SparseFeatureSpec(name="c", table="shared", pooling="mean"),
        SparseFeatureSpec(name="d", num_rows=5),
    ),
    tables=(TableSpec(name="shared", num_rows=6),),
)
LAYOUT = layout_of(FEATURES, tables_of(FEATURES, width=3))
SPARSE = Sparse(ids=torch.tensor([1, 1, 2, 3, 0, 5, 4, 4]), offsets=torch.tensor([0, 2, 2, 3, 4, 5, 6, 8, 8]), num_features=4)


def mixed(
    layout: Layout, optimizer: SparseOptimizerSpec | None, dtype: torch.dtype = torch.float32, every: int = 2
) -> MixedStore:
    """Tables dealt round-robin to `every` device stores."""
    shares = [[table.name for table in layout.tables[first::every]] for first in range(every)]
    stores: list[EmbeddingStore] = [
        DeviceStore(select_tables(layout, share), optimizer, dtype=dtype, check=False) for share in shares if share
    ]
    return MixedStore(layout, stores)


class TestTwoDeviceStores(StoreContract):
    has_snapshots = True

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> MixedStore:
        return mixed(layout, optimizer, dtype)


class TestAStoreForEachTable(StoreContract):
    has_snapshots = True

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> MixedStore:
        return mixed(layout, optimizer, dtype, every=len(layout.tables))


class TestEveryKindOfStoreSideBySide(StoreContract):
    """Tables dealt round-robin to memory of the device, a cache over RAM, a cache over a file, and what the CPU pools."""

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> MixedStore:
        shares = [select_tables(layout, [table.name for table in layout.tables[first::4]]) for first in range(4)]
        makers: list[Callable[[Layout], EmbeddingStore]] = [
            lambda own: DeviceStore(own, optimizer, dtype=dtype, check=False),
            lambda own: cached(own, optimizer, dtype, lambda group: RamRows(group, seed=1)),
            lambda own: HostStore(cached(own, optimizer, dtype, in_file), "cpu", check=False),
            lambda own: HostStore(DeviceStore(own, optimizer, dtype=dtype, check=False), "cpu", check=False),
        ]
        self.has_snapshots = len(layout.tables) == 1  # then all of them are in memory of the device
        return MixedStore(layout, [make(own) for make, own in zip(makers, shares, strict=True) if own.tables])


def cached(
    layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype, backing: Callable[[CacheGroup], Any]
) -> CachedStore:
    num_slots = {table.name: 2 for table in layout.tables}
    return CachedStore(layout, optimizer, num_slots=num_slots, backing=backing, dtype=dtype, check=False)


def in_file(group: CacheGroup) -> FileRows:
    """Records in a file that goes when the process ends."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return FileRows(folder / "rows", group.num_rows, group.columns, initial=initial_rows_of(group, seed=1))


def test_a_layout_of_some_tables_numbers_their_features_anew() -> None:
    own = select_tables(LAYOUT, ["d", "shared"])
    assert [table.name for table in own.tables] == ["shared", "d"]
    assert own.table_of == (0, 0, 1)
    assert own.columns == (0, 3, 6, 9)
    assert own.is_mean == (False, True, False)
    assert [table.features for table in own.tables] == [(0, 1), (2,)]


def test_a_mix_ends_at_the_same_bits_as_one_store() -> None:
    optimizer = SparseOptimizerSpec(kind="adam")
    whole, parts = DeviceStore(LAYOUT, optimizer), mixed(LAYOUT, optimizer, every=3)
    for step in (1, 2, 3):
        pooled = whole.lookup(SPARSE)
        assert torch.equal(parts.lookup(SPARSE), pooled)
        for store in (whole, parts):
            store.update(SPARSE, pooled + 1, lr=0.1, step=step)
    state = parts.state()
    assert list(state) == list(whole.state())
    assert all(torch.equal(value, state[name]) for name, value in whole.state().items())


def test_consecutive_features_are_not_copied() -> None:
    halves = [["shared"], ["b"], ["d"]]
    store = MixedStore(LAYOUT, [DeviceStore(select_tables(LAYOUT, half), None) for half in halves])
    shared, b, d = store._split(SPARSE).parts
    ends = SPARSE.ids.data_ptr(), SPARSE.ids.data_ptr() + SPARSE.ids.nbytes
    assert ends[0] <= b.ids.data_ptr() < ends[1]
    assert ends[0] <= d.ids.data_ptr() < ends[1]
    assert shared.ids.tolist() == [1, 1, 0, 5]
    assert shared.offsets.tolist() == [0, 2, 2, 3, 4]
    assert d.offsets.tolist() == [0, 2, 2]


def test_a_store_sees_the_same_ids_when_a_batch_is_prefetched_looked_up_and_updated() -> None:
    store = mixed(LAYOUT, SparseOptimizerSpec())
    seen: list[tuple[str, int]] = []
    inner = store.stores[1]
    for name in ("prefetch", "lookup", "update"):
        method = getattr(inner, name)
        setattr(
            inner, name, lambda s, *a, name=name, method=method, **k: (seen.append((name, id(s.ids))), method(s, *a, **k))[1]
        )
    batches = [SPARSE, Sparse(ids=SPARSE.ids.clone(), offsets=SPARSE.offsets, num_features=4)]
    for batch in batches:
        store.prefetch(batch)
    for step, batch in enumerate(batches, start=1):
        store.update(batch, store.lookup(batch), lr=0.1, step=step)
    (_, first), (_, second), *used = seen
    assert used == [("lookup", first), ("update", first), ("lookup", second), ("update", second)]
    assert first != second


def test_a_batch_that_fits_no_table_is_refused_before_any_store_sees_it() -> None:
    store = mixed(LAYOUT, SparseOptimizerSpec())
    wrong = Sparse(ids=SPARSE.ids + 3, offsets=SPARSE.offsets, num_features=4)
    with pytest.raises(DataError, match="is outside its table"):
        store.lookup(wrong)
    with pytest.raises(DataError, match="the gradient is"):
        store.update(SPARSE, torch.ones(2, 3), lr=0.1, step=1)


def test_a_batch_without_examples_gives_no_vectors() -> None:
    empty = Sparse(ids=torch.zeros(0, dtype=torch.int64), offsets=torch.zeros(1, dtype=torch.int64), num_features=4)
    assert mixed(LAYOUT, None).lookup(empty).shape == (0, 11)


def test_tables_take_part_in_autograd_when_asked() -> None:
    store = mixed(LAYOUT, None)
    store.requires_grad_(True)
    store.lookup(SPARSE).sum().backward()
    assert all(rows.grad is not None for rows in store.parameters())


def test_an_evaluation_between_look_up_and_update_changes_nothing() -> None:
    names = ["a", "b", "c"]
    features = FeaturesSpec(sparse=tuple(SparseFeatureSpec(name=name, num_rows=50) for name in names))
    layout, optimizer = layout_of(features, tables_of(features, width=4)), SparseOptimizerSpec(kind="sgd")
    own = [select_tables(layout, [name]) for name in names]
    store = MixedStore(
        layout,
        [
            cached(own[0], optimizer, torch.float64, lambda group: RamRows(group, seed=1)),
            HostStore(cached(own[1], optimizer, torch.float64, lambda group: RamRows(group, seed=1)), "cpu", check=False),
            DeviceStore(own[2], optimizer, dtype=torch.float64, check=False),
        ],
    )
    plain = DeviceStore(layout, optimizer, dtype=torch.float64)
    batches = [Sparse(ids=torch.randint(0, 50, (12,)), offsets=torch.arange(13), num_features=3) for _ in range(4)]
    for batch in batches[:3]:
        store.prefetch(batch)
    for step, batch in enumerate(batches[:3], start=1):
        pooled = store.lookup(batch)
        store.eval()
        torch.testing.assert_close(store.lookup(batches[3]), plain.lookup(batches[3]))
        store.train()
        store.update(batch, pooled + 1, lr=0.1, step=step)
        plain.update(batch, plain.lookup(batch) + 1, lr=0.1, step=step)
    for name, value in plain.state().items():
        torch.testing.assert_close(store.state()[name], value)
