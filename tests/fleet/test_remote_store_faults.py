"""Servers that restart, evict batches and lose replies: rows stay exact, or lost updates are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rowstead.fleet.remote_store import RemoteStore
from rowstead.fleet.rpc_client import Client
from rowstead.stores.device import DeviceStore
from tests.fleet.relay import Relay
from tests.fleet.sparse_servers import ADAGRAD, SGD, assert_same_rows, batch_of, grad_of, plain_layout, running, whole_tables
from tests.small_runs import wait_until


def test_a_restarted_server_resumes_from_its_snapshot_and_counts_lost_updates(tmp_path: Path) -> None:
    layout = plain_layout(40, 30)
    batches = [batch_of(layout, 4, seed) for seed in range(9)]
    grads = [grad_of(layout, batch, seed) for seed, batch in enumerate(batches)]
    partition = whole_tables(layout, 2)
    with running(layout, ADAGRAD, partition, folder=tmp_path) as fleet:
        store = fleet.store(staleness=1)
        local = DeviceStore(layout, ADAGRAD, dtype=torch.float64)
        saved: dict[str, torch.Tensor] = {}
        for index, batch in enumerate(batches):
            store.lookup(batch)
            if index == 6:  # between lookup and update: the new server does not have the batch
                store._wait_for_updates()
                fleet.restart(0)
                local.load_state({**local.state(), **saved})
            store.update(batch, grads[index], lr=0.1, step=index + 1)
            local.update(batch, grads[index], lr=0.1, step=index + 1)
            if index == 3:
                store._wait_for_updates()
                fleet.connect(0).call("snapshot")
                saved = {name: value.clone() for name, value in local.state().items() if name.startswith("t0.")}
        store.flush()
        assert store.num_lost_updates == 2, "updates 5 and 6 of the first server"
        assert [server.applied.num_lost for server in fleet.servers] == [2, 0]
        assert [server.applied.num_updates for server in fleet.servers] == [7, 9]
        assert_same_rows(store, local)


def test_updates_lost_at_the_very_end_are_counted_too(tmp_path: Path) -> None:
    layout = plain_layout(40)
    with running(layout, SGD, whole_tables(layout, 1), folder=tmp_path) as fleet:
        store = fleet.store()
        for seed in range(3):
            batch = batch_of(layout, 4, seed)
            store.update(batch, grad_of(layout, batch, seed), lr=0.1, step=1)
        store.flush()
        assert store.num_lost_updates == 0
        fleet.restart(0)
        store.flush()
        assert store.num_lost_updates == 3


def test_the_memory_of_a_server_does_not_grow_with_lookups_that_are_never_updated() -> None:
    layout = plain_layout(1000, width=4)
    with running(layout, SGD, whole_tables(layout, 1), kept_batches_bytes=20_000) as fleet:
        store = fleet.store()
        batches = [batch_of(layout, 100, seed, length=5) for seed in range(30)]
        local = DeviceStore(layout, SGD, dtype=torch.float64)
        for batch in batches:
            store.lookup(batch)
        facts = fleet.servers[0].status()
        assert facts["kept_batches_bytes"] <= 20_000
        assert facts["num_kept_batches"] < 30
        store._current = None
        first = store._claim_batch(batches[0])  # as if its update came late: the server has evicted the batch
        first.number, store._current = 1, first
        store.update(batches[0], grad_of(layout, batches[0], 0), lr=0.1, step=1)
        local.update(batches[0], grad_of(layout, batches[0], 0), lr=0.1, step=1)
        assert_same_rows(store, local)


@pytest.mark.parametrize("staleness", [0, 2])
def test_broken_connections_and_lost_replies_leave_the_rows_exact(staleness: int) -> None:
    layout = plain_layout(40, 30)
    batches = [batch_of(layout, 4, seed) for seed in range(12)]
    local = DeviceStore(layout, ADAGRAD, dtype=torch.float64)
    with running(layout, ADAGRAD, whole_tables(layout, 1)) as fleet, Relay(fleet.servers[0].address) as relay:
        client = Client(relay.address, name="trainer", deadline_s=120.0)
        store = RemoteStore(layout, ADAGRAD, fleet.partition, lambda _: client, dtype=torch.float64, staleness=staleness)
        fleet.stores.append(store)
        for index, batch in enumerate(batches):
            grad = grad_of(layout, batch, index)
            store.lookup(batch)
            local.lookup(batch)
            if index % 3 == 1:  # the server applies the update, but its reply is lost
                store._wait_for_updates()
                before = fleet.servers[0].applied.num_updates
                relay.loses_replies = True
            store.update(batch, grad, lr=0.1, step=index + 1)
            local.update(batch, grad, lr=0.1, step=index + 1)
            if index % 3 == 1:
                wait_until(lambda before=before: fleet.servers[0].applied.num_updates > before, what="the update")
                relay.cut()
                relay.loses_replies = False
        store.flush()
        assert_same_rows(store, local)
        assert store.figures()["num_resent"] >= 4
        assert (store.num_lost_updates, fleet.servers[0].applied.num_updates) == (0, 12)


def test_an_update_whose_reply_was_lost_is_not_applied_again_by_a_restarted_server(tmp_path: Path) -> None:
    layout = plain_layout(40)
    local, batch = DeviceStore(layout, ADAGRAD, dtype=torch.float64), batch_of(layout, 4, 1)
    partition = whole_tables(layout, 1)
    with running(layout, ADAGRAD, partition, folder=tmp_path) as fleet, Relay(fleet.servers[0].address) as relay:
        addresses = [relay.address]
        client = Client(lambda: addresses[-1], name="trainer", deadline_s=120.0)
        store = RemoteStore(layout, ADAGRAD, partition, lambda _: client, dtype=torch.float64)
        fleet.stores.append(store)
        store.lookup(batch)
        relay.loses_replies = True
        for each in (store, local):
            each.update(batch, grad_of(layout, batch, 1), lr=0.1, step=1)
        wait_until(lambda: fleet.servers[0].applied.num_updates == 1, what="the update")
        with fleet.connect(0) as other:
            other.call("snapshot")
        fleet.restart(0)  # it has the rows and their updates, but no request numbers
        addresses.append(fleet.servers[0].address)
        relay.cut()
        store.flush()
        assert store.figures()["num_resent"] > 0, "the update was resent"
        assert (fleet.servers[0].applied.num_updates, fleet.servers[0].applied.num_lost, store.num_lost_updates) == (1, 0, 0)
        assert_same_rows(store, local)
