"""The state of a fleet as rows of a table: one a role, from what each has sampled of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rowstead.fleet.role_usage import UsageReader
from rowstead.training.progress import NoProgress, ProgressCallback


@dataclass(frozen=True, kw_only=True)
class RoleRow:
    """One role at this moment; a figure that nobody has measured is None."""

    name: str
    state: str
    samples_per_s: float | None = None
    queue_depth: float | None = None
    waiting_share: float | None = None
    """Of the time: a trainer's threads for batches, a server's thread for requests."""
    cpu_cores: float | None = None
    """Cores that it keeps busy."""
    rss_bytes: float | None = None
    received_bytes_per_s: float | None = None
    sent_bytes_per_s: float | None = None
    num_restarts: int = 0


class FleetCallback(ProgressCallback, Protocol):
    """A ProgressCallback that is told of the roles too, about once a second."""

    def on_roles(self, rows: Sequence[RoleRow]) -> None: ...


class NoFleetProgress(NoProgress):
    """A FleetCallback that looks away."""

    def on_roles(self, rows: Sequence[RoleRow]) -> None: ...


def role_row(name: str, state: str, usage: UsageReader, *, num_restarts: int = 0, num_threads: int = 1) -> RoleRow:
    """A row from the last two samples of a role; `num_threads` of them wait."""
    waiting = usage.rate("waiting_s")
    return RoleRow(
        name=name,
        state=state,
        samples_per_s=usage.rate("num_samples"),
        queue_depth=usage.last.get("queue_depth"),
        waiting_share=None if waiting is None else min(1.0, waiting / num_threads),
        cpu_cores=usage.rate("cpu_s"),
        rss_bytes=usage.last.get("rss_bytes"),
        received_bytes_per_s=usage.rate("num_bytes_received"),
        sent_bytes_per_s=usage.rate("num_bytes_sent"),
        num_restarts=num_restarts,
    )
