"""Charts of model populations: number of servers, and utilization."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rowstead.records.store import StoreEntry
from rowstead.report.theme import Chart, TextTable, axis, bars, figure_text, layout, violin
from rowstead.spec.record import Record
from rowstead.spec.sizes import format_bytes


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


def draw_counts(name: str, found: Sequence[ServerCounts]) -> Chart | None:
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
    return Chart(
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


ROLES = {"trainer": "trainers", "sparse": "sparse servers", "dense": "dense servers", "reader": "readers"}
NUM_SERVERS = {"trainer": "num_trainers", "sparse": "num_sparse_servers", "dense": "num_dense_servers", "reader": "num_readers"}
"""Figures with the number of servers of each role."""
ALONE = "single processes"


@dataclass(frozen=True)
class Resource:
    """A resource of a machine, and where records have what is used of it."""

    title: str
    figures: tuple[str, ...]
    """Figures that add up to what is used; those of a role begin with its name."""
    capacity: str
    """The fact of a machine with the whole of it."""
    words: str
    unit: str = "bytes/s"
    """Of an amount, where the capacity is not known."""

    def use(self, record: Record, role: str) -> tuple[float, float | None] | None:
        """What one server of a role uses, and its share of the capacity if that is known; None if it was not measured."""
        names = [f"{role}_{name}" if role else name for name in self.figures]
        amounts = [record.figures[name] for name in names if name in record.figures]
        if not amounts:
            return None
        used = sum(amounts)
        if self is not CAPACITY:  # a total of all servers of the role
            used /= record.figures["train_s"] * (record.figures.get(NUM_SERVERS.get(role, ""), 0) or 1)
        whole = record.machine.get(self.capacity)
        return used, used / whole if isinstance(whole, (int, float)) and whole > 0 else None


CPU = Resource(
    "CPU", ("cpu_s",), "num_usable_cores", "Processor time over training time and the cores of the machine.", "cores"
)
CAPACITY = Resource(
    "memory capacity", ("rss_max_bytes",), "memory_bytes", "Largest resident memory over that of the machine.", "bytes"
)
BANDWIDTH = Resource(
    "memory bandwidth",
    ("memory_traffic_bytes",),
    "memory_bytes_per_s",
    "Bytes read from and written to memory, over training time.",
)
NETWORK = Resource(
    "network",
    ("num_bytes_sent", "num_bytes_received"),
    "network_bytes_per_s",
    "Bytes sent and received over training time; between roles on one machine they are copied in its memory.",
)
RESOURCES = (CPU, CAPACITY, BANDWIDTH, NETWORK)


@dataclass(frozen=True, kw_only=True)
class Use:
    """Utilization of one resource by one role, over the runs of a study (the paper's Fig. 5)."""

    resource: Resource
    role: str
    amounts: tuple[float, ...]
    """One per run, of one server of the role: cores, bytes, or bytes per second."""
    shares: tuple[float, ...] | None
    """The same as shares of the machine's capacity; None where that is unknown."""
    counted_by: tuple[str, ...] = ()
    """How bytes to and from memory were counted."""


def uses(entries: Sequence[StoreEntry]) -> list[Use]:
    """Utilization of machines in measured runs, by resource and role."""
    records = [entry.record for entry in entries if entry.is_measured and entry.failure is None]
    groups: dict[str, list[Record]] = {role: [] for role in (*ROLES, "")}
    for record in records:
        roles = [role for role in ROLES if f"{role}_cpu_s" in record.figures]
        for role in roles or [""]:
            groups[role] += [record] if record.figures.get("train_s", 0) > 0 else []
    found = []
    for resource in RESOURCES:
        for role, of_role in groups.items():
            measured = [(record, used) for record in of_role if (used := resource.use(record, role)) is not None]
            if measured:
                shares = [share for _, (_, share) in measured if share is not None]
                ways = {str(record.machine.get("memory_traffic_by", "")) for record, _ in measured} - {""}
                found.append(
                    Use(
                        resource=resource,
                        role=ROLES.get(role, ALONE),
                        amounts=tuple(amount for _, (amount, _) in measured),
                        shares=tuple(shares) if len(shares) == len(measured) else None,
                        counted_by=tuple(sorted(ways)),
                    )
                )
    return found


def _amount_text(amount: float, unit: str) -> str:
    return figure_text(amount) if unit == "cores" else format_bytes(amount) + unit.removeprefix("bytes")


def draw_uses(name: str, found: Sequence[Use]) -> list[Chart]:
    """The distribution of utilization by role, one chart per resource that at least three runs measured."""
    charts = []
    for resource in RESOURCES:
        mine = [one for one in found if one.resource is resource]
        if max((len(one.amounts) for one in mine), default=0) < 3:
            continue
        values = [one.shares for one in mine if one.shares is not None]
        is_share, words = len(values) == len(mine), resource.words
        values = values if is_share else [one.amounts for one in mine]
        if resource is BANDWIDTH:
            words += f" Counted by {' and '.join(dict.fromkeys(way for one in mine for way in one.counted_by))}."
            words += "" if is_share else " Its capacity is not known: run `rowstead calibrate` before the runs."
        form, up = (
            ("%{y:.1%}", axis("share", tickformat=".1~%"))
            if is_share
            else ("%{y:.3~s} " + resource.unit, axis(resource.unit, exponentformat="SI"))
        )
        traces, rows = [], []
        for index, (one, of_role) in enumerate(zip(mine, values, strict=True)):
            traces.append(violin(one.role, of_role, index, hovertemplate=f"{form}<extra>{one.role}</extra>"))
            numbers = (statistics.fmean(of_role), min(of_role), max(of_role))
            rows.append(
                (one.role, *(f"{n:.1%}" if is_share else _amount_text(n, resource.unit) for n in numbers), f"{len(of_role)}")
            )
        charts.append(
            Chart(
                key=f"{name}-use-of-{resource.title.replace(' ', '-')}",
                title=f"{name}: {resource.title}",
                words=words,
                traces=traces,
                layout=layout(axis("", type="category"), {**up, "rangemode": "tozero"}, showlegend=False),
                table=TextTable(f"Use of {resource.title}", ("role", "mean", "min", "max", "runs"), tuple(rows)),
            )
        )
    return charts
