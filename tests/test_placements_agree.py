"""A hundred steps end at the same weights wherever the rows live; shardings over processes are in test_processes.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from rowstead.data.batch import Batch, Sparse
from rowstead.kernels.layout import Layout, layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, TableSpec, tables_of
from rowstead.spec.model import ModelSpec
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.train import TrainSpec
from rowstead.stores.backing import RamRows
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.host import HostStore
from rowstead.stores.mixed import MixedStore, select_tables
from rowstead.stores.ssd import FileRows, initial_rows_of
from rowstead.training.prefetch import prefetch_rows
from rowstead.training.step import Stepper

NUM_STEPS, BATCH = 100, 32
FEATURES = FeaturesSpec(
    dense=(DenseFeatureSpec(name="d{i}", repeat=3),),
    sparse=(
        SparseFeatureSpec(name="user", num_rows=400),
        SparseFeatureSpec(name="item", table="items"),
        SparseFeatureSpec(name="seen", table="items", pooling="mean"),
        SparseFeatureSpec(name="shop", num_rows=60),
    ),
    tables=(TableSpec(name="items", num_rows=300),),
)
LAYOUT = layout_of(FEATURES, tables_of(FEATURES, width=8))

Make = Callable[[Layout, SparseOptimizerSpec, torch.dtype, Path], EmbeddingStore]


def behind(
    layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype, folder: Path, *, is_file: bool, num_slots: int
) -> CachedStore:
    def backing(group):  # type: ignore[no-untyped-def]
        if not is_file:
            return RamRows(group, seed=1)
        return FileRows(
            folder / f"{layout.tables[0].name}.rows", group.num_rows, group.columns, initial=initial_rows_of(group, seed=1)
        )

    counts = {table.name: num_slots for table in layout.tables}
    return CachedStore(layout, optimizer, num_slots=counts, backing=backing, dtype=dtype)


def mixed(layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype, folder: Path) -> MixedStore:
    user, items, shop = (select_tables(layout, [name]) for name in ("user", "items", "shop"))
    return MixedStore(
        layout,
        [
            behind(user, optimizer, dtype, folder, is_file=True, num_slots=40),
            behind(items, optimizer, dtype, folder, is_file=False, num_slots=20),
            DeviceStore(shop, optimizer, dtype=dtype),
        ],
    )


STORES: dict[str, Make] = {
    "cached": lambda layout, optimizer, dtype, folder: behind(layout, optimizer, dtype, folder, is_file=False, num_slots=20),
    "host": lambda layout, optimizer, dtype, folder: behind(layout, optimizer, dtype, folder, is_file=False, num_slots=1),
    "ssd": lambda layout, optimizer, dtype, folder: behind(layout, optimizer, dtype, folder, is_file=True, num_slots=30),
    "pooled by the CPU": lambda layout, optimizer, dtype, _: HostStore(DeviceStore(layout, optimizer, dtype=dtype), "cpu"),
    "mixed": mixed,
}


def batches(dtype: torch.dtype) -> list[Batch]:
    draws = torch.Generator().manual_seed(3)
    made = []
    for _ in range(NUM_STEPS):
        lengths = torch.randint(0, 5, (4, BATCH), generator=draws)
        limits = torch.tensor([400, 300, 300, 60]).repeat_interleave(lengths.sum(1))
        ids = (torch.rand(len(limits), generator=draws) ** 3 * limits).long()
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        dense = torch.randn(BATCH, 3, generator=draws).to(dtype)
        labels = (torch.rand(BATCH, generator=draws) < 0.3).to(dtype)
        made.append(Batch(dense=dense, sparse=Sparse(ids=ids, offsets=offsets, num_features=4), labels=labels))
    return made


def trained(make: Callable[[SparseOptimizerSpec], EmbeddingStore], kind: str, dtype: torch.dtype) -> tuple[list[float], DLRM]:
    optimizer = SparseOptimizerSpec(kind=kind, lr=0.05)
    torch.manual_seed(1)
    model = DLRM(ModelSpec(width=8, bottom=(8,), top=(8,)), FEATURES, make(optimizer)).to(dtype)
    stepper = Stepper(model, TrainSpec(sparse_optimizer=optimizer), total_steps=NUM_STEPS)
    items = ((batch, batch, {}) for batch in batches(dtype))
    losses = [stepper.step(batch, number) for number, (_, batch, _) in enumerate(prefetch_rows(items, model.store), start=1)]
    return losses, model


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adam"])
@pytest.mark.parametrize("name", STORES)
def test_every_store_ends_at_the_weights_of_the_device_store(name: str, kind: str, tmp_path: Path) -> None:
    def on_device(optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> EmbeddingStore:
        return DeviceStore(LAYOUT, optimizer, dtype=dtype)

    def elsewhere(optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> EmbeddingStore:
        return STORES[name](LAYOUT, optimizer, dtype, tmp_path)

    wanted, ours = (trained(partial(make, dtype=torch.float64), kind, torch.float64)[1] for make in (on_device, elsewhere))
    for (tensor, value), (_, other) in zip(
        [*wanted.store.state().items(), *wanted.net.state_dict().items()],
        [*ours.store.state().items(), *ours.net.state_dict().items()],
        strict=True,
    ):
        torch.testing.assert_close(other, value, rtol=1e-9, atol=1e-9, msg=tensor)
    ours.store.close() if hasattr(ours.store, "close") else None
    losses, others = (trained(partial(make, dtype=torch.float32), kind, torch.float32)[0] for make in (on_device, elsewhere))
    assert losses == pytest.approx(others, abs=1e-4)
