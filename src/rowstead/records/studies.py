"""Results of sweeps, searches and quality studies as plain numbers, for figures and tables. No torch, no Optuna."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rowstead.records.files import is_figure
from rowstead.records.store import StoreEntry
from rowstead.spec.errors import RowsteadError
from rowstead.spec.yaml_text import read_yaml

SEARCH_FILE, QUALITY_FILE = "tune.yaml", "quality.yaml"
"""The settings of a study, in its folder."""
LAPTOP = "laptop, not calibrated"
"""Described the machine of predictions that earlier versions called `here`; they say nothing about it and are left out."""


def machine_of(entry: StoreEntry) -> str:
    """The machine of an entry, measured or predicted: a name, or the processor and its usable cores."""
    facts = entry.record.machine
    if "name" in facts:
        return str(facts["name"])
    cores = f", {facts['num_usable_cores']} cores" if "num_usable_cores" in facts else ""
    return f"{facts.get('cpu', '')}{cores}"


def newest(entries: Iterable[StoreEntry]) -> list[StoreEntry]:
    """Of entries at the same point of a study with the same seed and machine, the newest; others unchanged.

    What was measured there with other settings, before the study's own were changed, is left out with all its seeds. Trials all
    count, as a search may try the same settings again.
    """
    found: dict[tuple[Any, ...], tuple[tuple[Any, ...], StoreEntry]] = {}
    common: dict[tuple[Any, ...], str] = {}
    for number, entry in enumerate(entries):
        if entry.record.machine.get("described_by") == LAPTOP:
            continue
        if entry.point is None or entry.source == "trial":
            found[(number,)] = ((), entry)
            continue
        where = json.dumps(entry.axes, sort_keys=True) if entry.axes else entry.point
        point = (entry.study, entry.record.kind, machine_of(entry), where)
        key = (*point, entry.seed)
        found[key] = (point, entry)
        common[point] = _common(entry)
    return [entry for point, entry in found.values() if not point or _common(entry) == common[point]]


def _common(entry: StoreEntry) -> str:
    """The settings of an entry without its seeds, which may differ at one point of a study."""
    return json.dumps({k: v for k, v in entry.settings.items() if k.rpartition(".")[2] != "seed"}, sort_keys=True)


def count_kinds(entries: Sequence[StoreEntry]) -> tuple[int, int, int]:
    """How many entries are measured, are predicted, and failed."""
    measured = sum(entry.is_measured for entry in entries)
    return measured, len(entries) - measured, sum(entry.has_failed for entry in entries)


def _mean(values: Sequence[float] | None) -> float | None:
    return statistics.fmean(values) if values else None


# searches

State = Literal["complete", "pruned", "failed"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial of a search."""

    number: int
    state: State
    objective: float | None
    best: float | None
    """The lowest objective so far, of trials that count."""
    counts: bool
    """Whether it may be the best: complete, and fast enough."""
    samples_per_s: float | None
    parameters: dict[str, Any]
    entry: StoreEntry


def trial_history(entries: Iterable[StoreEntry], *, samples_per_s: float | None = None) -> list[Trial]:
    """The trials of one search by number, each with the best so far; with a floor only trials at that speed count."""
    numbered = {int(e.record.figures["trial_number"]): e for e in entries if "trial_number" in e.record.figures}
    found: list[Trial] = []
    best: float | None = None
    for number, entry in sorted(numbered.items()):
        figures = entry.record.figures
        objective, speed = figures.get("objective"), figures.get("samples_per_s")
        state: State = "complete"
        if entry.failure is not None:
            state = "pruned" if entry.is_pruned else "failed"
        fast = samples_per_s is None or (speed is not None and speed >= samples_per_s)
        counts = state == "complete" and objective is not None and fast
        if counts and objective is not None and (best is None or objective < best):
            best = objective
        found.append(
            Trial(
                number=number,
                state=state,
                objective=objective,
                best=best,
                counts=counts,
                samples_per_s=speed,
                parameters=dict(entry.axes),
                entry=entry,
            )
        )
    return found


def best_trial(trials: Iterable[Trial]) -> Trial | None:
    """The one of the lowest objective among those that count, the earliest of equals."""
    counting = [trial for trial in trials if trial.counts]
    return min(counting, key=lambda trial: (trial.objective, trial.number), default=None)


def pareto_front(trials: Iterable[Trial]) -> list[Trial]:
    """Complete trials that no other beats in both objective and speed, the fastest last."""
    whole = [t for t in trials if t.state == "complete" and t.objective is not None and t.samples_per_s is not None]
    front: list[Trial] = []
    lowest = math.inf
    for trial in sorted(whole, key=lambda t: (-(t.samples_per_s or 0.0), t.objective)):
        if trial.objective is not None and trial.objective < lowest:
            front.append(trial)
            lowest = trial.objective
    return front[::-1]


def importance_in(folder: Path) -> dict[str, float]:
    """Parameter importance, as stored at the end of a search; empty if unknown."""
    try:
        plain = json.loads((folder / "importance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return _numbers(plain)


def importance_spread_in(folder: Path) -> dict[str, tuple[float, float]]:
    """How sure each importance is, as stored at the end of a search; empty if unknown."""
    try:
        plain = json.loads((folder / "importance_spread.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    pairs = plain.items() if isinstance(plain, dict) else ()
    return {
        name: (float(ends[0]), float(ends[1]))
        for name, ends in pairs
        if isinstance(ends, list) and len(ends) == 2 and all(map(is_figure, ends))
    }


def wishes_in(folder: Path) -> dict[str, float]:
    """The settings of a study: minimum speed of a search's trials, tolerance and confidence of a quality study.

    Empty where it is not known; what is no number is passed over.
    """
    found: dict[str, float] = {}
    for file in (SEARCH_FILE, QUALITY_FILE):
        with contextlib.suppress(RowsteadError, RecursionError, ValueError):
            found |= _numbers(read_yaml(folder / file))
    most = {"samples_per_s": math.inf, "tolerance": math.inf, "confidence": 1.0}
    return {name: found[name] for name, bound in most.items() if 0 < found.get(name, 0.0) < bound}


def _numbers(plain: Any) -> dict[str, float]:
    """The finite numbers of a mapping that may hold anything."""
    items = plain.items() if isinstance(plain, dict) else ()
    numbers = ((str(key), value) for key, value in items if isinstance(value, (int, float)) and not isinstance(value, bool))
    return {key: float(value) for key, value in numbers if abs(value) < 1e300}


# quality

Verdict = Literal["baseline", "regression", "within", "better", "open"]
"""`regression`: surely worse than tolerated; `within`: surely not; `better`: surely better than the baseline; `open`: more seeds."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The effect of one setting on NE, against the baseline with the same seeds."""

    axis: str
    value: Any
    num_seeds: int
    """Seeds with a figure on both sides."""
    ne: float | None
    """Mean over the seeds."""
    change: float | None
    """Mean of NE over the baseline's, minus 1: 0.001 is 0.1 % worse."""
    low: float | None
    """Lower end of the confidence interval; None with one seed."""
    high: float | None
    verdict: Verdict
    failures: tuple[str, ...] = ()


BASELINE = "baseline"
"""Axis of the runs that others are compared with."""


def quality_effects(entries: Iterable[StoreEntry], *, tolerance: float = 0.001, confidence: float = 0.95) -> list[Effect]:
    """The effects in a quality study, in its order, the baseline first.

    Differences are taken seed by seed, so that what a seed does to both sides drops out; the interval is Student's over seeds.
    """
    groups: dict[tuple[str, str], list[StoreEntry]] = {}
    for entry in newest(entries):
        if not entry.is_measured or "axis" not in entry.axes:
            continue
        groups.setdefault((str(entry.axes["axis"]), json.dumps(entry.axes.get("value"))), []).append(entry)
    base = {entry.seed: ne_of(entry) for entry in groups.get((BASELINE, "null"), [])}
    found = []
    for (axis, value), of_group in groups.items():
        nes = {entry.seed: ne_of(entry) for entry in of_group}
        known = [ne for ne in nes.values() if ne is not None]
        changes = [ne / before - 1 for seed, ne in nes.items() if ne is not None and (before := base.get(seed)) is not None]
        low, high = interval(changes, confidence)
        found.append(
            Effect(
                axis=axis,
                value=json.loads(value),
                num_seeds=len(changes),
                ne=_mean(known),
                change=_mean(changes),
                low=low,
                high=high,
                verdict="baseline" if axis == BASELINE else judged(low, high, tolerance),
                failures=tuple(dict.fromkeys(entry.failure for entry in of_group if entry.failure is not None)),
            )
        )
    return sorted(found, key=lambda effect: effect.axis != BASELINE)


def ne_of(entry: StoreEntry) -> float | None:
    """NE without label noise where the log has a teacher, else the plain one."""
    if entry.failure is not None:
        return None
    figures = entry.record.figures
    return figures.get("ne_expected", figures.get("ne"))


def judged(low: float | None, high: float | None, tolerance: float) -> Verdict:
    """The verdict of a confidence interval of relative change."""
    if low is None or high is None:
        return "open"
    if low > tolerance:
        return "regression"
    if high < 0:
        return "better"
    return "within" if high <= tolerance else "open"


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float | None, float | None]:
    """Student's confidence interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None, None
    mean = statistics.fmean(values)
    half = student(confidence, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def student(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's t, by bisection on its distribution."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if _t_inside(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_inside(t: float, freedom: int) -> float:
    """Probability that Student's t is between -t and t: closed forms for whole degrees of freedom."""
    theta, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    sine, cosine = math.sin(theta), math.cos(theta)
    term, total = cosine if odd else 1.0, 0.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
