"""Charts of sweeps: lines, heat maps and surfaces over their axes, bars for a categorical axis, and distributions of populations."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rowstead.records.store import StoreEntry
from rowstead.records.studies import machine_of, newest
from rowstead.report.theme import (
    Chart,
    TextTable,
    axis,
    bare,
    bars,
    color,
    figure_text,
    heat_map,
    label,
    labels,
    layout,
    lines,
    log_axis,
    violin,
    words_of,
)

MEASURED = "measured here"
"""Name of the measured series of a single machine; with several, there is one per machine, `measured on …`."""
MAX_SERIES = 10
MAX_PANELS = 6
"""Maximum number of heat maps per study."""
FULL_GRID = 0.5
"""Minimum share of the grid that a sweep covers; below it, the study is treated as a random population."""


@dataclass(frozen=True, kw_only=True)
class StudyAxis:
    """One axis of a study with its values, in order."""

    name: str
    values: tuple[Any, ...]

    @property
    def is_number(self) -> bool:
        return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in self.values)

    @property
    def words(self) -> list[str]:
        return labels(words_of(value) for value in self.values)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure at one point of a study: the median over its runs."""

    position: tuple[int, ...]
    """Index on each axis."""
    value: float
    low: float
    high: float
    num_runs: int


@dataclass(frozen=True, kw_only=True)
class Study:
    """One figure over the axes of a study, by series."""

    name: str
    figure: str
    axes: tuple[StudyAxis, ...]
    series: Mapping[str, tuple[Cell, ...]]
    """`measured here`, or one series per measured machine if there are several; and one per predicted machine."""
    num_failed: int

    @property
    def is_population(self) -> bool:
        size = math.prod(max(len(one.values), 1) for one in self.axes)
        filled = max((len(cells) for cells in self.series.values()), default=0)
        return filled < FULL_GRID * size

    def table(self, series: str) -> list[list[float | None]]:
        """The values of a study with two axes: rows are the first axis, columns the second."""
        assert len(self.axes) == 2
        found: list[list[float | None]] = [[None] * len(self.axes[1].values) for _ in self.axes[0].values]
        for cell in self.series.get(series, ()):
            found[cell.position[0]][cell.position[1]] = cell.value
        return found


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def grids_in(entries: Sequence[StoreEntry]) -> list[list[StoreEntry]]:
    """Group the entries of a study by their axes, in order of first use: a study may include several grids."""
    found: dict[frozenset[str], list[StoreEntry]] = {}
    for entry in entries:
        found.setdefault(frozenset(entry.axes), []).append(entry)
    return list(found.values())


def study_of(name: str, entries: Sequence[StoreEntry], figure: str = "samples_per_s") -> Study | None:
    """Build the study of one figure; None if no entry has it.

    Axes with a single value are omitted. The seed is not an axis: runs that differ only in their seed are one point.
    """
    entries = newest(entries)
    whole = [entry for entry in entries if entry.failure is None and figure in entry.record.figures]
    if not whole:
        return None
    names = list(dict.fromkeys(key for entry in whole for key in entry.axes))
    axes = []
    for key in names:
        values = {_key(entry.axes[key]): entry.axes[key] for entry in whole if key in entry.axes}
        if len(values) > 1 and key != "seed":
            axes.append(StudyAxis(name=key, values=_ordered(list(values.values()))))
    indices = [{_key(value): index for index, value in enumerate(one.values)} for one in axes]
    groups: dict[str, dict[tuple[int, ...], list[float]]] = {}
    several = len({machine_of(entry) for entry in whole if entry.is_measured}) > 1
    for entry in whole:
        if not all(one.name in entry.axes for one in axes):
            continue
        position = tuple(index_of[_key(entry.axes[one.name])] for one, index_of in zip(axes, indices, strict=True))
        series = f"predicted: {entry.record.machine.get('name', '?')}"
        if entry.is_measured:
            series = f"measured on {machine_of(entry) or 'another machine'}" if several else MEASURED
        groups.setdefault(series, {}).setdefault(position, []).append(entry.record.figures[figure])
    cells = {series: tuple(_cell(position, found) for position, found in sorted(of.items())) for series, of in groups.items()}
    ordered = dict(sorted(cells.items(), key=lambda one: not _is_measured(one[0])))
    return Study(
        name=name,
        figure=figure,
        axes=tuple(axes),
        series=ordered,
        num_failed=sum(entry.failure is not None for entry in entries),
    )


def _is_measured(series: str) -> bool:
    return series.startswith("measured ")


def _cell(position: tuple[int, ...], found: Sequence[float]) -> Cell:
    return Cell(position=position, value=statistics.median(found), low=min(found), high=max(found), num_runs=len(found))


def _ordered(values: list[Any]) -> tuple[Any, ...]:
    """Numbers and lists of numbers in ascending order; text in the given order."""
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return tuple(sorted(values))
    if all(isinstance(value, list) and all(isinstance(one, (int, float)) for one in value) for value in values):
        return tuple(sorted(values, key=lambda value: (sum(value), len(value))))
    return tuple(values)


UNITS = {"samples_per_s": "samples/s", "samples_per_j": "samples/J", "ne": "NE", "ne_expected": "NE, expected"}


def unit(figure: str) -> str:
    """Display name of a figure."""
    return UNITS.get(figure, figure.replace("_", " "))


def draw_study(study: Study) -> list[Chart]:
    """Draw a study by its number of axes."""
    if not study.axes or not study.series:
        return []
    if study.is_population and len(study.axes) > 1:
        return draw_spread(study)
    if len(study.axes) == 1:
        return [draw_lines(study)]
    if len(study.axes) == 2:
        made = draw_heat(study)
        surface = draw_surface(study)
        return made if surface is None else [*made, surface]
    return draw_slices(study)


def _whose(study: Study) -> str:
    predicted = any(not _is_measured(name) for name in study.series)
    if not any(_is_measured(name) for name in study.series):
        return "Predicted; nothing was measured."
    where = "here" if MEASURED in study.series else "on several machines"
    return f"Solid lines are measured {where}; dashed lines are predicted." if predicted else f"Measured {where}."


def _failed(study: Study) -> str:
    return f" {study.num_failed:,} points failed and are not drawn." if study.num_failed else ""


def draw_lines(study: Study, *, key: str | None = None, title: str | None = None) -> Chart:
    """A study with one axis: one line per series."""
    (one,) = study.axes
    logs = one.is_number and min(one.values) > 0 and max(one.values) > 8 * min(one.values)
    traces, rows = [], []
    is_words = not one.is_number and not all(isinstance(value, (list, tuple)) for value in one.values)
    at = one.values if one.is_number else one.words
    for index, (name, cells) in enumerate(itertools.islice(study.series.items(), MAX_SERIES)):
        x = [at[cell.position[0]] for cell in cells]
        y = [cell.value for cell in cells]
        hover = "%{x}<br>%{y:.4~s} " + label(unit(study.figure)) + "<extra>" + label(name) + "</extra>"
        if is_words:
            traces.append(bars(label(name), x, y, index, hovertemplate=hover))
        else:
            dash = {} if _is_measured(name) else {"line": {"color": color(index), "width": 2, "dash": "dash"}}
            spread: dict[str, Any] = {}
            if any(cell.num_runs > 1 for cell in cells):
                above, below = [cell.high - cell.value for cell in cells], [cell.value - cell.low for cell in cells]
                spread["error_y"] = {"type": "data", "array": above, "arrayminus": below, "symmetric": False, "thickness": 1.2}
            traces.append(lines(label(name), x, y, index, hovertemplate=hover) | dash | spread)
        by_index = {cell.position[0]: cell.value for cell in cells}
        rows.append((name, *(figure_text(by_index.get(number)) for number in range(len(one.values)))))
    values = [cell.value for cells in study.series.values() for cell in cells]
    wide = not is_words and min(values) > 0 and max(values) > 5 * min(values)
    kind = {} if one.is_number else {"type": "category"}
    across = log_axis(label(one.name), one.values) if logs else axis(label(one.name), **kind)
    # of a figure such as NE, small differences matter
    near = not is_words and (study.figure.startswith("ne") or max(values) < 1.25 * min(values))
    plain = {} if near else {"rangemode": "tozero"}
    up = log_axis(unit(study.figure), values) if wide else axis(unit(study.figure), exponentformat="SI", **plain)
    several = any(cell.num_runs > 1 for cells in study.series.values() for cell in cells)
    seeds = " Points are medians over seeds, with minimum and maximum." if several else ""
    return Chart(
        key=key or f"{study.name}-lines-{study.figure}",
        title=title or f"{study.name}: {unit(study.figure)} over {one.name}",
        words=_whose(study) + seeds + _failed(study),
        traces=traces,
        layout=layout(across, up, **({"barmode": "group"} if is_words else {})),
        table=TextTable(unit(study.figure), ("", *(words_of(value) for value in one.values)), tuple(rows)),
    )


def draw_heat(study: Study) -> list[Chart]:
    """A study with two axes: one heat map per series."""
    first, second = study.axes
    charts: list[Chart] = []
    for name in itertools.islice(study.series, MAX_PANELS):
        table = study.table(name)
        texts = [[figure_text(value) for value in row] for row in table]
        value = f"%{{z:.4~s}} {label(unit(study.figure))}<extra></extra>"
        hover = f"{label(first.name)} %{{y}}, {label(second.name)} %{{x}}<br>{value}"
        lower_is_better = study.figure.startswith("ne")
        trace = heat_map(second.words, first.words, table, texts, hovertemplate=hover, reversescale=lower_is_better)
        rows = tuple((words_of(value), *row) for value, row in zip(first.values, texts, strict=True))
        charts.append(
            Chart(
                key=f"{study.name}-heat-{len(charts)}-{study.figure}",
                title=f"{study.name}: {unit(study.figure)}, {name}",
                words=f"By {first.name} and {second.name}; the stronger the color, the better." + _failed(study),
                traces=[trace],
                layout=layout(axis(label(second.name), type="category"), axis(label(first.name), type="category")),
                table=TextTable(unit(study.figure), (first.name, *(words_of(value) for value in second.values)), rows),
                height_rem=max(14.0, 7 + 2.6 * len(first.values)),
            )
        )
    return charts


def draw_surface(study: Study) -> Chart | None:
    """A study with two axes as surfaces, each relative to its own maximum."""
    first, second = study.axes
    if len(first.values) < 3 or len(second.values) < 3:
        return None
    traces = []
    for index, name in enumerate(itertools.islice(study.series, 3)):
        table = study.table(name)
        most = max((value for row in table for value in row if value is not None), default=0.0)
        if most <= 0:
            continue
        traces.append(
            {
                "type": "surface", "name": label(name), "z": [[None if value is None else value / most for value in row] for row in table],
                "x": list(range(len(second.values))), "y": list(range(len(first.values))), "showscale": False, "opacity": 0.85,
                "colorscale": [[0, color(index)], [1, color(index)]], "showlegend": True,
                "hovertemplate": "%{z:.0%} of the maximum<extra>" + label(name) + "</extra>",
            }
        )  # fmt: skip
    if not traces:
        return None

    def ticks(one: StudyAxis) -> dict[str, Any]:
        return {
            "title": {"text": label(one.name)}, "tickvals": list(range(len(one.values))), "ticktext": one.words, "gridcolor": "@line",
            "backgroundcolor": "rgba(0,0,0,0)",
        }  # fmt: skip

    scene = {
        "xaxis": ticks(second), "yaxis": ticks(first),
        "zaxis": {"title": {"text": "share of the maximum"}, "tickformat": ".0%", "gridcolor": "@line", "backgroundcolor": "rgba(0,0,0,0)"},
        "camera": {"eye": {"x": 1.5, "y": -1.5, "z": 0.9}}, "aspectratio": {"x": 1.1, "y": 1.1, "z": 0.75},
    }  # fmt: skip
    return Chart(
        key=f"{study.name}-surface-{study.figure}",
        title=f"{study.name}: the shape of {unit(study.figure)}",
        words="Each surface is relative to its own maximum, so that shapes can be compared between machines of different speed. Drag to rotate.",
        traces=traces,
        layout=bare(scene=scene),
        height_rem=30,
    )


def ratio_of(study: Study, over: str, under: str) -> Study | None:
    """The ratio of two series, point by point; None if they have no point in common."""
    below = {cell.position: cell.value for cell in study.series.get(under, ()) if cell.value > 0}
    cells = [
        _cell(cell.position, [cell.value / below[cell.position]])
        for cell in study.series.get(over, ())
        if cell.position in below
    ]
    if not cells:
        return None
    name = f"{over} / {under}".replace("predicted: ", "")
    return dataclasses.replace(study, figure="ratio", series={f"predicted: {name}": tuple(cells)}, num_failed=0)


def draw_slices(study: Study) -> list[Chart]:
    """A study with more axes: lines over the last one, one chart per combination of the others, at most `MAX_PANELS`."""
    last, others = study.axes[-1], study.axes[:-1]
    made: list[Chart] = []
    combinations = list(itertools.product(*(range(len(one.values)) for one in others)))
    for number, fixed in enumerate(combinations):
        series = {
            name: tuple(
                dataclasses.replace(cell, position=(cell.position[-1],)) for cell in cells if cell.position[:-1] == fixed
            )
            for name, cells in study.series.items()
        }
        series = {name: cells for name, cells in series.items() if cells}
        if not series or len(made) == MAX_PANELS:
            continue
        slice_ = Study(name=study.name, figure=study.figure, axes=(last,), series=series, num_failed=study.num_failed)
        where = ", ".join(f"{one.name} {words_of(one.values[index])}" for one, index in zip(others, fixed, strict=True))
        made.append(draw_lines(slice_, key=f"{study.name}-slice-{number}-{study.figure}", title=f"{study.name}: {where}"))
    return made


def draw_spread(study: Study) -> list[Chart]:
    """A population: the distribution of the figure, by series."""
    traces, rows = [], []
    for index, (name, cells) in enumerate(itertools.islice(study.series.items(), MAX_SERIES)):
        values = sorted(cell.value for cell in cells)
        hover = "%{y:.4~s}<extra>" + label(name) + "</extra>"
        traces.append(violin(label(name), values, index, meanline={"visible": True}, hovertemplate=hover))
        quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        rows.append((name, f"{len(values):,}", *(figure_text(one) for one in (values[0], *quarters, values[-1]))))
    return [
        Chart(
            key=f"{study.name}-spread-{study.figure}",
            title=f"{study.name}: distribution of {unit(study.figure)}",
            words="Each point is one model, drawn at random from the study's axes." + _failed(study),
            traces=traces,
            layout=layout(axis("", type="category"), axis(unit(study.figure), exponentformat="SI"), showlegend=False),
            table=TextTable(unit(study.figure), ("", "models", "min", "p25", "median", "p75", "max"), tuple(rows)),
        )
    ]
