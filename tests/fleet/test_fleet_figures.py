"""Counts of finished and lost work: unavailable servers are asked again, and updates lost after training are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from rowstead.fleet.fleet_figures import WorkCounts
from rowstead.fleet.rpc_client import ServerUnavailable
from rowstead.fleet.wire import Message
from rowstead.training.progress import Position


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
    statuses = counts.read_final_statuses()  # the first was killed meanwhile and restarted from an old snapshot
    assert {name: status["num_lost_updates"] for name, status in statuses.items() if name.startswith("sparse")} == {
        "sparse-0": 43,
        "sparse-1": 0,
    }
