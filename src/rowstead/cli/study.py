"""`rowstead sweep`, `tune` and `quality`: many runs of a recipe."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from rowstead.report.terminal import print_wide, printable, terminal
from rowstead.spec.errors import RowsteadError

if TYPE_CHECKING:
    from rowstead.records.studies import Trial
    from rowstead.study.sweep import StudyResult, SweepCallback, SweepProgress
    from rowstead.study.tune import SearchResult

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the recipe for all its runs. Repeatable."),
]
Root = Annotated[Path, typer.Option("--runs", help="Folder that holds the runs.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the study. A study of the same name is continued.")]
RUNS = Path("runs")


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
    import dataclasses

    from rowstead.spec.axis import axis_from, settings_from
    from rowstead.spec.sweep import SWEEPS, load_sweep, sweep_names

    console = terminal()
    if recipe is None:
        width = max(len(known) for known in sweep_names())
        for known in sweep_names():
            about = (SWEEPS / f"{known}.yaml").read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            typer.echo(f"{known:<{width}}  {about}")
        return
    spec = load_sweep(recipe, grid=[axis_from(text) for text in grid or []])
    spec = spec.made_quick() if quick else spec
    spec = dataclasses.replace(spec, set={**spec.set, **settings_from(set_ or [])}, name=name or spec.name)
    machines = [one.strip() for one in on.split(",") if one.strip()] if on is not None else None

    from rowstead.study.sweep import sweep as run_sweep

    with _stoppable(console), sweep_callback(console) as callback:
        finished = run_sweep(
            spec, root=runs, on=machines, predict_only=predict_only, retry_failed=retry_failed, callback=callback
        )
    print_wide(console, sweep_table(finished))
    for text in dict.fromkeys(entry.failure for entry in finished.failed if entry.failure):
        num = sum(entry.failure == text for entry in finished.failed)
        console.print(f"{num:,} failed: {printable(text)}", soft_wrap=True)
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
    import dataclasses

    from rowstead.spec.axis import settings_from
    from rowstead.spec.parse import parse, to_plain
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
    rows += [(name, shown(value)) for name, value in best.parameters.items()]
    if found.importance:
        rows.append(("what mattered", " · ".join(f"{name} {share:.0%}" for name, share in found.importance.items())))
    if found.spec.samples_per_s is not None:
        front = [f"{t.objective:.5f} at {shown_speed(t.samples_per_s)}/s" for t in found.pareto]
        rows.append(("Pareto front of NE and speed", "\n".join(front)))
    rows.append(("recipe", str(found.recipe)))
    table = Table(title=Text(found.spec.name), title_justify="left", show_header=False, box=box.SIMPLE)
    for name, value in rows:
        table.add_row(Text(printable(name)), Text("\n".join(printable(line) for line in value.split("\n")), overflow="fold"))
    console.print(table)


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
    import dataclasses

    from rowstead.spec.axis import axis_from, settings_from
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
        study = run_quality(spec, root=runs, retry_failed=retry_failed, callback=callback)
    title = f"{spec.name}: NE against the baseline, {spec.num_seeds} seeds, {spec.confidence:.0%} intervals"
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for heading in ("what", "value", "NE", "change", "from", "to", f"against {spec.tolerance:.2%}"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("what", "value") else "right")
    for effect in study.effects:
        is_base = effect.verdict == "baseline"
        parts = ("", "", "") if is_base else (_percent(effect.change), _percent(effect.low), _percent(effect.high))
        value = "" if effect.value is None else shown(effect.value)
        ne = "failed" if effect.ne is None else f"{effect.ne:.5f}"
        table.add_row(*(Text(printable(cell)) for cell in (effect.axis, value, ne, *parts, effect.verdict)))
    print_wide(console, table)
    for text in dict.fromkeys(failure for effect in study.effects for failure in effect.failures):
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
    table = Table(title=Text(finished.name), box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    headings = [*titles, *(["samples/s"] if measured else []), *(["NE"] if has_ne else [])]
    for heading in [*headings, *(f"predicted: {name}" for name in machines)]:
        table.add_column(Text(printable(heading)), no_wrap=True, justify="left" if heading in titles else "right")
    for point in finished.points:
        cells = [shown(point.axes.get(title)) for title in titles]
        if measured:
            entry = measured[point.key]
            cells.append("failed" if entry.failure is not None else shown_speed(entry.record.figures.get("samples_per_s")))
            if has_ne:
                ne = entry.record.figures.get("ne")
                cells.append("" if ne is None else f"{ne:.4f}")
        for name in machines:
            one = predicted[point.key, name]
            gap = "not predicted" if (one.failure or "").startswith("not predicted") else "does not fit"
            cells.append(gap if one.failure is not None else shown_speed(one.record.figures.get("samples_per_s")))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


@contextlib.contextmanager
def _stoppable(console: Console) -> Iterator[None]:
    """On Ctrl-C, say how to continue."""
    try:
        yield
    except Exception:
        raise
    except BaseException as stop:
        if isinstance(stop, (SystemExit, GeneratorExit)):
            raise
        console.print("Stopped. Finished points are saved; run the same command again to continue.")
        raise typer.Exit(130) from None


@contextlib.contextmanager
def sweep_callback(console: Console) -> Iterator[SweepCallback]:
    """A progress bar with the remaining time on a terminal, one line per point elsewhere."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        yield _SweepBar(bar)


class _SweepBar:
    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None, state="")

    def on_progress(self, progress: SweepProgress) -> None:
        self._bar.update(self._task, completed=progress.num_done, total=progress.num_points, state=state_of(progress))


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console

    def on_progress(self, progress: SweepProgress) -> None:
        last = ""
        if progress.last is not None:
            axes = ", ".join(f"{name}={shown(value)}" for name, value in progress.last.axes.items())
            speed = progress.last.record.figures.get("samples_per_s")
            what = (
                f"failed: {progress.last.failure}" if progress.last.failure is not None else f"{shown_speed(speed)} samples/s"
            )
            last = f" · {axes}: {what}"
        text = f"{progress.num_done:,} of {progress.num_points:,} points{last} · {state_of(progress)}"
        self._console.print(printable(text), soft_wrap=True)


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


def shown(value: Any) -> str:
    """A value of an axis as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else json.dumps(value)
