"""Charts of predictions: error against measurements, and efficiency per watt."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rowstead.records.store import StoreEntry
from rowstead.records.studies import newest
from rowstead.report.describe import TextTable
from rowstead.report.theme import Figure, axis, color, diagonal, figure_text, label, labels, layout, log_axis, thinned
from rowstead.spec.catalogue import HERE

MAX_SHOWN = 2_000
"""Maximum number of points; of more, the largest errors and an even selection of the others."""
WORST = 100
MAX_GROUPS = 12
"""Maximum number of studies or recipes with their own color and row; the largest ones."""
OTHERS = "others"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Measurement and prediction of one run on the same machine."""

    group: str
    """Study or recipe."""
    what: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of predictions over a set of pairs."""

    num_pairs: int
    geomean: float
    """exp of the mean of |ln(predicted / measured)|, minus 1."""
    largest: float
    bias: float
    """exp of the mean of ln(predicted / measured): above 1 if predictions are too fast."""


def pairs(entries: Sequence[StoreEntry], figure: str = "samples_per_s") -> list[Pair]:
    """Pair measured entries with the newest prediction for the same point or recipe on this machine."""
    entries = newest(entries)
    measured: dict[tuple[str | None, ...], StoreEntry] = {}
    for entry in entries:
        if entry.is_measured and entry.record.figures.get(figure, 0) > 0:
            measured[_pair_key(entry)] = entry
    found = []
    for entry in entries:
        speed = entry.record.figures.get(figure, 0.0)
        if entry.is_measured or speed <= 0 or (entry.folder is None and entry.record.machine.get("name") != HERE):
            continue
        real = measured.get(_pair_key(entry))
        if real is not None:
            axes = ", ".join(f"{name} {value}" for name, value in entry.axes.items())
            found.append(
                Pair(
                    group=entry.study or entry.record.name,
                    what=axes or entry.record.name,
                    measured=real.record.figures[figure],
                    predicted=speed,
                )
            )
    return found


def _pair_key(entry: StoreEntry) -> tuple[str | None, ...]:
    """Key shared by a measured entry and its prediction: the run folder, a study's point, or a recipe."""
    return (entry.folder,) if entry.folder is not None else (entry.study, entry.point or entry.record.spec_digest)


def errors(found: Sequence[Pair]) -> Errors | None:
    """Errors over pairs; None without pairs."""
    if not found:
        return None
    logs = [math.log(pair.ratio) for pair in found]
    return Errors(
        num_pairs=len(found),
        geomean=math.exp(statistics.fmean(map(abs, logs))) - 1,
        largest=math.exp(max(map(abs, logs))) - 1,
        bias=math.exp(statistics.fmean(logs)),
    )


def shown_pairs(found: Sequence[Pair]) -> list[Pair]:
    """All pairs; of too many, the worst and an even selection."""
    if len(found) <= MAX_SHOWN:
        return list(found)
    by_error = sorted(found, key=lambda pair: -abs(math.log(pair.ratio)))
    return by_error[:WORST] + thinned(by_error[WORST:], MAX_SHOWN - WORST)


def draw_pairs(found: Sequence[Pair]) -> Figure | None:
    """Predicted against measured, with the diagonal."""
    total = errors(found)
    if total is None:
        return None
    of_name = _display_names(pair.group for pair in found)
    found = [dataclasses.replace(pair, group=of_name[pair.group]) for pair in found]
    shown = shown_pairs(found)
    groups = list(dict.fromkeys(of_name.values()))
    every = [value for pair in shown for value in (pair.measured, pair.predicted)]
    traces = [diagonal("equal", min(every), max(every))]
    rows = []
    for index, (group, name) in enumerate(zip(groups, labels(groups), strict=True)):
        mine = [pair for pair in shown if pair.group == group]
        of_group = errors([pair for pair in found if pair.group == group])
        assert of_group is not None
        rows.append(
            (
                group,
                f"{of_group.num_pairs:,}",
                _error_text(of_group.geomean),
                _error_text(of_group.largest),
                f"{of_group.bias:.2f}",
            )
        )
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": name, "x": [pair.measured for pair in mine],
                "y": [pair.predicted for pair in mine], "text": [label(pair.what) for pair in mine],
                "customdata": [pair.ratio for pair in mine],
                "hovertemplate": "%{text}<br>measured %{x:.3s}<br>predicted %{y:.3s}, %{customdata:.2f} of it<extra>" + name + "</extra>",
                "marker": {"color": color(index), "size": 8, "opacity": 0.75},
            }
        )  # fmt: skip
    less = (
        f" {len(shown):,} of {len(found):,} points are drawn: the {WORST} largest errors and an even selection."
        if len(shown) < len(found)
        else ""
    )
    return Figure(
        key="predicted-measured",
        title="Predicted against measured",
        words=f"Samples per second of {total.num_pairs:,} points on the machine that measured them. The mean error is "
        f"{_error_text(total.geomean)}, the largest {_error_text(total.largest)}; on the dotted line both are equal." + less,
        traces=traces,
        layout=layout(log_axis("measured, samples/s", every), log_axis("predicted, samples/s", every)),
        table=TextTable(
            "Error of predictions", ("study", "points", "mean error", "largest", "predicted over measured"), tuple(rows)
        ),
        height_rem=28,
    )


def _display_names(groups: Iterable[str]) -> dict[str, str]:
    """Display name of each group; of too many, the smaller ones are merged."""
    counted = collections.Counter(groups)
    if len(counted) <= MAX_GROUPS:
        return {group: group for group in counted}
    own = {group for group, _ in counted.most_common(MAX_GROUPS - 1)}
    called = {group: group for group in counted if group in own}
    return called | {group: f"{len(counted) - len(own):,} {OTHERS}" for group in counted if group not in own}


def _error_text(error: float) -> str:
    return f"{error:.0%}" if error < 1 else f"a factor of {1 + error:.3g}"


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Power and throughput of one machine over the points of a study."""

    study: str
    machine: str
    watts: tuple[float, ...]
    samples_per_s: tuple[float, ...]
    names: tuple[str, ...]
    kind: str
    """`nameplate` or `measured`."""

    @property
    def samples_per_j(self) -> tuple[float, ...]:
        return tuple(speed / watts for speed, watts in zip(self.samples_per_s, self.watts, strict=True))


def efficiencies(entries: Sequence[StoreEntry]) -> list[Efficiency]:
    """Efficiency by study and machine; measured power takes precedence over nameplate power."""
    found: dict[tuple[str, str, str], list[tuple[float, float, str]]] = {}
    entries = newest(entries)
    called = _display_names(entry.study or entry.record.name for entry in entries)
    for entry in entries:
        figures = entry.record.figures
        kind = next((name for name in ("measured", "nameplate") if figures.get(f"{_PREFIX[name]}watts", 0) > 0), None)
        speed = figures.get("samples_per_s", 0.0)
        if kind is None or speed <= 0:
            continue
        machine = str(
            entry.record.machine.get("name") or entry.record.machine.get("gpu") or entry.record.machine.get("cpu", "")
        )
        axes = ", ".join(f"{name} {value}" for name, value in entry.axes.items()) or entry.record.name
        watts = figures[f"{_PREFIX[kind]}watts"]
        found.setdefault((called[entry.study or entry.record.name], machine, kind), []).append((watts, speed, axes))
    return [
        Efficiency(
            study=study,
            machine=machine,
            kind=kind,
            watts=tuple(one[0] for one in points),
            samples_per_s=tuple(one[1] for one in points),
            names=tuple(one[2] for one in points),
        )
        for (study, machine, kind), points in found.items()
    ]


_PREFIX = {"measured": "", "nameplate": "nameplate_"}


def draw_efficiency(found: Sequence[Efficiency]) -> Figure | None:
    """Samples per joule by machine, as box plots."""
    if not found:
        return None
    found = sorted(found, key=lambda one: (one.study, -statistics.median(one.samples_per_j)))
    studies = list(dict.fromkeys(one.study for one in found))
    traces, rows = [], []
    for index, (study, name) in enumerate(zip(studies, labels(studies), strict=True)):
        mine = [one for one in found if one.study == study]
        points = [
            (label(one.machine), value, label(what))
            for one in mine
            for value, what in thinned(list(zip(one.samples_per_j, one.names, strict=True)), MAX_SHOWN // len(found) + 1)
        ]
        traces.append(
            {
                "type": "box", "name": name, "x": [one[0] for one in points], "y": [one[1] for one in points],
                "text": [one[2] for one in points], "boxpoints": "all", "jitter": 0.4, "pointpos": 0,
                "marker": {"color": color(index), "size": 5, "opacity": 0.7}, "line": {"width": 1.5}, "fillcolor": "rgba(128,128,128,0.12)",
                "hovertemplate": "%{text}<br>%{y:.3~g} samples/J<extra>%{x}</extra>",
            }
        )  # fmt: skip
        rows += [
            (
                f"{study}, {one.machine}",
                one.kind,
                figure_text(statistics.median(one.samples_per_s)),
                figure_text(statistics.median(one.watts)),
                figure_text(statistics.median(one.samples_per_j)),
            )
            for one in mine
        ]
    every = [value for one in found for value in one.samples_per_j]
    return Figure(
        key="efficiency",
        title="Efficiency per watt",
        words="Samples per joule, by machine and study: each point is one set-up, the box spans p25 to p75. Power is measured, or else the nameplate power of trainers and parameter servers without readers.",
        traces=traces,
        layout=layout(axis("", type="category"), log_axis("samples/J", every), boxmode="group"),
        table=TextTable("Medians", ("study and machine", "power", "samples/s", "watts", "samples/J"), tuple(rows)),
        height_rem=28,
    )
