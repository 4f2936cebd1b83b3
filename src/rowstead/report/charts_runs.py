"""Charts of runs: time by phase, throughput, quality and calibration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rowstead.records.files import is_figure
from rowstead.report.inputs import RunView, name_logs
from rowstead.report.theme import (
    Chart,
    TextTable,
    axis,
    diagonal,
    figure_text,
    horizontal_bars,
    label,
    labels,
    layout,
    limit_line,
    lines,
    log_axis,
    row_per_name,
    thinned,
)
from rowstead.spec.heads import MEASURES
from rowstead.spec.phases import STEP, Phase

MAX_RUNS = 8
"""Maximum number of runs in a chart: the newest, and the best one."""
MAX_SEGMENTS = 50
"""Maximum number of rows of a table of segments."""
MAX_RANKINGS = 20
"""Maximum number of columns of a table of rankings."""
MAX_POINTS = 400
"""Maximum number of points of a curve."""

PHASES = tuple(Phase)
"""A phase has one color in all charts: that of its index."""
Inks = Mapping[str, int]
"""The color of each run, the same in every chart."""


def inks_of(runs: Sequence[RunView]) -> Inks:
    """A color for each run that charts draw."""
    return {run.name: index for index, run in enumerate(runs)}


def drawn_runs(runs: Sequence[RunView], *, best: RunView | None) -> list[RunView]:
    """The newest runs that have something to draw, always with the best one; one that failed without a step has nothing."""
    found = [run for run in runs if run.has_begun][:MAX_RUNS]
    return found if best is None or best in found else [*found[: MAX_RUNS - 1], best]


FORMER_KEYS = {
    "waiting_for_data_s": Phase.DATA.key,
    "look_up_s": Phase.LOOKUP.key,
    "other_processes_s": Phase.EXCHANGE.key,
    "other_trainers_s": Phase.SYNC.key,
    "GPU_step_s": Phase.GPU_STEP.key,
    "Hogwild_threads_s": Phase.HOGWILD.key,
}
"""Keys of phases in records of version 0.1.0 before 2026-11-18."""


@dataclass(frozen=True, kw_only=True)
class TimeSpent:
    """Time of one run by phase."""

    name: str
    seconds: Mapping[Phase, float]
    """Total by phase, in the order of a step."""
    step_s: Mapping[Phase, float]
    """Mean per step, by the phases of a step."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def times_spent(runs: Sequence[RunView]) -> list[TimeSpent]:
    """Phase times of the runs that recorded them."""
    found = []
    for run in runs:
        figures = {FORMER_KEYS.get(key, key): value for key, value in run.figures.items()}
        seconds = {phase: figures[phase.key] for phase in Phase if figures.get(phase.key, 0.0) > 0}
        num_steps = figures.get("num_steps", 0)
        if seconds and num_steps:
            step = {phase: value / num_steps for phase, value in seconds.items() if phase in STEP}
            found.append(TimeSpent(name=run.name, seconds=seconds, step_s=step))
    return found


def draw_times(spent: Sequence[TimeSpent]) -> Chart | None:
    """Each run's time by phase, as a stacked bar."""
    if not spent:
        return None
    names = labels(one.name for one in spent)
    phases = [phase for phase in Phase if any(phase in one.seconds for one in spent)]
    traces = [
        horizontal_bars(
            phase.value,
            [100 * one.seconds.get(phase, 0.0) / one.total_s for one in spent],
            names,
            PHASES.index(phase),
            customdata=[one.seconds.get(phase, 0.0) for one in spent],
            hovertemplate=f"{phase.value}: %{{x:.1f}} %, %{{customdata:.3~s}}s<extra></extra>",
        )
        for phase in phases
    ]
    rows = tuple((one.name, *(figure_text(one.seconds.get(phase)) for phase in phases)) for one in spent)
    return Chart(
        key="time-by-phase",
        title="Time by phase",
        words="Wall-clock time of each run by phase, including evaluation and checkpoints, and including kernels that were compiled "
        "meanwhile." + _newest(spent),
        traces=traces,
        **row_per_name(axis("share of the run, %", range=[0, 100]), len(rows), barmode="stack", bargap=0.35),
        table=TextTable("Seconds", ("run", *(phase.value for phase in phases)), rows),
    )


def draw_steps(spent: Sequence[TimeSpent]) -> Chart | None:
    """A mean step of each run as a timeline of its phases."""
    spent = [one for one in spent if one.step_s]
    if not spent:
        return None
    names = labels(one.name for one in spent)
    phases = [phase for phase in STEP if any(phase in one.step_s for one in spent)]
    traces = []
    for index, phase in enumerate(phases):
        begins = [sum(one.step_s.get(other, 0.0) for other in phases[:index]) for one in spent]
        widths = [1e3 * one.step_s.get(phase, 0.0) for one in spent]
        hover = f"{phase.value}: %{{x:.3~g}} ms, from %{{base:.3~g}} ms<extra></extra>"
        traces.append(
            horizontal_bars(
                phase.value, widths, names, PHASES.index(phase), base=[1e3 * one for one in begins], hovertemplate=hover
            )
        )
    rows = tuple((one.name, *(figure_text(1e3 * one.step_s.get(phase, 0.0)) for phase in phases)) for one in spent)
    return Chart(
        key="mean-step",
        title="Mean step",
        words="Phases of a training step, as means over the run. Data that is prefetched counts only for the time that a step waits for it. "
        "A first run may wait for kernels that are compiled; throughput leaves its first steps out." + _newest(spent),
        traces=traces,
        **row_per_name(axis("milliseconds", rangemode="tozero"), len(rows), barmode="overlay", bargap=0.35),
        table=TextTable("Milliseconds", ("run", *(phase.value for phase in phases)), rows),
    )


@dataclass(frozen=True, kw_only=True)
class MetricCurve:
    """One metric of a run by step."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class QualityCurves:
    """Quality of a run's model during training."""

    name: str
    training: MetricCurve
    """NE of predictions made before each update, over a window."""
    evaluation: MetricCurve
    """NE on the evaluation split."""
    best: float | None
    """The best possible NE, if known."""
    batch_size: int | None = None
    """Samples per step, if the recipe is known."""
    log: str = ""
    """Identifies the log."""
    log_name: str = ""


def curve(run: RunView, kind: str, figure: str, *, most: int = MAX_POINTS) -> MetricCurve:
    """One metric of a run's events of a kind, evenly thinned to at most `most` points."""
    points = [(event["step"], event[figure]) for event in run.of_kind(kind) if is_figure(event.get(figure))]
    points = thinned(points, most)
    return MetricCurve(
        name=run.name, steps=tuple(step for step, _ in points), values=tuple(float(value) for _, value in points)
    )


def quality_curves(runs: Sequence[RunView]) -> list[QualityCurves]:
    """NE during training and on the evaluation split, for runs that have either."""
    found = []
    log_names = name_logs(runs)
    for run in runs:
        training, evaluation = curve(run, "train", "ne"), curve(run, "evaluation", "ne")
        if training.steps or evaluation.steps:
            best = curve(run, "evaluation", "ne_best").values
            size = run.spec.train.batch_size if run.spec is not None else None
            found.append(
                QualityCurves(
                    name=run.name,
                    training=training,
                    evaluation=evaluation,
                    best=best[-1] if best else None,
                    batch_size=size,
                    log=run.log,
                    log_name=log_names[run.log],
                )
            )
    return found


def draw_quality(curves: Sequence[QualityCurves], inks: Inks) -> list[Chart]:
    """NE of the runs on each log, whose best possible NE is no other's."""
    logs = list(dict.fromkeys(one.log for one in curves))
    return [
        _draw_quality([one for one in curves if one.log == log], inks, index if len(logs) > 1 else None)
        for index, log in enumerate(logs)
    ]


def _draw_quality(curves: Sequence[QualityCurves], inks: Inks, index: int | None) -> Chart:
    """NE against samples, so that batch sizes can be compared; against steps if a batch size is unknown."""
    by_samples = all(one.batch_size is not None for one in curves)
    what = "samples" if by_samples else "step"
    traces = []
    names = labels(one.name for one in curves)
    for one, name in zip(curves, names, strict=True):
        hover = f"{name}<br>{what} %{{x:,}}<br>NE %{{y:.4f}}"
        each = one.batch_size if by_samples and one.batch_size is not None else 1
        for part, points, options in (
            ("training", one.training, {"mode": "lines", "opacity": 0.45}),
            ("evaluation", one.evaluation, {}),
        ):
            if points.steps:
                x = [each * step for step in points.steps]
                in_legend = part == "evaluation" or not one.evaluation.steps
                options |= {"hovertemplate": f"{hover}, {part}<extra></extra>", "legendgroup": name, "showlegend": in_legend}
                traces.append(lines(name, x, points.values, inks.get(one.name, 0), **options))
    best = next((one.best for one in curves if one.best is not None), None)  # of the newest run, in case the split was changed
    shapes = [] if best is None else [limit_line(best, f"best possible {best:.4f}", textposition="start", yanchor="bottom")]
    rows = tuple(
        (
            one.name,
            *(figure_text(one.evaluation.values[at] if one.evaluation.values else None) for at in (0, -1)),
            figure_text(one.best),
        )
        for one in curves
    )
    return Chart(
        key="ne" if index is None else f"ne-{index}",
        title="NE during training" if index is None else f"NE during training on {label(curves[0].log_name)}",
        words="Normalized entropy: always predicting the mean label gives 1; lower is better. Pale lines are predictions made before each update, over a window; strong ones the evaluation split."
        + _newest(curves),
        traces=traces,
        layout=layout(axis(what, rangemode="tozero", exponentformat="SI"), axis("NE"), shapes=shapes, showlegend=True),
        table=TextTable("NE on the evaluation split", ("run", "first", "last", "best possible"), rows),
    )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Predictions against labels, by bucket, at a run's last evaluation."""

    name: str
    step: int
    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    weight: tuple[float, ...]


def calibrations(runs: Sequence[RunView]) -> list[Calibration]:
    """The last calibration of each run that recorded one."""
    found = []
    for run in runs:
        events = run.of_kind("calibration")
        if not events:
            continue
        last = events[-1]
        predicted, observed, weight = (_numbers(last.get(key)) for key in ("predicted", "observed", "weight"))
        if predicted and len(predicted) == len(observed) == len(weight):
            found.append(Calibration(name=run.name, step=last["step"], predicted=predicted, observed=observed, weight=weight))
    return found


def _numbers(part: object) -> tuple[float, ...]:
    """A list of finite numbers; empty for anything else."""
    given = part if isinstance(part, list) else []
    return tuple(map(float, given)) if all(is_figure(one) for one in given) else ()


def draw_calibration(found: Sequence[Calibration], inks: Inks) -> Chart | None:
    """Mean label against mean prediction, with the diagonal of perfect calibration."""
    if not found:
        return None
    most = max(max(*one.predicted, *one.observed) for one in found)
    traces = [diagonal("calibrated", 0, most)]
    for one, name in zip(found, labels(one.name for one in found), strict=True):
        hover = "predicted %{x:.2%}<br>observed %{y:.2%}<br>%{customdata:,.0f} examples<extra>" + name + "</extra>"
        traces.append(
            lines(name, one.predicted, one.observed, inks.get(one.name, 0), customdata=list(one.weight), hovertemplate=hover)
        )
    rows = tuple(
        (one.name, *(f"{100 * o - 100 * p:+.2f}" for p, o in zip(one.predicted, one.observed, strict=True))) for one in found
    )
    widest = max(len(row) for row in rows) - 1
    headings = ("run", *(f"bucket {index + 1}" for index in range(widest)))
    rows = tuple(row + ("",) * (widest + 1 - len(row)) for row in rows)
    return Chart(
        key="calibration",
        title="Calibration",
        words="Examples of the last evaluation in buckets by prediction: predicted against observed click rate. Above the dotted line, predictions are too low."
        + _newest(found),
        traces=traces,
        layout=layout(
            axis("mean prediction", tickformat=".0%", rangemode="tozero"),
            axis("mean label", tickformat=".0%", rangemode="tozero"),
        ),
        table=TextTable("Observed minus predicted, percentage points", headings, rows),
    )


def rankings_of(runs: Sequence[RunView]) -> TextTable | None:
    """GAUC, recall and NDCG of the runs that measured them; None if no run did."""
    ranked = [run for run in runs if any(_is_ranking(key) for key in run.figures)][:MAX_RUNS]
    keys = sorted({key for run in ranked for key in run.figures if _is_ranking(key)}, key=_ranking_order)[:MAX_RANKINGS]
    headings = [key.replace("gauc", "GAUC").replace("ndcg_at_", "NDCG at ").replace("recall_at_", "recall at ") for key in keys]
    rows = tuple((run.name, *(figure_text(run.figures.get(key)) for key in keys)) for run in ranked)
    return TextTable("Rankings within groups", ("run", *headings), rows) if rows else None


def _is_ranking(key: str) -> bool:
    return key == "gauc" or re.fullmatch(r"(recall|ndcg)_at_[0-9]{1,6}", key) is not None


def _ranking_order(key: str) -> tuple[bool, str, int]:
    name, _, k = key.partition("_at_")
    return name != "gauc", name, int(k or 0)


def tasks_of(runs: Sequence[RunView]) -> TextTable | None:
    """Measures of each task of models with several labels; None if no run has any."""
    rows = []
    keys = (*(entry.figure for entry in MEASURES.values()), "ne_best", "calibration", "num_missing")
    for run in runs[:MAX_RUNS]:
        names = dict.fromkeys(key.removesuffix("/mse") for key in run.figures if key.endswith("/mse"))
        tasks = [name for name in names if name.removeprefix("test_") == name or name.removeprefix("test_") not in names]
        rows += [(run.name, task, *(figure_text(run.figures.get(f"{task}/{key}")) for key in keys)) for task in tasks]
    headings = (*(entry.title for entry in MEASURES.values()), "best possible NE", "calibration", "labels missing")
    return TextTable("Tasks", ("run", "task", *headings), tuple(rows)) if rows else None


def segments_of(run: RunView) -> TextTable | None:
    """NE and calibration by the value of a column at a run's last evaluation; None if it has none."""
    found = [event for event in run.of_kind("segments") if event.get("of") == "evaluation"]
    column, rows = (found[-1].get(key) for key in ("column", "rows")) if found else (None, None)
    if not isinstance(column, str) or not isinstance(rows, list):
        return None
    keys = ("weight", "mean_label", "ne", "calibration")
    texts = []
    for row in rows[:MAX_SEGMENTS]:
        name = row.get("name") if isinstance(row, dict) else None
        if isinstance(name, str):
            texts.append((name, *(figure_text(row[key] if is_figure(row.get(key)) else None) for key in keys)))
    return (
        TextTable(f"{run.name}: quality by {column}", (column, "examples", "mean label", "NE", "calibration"), tuple(texts))
        if texts
        else None
    )


def speed_curves(runs: Sequence[RunView]) -> list[MetricCurve]:
    """Samples per second during runs."""
    found = [curve(run, "train", "samples_per_s") for run in runs]
    return [one for one in found if len(one.steps) > 1]


def draw_speed(curves: Sequence[MetricCurve], inks: Inks) -> Chart | None:
    """Throughput against steps."""
    if not curves:
        return None
    names = labels(one.name for one in curves)
    hover = "step %{x:,}<br>%{y:.3s} samples/s<extra>%{fullData.name}</extra>"
    traces = [
        lines(name, one.steps, one.values, inks.get(one.name, 0), mode="lines", hovertemplate=hover)
        for one, name in zip(curves, names, strict=True)
    ]
    values = [value for one in curves for value in one.values]
    up = (
        log_axis("samples/s", values)
        if max(values) > 5 * min(values)
        else axis("samples/s", rangemode="tozero", exponentformat="SI")
    )
    rows = tuple(
        (one.name, figure_text(min(one.values)), figure_text(one.values[-1]), figure_text(max(one.values))) for one in curves
    )
    return Chart(
        key="speed",
        title="Throughput during training",
        words="Samples per second since the start, without the first steps, which may compile kernels." + _newest(curves),
        traces=traces,
        layout=layout(axis("step", rangemode="tozero"), up, showlegend=True),
        table=TextTable("Samples per second", ("run", "lowest", "last", "highest"), rows),
    )


def _newest(shown: Sequence[object]) -> str:
    return f" At most {MAX_RUNS} runs are drawn: the newest, and the best one." if len(shown) == MAX_RUNS else ""
