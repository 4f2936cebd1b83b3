"""The report: records and runs as one self-contained page, section by section, each only where there is something to show."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rowstead.records.store import StoreEntry
from rowstead.records.studies import newest
from rowstead.report import charts_populations, charts_predictions, charts_runs, charts_searches, charts_studies, charts_tables
from rowstead.report.describe import TextTable
from rowstead.report.html import Section, cards_html, page_of
from rowstead.report.inputs import ReportInputs, RunView, gather
from rowstead.report.theme import Figure, figure_text
from rowstead.spec.catalogue import HERE

FIGURES = {
    "samples_per_s": "samples/s",
    "ne": "NE",
    "ne_expected": "NE, expected",
    "auc": "AUC",
    "calibration": "calibration",
    "num_samples": "samples",
    "train_s": "seconds",
    "peak_memory_bytes": "peak bytes",
}
"""Of runs, in the table at the top."""
MAX_SURFACES = 4
MAX_RECIPES_READ = 64
"""Runs, the newest, whose recipes are looked through for their tables: reading one takes some milliseconds."""
RATIOS = (("predicted: bigbasin-32", "predicted: cpu-2s"),)
"""Machines that the study of the paper compares."""
PAPER = {
    "fig5": "Fig. 5 of the study: how much of their machines runs use",
    "fig9": "Fig. 9: how many servers models take",
    "fig10": "Fig. 10: throughput over dense and sparse features",
    "fig11": "Fig. 11: throughput over batch size",
    "fig12": "Fig. 12: throughput over hash size",
    "fig13": "Fig. 13: throughput over MLP dimensions",
    "fig14": "Fig. 14: placements of tables",
    "fig15": "Fig. 15: quality over batch size",
}
"""What the shipped sweeps are about."""


def report_page(paths: Iterable[Path | str], *, root: Path | str = "runs", title: str | None = None) -> str:
    """The report of some runs, stores and files of records."""
    return page_from(gather(paths, root=root), title=title)


def page_from(material: ReportInputs, *, title: str | None = None) -> str:
    """The report of what was gathered."""
    sections = sections_of(material)
    when = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    lead = f"{_counted(material)} · {when}"
    return page_of(
        title or "rowstead report",
        lead,
        sections,
        foot="Made by rowstead report. It is self-contained: it makes no network requests.",
    )


def figures_of(material: ReportInputs) -> list[Figure]:
    """Every figure of the report, for files of their own."""
    return [figure for section in sections_of(material) for figure in section.figures]


def sections_of(material: ReportInputs) -> list[Section]:
    """The sections that have something to show."""
    studies = sorted(material.contents.studies.items(), key=lambda one: _in_order(one[0]))
    made = [overview(material), *_of_runs(material.runs), _of_forecasts(material.entries)]
    made += [_of_study(name, material) for name, source in studies if source in ("sweep", "plan")]
    made += [_of_search(name, material) for name, source in studies if source == "trial"]
    made += [_of_quality(name, material) for name, source in studies if source == "quality"]
    made += [_of_tables(material.runs), _of_efficiency(material.entries)]
    return _few_surfaces([one for one in made if one.figures or one.tables or one.blocks])


def _few_surfaces(sections: Sequence[Section]) -> list[Section]:
    """The sections with no more surfaces than a browser can show at once; the heat maps beside them have the same numbers."""
    left, made = MAX_SURFACES, []
    for section in sections:
        kept = []
        for figure in section.figures:
            is_surface = any(trace.get("type") == "surface" for trace in figure.traces)
            left -= is_surface
            if not is_surface or left >= 0:
                kept.append(figure)
        made.append(dataclasses.replace(section, figures=kept))
    return made


def _in_order(name: str) -> list[tuple[int, str]]:
    """Names in the order in which people count: fig9 before fig10."""
    return [(int(part), "") if part.isdigit() and part.isascii() else (0, part) for part in re.split(r"(\d+)", name)]


def _counted(material: ReportInputs) -> str:
    runs, entries = len(material.runs), newest(material.entries)
    measured = sum(entry.is_measured for entry in entries)
    parts = [
        f"{runs:,} run{'s' if runs != 1 else ''}",
        f"{measured:,} measured and {len(entries) - measured:,} predicted records",
    ]
    failed = sum(entry.has_failed for entry in entries)
    parts += [f"{failed:,} failed"] if failed else []
    bad = material.contents.num_bad_lines
    parts += [f"{bad:,} line{'s' if bad != 1 else ''} could not be read"] if bad else []
    return ", ".join(parts)


def overview(material: ReportInputs) -> Section:
    """The newest run in large figures, and all runs in a table."""
    blocks = []
    finished = [run for run in material.runs if run.entry is not None]
    if finished:
        last = finished[0]
        figures = last.figures
        cards = [("newest run", last.name, last.entry.record.date[:16].replace("T", " ") if last.entry else "")]
        if "samples_per_s" in figures:
            cards.append(("throughput", figure_text(figures["samples_per_s"]), "samples/s"))
        if "ne" in figures:
            best = f"best possible {figures['ne_best']:.4f}" if "ne_best" in figures else ""
            cards.append(("NE", f"{figures['ne']:.4f}", best))
        if "auc" in figures:
            cards.append(("AUC", f"{figures['auc']:.4f}", ""))
        if "reading_held_up_share" in figures:
            cards.append(("waiting for data", f"{figures['reading_held_up_share']:.0%}", "of the time"))
        blocks.append(cards_html(cards))
    tables = []
    if material.runs:
        shown = [key for key in FIGURES if any(key in run.figures for run in material.runs)]
        rows = tuple(
            (
                run.name,
                run.entry.record.date[:16].replace("T", " ") if run.entry else "not finished",
                *(figure_text(run.figures.get(key)) for key in shown),
            )
            for run in material.runs
        )
        tables.append(TextTable("Runs", ("run", "date", *(FIGURES[key] for key in shown)), rows))
    studies = material.contents.studies
    if studies:
        rows = tuple(_study_row(name, source, newest(material.contents.of(study=name))) for name, source in studies.items())
        tables.append(TextTable("Studies", ("study", "kind", "measured", "predicted", "failed"), rows))
    return Section(key="overview", title="Overview", blocks=blocks, tables=tables)


def _study_row(name: str, source: str, entries: Sequence[StoreEntry]) -> tuple[str, ...]:
    measured = sum(entry.is_measured for entry in entries)
    failed = sum(entry.has_failed for entry in entries)
    return name, source, f"{measured:,}", f"{len(entries) - measured:,}", f"{failed:,}"


def _of_runs(runs: Sequence[RunView]) -> list[Section]:
    spent = charts_runs.times_spent(runs[: 4 * charts_runs.MAX_RUNS])
    time = [
        charts_runs.draw_steps(spent),
        charts_runs.draw_times(spent),
        charts_runs.draw_speed(charts_runs.speed_curves(runs)),
    ]
    quality = [
        charts_runs.draw_quality(charts_runs.quality_curves(runs)),
        charts_runs.draw_calibration(charts_runs.calibrations(runs)),
    ]
    return [
        Section(key="time", title="Steps and time", figures=_there(time)),
        Section(key="quality", title="Quality", figures=_there(quality)),
    ]


def _there(figures: Iterable[Figure | None]) -> list[Figure]:
    return [figure for figure in figures if figure is not None]


def _of_forecasts(entries: Sequence[StoreEntry]) -> Section:
    figure = charts_predictions.draw_pairs(charts_predictions.pairs(entries))
    return Section(key="prediction", title="Predicted against measured", figures=_there([figure]))


def _of_study(name: str, material: ReportInputs) -> Section:
    entries = newest(material.contents.of(study=name))
    figures: list[Figure] = []
    for number, grid in enumerate(charts_studies.grids_in(entries), start=1):
        figures += _of_grid(name if number == 1 else f"{name}, grid {number}", grid)
    about = PAPER.get(name.removesuffix("-quick"), "")
    tables = _failures("Points that failed", entries)
    return Section(key=f"study-{name}", title=f"Sweep {name}", words=about, figures=figures, tables=tables)


def _of_grid(name: str, entries: Sequence[StoreEntry]) -> list[Figure]:
    """Speed over the axes that some entries have in common, and quality where it was measured."""
    figures: list[Figure] = []
    study = charts_studies.study_of(name, entries)
    if study is not None:
        figures += charts_studies.draw_study(study)
        for over, under in RATIOS:
            ratio = charts_studies.ratio_of(study, over, under) if len(study.axes) == 2 and not study.is_population else None
            figures += charts_studies.draw_heat(ratio) if ratio is not None else []
        if study.is_population:
            figures += _there([charts_populations.draw_uses(name, charts_populations.uses(entries))])
            predicted = [one for one in entries if not one.is_measured and one.record.machine.get("name") != HERE]
            figures += _there([charts_populations.draw_counts(name, charts_populations.server_counts(predicted))])
    for figure in ("ne_expected", "ne"):
        study = charts_studies.study_of(name, entries, figure)
        if study is not None:
            return [*figures, *charts_studies.draw_study(study)[:1]]
    return figures


def _failures(title: str, entries: Sequence[StoreEntry]) -> list[TextTable]:
    """Where something failed, and why; nothing where all went well."""
    lost = [entry for entry in entries if entry.has_failed]
    failed = [(_axes(entry) or entry.point or "", str(entry.seed or ""), entry.failure or "") for entry in lost]
    return [TextTable(title, ("where", "seed", "why"), tuple(failed))] if failed else []


def _axes(entry: StoreEntry) -> str:
    return ", ".join(f"{name} {charts_studies.words_of(value)}" for name, value in entry.axes.items())


def _of_search(name: str, material: ReportInputs) -> Section:
    entries = material.contents.of(study=name, source="trial")
    return Section(
        key=f"search-{name}",
        title=f"Search {name}",
        figures=charts_searches.draw_search(name, entries, material.places),
        tables=_failures("Trials that failed", entries),
    )


def _of_quality(name: str, material: ReportInputs) -> Section:
    entries = newest(material.contents.of(study=name, source="quality"))
    asked = charts_searches.wishes(name, material.places)
    figure = charts_searches.draw_effects(
        name,
        entries,
        tolerance=asked.get("tolerance", charts_searches.TOLERANCE),
        confidence=asked.get("confidence", charts_searches.CONFIDENCE),
    )
    tables = _failures("Runs that failed", entries)
    return Section(key=f"quality-{name}", title=f"Quality study {name}", figures=_there([figure]), tables=tables)


def _of_tables(runs: Sequence[RunView]) -> Section:
    by_recipe: dict[str, RunView] = {}
    for run in runs[:MAX_RECIPES_READ]:
        if run.spec is not None and run.spec.features.sparse:
            by_recipe.setdefault(run.spec.name, run)
        if len(by_recipe) == charts_runs.MAX_RUNS:
            break
    sizes = [(name, charts_tables.feature_sizes(run.spec)) for name, run in by_recipe.items() if run.spec is not None]
    figures: list[Figure | None] = [charts_tables.draw_sizes(sizes), charts_tables.draw_lengths(sizes)]
    for run in list(by_recipe.values())[:1]:
        tables = charts_tables.placed_tables(run)
        figures += [charts_tables.draw_placement(run.name, tables, by=by) for by in ("memory", "traffic")]
    return Section(key="tables", title="Features and tables", figures=_there(figures))


def _of_efficiency(entries: Sequence[StoreEntry]) -> Section:
    figure = charts_predictions.draw_efficiency(charts_predictions.efficiencies(entries))
    return Section(key="efficiency", title="Efficiency per watt", figures=_there([figure]))
