"""Sharded tables do what one process does, whatever the cut and the number of processes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.data.batch import Sparse
from rowstead.distributed.launch import process_environment
from rowstead.distributed.process_group import ProcessGroup, SingleProcess, TorchProcessGroup
from rowstead.distributed.sharded_store import ShardedStore
from rowstead.distributed.sharding import SHARDS, Shard, auto_shards, column_ranges, plan_shards, row_ranges
from rowstead.kernels.layout import Layout, layout_of
from rowstead.spec.errors import DataError, RowsteadError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.backing import RamRows
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from tests.distributed.thread_process_group import ThreadProcessGroup, in_threads
from tests.stores.store_contract import KINDS, BriefStoreContract, PlainStore, layouts, optimizers, sparse_batches


def sharded(
    layout: Layout,
    optimizer: SparseOptimizerSpec | None,
    shards: dict[str, Shard],
    process_group: ProcessGroup,
    dtype: torch.dtype = torch.float64,
    num_slots: int | None = None,
) -> ShardedStore:
    """Pieces in memory, or behind a cache with so many places a table."""

    def make(local: Layout, rule: SparseOptimizerSpec | None) -> DeviceStore | CachedStore:
        if num_slots is None:
            return DeviceStore(local, rule, dtype=dtype)
        counts = {table.name: num_slots for table in local.tables}
        return CachedStore(local, rule, num_slots=counts, backing=lambda group: RamRows(group, seed=1), dtype=dtype)

    plan = plan_shards(layout, shards, process_group.world_size)
    return ShardedStore(plan, optimizer, process_group, make, dtype=dtype)


@pytest.mark.parametrize("shard", SHARDS)
class TestAlone(BriefStoreContract):
    """The contract of every store, for a job of one process."""

    @pytest.fixture(autouse=True)
    def _shard(self, shard: Shard) -> None:
        self.shard: Shard = shard

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> ShardedStore:
        shards: dict[str, Shard] = {table.name: self.shard for table in layout.tables}
        return sharded(layout, optimizer, shards, SingleProcess(), dtype)


def cut(num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    return num_samples * rank // world_size, num_samples * (rank + 1) // world_size


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_mix_of_shards_over_any_number_of_processes_is_exact(kind: str, data: st.DataObject) -> None:
    layout, world_size = data.draw(layouts()), data.draw(st.integers(2, 4))
    shards = {table.name: data.draw(st.sampled_from(SHARDS)) for table in layout.tables}
    optimizer = data.draw(optimizers(kind))
    weighted, ahead = data.draw(st.booleans()), data.draw(st.integers(0, 2))
    num_slots = data.draw(st.sampled_from([None, None, 2]))
    batches = [data.draw(sparse_batches(layout, weighted)) for _ in range(3)]
    rng = np.random.default_rng(1)
    grads = [rng.normal(size=(batch.num_samples, layout.total_width)) for batch in batches]

    def work(process_group: ThreadProcessGroup) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        store = sharded(layout, optimizer, shards, process_group, num_slots=num_slots)
        shares = [cut(batch.num_samples, process_group.rank, world_size) for batch in batches]
        own = [batch.examples(*share) for batch, share in zip(batches, shares, strict=True)]
        for sparse in own[:ahead]:
            store.prefetch(sparse)
        pooled = []
        for place, sparse in enumerate(own):
            pooled.append(store.lookup(sparse))
            start, stop = shares[place]
            store.update(sparse, torch.from_numpy(grads[place][start:stop]), lr=0.1, step=place + 1)
            if ahead and place + ahead < len(own):
                store.prefetch(own[place + ahead])
        rows = {table.name: store.rows(table.name, torch.arange(table.num_rows)) for table in layout.tables}
        return pooled, rows, store.state()

    plain = PlainStore(layout, DeviceStore(layout, optimizer, dtype=torch.float64).state(), optimizer)
    results = in_threads(world_size, work)
    for step, (batch, grad) in enumerate(zip(batches, grads, strict=True), start=1):
        found = torch.cat([pooled[step - 1] for pooled, _, _ in results])
        np.testing.assert_allclose(found.numpy(), plain.lookup(batch), rtol=1e-9, atol=1e-12)
        plain.update(batch, grad, 0.1, step)
    for table, expected in zip(layout.tables, plain.rows, strict=True):
        for _, rows, state in results:
            np.testing.assert_allclose(rows[table.name].numpy(), expected, rtol=1e-9, atol=1e-12)
            assert torch.equal(rows[table.name], state[f"{table.name}.rows"])


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_pieces_begin_and_are_loaded_as_parts_of_the_whole(data: st.DataObject) -> None:
    layout, world_size = data.draw(layouts()), data.draw(st.integers(1, 4))
    shards = {table.name: data.draw(st.sampled_from(SHARDS)) for table in layout.tables}
    optimizer = SparseOptimizerSpec(kind=data.draw(st.sampled_from(KINDS)))  # type: ignore[arg-type]
    whole = DeviceStore(layout, optimizer, dtype=torch.float64).state()
    other = {name: torch.rand_like(value) for name, value in whole.items()}

    def work(
        process_group: ThreadProcessGroup,
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[tuple[str, bool, int]]]:
        store = sharded(layout, optimizer, shards, process_group)
        initial = store.state()
        store.load_state(other)
        return initial, store.state(), [(p.name, p.is_copy, p.num_rows * p.num_columns) for p in store.parts()]

    results = in_threads(world_size, work)
    for initial, loaded, _ in results:
        assert all(torch.equal(initial[name], value) for name, value in whole.items())
        assert all(torch.equal(loaded[name], value) for name, value in other.items())
    saved: dict[str, int] = {}
    for name, is_copy, num_elements in (part for _, _, parts in results for part in parts):
        saved[name] = saved.get(name, 0) + (0 if is_copy else num_elements)
    assert saved == {name: value.numel() for name, value in whole.items()}, "every element is saved by one process"


def plain_layout(*num_rows: int, width: int = 8) -> Layout:
    features = tuple(SparseFeatureSpec(name=f"t{place}", num_rows=rows) for place, rows in enumerate(num_rows))
    spec = FeaturesSpec(sparse=features)
    return layout_of(spec, tables_of(spec, width=width))


def test_all_processes_announce_equally_many_batches_whatever_their_own_stores_want() -> None:
    def make(local: Layout, rule: SparseOptimizerSpec | None) -> DeviceStore | CachedStore:
        if local.tables[0].name == "t0":
            return DeviceStore(local, rule)
        return CachedStore(local, rule, num_slots={"t1": 2}, backing=lambda group: RamRows(group, seed=1))

    def work(process_group: ThreadProcessGroup) -> int:
        return ShardedStore(plan_shards(plain_layout(20, 10), {}, 2), SparseOptimizerSpec(), process_group, make).batches_ahead

    first, second = in_threads(2, work)
    assert first == second > 1


def test_whole_tables_are_spread_by_their_weight() -> None:
    plan = plan_shards(plain_layout(100, 60, 50, 10), {}, 2)
    assert [[piece.table for piece in own] for own in plan.pieces] == [[0, 3], [1, 2]]
    heavy = plan_shards(plain_layout(100, 60, 50, 10), {}, 2, lookups={"t3": 100.0})
    assert [[piece.table for piece in own] for own in heavy.pieces] == [[3], [0, 1, 2]]


@given(size=st.integers(1, 100), world_size=st.integers(1, 9))
def test_ranges_of_rows_and_columns_cover_all_once(size: int, world_size: int) -> None:
    for ranges in (row_ranges(size, world_size), column_ranges(size, world_size)):
        assert len(ranges) == world_size
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == size


def test_auto_copies_what_is_small_and_cuts_what_is_too_large_for_one() -> None:
    layout = plain_layout(20, 900, 1000, 100_000)
    shards = auto_shards(layout, 2, batch_size=64)
    assert shards == {"t0": "replicate", "t1": "auto", "t2": "auto", "t3": "auto"}
    lookups = {"t1": 1.0, "t2": 1.0, "t3": 2.0}
    assert plan_shards(layout, shards, 2, lookups=lookups).shards == ("replicate", "table", "table", "row")


def test_a_table_narrower_than_the_processes_are_many_is_not_cut_by_columns() -> None:
    assert plan_shards(plain_layout(10, width=3), {"t0": "column"}, 4).shards == ("table",)


def test_shards_of_unknown_tables_and_kinds_are_refused() -> None:
    with pytest.raises(RowsteadError, match="unknown table `t9` to shard: known here: `t0`"):
        plan_shards(plain_layout(10), {"t9": "row"}, 2)
    with pytest.raises(RowsteadError, match="unknown shard `rows`: did you mean `row`"):
        plan_shards(plain_layout(10), {"t0": "rows"}, 2)  # type: ignore[dict-item]


def test_a_batch_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    store = sharded(plain_layout(10), SparseOptimizerSpec(), {"t0": "row"}, SingleProcess())
    with pytest.raises(DataError, match="id 10 of example 0"):
        store.lookup(Sparse(ids=torch.tensor([10]), offsets=torch.tensor([0, 1]), num_features=1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_one_process_on_a_gpu_exchanges_with_itself_by_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in process_environment(0, 1, tmp_path / "rendezvous", 0, {}).items():
        monkeypatch.setenv(name, value)
    device = torch.device("cuda", 0)
    process_group = TorchProcessGroup.join(device)
    layout = plain_layout(50, 200, 1000, 30)
    for shard, kind in itertools.product(SHARDS, KINDS):
        optimizer = SparseOptimizerSpec(kind=kind, clip=0.5)  # type: ignore[arg-type]

        def make(local: Layout, rule: SparseOptimizerSpec | None) -> DeviceStore:
            return DeviceStore(local, rule, device=device)

        shards: dict[str, Shard] = {table.name: shard for table in layout.tables}
        plan = plan_shards(layout, shards, 1)
        store, plain = ShardedStore(plan, optimizer, process_group, make, device=device), make(layout, optimizer)
        for step in range(1, 6):
            rng = torch.Generator().manual_seed(step)
            lengths = torch.randint(0, 4, (4 * 33,), generator=rng)
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            ids = torch.randint(0, 30, (int(offsets[-1]),), generator=rng)
            sparse = Sparse(ids=ids, offsets=offsets, num_features=4).to(device)
            store.prefetch(sparse)
            found, expected = store.lookup(sparse), plain.lookup(sparse)
            torch.testing.assert_close(found, expected, msg=lambda text, at=(shard, kind, step): f"{at}: {text}")
            grad = torch.randn(33, layout.total_width, generator=rng).to(device)
            store.update(sparse, grad, lr=0.1, step=step)
            plain.update(sparse, grad, lr=0.1, step=step)
    process_group.close()
