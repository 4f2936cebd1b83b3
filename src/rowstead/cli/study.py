"""`rowstead sweep`, `tune` and `quality`: many runs of a recipe."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from rowstead.cli.options import RUNS, Root, Set, print_shipped
from rowstead.distributed.stop import exit_code_of
from rowstead.report.terminal import build_table, print_wide, printable, terminal, two_columns
from rowstead.report.theme import words_of
from rowstead.spec.errors import RowsteadError

if TYPE_CHECKING:
    from rowstead.records.studies import Trial
    from rowstead.study.sweep import StudyResult, SweepCallback, SweepProgress
    from rowstead.study.tune import SearchResult

Name = Annotated[str | None, typer.Option("--name", help="Name of the study. A study of the same name is continued.")]


def sweep(
    recipe: Annotated[
        str | None, typer.Argument(help="A sweep, or with --grid the recipe of a run: file or shipped name.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=A,B,C", help="Sweep this key over these values. Repeatable."),
    ] = None,
    set_: Set = None,
    quick: Annotated[bool, typer.Option("--quick", help="The sweep's small size, for two cores.")] = False,
    predict_only: Annotated[bool, typer.Option("--predict-only", help="Measure nothing: predict every point.")] = False,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="NAME,NAME", help="Machines to predict on. [default: this one and the sweep's own]"),
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run points that failed before again.")] = False,
    name: Name = None,
    runs: Root = RUNS,
) -> None:
    """Measure a grid of runs, with predictions. Run it again to continue an interrupted sweep."""
    from rowstead.spec.axis import axis_from
    from rowstead.spec.parse import settings_from
    from rowstead.spec.study import SWEEPS
    from rowstead.spec.sweep import load_sweep, sweep_names

    console = terminal()
    if recipe is None:
        print_shipped(SWEEPS, sweep_names())
        return
    spec = load_sweep(recipe, grid=[axis_from(text) for text in grid or []])
    spec = spec.made_quick() if quick else spec
    spec = dataclasses.replace(spec, set={**spec.set, **settings_from(set_ or [])}, name=name or spec.name)
    machines = [one.strip() for one in on.split(",") if one.strip()] if on is not None else None

    from rowstead.study.predictions import NOT_CALIBRATED
    from rowstead.study.sweep import sweep as run_sweep

    with _stoppable(console), sweep_callback(console) as callback:
        finished = run_sweep(
            spec, root=runs, on=machines, predict_only=predict_only, retry_failed=retry_failed, callback=callback
        )
    print_wide(console, sweep_table(finished))
    failures = [entry.failure or "" for entry in finished.failed]
    for text in dict.fromkeys(failures):
        if text == NOT_CALIBRATED:
            console.print(
                "This machine is not calibrated and has no predictions: run `rowstead calibrate`, then this command again.",
                soft_wrap=True,
            )
        else:
            console.print(f"{failures.count(text):,} failed: {printable(text)}", soft_wrap=True)
    where = runs / "records.jsonl"
    console.print(f"{len(finished.points):,} points of `{finished.name}` in {where}", soft_wrap=True)


def tune(
    recipe: Annotated[str, typer.Argument(help="A search, or the recipe of a run to search around: file or shipped name.")],
    space: Annotated[
        list[str] | None,
        typer.Option("--space", metavar="KEY=LOW..HIGH", help="Search this key, or over values: KEY=A,B,C. Repeatable."),
    ] = None,
    retune_for: Annotated[
        list[str] | None,
        typer.Option(
            "--retune-for",
            metavar="KEY=VALUE",
            help="What changes, such as train.batch_size=8192; the search starts from the recipe's settings. Repeatable.",
        ),
    ] = None,
    sampler: Annotated[
        str | None, typer.Option("--sampler", metavar="gp|tpe|random|grid", help="What proposes settings. [default: gp]")
    ] = None,
    trials: Annotated[int | None, typer.Option("--trials", min=1, metavar="N", help="Number of trials. [default: 40]")] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", metavar="M", help="Time limit in minutes.")] = None,
    samples_per_s: Annotated[
        float | None, typer.Option("--samples-per-s", metavar="N", help="Only settings at least this fast count.")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, metavar="N", help="Number of worker processes.")] = None,
    prune: Annotated[bool, typer.Option("--prune/--no-prune", help="Prune bad trials.")] = True,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the search.")] = None,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File for the best recipe. [default: in the study's folder]")
    ] = None,
    name: Name = None,
    runs: Root = RUNS,
) -> None:
    """Search for the settings with the lowest NE, and write them as a recipe. Run it again to continue."""
    from rowstead.spec.parse import parse, settings_from, to_plain
    from rowstead.spec.tune import TuneSpec, load_tune, space_axis_from

    spec = load_tune(recipe)
    given = {
        "sampler": sampler,
        "trials": trials if trials is not None or minutes is None else None,
        "minutes": minutes,
        "samples_per_s": samples_per_s,
        "workers": workers,
        "seed": seed,
        "name": name,
    }
    plain = to_plain(spec) | {key: value for key, value in given.items() if value is not None}
    if minutes is not None and trials is None:
        plain["trials"] = None
    plain |= {"prune": spec.prune and prune, "set": {**spec.set, **settings_from(set_ or [])}}
    plain["retune_for"] = {**spec.retune_for, **settings_from(retune_for or [])}
    if space:
        plain["space"] = [dataclasses.asdict(space_axis_from(text)) for text in space]
    if retune_for and name is None:
        plain["name"] = f"{spec.name.removesuffix('-tune')}-retune"
    spec = parse(TuneSpec, plain)

    from rowstead.study.tune import tune as run_search

    console = terminal()
    with _stoppable(console):
        found = run_search(spec, root=runs, out=out, callback=TrialLines(console, spec.trials).update)
    _print_search(console, found)


class TrialLines:
    """Prints each trial once, when it ends: with several workers not in the order of their numbers."""

    def __init__(self, console: Console, num_trials: int | None) -> None:
        self._console = console
        self._of_all = "" if num_trials is None else f" of {num_trials:,}"
        self._printed: set[int] = set()

    def update(self, trials: list[Trial]) -> None:
        lowest = min((trial.objective for trial in trials if trial.counts and trial.objective is not None), default=None)
        best = "" if lowest is None else f" · best {lowest:.5f}"
        for trial in trials:
            if trial.number in self._printed:
                continue
            self._printed.add(trial.number)
            ne = "" if trial.objective is None else f": NE {trial.objective:.5f}"
            why = f" · {trial.entry.failure}" if trial.state == "failed" else ""
            line = f"trial {len(self._printed):,}{self._of_all} {trial.state}{ne}{best}{why}"
            self._console.print(printable(line), soft_wrap=True)


def _print_search(console: Console, found: SearchResult) -> None:
    best = found.best
    if best is None:
        floor = found.spec.samples_per_s
        why = f" at {floor:,.0f} samples/s or more" if floor is not None else ""
        raise RowsteadError(
            f"no trial of `{found.spec.name}` finished with an NE{why}: see `rowstead runs --where study={found.spec.name}`"
        )
    rows = [("best NE", f"{best.objective:.5f}, trial {best.number + 1:,} of {len(found.trials):,}")]
    if found.before is not None and best.objective is not None:
        before = found.before.record.figures["objective"]
        rows.append(("before the change", f"{before:.5f}: the best is {best.objective / before - 1:+.3%} from it"))
        if found.unchanged is not None and found.unchanged.objective is not None:
            rows.append(
                ("settings unchanged", f"{found.unchanged.objective:.5f}, {found.unchanged.objective / before - 1:+.3%}")
            )
    rows += [(name, words_of(value)) for name, value in best.parameters.items()]
    if found.importance:
        spread = {name: f" ({low:.0%} to {high:.0%})" for name, (low, high) in found.importance_spread.items()}
        shares = [f"{name} {share:.0%}{spread.get(name, '')}" for name, share in found.importance.items()]
        rows.append(("what mattered", " · ".join(shares)))
    if found.spec.samples_per_s is not None:
        front = [f"{t.objective:.5f} at {shown_speed(t.samples_per_s)}/s" for t in found.pareto]
        rows.append(("Pareto front of NE and speed", "\n".join(front)))
    rows.append(("recipe", str(found.recipe)))
    console.print(two_columns(found.spec.name, rows))


def quality(
    recipe: Annotated[str, typer.Argument(help="A quality study, or the recipe of a run: file or shipped name.")],
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", metavar="KEY=A,B", help="Change this key to these values, one at a time. Repeatable."),
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, metavar="N", help="Runs of each setting. [default: 5]")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", metavar="SHARE", help="Relative increase of NE that counts as a regression. [default: 0.001]"
        ),
    ] = None,
    set_: Set = None,
    quick: Annotated[bool, typer.Option("--quick", help="The study's small size, for two cores.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run points that failed before again.")] = False,
    name: Name = None,
    runs: Root = RUNS,
) -> None:
    """Measure the effect of settings on NE, with confidence intervals over seeds. Run it again to continue."""
    from rowstead.spec.axis import axis_from
    from rowstead.spec.parse import settings_from
    from rowstead.spec.quality import load_quality

    spec = load_quality(recipe, vary=[axis_from(text) for text in vary or []])
    spec = spec.made_quick() if quick else spec
    spec = dataclasses.replace(
        spec,
        set={**spec.set, **settings_from(set_ or [])},
        num_seeds=seeds or spec.num_seeds,
        tolerance=spec.tolerance if tolerance is None else tolerance,
        name=name or spec.name,
    )

    from rowstead.study.quality import quality as run_quality

    console = terminal()
    with _stoppable(console), sweep_callback(console) as callback:
        effects = run_quality(spec, root=runs, retry_failed=retry_failed, callback=callback)
    title = f"{spec.name}: NE against the baseline, {spec.num_seeds} seeds, {spec.confidence:.0%} intervals"
    rows = []
    for effect in effects:
        is_base = effect.verdict == "baseline"
        parts = ("", "", "") if is_base else (_percent(effect.change), _percent(effect.low), _percent(effect.high))
        value = "" if effect.value is None else words_of(effect.value)
        ne = "failed" if effect.ne is None else f"{effect.ne:.5f}"
        rows.append((effect.axis, value, ne, *parts, effect.verdict))
    headings = ("what", "value", "NE", "change", "from", "to", f"against {spec.tolerance:.2%}")
    print_wide(console, build_table(headings, rows, title=title, numbers=headings[2:]))
    for text in dict.fromkeys(failure for effect in effects for failure in effect.failures):
        console.print(f"failed: {printable(text)}", soft_wrap=True)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.3%}"


def sweep_table(finished: StudyResult) -> Table:
    """One row per point: axes, measured and predicted figures."""
    titles = list(dict.fromkeys(title for point in finished.points for title in point.axes))
    machines = list(dict.fromkeys(str(entry.record.machine.get("name")) for entry in finished.predicted))
    measured = {entry.point: entry for entry in finished.measured}
    predicted = {(entry.point, str(entry.record.machine.get("name"))): entry for entry in finished.predicted}
    has_ne = any("ne" in entry.record.figures for entry in finished.measured)
    rows = []
    for point in finished.points:
        cells = [words_of(point.axes.get(title)) for title in titles]
        if measured:
            entry = measured[point.key]
            cells.append("failed" if entry.failure is not None else shown_speed(entry.record.figures.get("samples_per_s")))
            if has_ne:
                ne = entry.record.figures.get("ne")
                cells.append("" if ne is None else f"{ne:.4f}")
        for name in machines:
            one = predicted[point.key, name]
            cells.append(_gap(one.failure) if one.failure else shown_speed(one.record.figures.get("samples_per_s")))
        rows.append(cells)
    numbers = [*(["samples/s"] if measured else []), *(["NE"] if has_ne else []), *(f"predicted: {name}" for name in machines)]
    return build_table([*titles, *numbers], rows, title=finished.name, numbers=numbers)


def _gap(failure: str) -> str:
    """Why a point has no prediction, in two or three words."""
    if failure.startswith("not calibrated"):
        return "not calibrated"
    return "does not fit" if "not fit" in failure else "not predicted"


@contextlib.contextmanager
def _stoppable(console: Console) -> Iterator[None]:
    """When the study is stopped, say how to continue; the exit code is that of the signal, which a trial may have handled."""
    try:
        yield
    except (Exception, SystemExit, GeneratorExit):
        raise
    except BaseException as stopped:
        console.print("Stopped. Finished points are saved; run the same command again to continue.")
        raise typer.Exit(exit_code_of(next(iter(stopped.args), None))) from None


@contextlib.contextmanager
def sweep_callback(console: Console) -> Iterator[SweepCallback]:
    """A progress bar with the remaining time on a terminal, one line per point elsewhere."""
    if not console.is_terminal:
        yield lambda progress: console.print(printable(_line_of(progress)), soft_wrap=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, state="")
        yield lambda progress: bar.update(
            task, completed=progress.num_done, total=progress.num_points, state=state_of(progress)
        )


def _line_of(progress: SweepProgress) -> str:
    last = ""
    if progress.last is not None:
        axes = ", ".join(f"{name}={words_of(value)}" for name, value in progress.last.axes.items())
        speed, failure = progress.last.record.figures.get("samples_per_s"), progress.last.failure
        last = f" · {axes}: " + (f"{shown_speed(speed)} samples/s" if failure is None else f"failed: {failure}")
    return f"{progress.num_done:,} of {progress.num_points:,} points{last} · {state_of(progress)}"


def state_of(progress: SweepProgress) -> str:
    """The progress of a study, in words."""
    parts = [f"{progress.num_found:,} found"] if progress.num_found else []
    parts += [f"{progress.num_failed:,} failed"] if progress.num_failed else []
    if progress.num_done < progress.num_points:
        parts.append("remaining time not known yet" if progress.left_s is None else f"about {shown_s(progress.left_s)} left")
    return " · ".join(parts)


def shown_s(seconds: float) -> str:
    """A duration, rounded as an estimate."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def shown_speed(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
