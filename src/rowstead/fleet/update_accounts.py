"""What the servers of a fleet say was done, repeated and lost: the counts of a run's record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rowstead.fleet.rpc_client import ServerUnavailable
from rowstead.fleet.supervisor import RoleHandle, Supervisor
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import RoleKind
from rowstead.training.progress import Position

STATUS_S = 3.0
"""How long a server may take to say how it does, before the roles are looked after again."""
PATIENCE_S = 120.0
"""How long the figures of a server that is just coming back are waited for."""

Status = dict[str, Any]


class Accounts:
    """Asks the servers of a crew, and puts into `position` how far the run has come by what they say."""

    def __init__(self, crew: Supervisor, position: Position, say: Callable[[str], None]) -> None:
        self._crew, self._position, self._say = crew, position, say
        self._num_updates: dict[str, int] = {}
        """Updates of each sparse server that are in its rows or known to be lost, once nobody sends any more."""
        self.num_skipped: int | None = None
        """Bad rows that readers have left out; absent for a log that cannot have any."""

    def settle(self) -> None:
        """Count what was done, when all trainers have ended."""
        servers = self._statuses("sparse")
        self._num_updates = {name: status["num_updates"] + status["num_lost_updates"] for name, status in servers.items()}
        self._count(self._statuses("reader"))

    def rescue(self) -> bool:
        """Count what can still be counted of a fleet that cannot go on; returns whether a reader has said what is wrong.

        Where a reader is gone, the position stays what trainers have counted.
        """
        readers = self._crew.of("reader")
        found = {post.name: self._status(post) for post in readers if post.role.code() is None}
        if len(found) == len(readers):
            self._count(found)
        return any("error" in status for status in found.values())

    def last(self) -> dict[str, Status]:
        """What the servers say at the end; updates that one has lost since `settle` are known here alone."""
        statuses: dict[str, Status] = {}
        try:
            statuses = self._statuses("sparse", "dense", "reader")
        except RowsteadError as error:
            self._say(f"what was repeated and lost is not in the record, as a server does not say it: {error}")
        for name, num_updates in self._num_updates.items():
            if name in statuses:
                lost = num_updates - statuses[name]["num_updates"] - statuses[name]["num_lost_updates"]
                statuses[name]["num_lost_updates"] += max(0, lost)
        return statuses

    def _count(self, readers: Mapping[str, Status]) -> None:
        """How far the run has come by the readers' books: every batch that is done, once."""
        found = readers.values()
        self._position.step = sum(int(status["num_done"]) for status in found)
        handed_out = sum(int(status["num_batches"]) for status in found)
        samples = sum(int(status["num_samples"]) for status in found)
        self._position.num_samples = round(samples * self._position.step / handed_out) if handed_out else 0
        self._position.epoch = max(int(status["epoch"]) for status in found)
        skipped = [int(status["num_skipped"]) for status in found if "num_skipped" in status]
        self.num_skipped = sum(skipped) if skipped else None

    def _statuses(self, *kinds: RoleKind) -> dict[str, Status]:
        """What the servers of some kinds say of themselves; one that is killed just now says so when it is back."""
        found: dict[str, Status] = {}
        ends_s = time.monotonic() + PATIENCE_S
        for post in self._crew.of(*kinds):
            while post.name not in found:
                try:
                    found[post.name] = self._status(post)
                except ServerUnavailable:
                    if time.monotonic() >= ends_s:
                        raise
                self._crew.look()
        return found

    def _status(self, post: RoleHandle) -> Status:
        return self._crew.call(post, "status", deadline_s=STATUS_S).facts
