"""Charts of model populations: number of servers, and utilization."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rowstead.records.store import StoreEntry
from rowstead.report.describe import TextTable
from rowstead.report.theme import Figure, axis, bars, layout, violin


@dataclass(frozen=True, kw_only=True)
class ServerCounts:
    """Histogram of the number of servers in a study (the paper's Fig. 9)."""

    kind: str
    counts: Mapping[int, int]

    @property
    def largest_share(self) -> float:
        return max(self.counts.values()) / sum(self.counts.values())


SERVERS = {
    "num_trainers": "trainers",
    "num_sparse_servers": "sparse parameter servers",
    "num_dense_servers": "dense parameter servers",
}


def server_counts(entries: Sequence[StoreEntry]) -> list[ServerCounts]:
    """Histograms of the number of servers, by kind."""
    found = []
    for key, kind in SERVERS.items():
        numbers = [round(entry.record.figures[key]) for entry in entries if key in entry.record.figures]
        if numbers and any(numbers):
            found.append(ServerCounts(kind=kind, counts={number: numbers.count(number) for number in sorted(set(numbers))}))
    return found


def draw_counts(name: str, found: Sequence[ServerCounts]) -> Figure | None:
    """Histogram of the number of servers."""
    if not found:
        return None
    traces = [
        bars(
            one.kind,
            [str(number) for number in one.counts],
            list(one.counts.values()),
            index,
            hovertemplate="%{y} models with %{x} " + one.kind + "<extra></extra>",
        )
        for index, one in enumerate(found)
    ]
    numbers = sorted({number for one in found for number in one.counts})
    rows = tuple((one.kind, f"{one.largest_share:.0%}", str(len(one.counts))) for one in found)
    return Figure(
        key=f"{name}-servers",
        title=f"{name}: number of servers",
        words="Number of models by the predicted number of servers of each kind that reaches the target throughput.",
        traces=traces,
        layout=layout(
            axis("servers", type="category", categoryorder="array", categoryarray=[str(number) for number in numbers]),
            axis("models"),
            barmode="group",
        ),
        table=TextTable("Servers", ("kind", "share of the mode", "distinct numbers"), rows),
    )


USE = {"cpu_share_mean": "CPU, mean", "cpu_share_max": "CPU, max"}


@dataclass(frozen=True, kw_only=True)
class Use:
    """Utilization of one resource over the runs of a study (the paper's Fig. 5)."""

    what: str
    shares: tuple[float, ...]


ROLES = {"trainer": "trainers", "sparse": "sparse servers", "dense": "dense servers", "reader": "readers"}


def uses(entries: Sequence[StoreEntry]) -> list[Use]:
    """Utilization of measured runs: of fleets by role, in cores; of single processes as a share of the machine."""
    measured = [entry.record for entry in entries if entry.is_measured and entry.failure is None]
    by_role = [
        Use(
            what=words,
            shares=tuple(
                record.figures[f"{role}_cpu_s"] / record.figures["train_s"]
                for record in measured
                if f"{role}_cpu_s" in record.figures and record.figures.get("train_s", 0) > 0
            ),
        )
        for role, words in ROLES.items()
    ]
    if any(one.shares for one in by_role):
        return [one for one in by_role if one.shares]
    found = [
        Use(what=words, shares=tuple(record.figures[key] for record in measured if key in record.figures))
        for key, words in USE.items()
    ]
    memory = [
        record.figures["rss_max_bytes"] / float(record.machine["memory_bytes"])
        for record in measured
        if "rss_max_bytes" in record.figures and isinstance(record.machine.get("memory_bytes"), (int, float))
    ]
    return [one for one in (*found, Use(what="memory, max", shares=tuple(memory))) if one.shares]


def draw_uses(name: str, found: Sequence[Use]) -> Figure | None:
    """Distributions of utilization."""
    if not found or max(len(one.shares) for one in found) < 3:
        return None
    traces = [
        violin(one.what, one.shares, index, hovertemplate="%{y:.1%}<extra>" + one.what + "</extra>")
        for index, one in enumerate(found)
    ]
    rows = tuple(
        (one.what, f"{statistics.fmean(one.shares):.1%}", f"{min(one.shares):.1%}", f"{max(one.shares):.1%}") for one in found
    )
    return Figure(
        key=f"{name}-use",
        title=f"{name}: utilization",
        words="Utilization during training: roles of a fleet in shares of one core, single processes in shares of the machine.",
        traces=traces,
        layout=layout(axis("", type="category"), axis("share", tickformat=".0%", rangemode="tozero"), showlegend=False),
        table=TextTable("Utilization", ("resource", "mean", "min", "max"), rows),
    )
