"""Rows of histories on sparse servers: each is sent once, trains as in one process, and survives what pooled features survive."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rowstead.fleet.coordinator import train_fleet
from rowstead.fleet.rpc_client import RefusedError
from rowstead.kernels.layout import layout_of
from rowstead.plan import remote
from rowstead.plan.predict import predict
from rowstead.plan.setup import Setup
from rowstead.plan.work import step_work
from rowstead.records.events import read_events
from rowstead.run import train
from rowstead.serve.export import export
from rowstead.serve.exported import load_exported
from rowstead.spec.catalogue import load_machine, load_software
from rowstead.spec.errors import DataError
from rowstead.spec.fleet import parse_fleet
from rowstead.stores.host import HostStore
from rowstead.training import trained
from tests.fleet.one_process import check_one_trainer
from tests.fleet.small_histories import batches_of, din_spec, gradient_of, local_store
from tests.fleet.sparse_servers import ADAGRAD, cut_by_rows, running, whole_tables

ROLES = "trainers=2,sparse=2,dense=1,readers=1"
SPEC = din_spec("train.batch_size=64")
LAYOUT = layout_of(SPEC.features, SPEC.tables)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_server_that_is_restarted_between_lookup_and_update_gets_the_batch_again(staleness: int, tmp_path: Path) -> None:
    local = local_store(LAYOUT, ADAGRAD, dtype=torch.float64)
    with running(LAYOUT, ADAGRAD, cut_by_rows(LAYOUT, 2), folder=tmp_path) as fleet:
        store = fleet.store(staleness=staleness)
        for index, sparse in enumerate(batches_of(SPEC, 4)):
            grad = gradient_of(store.lookup(sparse), index)
            if index == 2:
                store.wait()
                fleet.connect(1).call("snapshot")
                fleet.restart(1)
            for each in (store, local):
                each.update(sparse, grad, lr=0.1, step=index + 1)
        store.flush()
        assert store.num_lost_updates == 0
        for name, value in local.state().items():
            torch.testing.assert_close(store.state()[name], value, rtol=1e-12, atol=1e-14)


def test_a_batch_is_one_request_to_each_server_with_each_row_of_a_history_once() -> None:
    (sparse,) = batches_of(SPEC, 1)
    num_distinct = len(torch.cat([sparse.ids[:64], sparse.ids[sparse.offsets[2 * 64] :]]).unique())
    with running(LAYOUT, ADAGRAD, whole_tables(LAYOUT, 2), dtype=torch.float32) as fleet:
        store = fleet.store()
        rows = store.lookup(sparse)
        assert [server.num_requests for server in fleet.servers] == [1, 1]
        vectors = 64 * 16 * 4
        received = store.figures()["num_bytes_received"]
        assert num_distinct * 16 * 4 + vectors <= received <= num_distinct * 16 * 4 + vectors + 1000
        assert rows.numel() - 64 * 16 > 1.3 * num_distinct * 16, "several ids name the same row"
        machine = load_machine("cpu-2s")
        setup = Setup(placement="remote", batch_size=64, num_sparse_servers=2, server=machine, has_input=False)
        found = predict(step_work(SPEC), machine, load_software("rowstead"), setup)
        assert remote.vectors_bytes(found.trainer) == pytest.approx(received, rel=0.25)


def test_a_host_store_around_it_trains_the_same_rows() -> None:
    local = local_store(LAYOUT, ADAGRAD, dtype=torch.float64)
    with running(LAYOUT, ADAGRAD, cut_by_rows(LAYOUT, 2)) as fleet:
        inner = fleet.store()
        store = HostStore(inner, "cpu")
        for index, sparse in enumerate(batches_of(SPEC, 3)):
            store.prefetch(sparse)
            rows = store.lookup(sparse)
            torch.testing.assert_close(rows, local.lookup(sparse))
            for each in (store, local):
                each.update(sparse, gradient_of(rows, index), lr=0.1, step=index + 1)
        torch.testing.assert_close(inner.state(), local.state())
        store.close()


def test_a_gradient_that_does_not_fit_the_histories_is_refused_before_anything_is_sent() -> None:
    (sparse,) = batches_of(SPEC, 1)
    with running(LAYOUT, ADAGRAD, whole_tables(LAYOUT, 1)) as fleet:
        store = fleet.store()
        rows = store.lookup(sparse)
        with pytest.raises(DataError, match=r"the gradient is \[3\], and the look-up of this batch returned"):
            store.update(sparse, rows[:3], lr=0.1, step=1)
        assert store.figures()["num_updates_sent"] == 0


IDS = torch.tensor([1, 2, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"counts": [3, 0], "samples": 2**40}, "samples must be"),
        ({"counts": [1001, 0]}, "more distinct rows"),
        ({"counts": [4, 0]}, "expected 4 distinct rows"),
        ({"counts": [1, 0]}, "2 ids without bags"),
        ({"counts": [-1, 0], "length": 2**24, "samples": 2**23}, "the reply would have"),
    ],
)
def test_an_invalid_request_for_rows_of_histories_is_refused(facts: dict[str, Any], problem: str) -> None:
    with running(LAYOUT, ADAGRAD, whole_tables(LAYOUT, 1)) as fleet, fleet.connect(0) as client:
        with pytest.raises(RefusedError, match=problem):
            client.call("lookup", {"client": "test", "samples": 2, **facts}, [IDS])
        answer = client.call("lookup", {"client": "test", "samples": 2, "counts": [3, 0]}, [IDS])
        assert answer.tensors[0].numel() == 3 * 16


@pytest.mark.slow
def test_one_trainer_of_histories_ends_at_the_weights_of_one_process(tmp_path: Path) -> None:
    check_one_trainer(din_spec("train.max_steps=40", "train.batch_size=64", "train.eval_every=null"), 1, tmp_path)


@pytest.mark.slow
def test_a_fleet_of_histories_evaluates_predicts_and_exports(tmp_path: Path) -> None:
    spec, out = din_spec("train.eval_every=20"), tmp_path / "fleet"
    record = train_fleet(dataclasses.replace(spec, fleet=parse_fleet(ROLES)), out=out).record
    assert record is not None
    single = train(spec, out=tmp_path / "single").quality
    assert single is not None
    assert record.figures["ne"] == pytest.approx(single.ne, rel=0.04)
    assert any(event["kind"] == "evaluation" for event in read_events(out / "events.jsonl"))
    assert trained.evaluate(str(out)).ne == pytest.approx(record.figures["ne"], rel=1e-5)
    rows = {"item": [7, 999, 3], "history": [[3, 7, 8], [], list(range(20, 60))]}
    predictions = trained.load(out).predict(rows)
    export(out, tmp_path / "exported")
    np.testing.assert_allclose(load_exported(tmp_path / "exported").predict(rows), predictions, rtol=0, atol=1e-6)
