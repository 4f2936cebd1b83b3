"""The report: records and runs as one self-contained page; empty sections are omitted."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rowstead.records.store import StoreEntry
from rowstead.records.studies import count_kinds, newest
from rowstead.report import charts_populations, charts_predictions, charts_runs, charts_searches, charts_studies, charts_tables
from rowstead.report.html import Section, cards_html, page_of
from rowstead.report.inputs import ReportInputs, RunView, gather, name_logs
from rowstead.report.terminal import count
from rowstead.report.theme import Chart, TextTable, figure_text, words_of
from rowstead.spec.catalogue import HERE
from rowstead.spec.sizes import format_bytes

FIGURES = {
    "ne": "NE",
    "ne_expected": "NE, expected",
    "auc": "AUC",
    "calibration": "calibration",
    "samples_per_s": "samples/s",
    "num_samples": "samples",
    "train_s": "seconds",
    "peak_memory_bytes": "peak memory",
}
"""Figures in the table of runs."""
QUALITY = ("ne", "ne_expected", "auc", "calibration")
"""Figures of which the fourth decimal matters."""
MAX_SURFACES = 4
MAX_LOGS = 8
"""Maximum number of logs with a table of runs."""
MAX_RECIPES_READ = 64
"""Number of newest runs whose recipes are read for their tables: each takes some milliseconds."""
RATIOS = (("predicted: bigbasin-32", "predicted: cpu-2s"),)
"""Machines that the paper compares."""
PAPER = {
    "fig5": "Utilization of machines (the study's Fig. 5)",
    "fig9": "How many servers models take (the study's Fig. 9)",
    "fig10": "Throughput over dense and sparse features (the study's Fig. 10)",
    "fig11": "Throughput over batch size (the study's Fig. 11)",
    "fig12": "Throughput over hash size (the study's Fig. 12)",
    "fig13": "Throughput over MLP dimensions (the study's Fig. 13)",
    "fig14": "Placements of tables (the study's Fig. 14)",
    "fig15": "Quality over batch size (the study's Fig. 15)",
}
"""Descriptions of the shipped sweeps."""


def report_page(paths: Iterable[Path | str], *, root: Path | str = "runs", title: str | None = None) -> str:
    """Build the report of runs, stores and record files."""
    return page_from(gather(paths, root=root), title=title)


def page_from(inputs: ReportInputs, *, title: str | None = None) -> str:
    """Build the report from its inputs."""
    sections = sections_of(inputs)
    when = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    lead = f"{_summarize(inputs)} · {when}"
    return page_of(
        title or "rowstead report", lead, sections, foot="Made by rowstead report. This page makes no network requests."
    )


def charts_of(inputs: ReportInputs) -> list[Chart]:
    """All charts of the report."""
    return [chart for section in sections_of(inputs) for chart in section.charts]


def sections_of(inputs: ReportInputs) -> list[Section]:
    """The non-empty sections."""
    studies = sorted(inputs.contents.studies.items(), key=lambda one: _natural_key(one[0]))
    errors = charts_predictions.draw_pairs(charts_predictions.pairs(inputs.entries))
    efficiency = charts_predictions.draw_efficiency(charts_predictions.efficiencies(inputs.entries))
    made = [overview(inputs), *_run_sections(inputs.runs)]
    made.append(Section(key="prediction", title="Predicted against measured", charts=_drawn([errors])))
    made += [_study_section(name, inputs) for name, source in studies if source in ("sweep", "plan")]
    made += [_search_section(name, inputs) for name, source in studies if source == "trial"]
    made += [_quality_section(name, inputs) for name, source in studies if source == "quality"]
    made.append(_tables_section(inputs.runs))
    made.append(Section(key="efficiency", title="Efficiency per watt", charts=_drawn([efficiency])))
    return _limit_surfaces([one for one in made if one.charts or one.tables or one.blocks])


def _limit_surfaces(sections: Sequence[Section]) -> list[Section]:
    """Drop surfaces beyond what a browser can show at once; the heat maps show the same numbers."""
    left, made = MAX_SURFACES, []
    for section in sections:
        kept = []
        for chart in section.charts:
            is_surface = any(trace.get("type") == "surface" for trace in chart.traces)
            left -= is_surface
            if not is_surface or left >= 0:
                kept.append(chart)
        made.append(dataclasses.replace(section, charts=kept))
    return made


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Natural sort key: fig9 before fig10."""
    return [(int(part), "") if part.isdigit() and part.isascii() else (0, part) for part in re.split(r"(\d+)", name)]


def _summarize(inputs: ReportInputs) -> str:
    measured, predicted, failed = count_kinds(newest(inputs.entries))
    parts = [count(len(inputs.runs), "run"), f"{measured:,} measured and {predicted:,} predicted records"]
    parts += [f"{failed:,} failed"] if failed else []
    bad = inputs.contents.num_bad_lines
    parts += [f"{count(bad, 'line')} could not be read"] if bad else []
    return ", ".join(parts)


def overview(inputs: ReportInputs) -> Section:
    """The best run on the log that was trained on last as cards, and all runs in a table, the best of each log first."""
    blocks = []
    groups = _by_log(inputs.runs)
    finished = [run for run in next(iter(groups.values()), []) if run.status == "finished"]
    if finished:
        best, figures = finished[0], finished[0].figures
        date = best.entry.record.date[:16].replace("T", " ") if best.entry else ""
        cards = [("best run" if best.ne is not None and len(finished) > 1 else "newest run", best.name, date)]
        if best.ne is not None:
            possible = f"best possible {figures['ne_best']:.4f}" if "ne_best" in figures else ""
            cards.append(("NE", f"{best.ne:.4f}", ", ".join(filter(None, (_change(best, finished), possible)))))
        if "auc" in figures:
            cards.append(("AUC", f"{figures['auc']:.4f}", ""))
        if "samples_per_s" in figures:
            cards.append(("throughput", figure_text(figures["samples_per_s"]), "samples/s"))
        if "reading_held_up_share" in figures:
            cards.append(("waiting for data", f"{figures['reading_held_up_share']:.0%}", "of the time"))
        blocks.append(cards_html(cards))
    tables = []
    shown = [key for key in FIGURES if any(key in run.figures for run in inputs.runs)]
    log_names = name_logs(inputs.runs[:MAX_RECIPES_READ])
    for index, (log, runs) in enumerate(groups.items()):
        if index == MAX_LOGS:
            break
        rows = tuple(
            (
                run.name,
                *(_figure_text(key, run.figures.get(key)) for key in shown),
                _change_text(run.ne, runs[0].ne) if run is not runs[0] else "best" if run.ne is not None else "",
                run.status,
                run.entry.record.date[:16].replace("T", " ") if run.entry else "",
            )
            for run in runs
        )
        title = "Runs" if len(groups) == 1 else f"Runs on {log_names.get(log, 'older logs')}"
        headings = ("run", *(FIGURES[key] for key in shown), "NE against the best", "status", "date")
        tables.append(_without_empty(TextTable(title, headings, rows)))
    studies = inputs.contents.studies
    if studies:
        counts = {name: count_kinds(newest(inputs.contents.of(study=name))) for name in studies}
        rows = tuple((name, source, *(f"{number:,}" for number in counts[name])) for name, source in studies.items())
        tables.append(TextTable("Studies", ("study", "kind", "measured", "predicted", "failed"), rows))
    return Section(key="overview", title="Overview", blocks=blocks, tables=tables)


def _figure_text(key: str, value: float | None) -> str:
    if value is None:
        return ""
    if key in QUALITY and abs(value) < 100:
        return f"{value:.4f}"
    return format_bytes(value) if key.endswith("_bytes") else figure_text(value)


def _change_text(value: float | None, before: float | None) -> str:
    """A change in percent with its sign; empty if either is unknown."""
    return "" if value is None or not before else f"{100 * (value / before - 1):+.2f} %".replace("-", "−")


def _without_empty(table: TextTable) -> TextTable:
    """The table without columns that say nothing."""
    kept = [index for index in range(len(table.headings)) if any(row[index] not in ("", "best") for row in table.rows)]
    rows = tuple(tuple(row[index] for index in kept) for row in table.rows)
    return TextTable(table.title, tuple(table.headings[index] for index in kept), rows)


def _by_log(runs: Sequence[RunView]) -> dict[str, list[RunView]]:
    """The runs on each log, the log of the newest run first; of one log the best run first and those without a result last.

    Only the newest runs' recipes are read; the logs of older runs count as one.
    """
    found: dict[str, list[RunView]] = {}
    for index, run in enumerate(runs):
        found.setdefault(run.log if index < MAX_RECIPES_READ else "", []).append(run)
    return {log: sorted(of, key=lambda run: math.inf if run.ne is None else run.ne) for log, of in found.items()}


def _change(best: RunView, finished: Sequence[RunView]) -> str:
    """The change of the best run's NE against the run before it."""
    before = [run for run in finished if run.entry and best.entry and run.entry.record.date < best.entry.record.date and run.ne]
    if best.ne is None or not before:
        return ""
    last = max(before, key=lambda run: run.entry.record.date if run.entry else "")
    return f"{_change_text(best.ne, last.ne)} against {last.name}"


def _run_sections(runs: Sequence[RunView]) -> list[Section]:
    runs = charts_runs.drawn_runs(runs, best=next((one[0] for one in _by_log(runs).values() if one[0].ne is not None), None))
    spent = charts_runs.times_spent(runs)
    inks = charts_runs.inks_of(runs)
    time = [
        charts_runs.draw_steps(spent),
        charts_runs.draw_times(spent),
        charts_runs.draw_speed(charts_runs.speed_curves(runs), inks),
    ]
    quality = [
        *charts_runs.draw_quality(charts_runs.quality_curves(runs), inks),
        charts_runs.draw_calibration(charts_runs.calibrations(runs), inks),
    ]
    tasks = charts_runs.tasks_of(runs)
    tables = [
        None if tasks is None else _without_empty(tasks),
        charts_runs.rankings_of(runs),
        *(charts_runs.segments_of(run) for run in runs[: charts_runs.MAX_RUNS]),
    ]
    return [
        Section(key="time", title="Steps and time", charts=_drawn(time)),
        Section(key="quality", title="Quality", charts=_drawn(quality), tables=[one for one in tables if one is not None]),
    ]


def _drawn(charts: Iterable[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


def _study_section(name: str, inputs: ReportInputs) -> Section:
    entries = newest(inputs.contents.of(study=name))
    charts: list[Chart] = []
    for number, grid in enumerate(charts_studies.grids_in(entries), start=1):
        charts += _grid_charts(name if number == 1 else f"{name}, grid {number}", grid)
    about = PAPER.get(name.removesuffix("-quick"), "")
    if any(one.is_measured for one in entries) and not any(one.record.machine.get("name") == HERE for one in entries):
        about += f"{'. ' if about else ''}There are no predictions for the machine that measured it: `rowstead calibrate`, then the same sweep, adds them."
    tables = _failures("Failed points", entries)
    return Section(key=f"study-{name}", title=f"Sweep {name}", words=about, charts=charts, tables=tables)


def _grid_charts(name: str, entries: Sequence[StoreEntry]) -> list[Chart]:
    """Throughput over the axes of a grid, and quality if it was measured."""
    charts: list[Chart] = []
    study = charts_studies.study_of(name, entries)
    if study is not None:
        charts += charts_studies.draw_study(study)
        for over, under in RATIOS:
            ratio = charts_studies.ratio_of(study, over, under) if len(study.axes) == 2 and not study.is_population else None
            charts += charts_studies.draw_heat(ratio) if ratio is not None else []
        if study.is_population:
            charts += charts_populations.draw_uses(name, charts_populations.uses(entries))
            predicted = [one for one in entries if not one.is_measured and one.record.machine.get("name") != HERE]
            charts += _drawn([charts_populations.draw_counts(name, charts_populations.server_counts(predicted))])
    for figure in ("ne_expected", "ne"):
        study = charts_studies.study_of(name, entries, figure)
        if study is not None:
            return [*charts, *charts_studies.draw_study(study)[:1]]
    return charts


def _failures(title: str, entries: Sequence[StoreEntry]) -> list[TextTable]:
    """A table of failures with their reasons; empty if nothing failed."""
    lost = [entry for entry in entries if entry.has_failed]
    failed = [(_axes(entry) or entry.point or "", str(entry.seed or ""), entry.failure or "") for entry in lost]
    return [TextTable(title, ("where", "seed", "why"), tuple(failed))] if failed else []


def _axes(entry: StoreEntry) -> str:
    return ", ".join(f"{name} {words_of(value)}" for name, value in entry.axes.items())


def _search_section(name: str, inputs: ReportInputs) -> Section:
    entries = inputs.contents.of(study=name, source="trial")
    return Section(
        key=f"search-{name}",
        title=f"Search {name}",
        charts=charts_searches.draw_search(name, entries, inputs.paths),
        tables=_failures("Failed trials", entries),
    )


def _quality_section(name: str, inputs: ReportInputs) -> Section:
    entries = newest(inputs.contents.of(study=name, source="quality"))
    required = charts_searches.read_requirements(name, inputs.paths)
    chart = charts_searches.draw_effects(
        name,
        entries,
        tolerance=required.get("tolerance", charts_searches.TOLERANCE),
        confidence=required.get("confidence", charts_searches.CONFIDENCE),
    )
    tables = _failures("Failed runs", entries)
    return Section(key=f"quality-{name}", title=f"Quality study {name}", charts=_drawn([chart]), tables=tables)


def _tables_section(runs: Sequence[RunView]) -> Section:
    by_recipe: dict[str, RunView] = {}
    for run in sorted(runs[:MAX_RECIPES_READ], key=lambda run: run.status != "finished"):
        if run.spec is not None and run.spec.features.sparse and run.mean_ids is not None:
            by_recipe.setdefault(run.spec.name, run)
        if len(by_recipe) == charts_runs.MAX_RUNS:
            break
    sizes = [
        (name, charts_tables.feature_sizes(run.spec, run.mean_ids))
        for name, run in by_recipe.items()
        if run.spec and run.mean_ids
    ]
    charts: list[Chart | None] = [charts_tables.draw_sizes(sizes), charts_tables.draw_lengths(sizes)]
    for run in list(by_recipe.values())[:1]:
        tables = charts_tables.placed_tables(run)
        charts += [charts_tables.draw_placement(run.name, tables, by=by) for by in ("memory", "traffic")]
    return Section(key="tables", title="Features and tables", charts=_drawn(charts))
