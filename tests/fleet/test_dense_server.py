"""The dense server behaves the same over RPC and in memory, does not wait for lost trainers, and trainers continue without it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from rowstead.fleet.dense_client import DenseServerClient
from rowstead.fleet.dense_server import DenseServerProcess, encode_snapshot, restore_snapshot
from rowstead.fleet.dense_server_state import DenseServerState, LocalDenseServer
from rowstead.fleet.rpc_client import Client, RefusedError
from rowstead.spec.errors import RowsteadError
from rowstead.training.sync_base import DenseServerUnavailable
from tests.small_runs import wait_until


def flat(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@contextlib.contextmanager
def served(**options: object) -> Iterator[DenseServerProcess]:
    server = DenseServerProcess(**options).start()  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def connect(
    server: DenseServerProcess, name: str = "trainer-0.0", *, exchange_timeout_s: float = 20.0
) -> Iterator[DenseServerClient]:
    client = DenseServerClient([Client(lambda: server.address, name=name)], exchange_timeout_s=exchange_timeout_s)
    try:
        yield client
    finally:
        client.close()


def in_thread(call: object) -> tuple[threading.Thread, list[object]]:
    """Run `call` in a thread; returns the thread and a list that receives the result."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))  # type: ignore[operator]
    thread.start()
    return thread, results


def test_the_server_over_rpc_behaves_like_the_one_in_memory() -> None:
    with served() as server, connect(server) as remote:
        local = LocalDenseServer(DenseServerState(), "trainer-0.0")
        for client in (remote, local):
            assert torch.equal(client.join(flat(1, 2)), flat(1, 2))
            assert torch.equal(client.join(flat(5, 5)), flat(1, 2)), "the first trainer's parameters are used"
            assert torch.equal(client.elastic_average(flat(3, 2), 0.5), flat(1, 0))
            assert torch.equal(client.pull(), flat(2, 2))
            mean, number = client.average(flat(7, 8), "gradients.0")
            assert (mean.tolist(), number) == ([7, 8], 1)
            assert torch.equal(client.average_parameters(flat(4, 4), momentum=0.5, lr=0.5), flat(3, 3))
            assert torch.equal(client.average_parameters(flat(4, 4), momentum=0.5, lr=0.5), flat(4, 4))
            client.push(flat(9, 9))
            assert torch.equal(client.pull(), flat(9, 9))
            assert client.load_state("optimizer") is None
            client.save_state("optimizer", flat(1, 2, 3))
            saved = client.load_state("optimizer")
            assert saved is not None
            assert torch.equal(saved, flat(1, 2, 3))
            client.leave()


def test_arguments_may_change_after_a_call_and_results_belong_to_the_caller() -> None:
    with served() as server, connect(server) as client:
        own = flat(1, 1)
        taken = client.join(own)
        own.fill_(7)
        taken.fill_(8)
        assert torch.equal(client.pull(), flat(1, 1))


def test_a_round_waits_for_all_live_trainers() -> None:
    with served() as server, connect(server, "trainer-0.0") as one, connect(server, "trainer-1.0") as two:
        one.join(flat(0))
        two.join(flat(0))
        thread, results = in_thread(lambda: one.average(flat(2), "gradients.0"))
        wait_until(lambda: server.state.num_waiting == 1, what="the first of the round")
        assert not results
        mean, number = two.average(flat(4), "gradients.0")
        thread.join(30)
        assert mean.item() == 3
        assert results == [(flat(3), number)]


def test_a_lost_trainer_blocks_a_round_only_until_the_coordinator_reports_it() -> None:
    with served(round_deadline_s=600.0) as server, connect(server, "trainer-0.0") as one:
        one.join(flat(0))
        with connect(server, "trainer-1.0") as lost:
            lost.join(flat(0))
        thread, results = in_thread(lambda: one.average(flat(2), "gradients.0"))
        wait_until(lambda: server.state.num_waiting == 1, what="the survivor")
        with Client(server.address, name="coordinator") as coordinator:
            coordinator.call("members", {"names": ["trainer-0"]})
        thread.join(30)
        assert results == [(flat(2), 1)]


def test_rounds_wait_at_most_until_the_deadline_and_only_once_for_a_lost_member() -> None:
    with served(round_deadline_s=0.2) as server, connect(server, "trainer-0.0") as one:
        one.join(flat(0))
        with connect(server, "trainer-1.0") as lost:
            lost.join(flat(0))
        for _ in range(5):
            mean, _ = one.average(flat(2), "gradients.0")
            assert mean.item() == 2
        assert server.state.num_partial_rounds == 1
        assert server.state.num_rounds == 5
        with connect(server, "trainer-1.0") as back:  # rounds wait for it again
            thread, _ = in_thread(lambda: back.average(flat(4), "gradients.0"))
            wait_until(lambda: server.state.num_waiting == 1 or not thread.is_alive(), what="the trainer that is back")
            one.average(flat(2), "gradients.0")
            thread.join(30)


def test_a_trainer_continues_while_the_server_is_unavailable_and_reconnects(tmp_path: Path) -> None:
    snapshot = tmp_path / "dense.safetensors"
    current: list[DenseServerProcess] = [DenseServerProcess(snapshot=snapshot).start()]
    client = DenseServerClient([Client(lambda: current[0].address, name="trainer-0.0")], exchange_timeout_s=0.5)
    try:
        client.join(flat(1, 2))
        client.save_state("optimizer", flat(5))
        current[0].close()
        for _ in range(100):  # only the first one waits
            with pytest.raises(DenseServerUnavailable):
                client.elastic_average(flat(3, 4), 0.5)
        current[0] = DenseServerProcess(snapshot=snapshot).start()

        def is_back() -> bool:
            try:
                client.elastic_average(flat(3, 4), 0.5)
            except DenseServerUnavailable:
                return False
            return True

        wait_until(is_back, what="the server to be found again")
        assert torch.equal(client.pull(), flat(3, 4)), "a trainer's parameters are newer than the snapshot"
        saved = client.load_state("optimizer")
        assert saved is not None
        assert saved.tolist() == [5]
    finally:
        client.close()
        current[0].close()


def test_a_new_trainer_gets_the_parameters_from_before_a_server_restart(tmp_path: Path) -> None:
    snapshot = tmp_path / "dense.safetensors"
    with served(snapshot=snapshot, snapshot_every_s=1e9) as server, connect(server) as client:
        client.join(flat(1, 2))
        assert snapshot.exists(), "the first parameters are on disk before any trainer has them"
        restarted = DenseServerState()
        restore_snapshot(restarted, snapshot.read_bytes())
        assert torch.equal(restarted.join("trainer-1.0", flat(0, 0)), flat(1, 2))


def test_a_snapshot_holds_the_whole_state() -> None:
    state, other = DenseServerState(), DenseServerState()
    assert encode_snapshot(state) is None
    state.push(flat(1, 2, 3))
    state.saved["optimizer"] = flat(4)
    content = encode_snapshot(state)
    assert content is not None
    restore_snapshot(other, content)
    assert torch.equal(other.pull(), state.pull())
    assert torch.equal(other.saved["optimizer"], flat(4))


@pytest.mark.parametrize(
    ("kind", "facts", "tensors"),
    [
        ("join", {}, [torch.zeros(2, 2)]),
        ("push", {}, []),
        ("elastic_average", {"alpha": "much"}, [torch.zeros(2)]),
        ("elastic_average", {"alpha": 0.5}, [torch.zeros(3, dtype=torch.float64)]),
        ("elastic_average", {"alpha": 0.5}, [flat(float("nan"), 0)]),
        ("average", {}, [torch.zeros(2)]),
        ("members", {"names": "trainer-0"}, []),
        ("save_state", {"name": 7}, [torch.zeros(1)]),
    ],
)
def test_an_invalid_request_is_refused_and_changes_nothing(kind: str, facts: dict[str, object], tensors: list[Tensor]) -> None:
    with served() as server, connect(server) as client, Client(server.address, name="other") as other:
        client.join(flat(1, 2))
        with pytest.raises(RefusedError):
            other.call(kind, facts, tensors)
        assert torch.equal(client.pull(), flat(1, 2))


def test_it_serves_until_told_to_stop_and_then_writes_its_state(tmp_path: Path) -> None:
    ends, snapshot = threading.Event(), tmp_path / "snapshots" / "dense-0.safetensors"
    with DenseServerProcess(snapshot=snapshot, snapshot_every_s=1e9) as server:
        thread = threading.Thread(target=server.serve, args=(ends.is_set,))
        thread.start()
        with Client(server.address, name="trainer-0.0") as client:
            client.call("join", {}, [flat(1, 2)])
            client.call("push", {}, [flat(3, 4)])
            assert client.call("status").facts["num_parameters"] == 2
        ends.set()
        thread.join(30)
        assert not thread.is_alive()
    state = DenseServerState()
    restore_snapshot(state, snapshot.read_bytes())
    assert torch.equal(state.pull(), flat(3, 4))


def test_exchanges_that_are_in_no_snapshot_are_counted(tmp_path: Path) -> None:
    snapshot = tmp_path / "dense.safetensors"
    with served(snapshot=snapshot, snapshot_every_s=1e9) as server, connect(server, "trainer-0.0") as client:
        client.join(flat(0, 0))
        for _ in range(3):
            client.elastic_average(flat(1, 1), 0.5)
        assert server.status()["num_unsaved_exchanges"] == 3
        server.write()
        client.elastic_average(flat(1, 1), 0.5)
        assert server.status()["num_unsaved_exchanges"] == 1


def test_final_parameters_of_trainers_survive_a_server_restart(tmp_path: Path) -> None:
    snapshot = tmp_path / "dense.safetensors"
    with served(snapshot=snapshot, snapshot_every_s=1e9) as server, connect(server, "trainer-0.0") as one:
        one.join(flat(0, 0))
        one.finish(flat(2, 4))
        killed = snapshot.read_bytes()  # what a server killed now leaves
    snapshot.write_bytes(killed)
    with served(snapshot=snapshot) as server, connect(server, "trainer-1.0") as two:
        assert torch.equal(two.pull(), flat(2, 4)), "no trainer sends them again"
        two.finish(flat(4, 0))
        assert torch.equal(two.pull(), flat(3, 2)), "the mean of both"


def test_a_trainer_that_starts_without_the_server_waits_once_and_then_continues() -> None:
    nowhere = Client("ipc:///folder/gone", name="trainer-0.0", max_in_flight=4)
    client = DenseServerClient([nowhere], exchange_timeout_s=0.2, join_timeout_s=0.4)
    try:
        for _ in range(50):  # more often than max_in_flight
            with pytest.raises(DenseServerUnavailable):
                client.join(flat(1, 2))
        assert nowhere.waited_s < 2
        with pytest.raises(DenseServerUnavailable):
            client.finish(flat(1, 2))
        assert nowhere.num_in_flight == 1, "one probe is enough"
    finally:
        client.close()


def test_non_finite_parameters_are_refused_and_do_not_block_other_members() -> None:
    with (
        served(round_deadline_s=600.0) as server,
        connect(server, "trainer-0.0") as one,
        connect(server, "trainer-1.0") as bad,
    ):
        for client in (one, bad):
            client.join(flat(0, 0))
        thread, results = in_thread(lambda: one.average_parameters(flat(2, 4)))
        wait_until(lambda: server.state.num_waiting == 1, what="the first of the round")
        with pytest.raises(RefusedError, match="no longer finite"):
            bad.average_parameters(flat(float("nan"), 0))
        bad.leave()
        thread.join(30)
        assert torch.equal(results[0], flat(2, 4))  # type: ignore[arg-type]


def test_overdue_rounds_close_when_the_snapshot_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with served(snapshot=tmp_path / "file" / "dense", snapshot_every_s=0.05, round_deadline_s=0.2) as server:
        with connect(server, "trainer-1.0") as lost:
            lost.join(flat(0))
        wait_until(lambda: server.status()["num_snapshots_failed"] > 1, what="snapshots that fail")
        with connect(server, "trainer-0.0") as one:
            assert one.average(flat(2), "gradients.0")[0].item() == 2


def test_snapshots_written_by_several_threads_are_complete(tmp_path: Path) -> None:
    snapshot = tmp_path / "dense.safetensors"
    with served(snapshot=snapshot, snapshot_every_s=1e9) as server, connect(server) as client:
        client.join(flat(*range(1000)))
        threads = [threading.Thread(target=lambda: [server.write() for _ in range(20)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert server.status()["num_snapshots_failed"] == 0
        assert server.num_snapshots >= 81


def test_a_snapshot_with_unknown_tensors_is_refused() -> None:
    content = safetensors.torch.save({"parameters": flat(1), "kept.optimizer": flat(2)})
    with pytest.raises(RowsteadError, match=r"unknown tensors .*kept\.optimizer"):
        restore_snapshot(DenseServerState(), content)
