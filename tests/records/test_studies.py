"""The numbers behind pictures of studies: histories, fronts, effects and their intervals."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstead.records.store import StoreEntry
from rowstead.records.studies import (
    BASELINE,
    best_trial,
    importance_in,
    interval,
    judged,
    newest,
    pareto_front,
    quality_effects,
    student,
    trial_history,
    wishes_in,
)
from rowstead.spec.record import Record


def entry(figures: dict[str, float], *, kind: Any = "measured", **changes: Any) -> StoreEntry:
    record = Record(
        kind=kind, name="n", spec_digest="d", date="2026-01-01", figures=figures, machine=changes.pop("machine", {})
    )
    return StoreEntry(record=record, **{"study": "s", **changes})


def test_the_newest_of_a_point_counts() -> None:
    entries = [entry({"speed": v}, kind="predicted", axes={"x": 1}, point="1", machine={"name": "m"}) for v in (1.0, 2.0)]
    assert newest(entries) == entries[1:]
    assert len(newest([*entries, entry({}), entry({})])) == 3


def test_what_was_measured_with_other_settings_before_is_not_mixed_in() -> None:
    def at(steps: int, seed: int, speed: float, **changes: Any) -> StoreEntry:
        settings = {"train.max_steps": steps, "seed": seed, "data.synth.seed": seed}
        point = f"{steps}-{seed}-{changes}"
        return entry({"speed": speed}, axes={"x": 1}, settings=settings, seed=seed, point=point, **changes)

    before = [at(100, seed, 1.0) for seed in (1, 2, 3)]
    elsewhere = at(100, 1, 9.0, machine={"cpu": "another", "num_usable_cores": 64})
    after = [at(200, seed, 2.0) for seed in (1, 2)]
    kept = newest([*before, elsewhere, *after])
    assert sorted(map(id, kept)) == sorted(map(id, [*after, elsewhere]))
    assert newest(before) == before  # seeds are no change of settings
    tried = [entry({"trial_number": n}, source="trial", point="same", axes={"lr": 1}) for n in (0, 1)]
    assert newest(tried) == tried


def test_what_was_asked_of_a_study_is_read_from_its_folder(tmp_path: Path) -> None:
    assert wishes_in(tmp_path) == {}
    (tmp_path / "tune.yaml").write_text("name: t\nsamples_per_s: 5_000\ntrials: 4\n")
    assert wishes_in(tmp_path) == {"samples_per_s": 5000.0}
    (tmp_path / "quality.yaml").write_text("tolerance: 0.01\nconfidence: 0.9\n")
    assert wishes_in(tmp_path) == {"samples_per_s": 5000.0, "tolerance": 0.01, "confidence": 0.9}
    (tmp_path / "tune.yaml").write_text("samples_per_s: .nan\n")
    (tmp_path / "quality.yaml").write_text("tolerance: -1\nconfidence: 95\n")
    assert wishes_in(tmp_path) == {}
    (tmp_path / "quality.yaml").write_text("{" * 5000)
    assert wishes_in(tmp_path) == {}


def trial(number: int, objective: float | None, speed: float | None = 10.0, failure: str | None = None) -> StoreEntry:
    figures = {"trial_number": number, "objective": objective, "samples_per_s": speed}
    return entry({k: v for k, v in figures.items() if v is not None}, source="trial", failure=failure, axes={"lr": number})


def test_a_history_keeps_the_best_so_far_of_trials_that_count() -> None:
    entries = [
        trial(2, 0.7, failure="pruned after step 3"),
        trial(0, 0.9),
        trial(1, None, failure="no memory"),
        trial(3, 0.8, speed=5.0),
        trial(4, 0.85),
        entry({"objective": 0.1}, source="trial"),
    ]
    trials = trial_history(entries)
    assert [t.number for t in trials] == [0, 1, 2, 3, 4]
    assert [t.state for t in trials] == ["complete", "failed", "pruned", "complete", "complete"]
    assert [t.best for t in trials] == [0.9, 0.9, 0.9, 0.8, 0.8]
    assert best_trial(trials) is trials[3]
    fast = trial_history(entries, samples_per_s=8.0)
    assert [t.best for t in fast] == [0.9, 0.9, 0.9, 0.9, 0.85]
    assert best_trial(trial_history([])) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_no_trial_beats_one_on_the_front_in_both(pairs: list[tuple[int, int]]) -> None:
    trials = trial_history([trial(n, float(objective), float(speed)) for n, (objective, speed) in enumerate(pairs)])
    front = pareto_front(trials)
    on_it = {(t.objective, t.samples_per_s) for t in front}
    assert len(on_it) == len(front)
    for objective, speed in pairs:
        beaten = any((o <= objective and s >= speed) and (o, s) != (objective, speed) for o, s in pairs)
        assert ((objective, speed) in on_it) == (not beaten)
    assert [t.samples_per_s for t in front] == sorted(t.samples_per_s or 0 for t in front)


def runs_of(axis: str, value: Any, nes: list[float]) -> list[StoreEntry]:
    axes = {"axis": axis} | ({} if value is None else {"value": value})
    return [
        entry({"ne": 9.0, "ne_expected": ne}, source="quality", axes=axes, seed=seed, point=f"{axis}{value}{seed}")
        for seed, ne in enumerate(nes)
    ]


def test_effects_are_paired_by_seed_and_judged_against_the_tolerance() -> None:
    base = [0.70, 0.80, 0.75, 0.72, 0.78]
    noise = [1.0, -1.0, 0.5, -0.5, 0.0]
    entries = runs_of("batch", 8, [ne * (1.01 + 1e-4 * n) for ne, n in zip(base, noise, strict=True)])
    entries += runs_of("rows", "bf16", [ne * (1 + 1e-4 * n) for ne, n in zip(base, noise, strict=True)])
    entries += runs_of("rows", "fp64", [ne * (0.99 + 1e-4 * n) for ne, n in zip(base, noise, strict=True)])
    entries += runs_of("noise", 1, [ne * (1 + 1e-2 * n) for ne, n in zip(base, noise, strict=True)])
    entries += runs_of(BASELINE, None, base)
    entries.append(entry({}, source="quality", axes={"axis": "broken", "value": 1}, seed=0, point="b", failure="no memory"))
    effects = {(e.axis, e.value): e for e in quality_effects(entries, tolerance=0.001)}
    assert next(iter(effects)) == (BASELINE, None)
    verdicts = {key: effect.verdict for key, effect in effects.items()}
    assert verdicts == {
        (BASELINE, None): "baseline",
        ("batch", 8): "regression",
        ("rows", "bf16"): "within",
        ("rows", "fp64"): "better",
        ("noise", 1): "open",
        ("broken", 1): "open",
    }
    batch = effects["batch", 8]
    assert batch.num_seeds == 5
    assert batch.change == pytest.approx(0.01, abs=1e-6)
    assert batch.low is not None
    assert batch.high is not None
    assert batch.low < 0.01 < batch.high
    assert effects["broken", 1].failures == ("no memory",)
    assert effects["broken", 1].ne is None


def test_one_seed_decides_nothing() -> None:
    (_, effect) = quality_effects([*runs_of(BASELINE, None, [0.7]), *runs_of("batch", 8, [0.9])])
    assert effect.verdict == "open"
    assert effect.low is None


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.70620), (2, 4.302653), (4, 2.776445), (9, 2.262157), (30, 2.042272)])
def test_quantiles_are_students(freedom: int, quantile: float) -> None:
    assert student(0.95, freedom) == pytest.approx(quantile, rel=1e-6)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=20))
def test_an_interval_is_around_its_mean(values: list[float]) -> None:
    low, high = interval(values)
    assert low is not None
    assert high is not None
    assert (low + high) / 2 == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert low <= high
    assert judged(low, high, math.inf) in ("within", "better")


def test_importance_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert importance_in(tmp_path) == {}
    (tmp_path / "importance.json").write_text('{"lr": 0.7, "x": "y"}')
    assert importance_in(tmp_path) == {"lr": 0.7}
