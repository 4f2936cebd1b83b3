"""A sparse server starts with its shard of the tables, refuses invalid requests, counts, and recovers after a kill."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.fleet.partition import partition_tables
from rowstead.fleet.remote_store import RemoteStore
from rowstead.fleet.rpc_client import Client, RefusedError
from rowstead.kernels.layout import layout_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.device import DeviceStore
from tests.fleet.sparse_servers import ADAGRAD, SGD, batch_of, cut_by_rows, grad_of, plain_layout, running, whole_tables
from tests.small_runs import small_spec, wait_until
from tests.stores.store_contract import layouts


@settings(max_examples=8, deadline=None)
@given(layout=layouts(), num_servers=st.integers(1, 3))
def test_servers_start_with_the_rows_of_a_single_process(layout: Any, num_servers: int) -> None:
    optimizer = SparseOptimizerSpec(kind="adam")
    partition = partition_tables(layout.tables, num_servers)
    with running(layout, optimizer, partition) as fleet:
        state = fleet.store().state()
    whole = DeviceStore(layout, optimizer, dtype=torch.float64).state()
    assert state.keys() == whole.keys()
    assert all(torch.equal(state[name], value) for name, value in whole.items())


IDS = torch.tensor([1, 2], dtype=torch.int32)
GRADIENT = torch.ones(2, 8, dtype=torch.float64)
GOOD = {"client": "test", "samples": 2, "length": 1, "batch": 1, "keep": True, "number": 1, "lr": 0.1, "step": 1}


@pytest.mark.parametrize(
    ("kind", "facts", "tensors", "problem"),
    [
        ("lookup", {"samples": -1}, [IDS], "samples must be"),
        ("lookup", {"samples": 2**40}, [IDS], "samples must be"),
        ("lookup", {"samples": True}, [IDS], "samples must be"),
        ("lookup", {"samples": 3}, [IDS], "offsets must end"),
        ("lookup", {"length": None}, [IDS], "length must be"),
        ("lookup", {}, [], "ids must be"),
        ("lookup", {}, [IDS.float()], "ids must be"),
        ("lookup", {}, [IDS + 100], "outside its table"),
        ("lookup", {}, [IDS - 5], "outside its table"),
        ("lookup", {"weighted": True}, [IDS, torch.ones(3)], "weights of 2 ids"),
        ("lookup", {"counts": [1, 2]}, [IDS], "counts must be"),
        ("lookup", {"counts": [-7]}, [IDS], "more distinct rows"),
        ("lookup", {"counts": [101]}, [IDS], "more distinct rows"),
        ("lookup", {"counts": [2]}, [IDS + 99], "out of range"),
        ("lookup", {"counts": [2]}, [IDS - 2], "out of range"),
        ("lookup", {"counts": [5]}, [IDS], "expected 5 distinct rows"),
        ("lookup", {}, [IDS, IDS], "extra tensors"),
        ("lookup", {"client": 7}, [IDS], "`client`"),
        ("lookup", {"batch": "x"}, [IDS], "`batch`"),
        ("update", {}, [IDS], "gradients are"),
        ("update", {}, [IDS, GRADIENT[:1]], "gradients are"),
        ("update", {}, [IDS, GRADIENT.float()], "gradients are"),
        ("update", {"lr": float("inf")}, [IDS, GRADIENT], "finite"),
        ("update", {"lr": "0.1"}, [IDS, GRADIENT], "finite"),
        ("update", {"step": 0}, [IDS, GRADIENT], "`step`"),
        ("update", {"number": None}, [IDS, GRADIENT], "`number`"),
        ("read_rows", {"table": "t0", "part": "rows", "start": 0, "stop": 101}, [], "100 rows"),
        ("read_rows", {"table": "t0", "part": "rows"}, [IDS + 99], "100 rows"),
        ("read_rows", {"table": "t0", "part": "sums", "start": 0, "stop": 1}, [], "does not hold"),
        ("read_rows", {"table": "t9", "part": "rows", "start": 0, "stop": 1}, [], "does not hold"),
        ("write_rows", {"table": "t0", "part": "rows", "start": 99}, [GRADIENT], "100 rows"),
        ("write_rows", {"table": "t0", "part": "rows", "start": 0}, [GRADIENT[:, :3]], "do not fit"),
        ("write_rows", {"table": "t0", "part": "rows", "start": 0}, [], "one two-dimensional tensor"),
        ("flush", {"sent": -1}, [], "`sent`"),
        ("snapshot", {}, [], "no snapshot folder"),
    ],
)
def test_an_invalid_request_is_refused_and_changes_nothing(
    kind: str, facts: dict[str, Any], tensors: list[torch.Tensor], problem: str
) -> None:
    layout = plain_layout(100)
    with running(layout, SGD, whole_tables(layout, 1)) as fleet, fleet.connect(0) as client:
        before = fleet.store().state()["t0.rows"].clone()
        with pytest.raises(RefusedError, match=problem):
            client.call(kind, {**GOOD, **facts}, tensors)
        assert torch.equal(fleet.store().state()["t0.rows"], before)
        answer = client.call("lookup", GOOD, [IDS])
        assert torch.equal(answer.tensors[0], before[IDS.long()])
        client.call("update", GOOD, [IDS, GRADIENT])
        torch.testing.assert_close(fleet.store().state()["t0.rows"][IDS.long()], before[IDS.long()] - 0.1)


def test_an_update_that_arrives_twice_is_applied_once() -> None:
    layout = plain_layout(100)
    with running(layout, SGD, whole_tables(layout, 1)) as fleet, fleet.connect(0) as client:
        before = fleet.store().state()["t0.rows"].clone()
        for _ in range(2):  # with a new request number, as after a restart of the server
            client.call("update", GOOD, [IDS, GRADIENT])
        torch.testing.assert_close(fleet.store().state()["t0.rows"][IDS.long()], before[IDS.long()] - 0.1)
        assert fleet.servers[0].status()["num_updates"] == 1


def test_status_counts_what_the_server_did() -> None:
    layout = plain_layout(100)
    with running(layout, SGD, whole_tables(layout, 1)) as fleet, fleet.connect(0) as client:
        client.call("lookup", GOOD, [IDS])
        client.call("update", {**GOOD, "number": 4}, [IDS, GRADIENT])
        facts = client.call("status").facts
        expected = {"num_lookups": 1, "num_samples": 2, "num_updates": 1, "num_lost_updates": 3, "table_bytes": 100 * 8 * 8}
        assert {name: facts[name] for name in expected} == expected
        assert facts["cpu_s"] > 0


def test_updates_in_no_snapshot_count_as_lost_though_the_trainer_that_sent_them_is_gone_too(tmp_path: Path) -> None:
    layout = plain_layout(100)
    with running(layout, SGD, whole_tables(layout, 1), folder=tmp_path) as fleet, fleet.connect(0) as client:

        def count() -> tuple[int, int]:
            facts = client.call("status").facts
            return facts["num_updates"], facts["num_lost_updates"]

        def train(name: str, *numbers: int) -> None:
            """As a trainer that is never heard of again."""
            for number in numbers:
                client.call("update", {**GOOD, "client": name, "number": number}, [IDS, GRADIENT])

        train("a", *range(1, 8))
        fleet.restart(0)
        assert count() == (0, 7), "there was no snapshot yet"
        train("b", 1, 2, 3, 4, 5)
        client.call("snapshot")
        train("b", 6, 7, 8, 9)
        train("c", 1, 2, 3)
        fleet.restart(0)
        assert count() == (5, 7 + 4 + 3)
        fleet.restart(0)
        assert count() == (5, 7 + 4 + 3), "each is lost once"
        train("c", 3)  # it lives after all, and sends again what was not answered
        assert count() == (6, 7 + 4 + 2)


def test_a_table_is_read_and_written_in_portions_of_a_few_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rowstead.fleet.remote_rows.PIECE_BYTES", 1000)
    layout = plain_layout(100, 30)
    with running(layout, ADAGRAD, cut_by_rows(layout, 2)) as fleet:
        store = fleet.store()
        other = {name: torch.rand_like(value) for name, value in store.state().items()}
        store.load_state(other)
        assert all(torch.equal(value, other[name]) for name, value in store.state().items())
        rows = torch.from_numpy(np.random.default_rng(1).permutation(100)[:60].copy())
        assert torch.equal(store.rows("t0", rows), other["t0.rows"][rows])
        part = store.parts()[1]
        assert part.take is not None
        assert torch.equal(part.take(torch.tensor([3, 7])), other["t0.rows"][part.first_row + torch.tensor([3, 7])])


@contextlib.contextmanager
def processes(folder: Path, num_servers: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    running_now = [start(folder, number, num_servers) for number in range(num_servers)]
    try:
        yield running_now
    finally:
        (folder / "end").touch()
        for process in running_now:
            try:
                assert process.wait(30) == 0, "it exited cleanly"
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def start(folder: Path, number: int, num_servers: int) -> subprocess.Popen[bytes]:
    (folder / f"address-{number}").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.fleet.sparse_process", str(folder), str(number), str(num_servers)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    wait_until(lambda: (folder / f"address-{number}").exists() or process.poll() is not None, what="a sparse server")
    return process


@pytest.mark.slow
def test_a_trainer_continues_when_a_server_process_is_killed_and_restarts_from_its_snapshot(tmp_path: Path) -> None:
    spec = small_spec()
    layout = layout_of(spec.features, spec.tables)
    optimizer = spec.train.sparse_optimizer
    partition = partition_tables(spec.tables, 2)
    batches = [batch_of(layout, 6, seed) for seed in range(40)]
    grads = [grad_of(layout, batch, seed) for seed, batch in enumerate(batches)]
    local = DeviceStore(layout, optimizer, dtype=torch.float64, seed=spec.seed)

    def connect(number: int) -> Client:
        return Client(lambda: (tmp_path / f"address-{number}").read_text(), name=f"trainer-{number}", deadline_s=60.0)

    own = {(piece.table, piece.first_row): piece for piece in partition.servers[0]}

    def of_first(state: dict[str, torch.Tensor]) -> dict[tuple[str, int], torch.Tensor]:
        found = {}
        for name, value in state.items():
            for (table, first), piece in own.items():
                if name.rpartition(".")[0] == table:
                    found[name, first] = value[first : first + piece.num_rows].clone()
        return found

    saved: dict[tuple[str, int], torch.Tensor] = {}
    with processes(tmp_path, 2) as servers:
        store = RemoteStore(layout, optimizer, partition, connect, dtype=torch.float64)
        for index, batch in enumerate(batches):
            pooled = store.lookup(batch)
            torch.testing.assert_close(pooled, local.lookup(batch), rtol=1e-9, atol=1e-12)
            if index == 25:
                servers[0].send_signal(signal.SIGKILL)
                servers[0].wait(30)
                servers[0] = start(tmp_path, 0, 2)
                state = local.state()
                for (name, first), value in saved.items():
                    state[name][first : first + len(value)] = value
            store.update(batch, grads[index], lr=0.1, step=index + 1)
            local.update(batch, grads[index], lr=0.1, step=index + 1)
            if index == 10:
                store.flush()
                with connect(0) as client:
                    client.call("snapshot")
                saved = of_first(local.state())
        store.flush()
        assert store.num_lost_updates == 14, "updates 12 to 25 of the first server"
        for name, value in local.state().items():
            torch.testing.assert_close(store.state()[name], value, rtol=1e-9, atol=1e-12)
        with connect(0) as client:
            assert client.call("status").facts["num_lost_updates"] == 14
        store.close()
