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
from rowstead.report.theme import (
    Chart,
    TextTable,
    axis,
    color,
    diagonal,
    figure_text,
    label,
    labels,
    layout,
    log_axis,
    points,
    thinned,
)
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
            group, speed_there = entry.study or entry.record.name, real.record.figures[figure]
            found.append(Pair(group=group, what=_what(entry), measured=speed_there, predicted=speed))
    return found


def _what(entry: StoreEntry) -> str:
    """The point of an entry in its study, or its recipe."""
    return ", ".join(f"{name} {value}" for name, value in entry.axes.items()) or entry.record.name


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


def draw_pairs(found: Sequence[Pair]) -> Chart | None:
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
        texts = (_error_text(of_group.geomean), _error_text(of_group.largest), f"{of_group.bias:.2f}")
        rows.append((group, f"{of_group.num_pairs:,}", *texts))
        hover = "%{text}<br>measured %{x:.3s}<br>predicted %{y:.3s}, %{customdata:.2f} of it<extra>%{fullData.name}</extra>"
        trace = points(name, [pair.measured for pair in mine], [pair.predicted for pair in mine], index, hovertemplate=hover)
        traces.append(trace | {"text": [label(pair.what) for pair in mine], "customdata": [pair.ratio for pair in mine]})
    less = ""
    if len(shown) < len(found):
        less = f" {len(shown):,} of {len(found):,} points are drawn: the {WORST} largest errors and an even selection."
    return Chart(
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
    kind: str
    """Of power: `nameplate` or `measured`."""
    points: tuple[tuple[float, float, str], ...]
    """Watts, samples per second and name of each point."""

    @property
    def samples_per_j(self) -> tuple[float, ...]:
        return tuple(speed / watts for watts, speed, _ in self.points)


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
        facts = entry.record.machine
        machine = str(facts.get("name") or facts.get("gpu") or facts.get("cpu", ""))
        one = (figures[f"{_PREFIX[kind]}watts"], speed, _what(entry))
        found.setdefault((called[entry.study or entry.record.name], machine, kind), []).append(one)
    return [
        Efficiency(study=study, machine=machine, kind=kind, points=tuple(points))
        for (study, machine, kind), points in found.items()
    ]


_PREFIX = {"measured": "", "nameplate": "nameplate_"}


def draw_efficiency(found: Sequence[Efficiency]) -> Chart | None:
    """Samples per joule by machine, as box plots."""
    if not found:
        return None
    found = sorted(found, key=lambda one: (one.study, -statistics.median(one.samples_per_j)))
    studies = list(dict.fromkeys(one.study for one in found))
    traces, rows = [], []
    for index, (study, name) in enumerate(zip(studies, labels(studies), strict=True)):
        mine = [one for one in found if one.study == study]
        shown = [
            (label(one.machine), speed / watts, label(what))
            for one in mine
            for watts, speed, what in thinned(one.points, MAX_SHOWN // len(found) + 1)
        ]
        traces.append(
            {
                "type": "box", "name": name, "x": [one[0] for one in shown], "y": [one[1] for one in shown],
                "text": [one[2] for one in shown], "boxpoints": "all", "jitter": 0.4, "pointpos": 0,
                "marker": {"color": color(index), "size": 5, "opacity": 0.7}, "line": {"width": 1.5}, "fillcolor": "rgba(128,128,128,0.12)",
                "hovertemplate": "%{text}<br>%{y:.3~g} samples/J<extra>%{x}</extra>",
            }
        )  # fmt: skip
        for one in mine:
            watts, speeds, _ = zip(*one.points, strict=True)
            medians = (figure_text(statistics.median(values)) for values in (speeds, watts, one.samples_per_j))
            rows.append((f"{study}, {one.machine}", one.kind, *medians))
    every = [value for one in found for value in one.samples_per_j]
    return Chart(
        key="efficiency",
        title="Efficiency per watt",
        words="Samples per joule, by machine and study: each point is one set-up, the box spans p25 to p75. Power is measured, or else the nameplate power of trainers and parameter servers without readers.",
        traces=traces,
        layout=layout(axis("", type="category"), log_axis("samples/J", every), boxmode="group"),
        table=TextTable("Medians", ("study and machine", "power", "samples/s", "watts", "samples/J"), tuple(rows)),
        height_rem=28,
    )
