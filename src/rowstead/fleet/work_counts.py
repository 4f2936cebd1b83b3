"""Counts finished, repeated and lost work, and says whether a run has done what it planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rowstead.fleet.reader_server import ReaderPlan
from rowstead.fleet.rpc_client import ServerUnavailable
from rowstead.fleet.supervisor import RoleHandle, Supervisor
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import RoleKind
from rowstead.training.progress import Position

STATUS_TIMEOUT_S = 3.0
"""Timeout of a status call, before the roles are polled again."""
STATUS_DEADLINE_S = 120.0
"""How long to wait for the status of a server that is being restarted."""

Status = dict[str, Any]


class WorkCounts:
    """Counts finished, repeated and lost work from the status of the servers, and keeps `position` up to date."""

    def __init__(self, supervisor: Supervisor, position: Position, on_message: Callable[[str], None]) -> None:
        self._supervisor, self._position, self._on_message = supervisor, position, on_message
        self._num_updates: dict[str, int] = {}
        """Updates that each sparse server has applied or is known to have lost, once no trainer sends any more."""
        self.num_skipped: int | None = None
        """Bad rows that readers have skipped; None for a log that cannot have any."""
        self._readers: dict[str, Status] = {}

    def count(self) -> None:
        """Count the finished work when all trainers have exited."""
        servers = self._read_statuses("sparse")
        self._num_updates = {name: status["num_updates"] + status["num_lost_updates"] for name, status in servers.items()}
        self._readers = self._read_statuses("reader")
        self._count_batches(self._readers)

    def unfinished(self, plans: Sequence[ReaderPlan]) -> str | None:
        """Say what was planned and is not done, by the last `count`; None if everything is."""
        numbers = {handle.name: handle.number for handle in self._supervisor.of_kind("reader")}
        missing = [
            f"reader {numbers[name]} has finished {status['num_done']:,} of {plans[numbers[name]].num_batches:,} batches"
            for name, status in self._readers.items()
            if not plans[numbers[name]].is_done(status)
        ]
        return "; ".join(missing) or None

    def count_after_failure(self) -> bool:
        """Count what can still be counted of a fleet that cannot continue; return whether a reader has reported an error.

        If a reader is gone, the position stays what trainers have counted.
        """
        readers = self._supervisor.of_kind("reader")
        statuses = {handle.name: self._status(handle) for handle in readers if handle.role.exit_code() is None}
        if len(statuses) == len(readers):
            self._count_batches(statuses)
        return any("error" in status for status in statuses.values())

    def read_final_statuses(self, num_updates_sent: Mapping[str, int]) -> dict[str, Status]:
        """Return the last status of each server. Updates that it no longer knows of are added to its losses.

        `num_updates_sent` is what each sparse server had reported at most; updates may also be lost after the last `count`.
        """
        statuses: dict[str, Status] = {}
        try:
            statuses = self._read_statuses("sparse", "dense", "reader")
        except RowsteadError as error:
            self._on_message(
                f"the record lacks the counts of repeated and lost work, because a server does not answer: {error}"
            )
        for name, status in statuses.items():
            known = max(self._num_updates.get(name, 0), num_updates_sent.get(name, 0))
            if "num_lost_updates" in status:
                status["num_lost_updates"] = max(status["num_lost_updates"], known - status["num_updates"])
        return statuses

    def _count_batches(self, readers: Mapping[str, Status]) -> None:
        """Set the position from the readers' assignment logs: every finished batch counts once."""
        statuses = readers.values()
        self._position.step = sum(int(status["num_done"]) for status in statuses)
        assigned = sum(int(status["num_batches"]) for status in statuses)
        samples = sum(int(status["num_samples"]) for status in statuses)
        self._position.num_samples = round(samples * self._position.step / assigned) if assigned else 0
        self._position.epoch = max(int(status["epoch"]) for status in statuses)
        skipped = [int(status["num_skipped"]) for status in statuses if "num_skipped" in status]
        self.num_skipped = sum(skipped) if skipped else None

    def _read_statuses(self, *kinds: RoleKind) -> dict[str, Status]:
        """Ask all servers of some kinds for their status; wait for one that is being restarted."""
        statuses: dict[str, Status] = {}
        deadline = time.monotonic() + STATUS_DEADLINE_S
        for handle in self._supervisor.of_kind(*kinds):
            while handle.name not in statuses:
                try:
                    statuses[handle.name] = self._status(handle)
                except ServerUnavailable:
                    if time.monotonic() >= deadline:
                        raise
                self._supervisor.poll()
        return statuses

    def _status(self, handle: RoleHandle) -> Status:
        return self._supervisor.call(handle, "status", deadline_s=STATUS_TIMEOUT_S).facts


def describe_losses(figures: Mapping[str, float]) -> list[str]:
    """Tell the user about everything that was lost, by the figures of a record."""
    counts = {describe: int(figures.get(name, 0)) for name, describe in _LOSSES.items()}
    return [describe(count) for describe, count in counts.items() if count]


def describe_lost_dense_steps(num_lost: int) -> str:
    """Tell the user about lost steps of dense parameters."""
    return (
        f"{num_lost:,} {'step' if num_lost == 1 else 'steps'} of dense parameters were lost when trainers were restarted: not yet saved then. "
        "With a dense server (`dense=1` in `--fleet`) other processes keep them"
    )


def describe_lost_updates(num_lost: int) -> str:
    """Tell the user about lost updates of rows."""
    return (
        f"{num_lost:,} {'update' if num_lost == 1 else 'updates'} of rows were lost when sparse servers were restarted: their last snapshots did not "
        "have them. A shorter `fleet.snapshot_every_s` loses less"
    )


_LOSSES = {"num_lost_updates": describe_lost_updates, "num_lost_dense_steps": describe_lost_dense_steps}
