"""What stands for one figure or table of the HPCA 2021 study, and how ours is put beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rowstead.records.store import Contents
from rowstead.records.studies import machine_of
from rowstead.report import charts_studies
from rowstead.report.charts_studies import MEASURED, Cell, Study, StudyAxis
from rowstead.report.theme import Chart, TextTable

MEASURED_WORDS = "On this machine, in sizes that it can train. Its speed is no fleet's: compare the shape."


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A figure that the study prints, and the same as we predict it."""

    kind: str
    what: str
    study: float
    ours: float


@dataclass(frozen=True, kw_only=True)
class Item:
    """One figure or table of the study, with ours beside it."""

    key: str
    title: str
    paper: str
    """What the study found."""
    differs: str
    """One honest sentence, or a few, made from the figures."""
    verdict: str
    """`yes`, `partly`, `no`, or `not measured`."""
    compared: Sequence[Compared] = ()
    """Figures that the study prints, each with our prediction."""
    said: Sequence[tuple[str, bool]] = ()
    """Statements of the study as they hold of our figures or not, for the count on the page."""
    figures: Sequence[Chart] = ()
    tables: Sequence[TextTable] = ()
    measured_words: str = "not measured"
    predicted_words: str = ""


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Statements that either hold of the figures or do not."""

    said: list[tuple[str, bool]] = field(default_factory=list)

    def add(self, text: str, holds: bool) -> None:
        self.said.append((text, holds))

    @property
    def verdict(self) -> str:
        right = sum(holds for _, holds in self.said)
        return "yes" if right == len(self.said) else "no" if right == 0 else f"partly: {right} of {len(self.said)}"

    @property
    def words(self) -> str:
        agree = "; ".join(text for text, holds in self.said if holds)
        differ = "; ".join(text for text, holds in self.said if not holds)
        return (
            ". ".join(
                filter(None, (f"Not as in the study: {differ}" if differ else "", f"As in the study: {agree}" if agree else ""))
            )
            + "."
        )


def measured_of(contents: Contents, name: str, figure: str = "samples_per_s") -> Study | None:
    """What was measured in a sweep, in its whole size where that was run, else in its quick one; by one machine, the last one."""
    for study in (name, f"{name}-quick"):
        entries = contents.of(study=study, kind="measured")
        here = [entry for entry in entries if machine_of(entry) == machine_of(entries[-1])]
        found = charts_studies.study_of(study, here, figure) if here else None
        if found is not None and found.series:
            return found
    return None


def line(study: Study, series: str = MEASURED) -> list[float]:
    """The values of a study of one axis, in order of the axis."""
    return [one.value for one in sorted(study.series.get(series, ()), key=lambda one: one.position)]


def predicted_lines(name: str, axis_name: str, series: Mapping[str, Mapping[object, float]]) -> Study:
    """Predictions over one axis as a study."""
    values = tuple(dict.fromkeys(value for of in series.values() for value in of))
    cells = {
        title: tuple(
            Cell(position=(values.index(value),), value=speed, low=speed, high=speed, num_runs=1) for value, speed in of.items()
        )
        for title, of in series.items()
    }
    return Study(
        name=name, figure="samples_per_s", axes=(StudyAxis(name=axis_name, values=values),), series=cells, num_failed=0
    )


def renamed(figure: Chart, key: str, title: str, **changes: Any) -> Chart:
    """The same figure under another name."""
    return dataclasses.replace(figure, key=key, title=title, **changes)


def lines_along(study: Study, name: str) -> Study:
    """A study of two axes as one over the axis of this name, with a series for each value of the other."""
    if len(study.axes) != 2 or name not in [one.name for one in study.axes]:
        return study
    along = [one.name for one in study.axes].index(name)
    other = study.axes[1 - along]
    series: dict[str, tuple[Cell, ...]] = {}
    for title, cells in study.series.items():
        for cell in cells:
            value = charts_studies.words_of(other.values[cell.position[1 - along]])
            moved = dataclasses.replace(cell, position=(cell.position[along],))
            series[f"{title}, {other.name} {value}"] = (*series.get(f"{title}, {other.name} {value}", ()), moved)
    return dataclasses.replace(study, axes=(study.axes[along],), series=series)


def side_by_side(key: str, measured: Study | None, predicted: Study) -> list[Chart]:
    """The figure of what was measured, where there is one, and that of the predictions, over the same axis."""
    drawn = charts_studies.draw_study(lines_along(measured, predicted.axes[0].name))[:4] if measured is not None else []
    made = [
        renamed(one, f"{key}-measured-{n}", one.title if n else "Measured here", words=MEASURED_WORDS)
        for n, one in enumerate(drawn)
    ]
    words = "In the study's own sizes, by the equations of rowstead plan."
    shown = charts_studies.draw_lines(predicted)
    return [*made, renamed(shown, f"{key}-predicted", "Predicted for the study's machines", words=words)]


def item_of(
    key: str,
    title: str,
    paper: str,
    checks: Checks,
    measured: Study | None,
    predicted: Study,
    *,
    in_short: str,
    note: str = "",
    compared: Sequence[Compared] = (),
) -> Item:
    """A sweep over one axis: what was measured and what is predicted side by side, and what the checks say."""
    return Item(
        key=key,
        title=title,
        paper=paper,
        differs=checks.words + note,
        verdict=checks.verdict,
        compared=compared,
        said=checks.said,
        figures=side_by_side(key, measured, predicted),
        measured_words=size_of(measured),
        predicted_words=in_short,
    )


def thousands(value: float | None) -> str:
    """A speed in thousands."""
    return "?" if value is None else f"{value / 1e3:,.1f}k"


def size_of(study: Study | None) -> str:
    """How much was measured, in words."""
    if study is None:
        return "not measured"
    return f"{len(study.series.get(MEASURED, ()))} points" + (f", {study.num_failed} failed" if study.num_failed else "")
