"""What the roles of a fleet have measured, put together: rows of the live table, progress, and the figures of the record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowstead.fleet.role_usage import UsageReader
from rowstead.fleet.roster import RoleFiles
from rowstead.fleet.supervisor import Supervisor
from rowstead.plan.work import step_work
from rowstead.records.usage import perf_traffic_bytes
from rowstead.spec.fleet import RoleKind
from rowstead.spec.heads import HEADS
from rowstead.spec.run import RunSpec
from rowstead.training.progress import Callback, Position, Progress

SERVER_COUNTS = (
    "num_batches_repeated",
    "num_samples_repeated",
    "num_batches_resent",
    "num_lost_updates",
)
"""Counts in the status of servers whose sums are figures of the record."""
ROLE_TOTALS = (
    "cpu_s",
    "memory_traffic_bytes",
    "waiting_s",
    "num_bytes_sent",
    "num_bytes_received",
    "num_resent",
    "num_exchanges",
    "num_missed",
    "num_lookups_early",
)
"""Usage samples of roles that are summed over all roles of a kind and all their incarnations."""
UNSAVED_WORK: tuple[tuple[str, RoleKind, str], ...] = (
    ("num_lost_exchanges", "dense", "num_unsaved_exchanges"),
    ("num_lost_dense_steps", "trainer", "num_unsaved_steps"),
)
"""Figures of the record about dense parameters: what roles of a kind had not saved when they were killed, by their last samples. Trainers
that have dense servers need not save."""
NUM_SERVERS = {"trainer": "num_trainers", "sparse": "num_sparse_servers", "dense": "num_dense_servers", "reader": "num_readers"}
"""Figures of the record with the number of roles of a kind."""


@dataclass(frozen=True, kw_only=True)
class RoleRow:
    """One role in the live table; figures that were not measured are None."""

    name: str
    state: str
    samples_per_s: float | None = None
    queue_depth: float | None = None
    waiting_share: float | None = None
    """Share of the time that a trainer's threads wait for batches, or a server's thread for requests."""
    cpu_cores: float | None = None
    """Average number of busy cores."""
    rss_bytes: float | None = None
    received_bytes_per_s: float | None = None
    sent_bytes_per_s: float | None = None
    num_restarts: int = 0


class FleetCallback(Callback):
    """A Callback that also gets the live table. Of a Callback's methods, fleets call `on_step`, `on_evaluation` and `on_message`."""

    def on_roles(self, rows: Sequence[RoleRow]) -> None:
        """Called with a row for each role, about twice a second."""


def role_row(name: str, state: str, usage: UsageReader, *, num_restarts: int = 0, num_threads: int = 1) -> RoleRow:
    """Build the row of a role from its last two samples; `num_threads` is how many of its threads wait."""
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


class FleetFigures:
    """Follows the usage files of all roles of one run; `before` is how far it had come before this process resumed it."""

    def __init__(self, spec: RunSpec, folder: Path, supervisor: Supervisor, *, total_steps: int, before: Position) -> None:
        self._spec, self._folder, self._supervisor = spec, folder, supervisor
        self._total_steps, self._before = total_steps, before
        self._usage: dict[str, UsageReader] = {}

    def follow(self) -> None:
        """Follow the roles that were started since the last call."""
        for handle in self._supervisor.handles:
            if handle.name not in self._usage:
                path = RoleFiles(self._folder, handle.kind, handle.number).usage
                self._usage[handle.name] = UsageReader(path, from_now=True)

    def read(self) -> None:
        for usage in self._usage.values():
            usage.read()

    def rows(self) -> list[RoleRow]:
        threads = self._spec.train.sync.hogwild_threads
        return [
            role_row(
                handle.name,
                handle.state,
                self._usage[handle.name],
                num_restarts=handle.incarnation,
                num_threads=threads if handle.kind == "trainer" else 1,
            )
            for handle in self._supervisor.handles
            if handle.name in self._usage
        ]

    def progress(self, rows: Iterable[RoleRow]) -> Progress | None:
        """Return the progress of training; None before the first step."""
        steps, samples = (int(sum(self._trainer_totals(name))) for name in ("num_steps", "num_samples"))
        if not steps:
            return None
        trainers = self._trainers()
        waiting = _mean(row.waiting_share for row in rows if row.name.startswith("trainer"))
        return Progress(
            step=self._before.step + steps,
            total_steps=self._total_steps,
            num_samples=self._before.num_samples + samples,
            loss=_mean(usage.last.get("loss") for usage in trainers) or math.nan,
            samples_per_s=self.samples_per_s or 0.0,
            waiting_share=waiting or 0.0,
            ne=_mean(usage.last.get("ne") for usage in trainers) if HEADS[self._spec.train.loss].is_log_loss else None,
        )

    @property
    def samples_per_s(self) -> float | None:
        """Samples of all trainers over the training time of the one that trained longest: see `training/throughput.py`."""
        timed_s = max(self._trainer_totals("timed_s"), default=0.0)
        return sum(self._trainer_totals("num_timed_samples")) / timed_s if timed_s > 0 else None

    @property
    def train_s(self) -> float:
        """Training time of the trainer that trained longest, and what the run had trained before."""
        return self._before.train_s + max(self._trainer_totals("train_s"), default=0.0)

    @property
    def num_updates_sent(self) -> dict[str, int]:
        """Updates that each sparse server has ever reported as applied or lost."""
        servers = [handle.name for handle in self._supervisor.of_kind("sparse") if handle.name in self._usage]
        return {name: int(self._usage[name].maximum("num_updates_sent") or 0) for name in servers}

    @property
    def num_lost_updates(self) -> int:
        """Updates of rows that sparse servers have lost so far, also before a resume."""
        sent = self.num_updates_sent
        return self._before.num_lost_updates + sum(
            sent[name] - int(self._usage[name].last.get("num_updates", 0)) for name in sent
        )

    def lost_work(self) -> dict[str, float]:
        """Return what was lost, as far as usage samples say it."""
        return {"num_lost_updates": self.num_lost_updates, **self.lost_dense_work()}

    def lost_dense_work(self) -> dict[str, float]:
        """Return what roles had not saved of dense parameters when they were killed, since this process started them."""
        lost = {}
        for name, kind, unsaved in UNSAVED_WORK:
            usages = [self._usage[handle.name] for handle in self._supervisor.of_kind(kind) if handle.name in self._usage]
            if usages and (kind == "dense" or not self._supervisor.of_kind("dense")):
                lost[name] = sum(usage.total_of_earlier(unsaved) for usage in usages)
        return lost

    def _trainers(self) -> list[UsageReader]:
        return [self._usage[handle.name] for handle in self._supervisor.of_kind("trainer") if handle.name in self._usage]

    def _trainer_totals(self, name: str) -> list[float]:
        return [usage.total(name) or 0.0 for usage in self._trainers()]

    def for_record(self, statuses: Mapping[str, Mapping[str, Any]], coordinator_cpu_s: float) -> dict[str, float]:
        """Return repeated and lost work, restarts, and the usage of each kind of role; `statuses` are the servers' last ones."""
        figures: dict[str, float] = {
            "num_restarts": sum(self._supervisor.num_restarts.values()),
            "num_lost_steps": self._before.num_lost_steps,
        }
        for name in SERVER_COUNTS:
            if values := [status[name] for status in statuses.values() if name in status]:
                figures[name] = sum(values)
        if "num_lost_updates" in figures:
            figures["num_lost_updates"] += self._before.num_lost_updates
        self.read()
        figures |= self.lost_dense_work()
        cpu_s = coordinator_cpu_s
        for kind in dict.fromkeys(handle.kind for handle in self._supervisor.handles):
            usages = [self._usage[handle.name] for handle in self._supervisor.of_kind(kind)]
            figures[NUM_SERVERS[kind]] = len(usages)
            for name in ROLE_TOTALS:
                if totals := [total for usage in usages if (total := usage.total(name)) is not None]:
                    figures[f"{kind}_{name}"] = sum(totals)
            maxima = [usage.maximum("rss_bytes") for usage in usages]
            if measured := [value for value in maxima if value is not None]:
                figures[f"{kind}_rss_max_bytes"] = max(measured)
            share = _mean(usage.last.get("nonempty_share") for usage in usages)
            if share is not None:
                figures["queue_nonempty_share"] = share
            cpu_s += figures.get(f"{kind}_cpu_s", 0.0)
        if perf_traffic_bytes() is None:
            self._count_layers(figures)
        return {**figures, "coordinator_cpu_s": coordinator_cpu_s, "cpu_s": cpu_s}

    def _count_layers(self, figures: dict[str, float]) -> None:
        """Add the bytes of layers, by their sizes, to those of rows that the kernels of roles counted."""
        work, trainers = step_work(self._spec), [self._usage[handle.name] for handle in self._supervisor.of_kind("trainer")]
        layer_bytes = sum(usage.total("num_steps") or 0 for usage in trainers) * work.dense_traffic_bytes(
            self._spec.train.batch_size
        )
        figures["trainer_memory_traffic_bytes"] = figures.get("trainer_memory_traffic_bytes", 0.0) + layer_bytes
        if "dense_cpu_s" in figures:  # an exchange reads both copies of the parameters and writes one
            figures["dense_memory_traffic_bytes"] = 3 * work.dense_bytes * figures.get("trainer_num_exchanges", 0.0)
        figures.pop("reader_memory_traffic_bytes", None)  # has no kernels that count


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None
