"""Console output of long commands: a progress bar, or plain lines if output is not a terminal."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rowstead.distributed.stop import exit_code_of
from rowstead.report.terminal import build_table, count, print_wide, two_columns
from rowstead.run import Result
from rowstead.spec.heads import MEASURES, Measure
from rowstead.training.importance import Importances
from rowstead.training.metrics import Quality
from rowstead.training.progress_bar import PLAIN_EVERY_S, Throttle, quality_line
from rowstead.training.ranking_metrics import Ranking
from rowstead.training.segments import Segments


def quality_rows(quality: Quality) -> list[tuple[str, str]]:
    """An evaluation as names and values."""
    if quality.tasks:
        rows = [(f"{task}: {name}", text) for task, one in quality.tasks.items() for name, text in quality_rows(one)]
        return [*rows, *((task, "no example has its label") for task in quality.tasks_without_labels)]
    if quality.log_loss is None:
        rows = [("MSE", f"{quality.mse:.6g}"), ("mean prediction", f"{quality.mean_prediction:.6g}")]
        rows.append(("mean label", f"{quality.mean_label:.6g}"))
        return [*rows, *_missing_row(quality)]
    rows = []
    for measure, entry in MEASURES.items():
        value = getattr(quality, entry.figure)
        if value is not None:
            error = f" ± {quality.auc_error:.1g}" if measure == "auc" and quality.auc_error else ""
            rows.append((entry.title, f"{value:.4f}{error}{f' ({entry.note})' if entry.note else ''}"))
        elif measure == "ne":
            rows.append((entry.title, "undefined: all labels are equal"))
        rows += _rows_after(measure, quality)
    return [*rows, *_missing_row(quality)]


def _rows_after(measure: Measure, quality: Quality) -> list[tuple[str, str]]:
    """What belongs to a measure."""
    rows = []
    if measure == "ne" and quality.ne_train_rate is not None:
        against = "against always predicting the training split's mean label"
        rows.append(("NE by training's rate", f"{quality.ne_train_rate:.4f} ({against})"))
    if measure == "ne" and quality.ne_best is not None and quality.ne_expected is not None:
        above = quality.ne_expected / quality.ne_best - 1
        rows.append(("best possible NE", f"{quality.ne_best:.4f} (the model's is {above:.2%} above it, label noise aside)"))
    if measure == "gauc" and quality.ranking is not None:
        rows += ranking_rows(quality.ranking)
    if measure == "logloss" and quality.calibration is not None:
        rows.append(("calibration", f"{quality.calibration:.4f} (mean prediction over mean label; 1 is right)"))
    return rows


def _missing_row(quality: Quality) -> list[tuple[str, str]]:
    """Of a task some of whose labels are missing, how many."""
    if not quality.num_missing:
        return []
    return [("labels missing", f"{quality.num_missing:,} of {quality.num_samples + quality.num_missing:,}, not counted")]


def ranking_rows(ranking: Ranking) -> list[tuple[str, str]]:
    """Recall and NDCG as names and values."""
    share = "" if ranking.group_share == 1 else f", a random 1/{round(1 / ranking.group_share)} of all"
    over = f" (mean over {count(ranking.num_groups, 'group')} with a positive{share})"
    rows = []
    for k in ranking.recall:
        rows.append((f"recall at {k}", f"{ranking.recall[k]:.4f}{over}"))
        rows.append((f"NDCG at {k}", f"{ranking.ndcg[k]:.4f}"))
        over = ""
    return rows


def segments_table(segments: Segments) -> Table:
    """NE and calibration by the value of a column."""
    weight = sum(row.weight for row in segments.rows)
    rows = [
        [
            row.name,
            f"{row.weight:,.0f}",
            f"{row.weight / weight:.1%}",
            f"{row.mean_label:.4f}",
            "" if row.ne is None else f"{row.ne:.4f}",
            "" if row.calibration is None else f"{row.calibration:.4f}",
        ]
        for row in segments.rows
    ]
    headings = (segments.column, "examples", "share", "mean label", "NE", "calibration")
    return build_table(
        headings, rows, title=f"By {segments.column}, {count(segments.num_values, 'value')}", numbers=headings[1:]
    )


def print_importance(console: Console, found: Importances) -> None:
    """Print what permuting each feature costs."""
    title = f"What mattered: NE {found.ne:.4f} of {count(found.num_samples, 'example')}, each feature permuted {found.permutations} times"
    rows = [[one.name, one.kind, f"{one.ne_increase:+.5f}", f"{one.low:+.5f} to {one.high:+.5f}"] for one in found.features]
    headings = ("feature", "kind", "NE increase", "95 % interval")
    console.print(title, soft_wrap=True)
    print_wide(console, build_table(headings, rows, numbers=headings[2:]))


def command_name() -> str:
    """How to call this program again: `rowstead`, or its path if it is not on PATH."""
    called = Path(sys.argv[0])
    found = called.name != "rowstead" or shutil.which("rowstead") is not None or not called.is_file()
    return "rowstead" if found else os.path.relpath(called)


def as_typed(path: Path) -> str:
    """A path quoted for a shell, so that it is one argument and not an option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def summary(result: Result) -> Table:
    """The summary of a run: quality, speed and where the time went."""
    outcome = result.outcome
    rows = quality_rows(outcome.quality) if outcome.quality is not None else []
    if outcome.test is not None:
        rows.append((f"test ({outcome.test.num_samples:,})", quality_line(outcome.test)))
    if outcome.samples_per_s is not None:
        rows.append(("samples/s", f"{outcome.samples_per_s:,.0f}"))
    total_s = sum(outcome.phase_s.values())
    if total_s > 0:
        parts = sorted(outcome.phase_s.items(), key=lambda item: -item[1])
        rows.append(("where the time went", " · ".join(f"{phase.value} {s / total_s:.0%}" for phase, s in parts)))
    title = f"{result.folder.name}: {outcome.ending} after {count(outcome.position.step, 'step')}"
    return two_columns(title, rows)


def print_ending(console: Console, result: Result, *, options: str = "") -> None:
    """Print the summary of a run; of one that was interrupted, how to resume it, with these options."""
    step = result.outcome.position.step
    if result.outcome.ending != "interrupted":
        console.print(summary(result))
        quality = result.outcome.quality
        if quality is not None and quality.segments is not None:
            print_wide(console, segments_table(quality.segments))
        me, run = command_name(), as_typed(result.folder)
        for line in (f"model: {result.folder}", "next:", f"  {me} evaluate {run}", f"  {me} export {run} --to exported"):
            console.print(line, soft_wrap=True)  # not in the table, whose borders and line breaks a shell would get
        return
    console.print(f"Stopped after step {step:,}; the checkpoint is saved." if step else "Stopped before the first step.")
    console.print(f"Resume with: {command_name()} train --resume {as_typed(result.folder)}{options}", soft_wrap=True)
    raise typer.Exit(exit_code_of(result.stopped_by))


@contextmanager
def doing(console: Console, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of work; the yielded function takes how much is done, and of how much (0: unknown)."""
    if not console.is_terminal:
        yield _plain_counter(console, unit)
        return
    columns = (BarColumn(), TextColumn("{task.completed:,.0f} " + unit), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def _plain_counter(console: Console, unit: str) -> Callable[[int, int], None]:
    """Prints a line every few seconds."""
    throttle = Throttle(PLAIN_EVERY_S)

    def advance(done: int, total: int) -> None:
        if throttle.is_due():
            of_all = f" of {total:,}" if total else ""
            console.print(f"{done:,}{of_all} {unit}", soft_wrap=True)

    return advance
