"""Rows behind a cache: exact, whatever comes ahead, however few slots there are."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.data.batch import Sparse
from rowstead.kernels.choose import has_triton
from rowstead.kernels.layout import Layout, layout_of
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.backing import RamRows
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.prefetch_scheduler import PrefetchScheduler
from tests.stores.store_contract import KINDS, StoreContract, layouts, sparse_batches

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available() or not has_triton(), reason="needs Triton's interpreter: a GPU works on tensors of its own alone"
)


def cached(
    layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype, *, num_slots: int = 2, device: str = "cpu"
) -> CachedStore:
    counts = {table.name: num_slots for table in layout.tables}
    return CachedStore(
        layout,
        optimizer,
        num_slots=counts,
        backing=lambda group: RamRows(group, seed=1, device=device),
        dtype=dtype,
        device=device,
    )


class TestCachedStore(StoreContract):
    """All tables behind two slots each."""

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> CachedStore:
        return cached(layout, optimizer, dtype)


class TestPartlyCachedStore(StoreContract):
    """Every other table is in fast memory whole."""

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> CachedStore:
        counts = {table.name: 3 for table in layout.tables[::2]}
        return CachedStore(layout, optimizer, num_slots=counts, backing=lambda group: RamRows(group, seed=1), dtype=dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestCachedStoreOnGpu(StoreContract):
    device = "cuda"
    same_bits = (
        False  # the order in which the gradients of a row are summed follows the slots, and they follow the batches before
    )

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> CachedStore:
        return cached(layout, optimizer, dtype, device="cuda")


def test_the_set_size_follows_from_the_rows_that_a_batch_needs_of_cached_tables() -> None:
    features = FeaturesSpec(
        sparse=(
            SparseFeatureSpec(name="long", num_rows=4000),  # in fast memory whole
            SparseFeatureSpec(name="short", num_rows=4000),
            SparseFeatureSpec(name="empty", num_rows=4000, width=8),
        )
    )
    layout = layout_of(features, tables_of(features, width=4))
    backing = partial(RamRows, seed=1)
    store = CachedStore(layout, None, num_slots={"short": 1, "empty": 1}, backing=backing)
    large = CachedStore(layout, None, num_slots={"short": 64, "empty": 1}, backing=backing)

    def sets_for(short: torch.Tensor, store: CachedStore) -> tuple[int, int]:
        lengths = torch.tensor([100] * 16 + [1] * 16 + [0] * 16)
        ids = torch.cat([torch.arange(1600), short])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return store._choose_set_size(Sparse(ids=ids, offsets=offsets, num_features=3))

    assert sets_for(torch.arange(16), store) == (1, 2)  # three sets of two would need 96 slots, and there is capacity for 60
    assert sets_for(torch.arange(16) // 4, store) == (5, 2)
    assert sets_for(torch.zeros(16, dtype=torch.int64), store) == (8, 2)
    assert sets_for(torch.arange(16), large) == (1, 1)  # two sets of one need 32 of 64 slots
    assert sets_for(torch.arange(16) // 4, large) == (5, 1)
    store.eval()
    store.lookup(Sparse(ids=torch.arange(3000), offsets=torch.arange(0, 3001, 1000), num_features=3))  # takes memory for slots
    store.train()
    assert sets_for(torch.arange(16) // 4, store) == (5, 2)


def small_layout() -> Layout:
    features = FeaturesSpec(sparse=tuple(SparseFeatureSpec(name=name, num_rows=40) for name in "ab"))
    return layout_of(features, tables_of(features, width=4))


def sparse_of(layout: Layout, seed: int, *, num_samples: int = 3, num_ids: int = 4) -> Sparse:
    """A batch of full bags."""
    draws = torch.Generator().manual_seed(seed)
    count = layout.num_features * num_samples
    ids = torch.randint(0, min(table.num_rows for table in layout.tables), (count * num_ids,), generator=draws)
    return Sparse(ids=ids, offsets=torch.arange(count + 1) * num_ids, num_features=layout.num_features)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_prefetched_batches_train_the_same_rows(kind: str, data: st.DataObject) -> None:
    layout = data.draw(layouts())
    store = cached(layout, SparseOptimizerSpec(kind=kind), torch.float64, num_slots=data.draw(st.integers(1, 4)))
    store._scheduler.ahead = data.draw(st.integers(1, 2))
    check_prefetched(store, data)


@pytest.mark.timeout(60)
def test_training_continues_after_an_interrupted_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = small_layout()
    store = cached(layout, SparseOptimizerSpec(kind="sgd"), torch.float64, num_slots=2)
    batches = [sparse_of(layout, seed) for seed in range(8)]

    def cut_off(self: PrefetchScheduler, happened: object) -> None:
        raise KeyboardInterrupt

    def train(batch: Sparse) -> None:
        store.lookup(batch)
        store.update(batch, torch.ones(batch.num_samples, 8, dtype=torch.float64), lr=0.1, step=1)

    for batch in batches[:2]:
        store.prefetch(batch)
    with monkeypatch.context() as patched:
        patched.setattr(PrefetchScheduler, "_wait_until", cut_off)
        with pytest.raises(KeyboardInterrupt):
            store.state()
    for batch in batches[:2]:
        train(batch)
    for batch in batches[2:5]:  # more often than batches are fetched ahead
        with monkeypatch.context() as patched:
            patched.setattr(store._scheduler, "_is_paused", True)  # its rows are not fetched yet
            patched.setattr(PrefetchScheduler, "_wait_until", cut_off)
            store.prefetch(batch)
            with pytest.raises(KeyboardInterrupt):
                store.lookup(batch)
        store.drop_prefetched()
    for batch in batches[5:]:
        store.prefetch(batch)
    for batch in batches[5:]:
        train(batch)
    store.close()


def planned_by_kernels(
    layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype, *, num_slots: int, every: int = 1
) -> CachedStore:
    """A store in system memory that plans as on a GPU, in Triton's interpreter; each `every`-th table is cached."""
    from rowstead.stores.cache_slots_gpu import GpuCacheSlots, plan_set_on_gpu

    counts = {table.name: num_slots for table in layout.tables[::every]}
    store = CachedStore(layout, optimizer, num_slots=counts, backing=lambda group: RamRows(group, seed=1), dtype=dtype)
    store._slots = [GpuCacheSlots(part.slot_of.numel(), part.num_slots, part.slot_of.device) for part in store._slots]
    store._plan_set = plan_set_on_gpu
    store._scheduler = PrefetchScheduler(store, moves_block=False)
    return store


@needs_interpreter
@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_batches_planned_by_gpu_kernels_train_the_same_rows(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    every = data.draw(st.integers(1, 2))
    store = planned_by_kernels(layout, SparseOptimizerSpec(kind="sgd"), torch.float64, num_slots=2, every=every)
    check_prefetched(store, data, most_batches=3)


@needs_interpreter
@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_many_batches_planned_by_gpu_kernels_train_the_same_rows(data: st.DataObject) -> None:
    layout, optimizer = data.draw(layouts()), SparseOptimizerSpec(kind="rowwise_adagrad")
    every, num_slots = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    store = planned_by_kernels(layout, optimizer, torch.float64, num_slots=num_slots, every=every)
    store._scheduler.set_size, store._scheduler.ahead = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    check_prefetched(store, data)


@pytest.mark.parametrize("make", [cached, pytest.param(planned_by_kernels, marks=[pytest.mark.slow, needs_interpreter])])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_rows_are_exact_whatever_is_done_between_prefetched_batches(
    make: Callable[..., CachedStore], data: st.DataObject
) -> None:
    layout, optimizer = data.draw(layouts()), SparseOptimizerSpec(kind="rowwise_adagrad")
    store = make(layout, optimizer, torch.float64, num_slots=data.draw(st.integers(1, 4)))
    store._scheduler.set_size, store._scheduler.ahead = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    device = DeviceStore(layout, optimizer, dtype=torch.float64)
    batches = data.draw(st.lists(sparse_batches(layout, weighted=False), min_size=4, max_size=8))
    saved, prefetched = device.state(), 0
    for step, sparse in enumerate(batches, start=1):
        done = data.draw(st.sampled_from(["nothing", "look", "drop", "save", "load"]))
        if done in ("drop", "load"):
            store.drop_prefetched()
            prefetched = step - 1
        prefetched = max(prefetched, step - 1)
        ahead = data.draw(st.integers(0, 5))
        while done != "load" and prefetched < min(len(batches), step - 1 + ahead):
            store.prefetch(batches[prefetched])
            prefetched += 1
        if done == "load":
            for each in (device, store):
                each.load_state(saved)
        elif done == "save":
            saved = {name: value.clone() for name, value in store.state().items()}
        elif done == "look":
            store.eval()
            torch.testing.assert_close(store.lookup(batches[-1]), device.lookup(batches[-1]))
            store.train()
        for each in (device, store):
            each.update(sparse, each.lookup(sparse) + 1, lr=0.1, step=step)
    ours = store.state()
    for name, value in device.state().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12)
    store.close()


def check_prefetched(store: CachedStore, data: st.DataObject, *, most_batches: int = 8) -> None:
    """Train on batches that are prefetched, and beside it without a cache."""
    layout, optimizer = store.layout, store.optimizer
    device = DeviceStore(layout, optimizer, dtype=torch.float64)
    batches = data.draw(st.lists(sparse_batches(layout, weighted=False), min_size=1, max_size=most_batches))
    ahead = data.draw(st.integers(1, 5))
    looks_aside = data.draw(st.booleans())
    prefetched = 0
    for step, sparse in enumerate(batches, start=1):
        while prefetched < min(len(batches), step - 1 + ahead):
            store.prefetch(batches[prefetched])
            prefetched += 1
        for each in (device, store):
            pooled = each.lookup(sparse)
            each.update(sparse, pooled + 1, lr=0.1, step=step)
        if looks_aside:
            store.eval()
            other = data.draw(sparse_batches(layout, weighted=False))
            torch.testing.assert_close(store.lookup(other), device.lookup(other))
            store.train()
    ours = store.state()
    for name, value in device.state().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12)


def test_prefetched_batches_can_be_dropped() -> None:
    layout, optimizer = small_layout(), SparseOptimizerSpec(kind="sgd")
    store, device = cached(layout, optimizer, torch.float64), DeviceStore(layout, optimizer, dtype=torch.float64)
    batches = [sparse_of(layout, seed) for seed in range(6)]
    for batch in batches:
        store.prefetch(batch)
    store.lookup(batches[0])
    store.drop_prefetched()
    for step, batch in enumerate(reversed(batches), start=1):
        for each in (device, store):
            each.update(batch, each.lookup(batch) + 1, lr=0.1, step=step)
    for name, value in device.state().items():
        torch.testing.assert_close(store.state()[name], value)


class FullDisk(RamRows):
    """A backing that fails to write."""

    def write(self, rows: torch.Tensor, values: Sequence[torch.Tensor], slots: torch.Tensor | None = None) -> None:
        if rows.numel():
            raise RowsteadError("the disk is full")


@pytest.mark.parametrize("ahead", [0, 3])
def test_an_error_while_rows_move_is_raised_by_every_later_call(ahead: int) -> None:
    layout, optimizer = small_layout(), SparseOptimizerSpec(kind="sgd")
    counts = {table.name: 4 for table in layout.tables}
    store = CachedStore(layout, optimizer, num_slots=counts, backing=lambda group: FullDisk(group, seed=1))
    batches = [sparse_of(layout, seed) for seed in range(6)]
    for batch in batches[:ahead]:
        store.prefetch(batch)

    def train() -> None:
        for step, batch in enumerate(batches, start=1):
            store.update(batch, store.lookup(batch) + 1, lr=0.1, step=step)

    with pytest.raises(RowsteadError, match="the disk is full"):
        train()
    store.drop_prefetched()
    with pytest.raises(RowsteadError, match="the disk is full"):
        store.state()
    store.close()


def test_the_threads_of_a_store_end_with_it() -> None:
    layout = small_layout()
    store = cached(layout, SparseOptimizerSpec(kind="sgd"), torch.float32)
    batch = sparse_of(layout, 1)
    store.prefetch(batch)
    store.update(batch, store.lookup(batch) + 1, lr=0.1, step=1)
    (thread,) = [thread for thread in threading.enumerate() if thread is store._scheduler._thread]
    del store
    gc.collect()
    thread.join(timeout=30)
    assert not thread.is_alive()


@pytest.mark.parametrize("is_late", [False, True])
def test_what_stays_was_decided_when_a_batch_was_prefetched_whenever_it_is_planned(is_late: bool) -> None:
    layout, seen = small_layout(), []
    store = cached(layout, SparseOptimizerSpec(kind="sgd"), torch.float64, num_slots=2)
    turns, plan = store._scheduler, store.plan_rows

    def plan_rows(some: Any, oldest: int, left: Any) -> Any:
        seen.append((some[0].number, oldest))
        return plan(some, oldest, left)

    store.plan_rows = plan_rows  # type: ignore[method-assign]
    batches = [sparse_of(layout, seed) for seed in range(6)]
    for step, batch in enumerate(batches, 1):
        if step == 5:
            with turns.pause() if is_late else contextlib.nullcontext():  # nothing is planned meanwhile
                turns.ahead = 1
                store.prefetch(batch)
                turns.ahead = 2
                store.prefetch(batches[5])
        store.update(batch, store.lookup(batch) + 1, lr=0.1, step=step)
    assert seen[4:] == [(4, 3), (5, 3)]


def test_rows_that_prefetched_batches_need_stay_when_sets_become_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, optimizer = small_layout(), SparseOptimizerSpec(kind="sgd")
    store, plain = cached(layout, optimizer, torch.float64, num_slots=2), DeviceStore(layout, optimizer, dtype=torch.float64)
    turns = store._scheduler
    begin = turns.next_set

    def next_set() -> Any:
        some = begin()
        turns.set_size = 1  # as the prefetch of a larger batch does, in another thread, before this set is planned
        return some

    monkeypatch.setattr(turns, "next_set", next_set)
    batches = [sparse_of(layout, seed) for seed in range(24)]
    prefetched = iter(batches)
    for step, batch in enumerate(batches, 1):
        turns.set_size = 4
        for coming in itertools.islice(prefetched, 11 if step == 1 else 1):
            store.prefetch(coming)
        for each in (plain, store):
            each.update(batch, each.lookup(batch) + 1, lr=0.1, step=step)
    mine = store.state()
    for name, value in plain.state().items():
        torch.testing.assert_close(mine[name], value, rtol=1e-12, atol=1e-12)
