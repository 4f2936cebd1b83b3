"""Throughput, and counts of finished and lost work: unavailable servers are asked again, and updates lost after training are counted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rowstead.fleet.fleet_figures import FleetFigures
from rowstead.fleet.reader_server import ReaderPlan
from rowstead.fleet.rpc_client import ServerUnavailable
from rowstead.fleet.wire import Message
from rowstead.fleet.work_counts import WorkCounts, describe_losses
from rowstead.training.progress import Position
from tests.small_runs import small_spec


@dataclass
class FakeHandle:
    kind: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"


class FakeSupervisor:
    """Servers with prepared replies; an exception is an unavailable server."""

    def __init__(self, **replies: list[dict[str, Any] | Exception]) -> None:
        self._replies = {name.replace("_", "-"): list(values) for name, values in replies.items()}
        self.handles = [FakeHandle(*_parts(name)) for name in self._replies]
        self.num_polls = 0
        self.num_restarts: dict[str, int] = {}

    def of_kind(self, *kinds: str) -> list[FakeHandle]:
        return [handle for handle in self.handles if handle.kind in kinds]

    def poll(self) -> None:
        self.num_polls += 1

    def call(self, handle: FakeHandle, kind: str, *, deadline_s: float) -> Message:
        reply = self._replies[handle.name].pop(0)
        if isinstance(reply, Exception):
            raise reply
        return Message(kind, dict(reply))


def _parts(name: str) -> tuple[str, int]:
    kind, _, number = name.partition("-")
    return kind, int(number)


def reader(num_done: int, num_batches: int) -> dict[str, Any]:
    return {
        "num_done": num_done,
        "num_batches": num_batches,
        "num_samples": 10 * num_batches,
        "epoch": 1,
        "num_batches_repeated": 0,
    }


def sparse(num_updates: int, num_lost: int) -> dict[str, Any]:
    return {"num_updates": num_updates, "num_lost_updates": num_lost}


def build_counts(supervisor: FakeSupervisor, position: Position) -> WorkCounts:
    return WorkCounts(supervisor, position, pytest.fail)  # type: ignore[arg-type]


def test_a_reader_that_is_being_restarted_is_counted_too() -> None:
    supervisor = FakeSupervisor(
        reader_0=[ServerUnavailable("restarting"), reader(40, 40)], reader_1=[reader(39, 40)], sparse_0=[sparse(79, 0)]
    )
    position = Position()
    build_counts(supervisor, position).count()
    assert (position.step, position.num_samples) == (79, 790)
    assert supervisor.num_polls >= 3, "the roles are supervised meanwhile"


def test_updates_that_a_server_loses_after_training_are_counted() -> None:
    supervisor = FakeSupervisor(
        sparse_0=[sparse(100, 3), sparse(60, 2)], sparse_1=[sparse(100, 0)] * 2, reader_0=[reader(100, 100)] * 2
    )
    counts = build_counts(supervisor, Position())
    counts.count()
    statuses = counts.read_final_statuses({})  # the first was killed meanwhile and restarted from an old snapshot
    assert {name: status["num_lost_updates"] for name, status in statuses.items() if name.startswith("sparse")} == {
        "sparse-0": 43,
        "sparse-1": 0,
    }


def test_updates_that_a_server_no_longer_knows_of_are_counted_from_its_usage_samples(tmp_path: Path) -> None:
    """As after a power failure of its machine, which its journal does not survive."""
    supervisor = FakeSupervisor(sparse_0=[sparse(60, 2)], reader_0=[reader(100, 100)])
    figures = FleetFigures(
        small_spec(),
        tmp_path,
        supervisor,
        total_steps=100,
        before=Position(num_lost_updates=5),  # type: ignore[arg-type]
    )
    (tmp_path / "roles").mkdir()
    figures.follow()
    for incarnation, num_updates, num_lost in ((0, 100, 3), (1, 50, 0), (1, 60, 2)):
        sample = {"incarnation": incarnation, "num_updates": num_updates, "num_lost_updates": num_lost, "time_s": 0.0}
        with open(tmp_path / "roles" / "sparse-0.jsonl", "a") as file:
            file.write(json.dumps({**sample, "num_updates_sent": num_updates + num_lost}) + "\n")
    figures.read()
    assert figures.num_lost_updates == 5 + 43
    statuses = build_counts(supervisor, Position()).read_final_statuses(figures.num_updates_sent)
    assert statuses["sparse-0"]["num_lost_updates"] == 43
    assert figures.for_record(statuses, 0.0)["num_lost_updates"] == 5 + 43, "with those before a resume"


def test_all_that_was_lost_is_told_and_nothing_else() -> None:
    assert describe_losses({"num_steps": 100, "num_lost_updates": 0.0, "num_lost_dense_steps": 0.0}) == []
    rows, dense = describe_losses({"num_lost_updates": 480.0, "num_lost_dense_steps": 1.0})
    assert rows.startswith("480 updates of rows were lost")
    assert dense.startswith("1 step of dense parameters were lost")


@pytest.mark.parametrize(
    ("role", "unsaved", "figure"),
    [("dense", "num_unsaved_exchanges", "num_lost_exchanges"), ("trainer", "num_unsaved_steps", "num_lost_dense_steps")],
)
def test_what_a_killed_role_had_not_saved_of_the_dense_parameters_is_counted(
    role: str, unsaved: str, figure: str, tmp_path: Path
) -> None:
    supervisor = FakeSupervisor(**{f"{role}_0": [], f"{role}_1": []})
    figures = FleetFigures(small_spec(), tmp_path, supervisor, total_steps=100, before=Position())  # type: ignore[arg-type]
    (tmp_path / "roles").mkdir()
    figures.follow()
    for number, incarnation, value in ((0, 0, 7), (0, 0, 3), (0, 1, 5), (0, 2, 40), (1, 0, 100)):
        with open(tmp_path / "roles" / f"{role}-{number}.jsonl", "a") as file:
            file.write(json.dumps({"incarnation": incarnation, unsaved: value, "time_s": 0.0}) + "\n")
    assert figures.for_record({}, 0.0)[figure] == 3 + 5, "the last incarnation has lost nothing"
    assert figures.lost_dense_work() == {figure: 3 + 5}


@pytest.mark.parametrize(
    ("status", "is_done"),
    [
        (reader(40, 40), True),
        (reader(39, 40), False),
        (reader(39, 39), False),
        ({**reader(39, 39), "num_skipped": 10}, True),
        ({**reader(38, 39), "num_skipped": 10}, False),
        ({**reader(39, 39), "num_skipped": 9}, False),
    ],
)
def test_a_run_is_finished_only_if_every_batch_that_was_planned_is_done(status: dict[str, Any], is_done: bool) -> None:
    plans = [ReaderPlan(num_batches=40, num_rows=400)] * 2
    supervisor = FakeSupervisor(reader_0=[reader(40, 40)], reader_1=[status])
    counts = build_counts(supervisor, Position())
    counts.count()
    expected = None if is_done else f"reader 1 has finished {status['num_done']} of 40 batches"
    assert counts.unfinished(plans) == expected


def test_the_throughput_is_the_samples_of_all_trainers_over_the_time_of_the_one_that_trained_longest(tmp_path: Path) -> None:
    supervisor = FakeSupervisor(trainer_0=[], trainer_1=[])
    before = Position(step=5, num_samples=500, train_s=7.0)
    figures = FleetFigures(small_spec(), tmp_path, supervisor, total_steps=100, before=before)  # type: ignore[arg-type]
    (tmp_path / "roles").mkdir()
    figures.follow()
    assert figures.samples_per_s is None
    for number, incarnation, samples, timed_s in ((0, 0, 300, 1.0), (0, 1, 300, 2.0), (1, 0, 900, 4.0)):
        sample = {"incarnation": incarnation, "num_timed_samples": samples, "timed_s": timed_s, "train_s": timed_s + 1}
        with open(tmp_path / "roles" / f"trainer-{number}.jsonl", "a") as file:
            file.write(json.dumps({**sample, "num_steps": 10, "num_samples": 1000, "time_s": 0.0}) + "\n")
    figures.read()
    assert figures.samples_per_s == pytest.approx(1500 / 4.0)
    assert figures.train_s == pytest.approx(7.0 + 5.0)
    progress = figures.progress([])
    assert progress is not None
    assert (progress.step, progress.num_samples, progress.samples_per_s) == (35, 3500, pytest.approx(375.0))
