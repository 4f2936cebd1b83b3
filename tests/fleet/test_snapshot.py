"""A snapshot is consistent, holds the touched rows, does not block the server, and is restored completely or not at all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.fleet import table_shard
from rowstead.fleet.applied_updates import AppliedUpdates, ClientUpdates, UpdateJournal
from rowstead.fleet.lookup_request import LookupRequest
from rowstead.fleet.router import ServerRouter
from rowstead.fleet.snapshot import MANIFEST, GrowingInterval, Snapshots
from rowstead.fleet.table_shard import TableShard
from rowstead.fleet.wire import Message
from rowstead.kernels.layout import Layout
from rowstead.records.usage import peak_memory_bytes
from rowstead.spec.errors import CheckpointError
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from tests.fleet.sparse_servers import batch_of, grad_of, plain_layout, whole_tables
from tests.small_runs import wait_until

ADAM = SparseOptimizerSpec(kind="adam")


class Trained:
    """Rows trained on numbered batches, as a server trains them."""

    def __init__(self, layout: Layout, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        self.layout = layout
        self.shard = TableShard(layout, ADAM, dtype=dtype)
        self.num_updates = 0
        self.snapshots = Snapshots(self.shard, folder, get_counts=lambda: {"updates": self.num_updates})
        self._router = ServerRouter(layout, whole_tables(layout, 1), dtype)

    def asked(self, seed: int) -> tuple[LookupRequest, list[torch.Tensor]]:
        batch = batch_of(self.layout, 6, seed)
        split = self._router.split(batch)
        (gradients,) = split.gradients(grad_of(self.layout, batch, seed), None)
        return self.shard.parser.parse(Message("lookup", *split.requests[0].message()))[0], gradients

    def update(self) -> None:
        asked, gradients = self.asked(self.num_updates)
        with self.shard.changing:
            if asked.ids.size:
                self.shard.update(asked, gradients, lr=0.1, step=self.num_updates + 1)
            self.num_updates += 1

    def rows(self) -> list[torch.Tensor]:
        tables = range(len(self.layout.tables))
        return [tensor.clone() for table in tables for tensor in self.shard.parts(table).values()]


def after(layout: Layout, num_updates: int, folder: Path) -> list[torch.Tensor]:
    trained = Trained(layout, folder)
    for _ in range(num_updates):
        trained.update()
    return trained.rows()


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@settings(max_examples=12, deadline=None)
@given(plan=st.lists(st.sampled_from(["update", "update", "snapshot"]), max_size=12))
def test_a_restart_has_the_rows_and_counts_of_the_last_snapshot(
    plan: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    layout, folder = plain_layout(60, 9), tmp_path_factory.mktemp("snapshots")
    trained, saved = Trained(layout, folder), None
    for action in plan:
        if action == "update":
            trained.update()
        else:
            trained.snapshots.take()
            saved = trained.num_updates
    again = Trained(layout, folder)
    counts = again.snapshots.restore()
    assert counts == (None if saved is None else {"updates": saved})
    assert_equal(again.rows(), after(layout, saved or 0, folder / "none"))
    again.num_updates = saved or 0  # and the next snapshot holds all rows touched before
    again.update()
    again.snapshots.take()
    third = Trained(layout, folder)
    assert third.snapshots.restore() == {"updates": again.num_updates}
    assert_equal(third.rows(), again.rows())


def test_a_snapshot_holds_the_rows_as_they_were_when_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_shard, "PORTION_BYTES", 2048)
    monkeypatch.setattr(table_shard, "SCANNED_ROWS", 16)
    layout = plain_layout(300, 200)
    trained = Trained(layout, tmp_path)
    for _ in range(5):
        trained.update()
    between: list[int] = []
    whole = trained.shard.copy_rows

    def copy_rows() -> Any:
        for copied in whole():  # an update between any two portions
            trained.update()
            between.append(trained.num_updates)
            yield copied

    monkeypatch.setattr(trained.shard, "copy_rows", copy_rows)
    trained.snapshots.take()
    assert len(between) > 20, "it was copied in many portions"
    again = Trained(layout, tmp_path)
    assert again.snapshots.restore() == {"updates": 5}
    assert_equal(again.rows(), after(layout, 5, tmp_path / "none"))
    assert trained.num_updates == 5 + len(between)


def test_a_snapshot_under_concurrent_training_holds_whole_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_shard, "PORTION_BYTES", 4096)
    layout = plain_layout(20_000, width=16)
    trained = Trained(layout, tmp_path)
    stops = threading.Event()

    def train() -> None:
        while not stops.is_set():
            trained.update()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(3):
            before = trained.num_updates
            wait_until(lambda before=before: trained.num_updates > before + 3, what="updates")
            trained.snapshots.take()
    finally:
        stops.set()
        thread.join()
    again = Trained(layout, tmp_path)
    counts = again.snapshots.restore()
    assert counts is not None
    assert_equal(again.rows(), after(layout, counts["updates"], tmp_path / "none"))


def test_only_touched_rows_are_written_until_they_are_half_of_all(tmp_path: Path) -> None:
    layout = plain_layout(10_000, width=16)
    trained = Trained(layout, tmp_path)
    assert trained.snapshots.take().num_rows == 0
    trained.update()
    named = len(np.unique(trained.asked(0)[0].ids))
    written = trained.snapshots.take()
    assert (written.is_full, written.num_rows) == (False, named)
    row_bytes = 3 * 16 * 8
    assert written.num_bytes < named * (row_bytes + 8) + 500
    trained.shard.touched[:6000] = 1
    full = trained.snapshots.take()
    assert (full.is_full, full.num_rows) == (True, 10_000)
    trained.update()
    later = trained.snapshots.take()
    assert (later.is_full, later.num_rows < 100) == (False, True)
    assert {path.name for path in tmp_path.glob("*.rows")} == {"full-000003.rows", "touched-000004.rows"}
    again = Trained(layout, tmp_path)
    again.snapshots.restore()
    assert_equal(again.rows(), trained.rows())


def test_a_failed_snapshot_leaves_the_last_one_and_keeps_all_touched_rows(tmp_path: Path) -> None:
    layout = plain_layout(100)
    trained = Trained(layout, tmp_path)
    trained.shard.touched[:] = 1
    trained.snapshots.take()
    for _ in range(3):
        trained.update()
    shard = trained.rows()
    trained.shard.touched[:] = 1  # so that a full snapshot is due
    (tmp_path / "full-000002.rows").mkdir()
    with pytest.raises(OSError):
        trained.snapshots.take()
    trained.snapshots.take()
    again = Trained(layout, tmp_path)
    assert again.snapshots.restore() == {"updates": 3}
    assert_equal(again.rows(), shard)


@pytest.mark.parametrize("harm", ["flip", "cut", "magic", "manifest", "missing"])
def test_a_damaged_snapshot_is_refused(tmp_path: Path, harm: str) -> None:
    layout = plain_layout(100)
    trained = Trained(layout, tmp_path)
    trained.update()
    trained.snapshots.take()
    (path,) = tmp_path.glob("*.rows")
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
    elif harm == "cut":
        del content[-40:]
    elif harm == "magic":
        content[0] ^= 1
    path.write_bytes(content)
    if harm == "manifest":
        (tmp_path / MANIFEST).write_text("{")
    if harm == "missing":
        path.unlink()
    with pytest.raises(CheckpointError, match=r"damaged|missing|cannot be read|not a row file"):
        Trained(layout, tmp_path).snapshots.restore()


def test_a_snapshot_of_other_shards_is_refused(tmp_path: Path) -> None:
    Trained(plain_layout(100), tmp_path).snapshots.take()
    with pytest.raises(CheckpointError, match="other tables"):
        Trained(plain_layout(101), tmp_path).snapshots.restore()
    with pytest.raises(CheckpointError, match="other tables"):
        Trained(plain_layout(100), tmp_path, torch.float32).snapshots.restore()


def test_snapshots_are_taken_on_request_and_after_intervals_with_changes(tmp_path: Path) -> None:
    trained = Trained(plain_layout(100), tmp_path)
    snapshots = Snapshots(trained.shard, tmp_path, every_s=0.01).start()
    for number in (1, 2, 3):
        assert snapshots.num_taken == number - 1
        trained.update()
        wait_until(lambda number=number: snapshots.num_taken == number, what="a snapshot")  # type: ignore[misc]
    snapshots.close()
    asked: list[Any] = []
    snapshots = Snapshots(trained.shard, tmp_path).start()
    snapshots.request(asked.append)
    wait_until(lambda: bool(asked), what="the snapshot")
    assert snapshots.status()["num_snapshots"] == 1
    snapshots.close()


def test_the_first_snapshot_comes_early_and_no_interval_is_longer_than_all_before_it() -> None:
    interval, seconds = GrowingInterval(30.0), []
    for _ in range(7):
        seconds.append(interval.seconds)
        interval.grow()
    assert seconds == [2.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert GrowingInterval(0.5).seconds == 0.5


def test_a_journal_knows_the_highest_update_of_each_client_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "new" / "applied.journal"
    journal = UpdateJournal(path)
    clients = [f"{number}-{'ü' * (number % 60)}" for number in range(300)]  # more than are allocated at once
    for client in clients:
        journal.write(client, 1)
    journal.write(clients[7], 2**61)
    journal.write(clients[299], 5)
    again = UpdateJournal(path)  # the first is not closed, as after a kill
    assert again.highest == {**dict.fromkeys(clients, 1), clients[7]: 2**61, clients[299]: 5}
    again.write(clients[0], 9)
    again.write("another", 3)
    assert UpdateJournal(path).highest == {**again.highest, clients[0]: 9, "another": 3}
    journal.close()
    again.close()


@pytest.mark.slow
def test_a_snapshot_of_a_large_table_takes_little_extra_memory(tmp_path: Path) -> None:
    layout = plain_layout(1_000_000, width=64)
    trained = Trained(layout, tmp_path, torch.float32)  # 768 MB with Adam's moments
    trained.shard.touched[:] = 1
    before = peak_memory_bytes()
    assert before is not None
    stops = threading.Event()
    seeds = iter(range(10**9))

    def train() -> None:
        while not stops.is_set():
            asked, gradients = trained.asked(next(seeds))
            with trained.shard.changing:
                trained.shard.update(asked, [each.float() for each in gradients], lr=0.1, step=1)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert trained.snapshots.take().num_rows == 1_000_000
    finally:
        stops.set()
        thread.join()
    after_bytes = peak_memory_bytes()
    assert after_bytes is not None
    assert after_bytes - before < 150 << 20


@settings(max_examples=100)
@given(numbers=st.lists(st.integers(1, 30)), heard=st.integers(0, 40))
def test_applied_and_missing_updates_are_counted(numbers: list[int], heard: int) -> None:
    applied = AppliedUpdates()
    sent = applied.of("trainer")
    for number in numbers:
        if not sent.has(number):
            sent.add(number)
    assert all(sent.has(number) == (number in numbers) for number in range(1, 41))
    sent.note_sent(heard)
    highest = max([*numbers, heard], default=0)
    assert applied.num_lost == highest - len(set(numbers))
    assert applied.num_updates == len(set(numbers))
    again = AppliedUpdates.from_json(applied.to_json())
    assert again.of("trainer") == sent
    assert again.of("another") == ClientUpdates()


def test_any_error_of_a_snapshot_is_reported_and_the_next_one_is_taken(tmp_path: Path) -> None:
    counts = iter([RuntimeError("dictionary changed size during iteration"), {"sent": {}}])

    def get_counts() -> dict[str, object]:
        found = next(counts)
        if isinstance(found, Exception):
            raise found
        return found

    shard = TableShard(plain_layout(10), ADAM)
    snapshots, outcomes = Snapshots(shard, tmp_path, get_counts=get_counts).start(), list[object]()
    try:
        for number in (1, 2):
            snapshots.request(outcomes.append)
            wait_until(lambda number=number: len(outcomes) == number, what="an outcome")  # type: ignore[misc]
    finally:
        snapshots.close()
    assert isinstance(outcomes[0], RuntimeError)
    assert (snapshots.num_failed, snapshots.num_taken) == (1, 1)
