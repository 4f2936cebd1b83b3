"""Charts of searches (history, importance, Pareto front) and of quality studies (effects with confidence intervals)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rowstead.records.store import StoreEntry
from rowstead.records.studies import (
    Effect,
    Trial,
    importance_in,
    importance_spread_in,
    pareto_front,
    quality_effects,
    trial_history,
    wishes_in,
)
from rowstead.report.theme import (
    Chart,
    TextTable,
    axis,
    color,
    figure_text,
    horizontal_bars,
    labels,
    layout,
    limit_line,
    lines,
    points,
    row_per_name,
    thinned,
    words_of,
)

MAX_TRIALS = 2_000
TOLERANCE = 0.001
"""Default tolerance: a larger relative increase of NE is a regression."""
CONFIDENCE = 0.95
"""Default confidence level of intervals."""


def draw_search(name: str, entries: Sequence[StoreEntry], paths: Sequence[str]) -> list[Chart]:
    """Draw history, importance and quality against speed; empty if no trial finished at the required speed."""
    trials = trial_history(entries, samples_per_s=read_requirements(name, paths).get("samples_per_s"))
    if not any(trial.counts for trial in trials):
        return []
    charts = [draw_history(name, trials)]
    shares = read_importance(name, paths)
    if shares:
        charts.append(draw_importance(name, shares, read_spread(name, paths)))
    timed = [trial for trial in trials if trial.counts and trial.samples_per_s is not None]
    if len(timed) > 2:
        charts.append(draw_front(name, timed))
    return charts


def _range_without_outliers(values: Sequence[float]) -> list[float]:
    """An axis range for the best 90 % of the values: outliers would flatten the rest."""
    ordered = sorted(values)
    high = ordered[math.ceil(0.9 * (len(ordered) - 1))]
    margin = 0.08 * (high - ordered[0]) or 0.001
    return [ordered[0] - margin, high + margin]


def draw_history(name: str, trials: Sequence[Trial]) -> Chart:
    """NE by trial, and the best so far."""
    whole = [trial for trial in trials if trial.counts and trial.objective is not None]
    kept = thinned(whole, MAX_TRIALS)
    numbers, values = [trial.number + 1 for trial in kept], [float(trial.objective or 0.0) for trial in kept]
    best = [trial.best for trial in kept]
    each = points("trial", numbers, values, 0, hovertemplate="trial %{x}<br>%{y:.5~g}<extra></extra>")
    steps = lines("best so far", numbers, best, 1, mode="lines", hovertemplate="after trial %{x}<br>%{y:.5~g}<extra></extra>")
    steps["line"] = {"color": color(1), "width": 2, "shape": "hv"}
    not_counted = len(trials) - len(whole)
    left_out = sum(value > _range_without_outliers(values)[1] for value in values)
    above = f" {left_out:,} above the range of the chart." if left_out else ""
    lost = f" {not_counted:,} pruned, failed or too slow, not drawn." if not_counted else ""
    rows = (("first", figure_text(values[0])), ("best", figure_text(min(values))), ("trials", f"{len(whole):,}"))
    return Chart(
        key=f"{name}-history",
        title="Optimization history",
        words="NE of each trial; lower is better." + lost + above,
        traces=[each, steps],
        layout=layout(
            axis("trial", tick0=1, dtick=max(1, math.ceil(max(numbers) / 8))), axis("NE", range=_range_without_outliers(values))
        ),
        table=TextTable("Search", ("", "value"), rows),
    )


def read_importance(name: str, paths: Sequence[str]) -> dict[str, float]:
    """Read the parameter importances that the search saved; empty if there are none."""
    return next((found for folder in _study_folders(name, paths) if (found := importance_in(folder))), {})


def read_spread(name: str, paths: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Read how sure the importances are; empty if unknown."""
    return next((found for folder in _study_folders(name, paths) if (found := importance_spread_in(folder))), {})


def read_requirements(name: str, paths: Sequence[str]) -> dict[str, float]:
    """Read the requirements of a study, such as its tolerance; empty if unknown."""
    return next((found for folder in _study_folders(name, paths) if (found := wishes_in(folder))), {})


def _study_folders(name: str, paths: Sequence[str]) -> list[Path]:
    """The folders of a study next to the stores; empty for a name that is not a plain folder name."""
    if not name or any(c in name for c in "/\\\0") or name.startswith("."):
        return []
    stores = [Path(path).parent if Path(path).is_file() else Path(path) for path in paths]
    return [store / "studies" / name for store in stores]


def draw_importance(name: str, shares: dict[str, float], spread: Mapping[str, tuple[float, float]]) -> Chart:
    """Bars, most important first, with how far resampled trials differ."""
    falling = sorted(shares.items(), key=lambda one: -one[1])
    names, widths = labels(key for key, _ in falling), [share for _, share in falling]
    ranges = {key: f"{low:.1%} to {high:.1%}" for key, (low, high) in spread.items()}
    rows = tuple((key, f"{share:.1%}", ranges.get(key, "")) for key, share in falling)
    trace = horizontal_bars("importance", widths, names, 0, hovertemplate="%{y}: %{x:.0%}<extra></extra>")
    return Chart(
        key=f"{name}-importance",
        title="Parameter importance",
        words="Relative importance of each parameter for NE (PED-ANOVA). The table has what 90 % of resamples of the trials say: where the "
        "ranges of two parameters overlap, the trials do not tell which matters more.",
        traces=[trace],
        **row_per_name(axis("importance", tickformat=".0%", rangemode="tozero"), len(falling)),
        table=TextTable("Importance", ("parameter", "share", "90 % of resamples"), rows),
    )


def draw_front(name: str, trials: Sequence[Trial]) -> Chart:
    """Quality against speed, and the Pareto front."""
    best = pareto_front(trials)
    on_front = {trial.number for trial in best}
    others = thinned([trial for trial in trials if trial.number not in on_front], MAX_TRIALS)
    hover = "%{x:.3s} samples/s<br>%{y:.5f}<extra></extra>"
    traces = [
        points("dominated", [t.samples_per_s for t in others], [t.objective for t in others], 7, hovertemplate=hover),
        lines("Pareto front", [t.samples_per_s for t in best], [t.objective for t in best], 0, hovertemplate=hover),
    ]
    keys = list(trials[0].parameters)
    rows = tuple(
        (
            f"trial {t.number + 1}",
            figure_text(t.samples_per_s),
            figure_text(t.objective),
            *(words_of(t.parameters[key]) if key in t.parameters else "" for key in keys),
        )
        for t in best
    )
    every = [float(trial.objective) for trial in trials if trial.objective is not None]
    return Chart(
        key=f"{name}-front",
        title="Quality against speed",
        words="Each point is a trial. No trial is both faster and better than one on the Pareto front.",
        traces=traces,
        layout=layout(axis("samples/s", exponentformat="SI"), axis("NE", range=_range_without_outliers(every))),
        table=TextTable("Pareto front", ("", "samples/s", "NE", *keys), rows),
    )


VERDICTS = {"regression": "@bad", "within": "@good", "better": "@good", "open": "@quiet", "baseline": "@0"}
WORDS = {
    "regression": "worse than tolerated",
    "within": "within tolerance",
    "better": "better",
    "open": "undecided, needs more seeds",
    "baseline": "baseline",
}


def draw_effects(
    name: str, entries: Sequence[StoreEntry], *, tolerance: float = TOLERANCE, confidence: float = CONFIDENCE
) -> Chart | None:
    """Changes of NE with confidence intervals and the tolerance."""
    effects = quality_effects(entries, tolerance=tolerance, confidence=confidence)
    found = [one for one in effects if one.change is not None and one.verdict != "baseline"]
    if not found:
        return None
    changes = [100 * (one.change or 0.0) for one in found]
    above = [100 * one.high - change if one.high is not None else 0.0 for one, change in zip(found, changes, strict=True)]
    below = [change - 100 * one.low if one.low is not None else 0.0 for one, change in zip(found, changes, strict=True)]
    trace = {
        "type": "scatter", "mode": "markers", "y": labels(_title(one) for one in found), "x": changes, "name": "change of NE",
        "error_x": {"type": "data", "array": above, "arrayminus": below, "symmetric": False, "color": "@quiet", "thickness": 1.5},
        "marker": {"color": [VERDICTS[one.verdict] for one in found], "size": 10}, "text": [WORDS[one.verdict] for one in found],
        "hovertemplate": "%{y}<br>NE %{x:+.3f} %<br>%{text}<extra></extra>",
    }  # fmt: skip
    limit = limit_line(100 * tolerance, f"tolerance {100 * tolerance:g} %", is_vertical=True, ink="@bad")
    rows = tuple(
        (
            _title(one),
            f"{change:+.3f} %",
            "" if one.low is None or one.high is None else f"{100 * one.low:+.3f} to {100 * one.high:+.3f} %",
            str(one.num_seeds),
            WORDS[one.verdict],
        )
        for one, change in zip(found, changes, strict=True)
    )
    return Chart(
        key=f"{name}-effects",
        title="Effect on NE",
        words=f"Relative change of NE against the baseline over paired seeds, with {100 * confidence:g} % confidence intervals. Right of the dotted line is a regression beyond the tolerance.",
        traces=[trace],
        **row_per_name(
            axis("change of NE, %", zeroline=True, zerolinecolor="@quiet"), len(found), shapes=[limit], showlegend=False
        ),
        table=TextTable("Effects", ("change", "NE", "interval", "seeds", "verdict"), rows),
    )


def _title(one: Effect) -> str:
    return f"{one.axis} {words_of(one.value)}"
