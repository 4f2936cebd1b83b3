"""A remote store behaves like a local one, with few bytes sent and bounded staleness."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.data.batch import Sparse
from rowstead.fleet.remote_store import RemoteStore
from rowstead.fleet.sparse_server import SparseServer
from rowstead.kernels.layout import Layout
from rowstead.spec.errors import DataError, RowsteadError
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.device import DeviceStore
from rowstead.stores.host import HostStore
from rowstead.training.prefetch import prefetch_rows
from tests.fleet.sparse_servers import (
    ADAGRAD,
    SGD,
    Fleet,
    assert_same_rows,
    batch_of,
    cut_by_rows,
    grad_of,
    plain_layout,
    running,
    whole_tables,
)
from tests.small_runs import wait_until
from tests.stores.store_contract import BriefStoreContract, HistoryContract


@pytest.mark.parametrize(
    ("num_servers", "cut"),
    [(1, cut_by_rows), (2, cut_by_rows), (3, cut_by_rows), (2, whole_tables)],
    ids=["one", "two, row-wise", "three, row-wise", "two, table-wise"],
)
class TestRemoteStore(BriefStoreContract, HistoryContract):
    """The conformance suite of every store, over real sockets."""

    @pytest.fixture(autouse=True)
    def _servers(self, num_servers: int, cut) -> Iterator[None]:  # type: ignore[no-untyped-def]
        self.num_servers, self.cut = num_servers, cut
        self.fleets: list[Fleet] = []
        yield
        for fleet in self.fleets:
            fleet.close()

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> RemoteStore:
        fleet = Fleet(layout, optimizer, self.cut(layout, self.num_servers), dtype=dtype)
        self.fleets.append(fleet)
        return fleet.store()

    def make_with_histories(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> RemoteStore:
        return self.make(layout, optimizer, dtype)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_lookup_sees_every_update_but_those_of_the_last_k_batches(staleness: int) -> None:
    layout = plain_layout(40, 7, 100, pooling="mean")
    batches = [batch_of(layout, 5, seed) for seed in range(8)]
    grads = [grad_of(layout, batch, seed) for seed, batch in enumerate(batches)]
    local = DeviceStore(layout, ADAGRAD, dtype=torch.float64)
    expected = []
    for index, batch in enumerate(batches):  # exactly the updates up to k + 1 batches before are applied
        if (updated := index - staleness - 1) >= 0:
            local.update(batches[updated], grads[updated], lr=0.1, step=updated + 1)
        expected.append(local.lookup(batch))
    for index in range(len(batches) - staleness - 1, len(batches)):
        local.update(batches[index], grads[index], lr=0.1, step=index + 1)
    with running(layout, ADAGRAD, cut_by_rows(layout, 2)) as fleet:
        store = fleet.store(staleness=staleness)
        assert store.batches_ahead == staleness
        items = ((None, types.SimpleNamespace(sparse=batch), None) for batch in batches)
        for index, (_, item, _) in enumerate(prefetch_rows(items, store)):  # type: ignore[arg-type]
            torch.testing.assert_close(store.lookup(item.sparse), expected[index], rtol=1e-12, atol=1e-14)
            store.update(item.sparse, grads[index], lr=0.1, step=index + 1)
            assert len(store._unanswered) <= max(1, staleness)
        assert store.num_lookups_early >= (len(batches) - 1 if staleness else 0)
        assert_same_rows(store, local)


class Held(SparseServer):
    """Blocks updates until released."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.turns = threading.Semaphore(0)
        super().__init__(*arguments, **options)

    def _update(self, message: Any, caller: Any) -> Any:
        assert self.turns.acquire(timeout=20)
        return super()._update(message, caller)


def test_at_most_k_updates_are_unanswered_and_the_next_one_waits() -> None:
    layout = plain_layout(50)
    batches = [batch_of(layout, 4, seed) for seed in range(4)]
    with running(layout, SGD, whole_tables(layout, 1), kinds=[Held]) as fleet:
        server = fleet.servers[0]
        assert isinstance(server, Held)
        store = fleet.store(staleness=2)
        for index in (0, 1):  # returns before the server has applied anything
            store.update(batches[index], grad_of(layout, batches[index], 0), lr=0.1, step=index + 1)
        assert len(store._unanswered) == 2
        has_sent = threading.Event()

        def third() -> None:
            store.update(batches[2], grad_of(layout, batches[2], 0), lr=0.1, step=3)
            has_sent.set()

        thread = threading.Thread(target=third)
        thread.start()
        assert not has_sent.wait(0.2)
        server.turns.release()
        assert has_sent.wait(20)
        thread.join()
        assert server.applied.num_updates == 1
        for _ in range(2):
            server.turns.release()
        store.flush()
        assert (len(store._unanswered), server.applied.num_updates) == (0, 3)


def test_prefetched_lookups_are_answered_in_the_background() -> None:
    layout = plain_layout(50, 60)
    batches = [batch_of(layout, 4, seed) for seed in range(4)]
    with running(layout, SGD, whole_tables(layout, 2)) as fleet:
        store = fleet.store(staleness=2)
        for batch in batches:
            store.prefetch(batch)
        for server in fleet.servers:  # the first and two more: the fourth would see the rows too early
            wait_until(lambda server=server: server.num_lookups == 3, what="three lookups")
        store.lookup(batches[0])
        store.update(batches[0], grad_of(layout, batches[0], 0), lr=0.1, step=1)
        for server in fleet.servers:
            wait_until(lambda server=server: server.num_lookups == 4, what="the fourth lookup")
        store.drop_prefetched()


def wire_bytes(store: RemoteStore) -> int:
    figures = store.figures()
    return int(figures["num_bytes_sent"] + figures["num_bytes_received"])


HEADERS = 2000
"""Bytes of four messages and their facts, and more than that."""


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, 500), width=st.sampled_from([1, 16, 64]), num_samples=st.integers(1, 64), length=st.integers(0, 8)
)
def test_distinct_rows_are_sent_where_they_take_fewer_bytes_than_pooled_vectors(
    num_rows: int, width: int, num_samples: int, length: int
) -> None:
    layout = plain_layout(num_rows, width=width)
    batch = batch_of(layout, num_samples, num_rows, length=length)
    num_ids, num_distinct = batch.ids.numel(), len(batch.ids.unique())
    pooled = 4 * num_ids + num_samples + 2 * 8 * num_samples * width
    distinct = 4 * num_distinct + 2 * 8 * num_distinct * width
    with running(layout, SGD, whole_tables(layout, 1)) as fleet:
        store = fleet.store()
        store.lookup(batch)
        store.update(batch, grad_of(layout, batch, 0), lr=0.1, step=1)
        store.flush()
        assert wire_bytes(store) <= (distinct if distinct <= 0.75 * pooled else pooled) + HEADERS
        local = DeviceStore(layout, SGD, dtype=torch.float64)
        local.update(batch, grad_of(layout, batch, 0), lr=0.1, step=1)
        assert_same_rows(store, local)


def test_one_request_sends_rows_of_a_small_table_and_vectors_of_a_large_one() -> None:
    layout = plain_layout(3, 10**5, width=64)
    batch = batch_of(layout, 100, 1, length=20)
    with running(layout, SGD, whole_tables(layout, 1), dtype=torch.float32) as fleet:
        store = fleet.store()
        store.lookup(batch)
        few_rows, vectors = 3 * 64 * 4, 100 * 64 * 4
        received = store.figures()["num_bytes_received"]
        assert few_rows + vectors <= received <= few_rows + vectors + HEADERS
        assert fleet.servers[0].num_requests == 1


def test_16_bit_rows_are_sent_as_such_and_train_like_local_ones() -> None:
    layout = plain_layout(4, width=32)
    batch = batch_of(layout, 64, 1)
    with running(layout, SGD, whole_tables(layout, 1), dtype=torch.bfloat16) as fleet:
        store = fleet.store()
        local = DeviceStore(layout, SGD, dtype=torch.bfloat16)
        torch.testing.assert_close(store.lookup(batch), local.lookup(batch))
        assert store.figures()["num_bytes_received"] <= 4 * 32 * 2 + HEADERS
        grad = grad_of(layout, batch, 0).float()
        store.update(batch, grad, lr=0.1, step=1)
        local.update(batch, grad, lr=0.1, step=1)
        torch.testing.assert_close(store.state()["t0.rows"], local.state()["t0.rows"], rtol=2**-7, atol=1e-3)


def test_two_threads_with_a_copy_each_train_the_same_rows() -> None:
    layout = plain_layout(30, 40)
    batches = [batch_of(layout, 4, seed) for seed in range(20)]
    local = DeviceStore(layout, SGD, dtype=torch.float64)
    for seed, batch in enumerate(batches):
        local.update(batch, grad_of(layout, batch, seed), lr=0.1, step=1)
    with running(layout, SGD, cut_by_rows(layout, 2)) as fleet:
        first = fleet.store()
        stores = [first, first.copy_for_thread()]
        fleet.stores.append(stores[1])

        def train(thread: int) -> None:
            for seed in range(thread, len(batches), 2):
                stores[thread].lookup(batches[seed])
                stores[thread].update(batches[seed], grad_of(layout, batches[seed], seed), lr=0.1, step=1)
            stores[thread].flush()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(train, range(2)))
        assert_same_rows(first, local)


def test_evaluation_between_lookup_and_update_changes_nothing() -> None:
    layout = plain_layout(30)
    batches = [batch_of(layout, 4, seed) for seed in range(3)]
    with running(layout, SGD, whole_tables(layout, 1)) as fleet:
        store = fleet.store(staleness=1)
        local = DeviceStore(layout, SGD, dtype=torch.float64)
        store.prefetch(batches[0])
        store.prefetch(batches[1])
        store.lookup(batches[0])
        store.eval()
        torch.testing.assert_close(store.lookup(batches[2]), local.lookup(batches[2]))
        store.train()
        store.update(batches[0], grad_of(layout, batches[0], 0), lr=0.1, step=1)
        local.update(batches[0], grad_of(layout, batches[0], 0), lr=0.1, step=1)
        assert_same_rows(store, local)
        store.drop_prefetched()
        assert fleet.servers[0].status()["num_kept_batches"] == 1  # the second was looked up and never updated


def test_a_batch_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    layout = plain_layout(30)
    wrong = Sparse(ids=torch.tensor([30]), offsets=torch.tensor([0, 1]), num_features=1)
    with running(layout, SGD, whole_tables(layout, 1)) as fleet:
        store = fleet.store()
        with pytest.raises(DataError, match="outside"):
            store.lookup(wrong)
        assert wire_bytes(store) == 0
        with pytest.raises(RowsteadError, match="staleness"):
            fleet.store(staleness=-1)
        with pytest.raises(DataError, match="rows 0 to 29"):
            store.rows("t0", torch.tensor([30]))


def test_a_batch_without_examples_or_without_ids_is_legal() -> None:
    layout = plain_layout(30, 4, pooling="mean")
    with running(layout, SGD, cut_by_rows(layout, 2)) as fleet:
        store = fleet.store()
        for offsets in ([0], [0] * 7):
            sparse = Sparse(ids=torch.empty(0, dtype=torch.int64), offsets=torch.tensor(offsets), num_features=2)
            pooled = store.lookup(sparse)
            assert pooled.shape == (len(offsets) // 2, 16)
            assert not pooled.any()
            store.update(sparse, pooled, lr=0.1, step=1)
        assert store.figures()["num_updates_sent"] == 0


def test_several_threads_join_a_large_batch_to_the_same_values() -> None:
    layout = plain_layout(50_000, 40, 60_000, 30, width=64, pooling="mean")
    batch, clipped = batch_of(layout, 1000, 1), SparseOptimizerSpec(kind="adagrad", eps=1e-6, clip=0.5)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with running(layout, clipped, cut_by_rows(layout, 2)) as fleet:
            store, local = fleet.store(), DeviceStore(layout, clipped, dtype=torch.float64)
            torch.testing.assert_close(store.lookup(batch), local.lookup(batch))
            for each in (store, local):
                each.update(batch, grad_of(layout, batch, 0), lr=0.1, step=1)
            for name in ("t0.rows", "t1.rows"):
                torch.testing.assert_close(store.state()[name], local.state()[name], rtol=1e-9, atol=1e-12)
    finally:
        torch.set_num_threads(threads)


def test_a_host_store_around_it_trains_the_same_rows_from_its_own_thread() -> None:
    layout = plain_layout(40, 30)
    batches = [batch_of(layout, 4, seed) for seed in range(6)]
    local = DeviceStore(layout, ADAGRAD, dtype=torch.float64)
    with running(layout, ADAGRAD, cut_by_rows(layout, 2)) as fleet:
        remote = fleet.store()
        store = HostStore(remote, "cpu")
        for index, batch in enumerate(batches):
            grad = grad_of(layout, batch, index)
            for each in (store, local):
                each.prefetch(batch)
                each.lookup(batch)
                each.update(batch, grad, lr=0.1, step=index + 1)
        assert_same_rows(remote, local)
        store.close()
