"""Figures of searches and of quality studies: history, importance and the front of a search; effects with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rowstead.records.store import StoreEntry
from rowstead.records.studies import Effect, Trial, importance_in, pareto_front, quality_effects, trial_history, wishes_in
from rowstead.report.charts_studies import words_of
from rowstead.report.describe import TextTable
from rowstead.report.theme import Figure, axis, color, figure_text, horizontal_bars, labels, layout, lines, thinned

MAX_TRIALS = 2_000
TOLERANCE = 0.001
"""Relative rise of NE that is not tolerable, where a study does not say otherwise."""
CONFIDENCE = 0.95
"""Of intervals, where a study does not say otherwise."""


def draw_search(name: str, entries: Sequence[StoreEntry], places: Sequence[str]) -> list[Figure]:
    """History, importance, and quality against speed; nothing before a trial has ended well, and fast enough where that was asked."""
    trials = trial_history(entries, samples_per_s=wishes(name, places).get("samples_per_s"))
    if not any(trial.counts for trial in trials):
        return []
    figures = [draw_history(name, trials)]
    shares = importance(name, places)
    if shares:
        figures.append(draw_importance(name, shares))
    timed = [trial for trial in trials if trial.counts and trial.samples_per_s is not None]
    if len(timed) > 2:
        figures.append(draw_front(name, timed))
    return figures


def _mostly(values: Sequence[float]) -> list[float]:
    """A range that shows the better nine tenths: what went astray would squeeze the others flat."""
    ordered = sorted(values)
    high = ordered[math.ceil(0.9 * (len(ordered) - 1))]
    room = 0.08 * (high - ordered[0]) or 0.001
    return [ordered[0] - room, high + room]


def draw_history(name: str, trials: Sequence[Trial]) -> Figure:
    """Objective by trial, and the best so far."""
    whole = [trial for trial in trials if trial.counts and trial.objective is not None]
    kept = thinned(whole, MAX_TRIALS)
    numbers, values = [trial.number for trial in kept], [float(trial.objective or 0.0) for trial in kept]
    best = [trial.best for trial in kept]
    points = lines("trial", numbers, values, 0, mode="markers", hovertemplate="trial %{x}<br>%{y:.5~g}<extra></extra>")
    steps = lines("best so far", numbers, best, 1, mode="lines", hovertemplate="after trial %{x}<br>%{y:.5~g}<extra></extra>")
    steps["line"] = {"color": color(1), "width": 2, "shape": "hv"}
    not_counted = len(trials) - len(whole)
    left_out = sum(value > _mostly(values)[1] for value in values)
    above = f" Above the figure: {left_out}." if left_out else ""
    lost = f" Pruned, failed or too slow, and not counted: {not_counted:,}." if not_counted else ""
    rows = (("first", figure_text(values[0])), ("best", figure_text(min(values))), ("trials that count", f"{len(whole):,}"))
    return Figure(
        key=f"{name}-history",
        title="History of the search",
        words="Objective of each trial, lower is better." + lost + above,
        traces=[points, steps],
        layout=layout(axis("trial"), axis("objective", range=_mostly(values))),
        table=TextTable("Search", ("", "value"), rows),
    )


def importance(name: str, places: Sequence[str]) -> dict[str, float]:
    """What the search wrote down about which parameters mattered; nothing where it did not."""
    return next((found for folder in _folders(name, places) if (found := importance_in(folder))), {})


def wishes(name: str, places: Sequence[str]) -> dict[str, float]:
    """What was asked of a study beyond what its records say; nothing where that is not known."""
    return next((found for folder in _folders(name, places) if (found := wishes_in(folder))), {})


def _folders(name: str, places: Sequence[str]) -> list[Path]:
    """The folders that a study of this name has beside the stores; none for a name that would lead elsewhere."""
    if not name or any(c in name for c in "/\\\0") or name.startswith("."):
        return []
    stores = [Path(index).parent if Path(index).is_file() else Path(index) for index in places]
    return [store / "studies" / name for store in stores]


def draw_importance(name: str, shares: dict[str, float]) -> Figure:
    """Bars, the most important first."""
    falling = sorted(shares.items(), key=lambda one: -one[1])
    names, widths = labels(key for key, _ in falling), [share for _, share in falling]
    trace = horizontal_bars("importance", widths, names, 0, hovertemplate="%{y}: %{x:.0%}<extra></extra>")
    return Figure(
        key=f"{name}-importance",
        title="Which parameters mattered",
        words="The share of the spread of the objective that each parameter explains.",
        traces=[trace],
        layout=layout(
            axis("importance", tickformat=".0%", rangemode="tozero"), axis("", autorange="reversed", type="category")
        ),
        table=TextTable("Importance", ("parameter", "share"), tuple((key, f"{share:.1%}") for key, share in falling)),
        height_rem=max(11.0, 6 + 1.8 * len(falling)),
    )


def draw_front(name: str, trials: Sequence[Trial]) -> Figure:
    """Quality against speed, and the trials that none beats in both."""
    best = pareto_front(trials)
    on_front = {trial.number for trial in best}
    others = thinned([trial for trial in trials if trial.number not in on_front], MAX_TRIALS)
    hover = "%{x:.3s} samples/s<br>%{y:.5f}<extra></extra>"
    traces = [
        lines(
            "beaten in both",
            [t.samples_per_s for t in others],
            [t.objective for t in others],
            7,
            mode="markers",
            hovertemplate=hover,
        ),
        lines("front", [t.samples_per_s for t in best], [t.objective for t in best], 0, hovertemplate=hover),
    ]
    rows = tuple(
        (f"trial {t.number}", figure_text(t.samples_per_s), figure_text(t.objective), *_parameters(t, trials[0])) for t in best
    )
    every = [float(trial.objective) for trial in trials if trial.objective is not None]
    return Figure(
        key=f"{name}-front",
        title="Quality against speed",
        words="Each point is a trial. On the front no other trial is both faster and better.",
        traces=traces,
        layout=layout(axis("samples/s", exponentformat="SI"), axis("objective", range=_mostly(every))),
        table=TextTable("The front", ("", "samples/s", "objective", *trials[0].parameters), rows),
    )


def _parameters(trial: Trial, first: Trial) -> list[str]:
    return [words_of(trial.parameters[key]) if key in trial.parameters else "" for key in first.parameters]


VERDICTS = {"regression": "@bad", "within": "@good", "better": "@good", "open": "@quiet", "baseline": "@0"}
WORDS = {
    "regression": "worse than tolerated",
    "within": "within tolerance",
    "better": "better",
    "open": "not decided at so few seeds",
    "baseline": "baseline",
}


def draw_effects(
    name: str, entries: Sequence[StoreEntry], *, tolerance: float = TOLERANCE, confidence: float = CONFIDENCE
) -> Figure | None:
    """Changes of NE with their intervals, beside the tolerance."""
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
    limit = {
        "type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 100 * tolerance, "x1": 100 * tolerance,
        "line": {"dash": "dot", "width": 1.5, "color": "@bad"},
        "label": {"text": f"tolerance {100 * tolerance:g} %", "textposition": "end", "font": {"color": "@quiet"}},
    }  # fmt: skip
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
    return Figure(
        key=f"{name}-effects",
        title="What changes do to NE",
        words=f"Relative change of NE against the baseline over paired seeds, with {100 * confidence:g} % intervals. Right of the dotted line is a regression that is not tolerable.",
        traces=[trace],
        layout=layout(
            axis("change of NE, %", zeroline=True, zerolinecolor="@quiet"),
            axis("", autorange="reversed", type="category"),
            shapes=[limit],
            showlegend=False,
        ),
        table=TextTable("Effects", ("change", "NE", "interval", "seeds", "verdict"), rows),
        height_rem=max(12.0, 7 + 1.9 * len(found)),
    )


def _title(one: Effect) -> str:
    return f"{one.axis} {words_of(one.value)}"
