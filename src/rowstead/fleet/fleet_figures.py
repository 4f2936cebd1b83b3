"""What a fleet's roles have sampled of themselves, put together: rows of the live table, progress, figures of the record."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rowstead.fleet.role_table import RoleRow, role_row
from rowstead.fleet.role_usage import UsageReader
from rowstead.fleet.roster import RoleFiles
from rowstead.fleet.supervisor import Supervisor
from rowstead.spec.run import RunSpec
from rowstead.training.progress import Progress

REPORTED = (
    "num_batches_repeated",
    "num_samples_repeated",
    "num_batches_resent",
    "num_lost_updates",
)
"""Facts of servers that add up to figures of the record."""
ADDED = (
    "cpu_s",
    "waiting_s",
    "num_bytes_sent",
    "num_bytes_received",
    "num_resent",
    "num_exchanges",
    "num_missed",
    "num_lookups_early",
)
"""Samples of roles that add up, over all of a kind and all their starts."""


class FleetFigures:
    """Follows the usage files of all roles of one run; `before` is how many steps and examples earlier parts of it had."""

    def __init__(self, spec: RunSpec, folder: Path, crew: Supervisor, *, total_steps: int, before: tuple[int, int]) -> None:
        self._spec, self._folder, self._crew, self._total_steps, self._before = spec, folder, crew, total_steps, before
        self._usage: dict[str, UsageReader] = {}
        self._first: tuple[float, int] | None = None
        """When the first figures of trainers came, and how many examples they had by then."""
        self._last: tuple[float, int] | None = None

    def follow(self) -> None:
        """Take in roles that were begun since."""
        for post in self._crew.posts:
            if post.name not in self._usage:
                path = RoleFiles(self._folder, post.kind, post.number).usage
                self._usage[post.name] = UsageReader(path, from_now=True)

    def read(self) -> None:
        """Take in what was sampled since."""
        for usage in self._usage.values():
            usage.read()

    def rows(self) -> list[RoleRow]:
        """The live table."""
        threads = self._spec.train.sync.hogwild_threads
        return [
            role_row(
                post.name,
                post.state,
                self._usage[post.name],
                num_restarts=post.incarnation,
                num_threads=threads if post.kind == "trainer" else 1,
            )
            for post in self._crew.posts
            if post.name in self._usage
        ]

    def progress(self, rows: Iterable[RoleRow]) -> Progress | None:
        """Where training stands; none before the first step."""
        trainers = [self._usage[post.name] for post in self._crew.of("trainer") if post.name in self._usage]
        steps, samples = (int(sum(usage.total(name) or 0 for usage in trainers)) for name in ("num_steps", "num_samples"))
        if not steps:
            return None
        now = time.monotonic()
        self._first = self._first or (now, samples)
        if self._last is None or samples > self._last[1]:
            self._last = (now, samples)
        waiting = _mean(row.waiting_share for row in rows if row.name.startswith("trainer"))
        return Progress(
            step=self._before[0] + steps,
            total_steps=self._total_steps,
            num_samples=self._before[1] + samples,
            loss=_mean(usage.last.get("loss") for usage in trainers) or math.nan,
            samples_per_s=self.samples_per_s or 0.0,
            waiting_share=waiting or 0.0,
            ne=_mean(usage.last.get("ne") for usage in trainers) if self._spec.train.loss == "bce" else None,
        )

    @property
    def samples_per_s(self) -> float | None:
        """Between the first figures of trainers and the last that grew."""
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return None
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])

    def for_record(self, statuses: Mapping[str, Mapping[str, Any]], head_cpu_s: float) -> dict[str, float]:
        """Repeated and lost work, restarts, and what each kind of role used; `statuses` is what servers said last."""
        figures: dict[str, float] = {"num_restarts": sum(self._crew.num_restarts.values())}
        for name in REPORTED:
            if values := [status[name] for status in statuses.values() if name in status]:
                figures[name] = sum(values)
        self.read()
        cpu_s = head_cpu_s
        for kind in dict.fromkeys(post.kind for post in self._crew.posts):
            usages = [self._usage[post.name] for post in self._crew.of(kind)]
            for name in ADDED:
                if totals := [total for usage in usages if (total := usage.total(name)) is not None]:
                    figures[f"{kind}_{name}"] = sum(totals)
            largest = [usage.largest("rss_bytes") for usage in usages]
            if found := [value for value in largest if value is not None]:
                figures[f"{kind}_rss_max_bytes"] = max(found)
            share = _mean(usage.last.get("nonempty_share") for usage in usages)
            if share is not None:
                figures["queue_nonempty_share"] = share
            cpu_s += figures.get(f"{kind}_cpu_s", 0.0)
        return {**figures, "head_cpu_s": head_cpu_s, "cpu_s": cpu_s}


def _mean(values: Iterable[float | None]) -> float | None:
    """Of those that were measured."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None
