"""A sweep: every point is measured once, even if the sweep is killed in between, with its predictions beside it.

The result of a point is one line of the run store, added atomically together with its predictions. A sweep that was killed and is
started again skips the points that are stored; a point that had finished without being stored is read from its folder. So no point
is lost, and none is measured twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rowstead.records.run_folder import DEFAULT_ROOT
from rowstead.records.store import Contents, RunStore, Source, StoreEntry
from rowstead.records.usage import machine_facts, versions
from rowstead.spec.parse import digest
from rowstead.spec.record import Record, date_now
from rowstead.spec.sweep import OnSpec, SweepSpec
from rowstead.study.points import Point, points_of
from rowstead.study.predictions import PointPrediction, expected_s, predict_point, this_machine
from rowstead.study.run_points import PointResult, PointRunner, lock_study

SAME_MACHINE = ("cpu", "num_usable_cores")
"""Facts that identify this machine in a record: results of another machine, in a copied store, do not count."""
LINE_POINTS = 3
"""Points needed to fit a fixed part and a factor."""


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """The progress of a study."""

    num_done: int
    num_failed: int
    num_points: int
    num_found: int
    """Number of those done that were stored before."""
    left_s: float | None
    """Estimated time for the others; None before the first point of this process has ended."""
    last: StoreEntry | None = None
    """The point that ended last."""


class SweepCallback(Protocol):
    """Called with the progress of a study."""

    def on_progress(self, progress: SweepProgress) -> None: ...


class NoSweepProgress:
    """A no-op SweepCallback."""

    def on_progress(self, progress: SweepProgress) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """The results of a study."""

    name: str
    points: tuple[Point, ...]
    measured: tuple[StoreEntry, ...]
    """In the order of the points; empty with `predict_only`."""
    predicted: tuple[StoreEntry, ...]

    @property
    def failed(self) -> tuple[StoreEntry, ...]:
        return tuple(entry for entry in (*self.measured, *self.predicted) if entry.failure is not None)


def sweep(
    spec: SweepSpec,
    *,
    root: Path | str = DEFAULT_ROOT,
    on: Sequence[str] | None = None,
    predict_only: bool = False,
    retry_failed: bool = False,
    callback: SweepCallback | None = None,
) -> StudyResult:
    """Measure every point of a sweep that is not stored yet (none with `predict_only`), and predict all of them.

    `on` names the machines to predict on, instead of this one and those of the recipe.
    """
    machines = machines_of(spec, on, with_here=not predict_only)
    return run_sweep(
        points_of(spec),
        study=spec.name,
        source="sweep",
        root=root,
        machines=machines,
        predict_only=predict_only,
        retry_failed=retry_failed,
        limit_s=spec.limit_s,
        samples_per_s=spec.samples_per_s,
        fresh=True,
        callback=callback,
    )


def machines_of(spec: SweepSpec, on: Sequence[str] | None, *, with_here: bool) -> list[OnSpec]:
    """The machines to predict on: those named, set up as in the recipe if it has them; by default this one and all of the recipe's."""
    if on is None:
        return [*([this_machine()] if with_here or not spec.machines else []), *spec.machines]
    known: dict[str, list[OnSpec]] = {}
    for one in spec.machines:
        for name in dict.fromkeys((one.title, one.machine)):
            known.setdefault(name, []).append(one)
    return [one for name in on for one in known.get(name, [OnSpec(machine=name)])]


def run_sweep(
    points: Sequence[Point],
    *,
    study: str,
    source: Source,
    root: Path | str = DEFAULT_ROOT,
    machines: Sequence[OnSpec] = (),
    predict_only: bool = False,
    retry_failed: bool = False,
    limit_s: float | None = None,
    samples_per_s: float | None = None,
    fresh: bool = True,
    callback: SweepCallback | None = None,
) -> StudyResult:
    """Run the points of a study that are not stored yet, and predict all of them."""
    store, callback = RunStore(root), callback or NoSweepProgress()
    folder = store.study_folder(study)
    with lock_study(folder) as lock:
        contents = store.read()
        predicted_points = {p.key: predict_point(p, machines, date=date_now(), samples_per_s=samples_per_s) for p in points}
        known = _predictions_in(contents, study)
        predicted = {p.key: [_predicted(p, one, study, source) for one in predicted_points[p.key]] for p in points}
        fresh_of = {key: [e for e in entries if not _is_known(e, known)] for key, entries in predicted.items()}
        measured = _measured_in(contents, study, retry_failed=retry_failed)
        measured = {point.key: measured[point.key] for point in points if point.key in measured}
        if predict_only:
            measured = {}
            store.add(*(entry for entries in fresh_of.values() for entry in entries))
        else:
            store.add(*(entry for key in measured for entry in fresh_of[key]))
            num_found, done = len(measured), []
            with PointRunner(folder / "points", fresh=fresh, limit_s=limit_s, held=(lock,)) as runner:
                left = [point for point in points if point.key not in measured]
                callback.on_progress(_progress(measured, points, num_found, None))
                for index, point in enumerate(left):
                    if point.key in measured:
                        continue  # two points of a study may be the same run
                    outcome = runner.finished(point) or runner.run(point)
                    entry = _measured(point, outcome, study, source)
                    store.add(entry, *fresh_of[point.key])
                    runner.forget(point)
                    measured[point.key] = entry
                    if outcome.spent_s is not None and point.spec is not None:
                        done.append((expected_s(point, _records(predicted_points[point.key])), outcome.spent_s))
                    ahead = [expected_s(p, _records(predicted_points[p.key])) for p in left[index + 1 :] if p.spec is not None]
                    callback.on_progress(_progress(measured, points, num_found, remaining_s(done, ahead), entry))
    return StudyResult(
        name=study,
        points=tuple(points),
        measured=tuple(_with_axes(measured[point.key], point) for point in points if point.key in measured),
        predicted=tuple(entry for point in points for entry in predicted[point.key]),
    )


def _with_axes(entry: StoreEntry, point: Point) -> StoreEntry:
    """An entry under the study's present axes, which may differ from those under which it was stored."""
    return dataclasses.replace(entry, axes=dict(point.axes), settings=dict(point.settings))


def _progress(
    measured: dict[str, StoreEntry],
    points: Sequence[Point],
    num_found: int,
    left_s: float | None,
    last: StoreEntry | None = None,
) -> SweepProgress:
    return SweepProgress(
        num_done=len(measured),
        num_failed=sum(entry.failure is not None for entry in measured.values()),
        num_points=len({point.key for point in points}),
        num_found=num_found,
        left_s=left_s,
        last=last,
    )


def _measured_in(contents: Contents, study: str, *, retry_failed: bool) -> dict[str, StoreEntry]:
    """The newest result of each point that this machine has measured."""
    facts = machine_facts()
    return {
        entry.point: entry
        for entry in contents.of(study=study, kind="measured")
        if entry.point is not None
        and all(entry.record.machine.get(name) == facts[name] for name in SAME_MACHINE)
        and not (retry_failed and entry.failure is not None)
    }


def _predictions_in(contents: Contents, study: str) -> dict[tuple[str | None, object], StoreEntry]:
    """The newest prediction of each point on each machine."""
    return {(entry.point, entry.record.machine.get("name")): entry for entry in contents.of(study=study, kind="predicted")}


def _is_known(entry: StoreEntry, known: dict[tuple[str | None, object], StoreEntry]) -> bool:
    """Whether the same prediction is stored already; one by a changed cost model is added."""
    before = known.get((entry.point, entry.record.machine.get("name")))
    return before is not None and before.record.figures == entry.record.figures and before.failure == entry.failure


def _records(predicted_points: Iterable[PointPrediction]) -> list[Record]:
    return [one.record for one in predicted_points]


def _predicted(point: Point, forecast: PointPrediction, study: str, source: Source) -> StoreEntry:
    return dataclasses.replace(_entry_of(point, study, source), record=forecast.record, failure=forecast.failure)


def _measured(point: Point, outcome: PointResult, study: str, source: Source) -> StoreEntry:
    record = outcome.record
    if record is None:
        spec = point.spec
        record = Record(
            kind="measured",
            name=spec.name if spec is not None else study,
            spec_digest=digest(spec) if spec is not None else point.key,
            date=date_now(),
            machine=machine_facts(),
            versions=versions(),
        )
    return dataclasses.replace(_entry_of(point, study, source), record=record, failure=outcome.failure)


def _entry_of(point: Point, study: str, source: Source) -> StoreEntry:
    """The entry of a point, without its record."""
    empty = Record(kind="measured", name="", spec_digest="", date="")
    return StoreEntry(
        record=empty,
        source=source,
        study=study,
        point=point.key,
        axes=dict(point.axes),
        settings=dict(point.settings),
        seed=point.seed,
    )


def remaining_s(done: Sequence[tuple[float | None, float]], left: Sequence[float | None]) -> float | None:
    """Seconds that the remaining points will take; None before the first has ended.

    `done` has the predicted training time and the wall time of each point that ended, `left` the predicted times of the others.
    A point takes a fixed time, the start of its process, plus a multiple of the prediction; both are fitted to the points that
    ended. Without predictions, or if all are the same, the mean is used.
    """
    if not done:
        return None
    spent = [taken for _, taken in done]
    mean = sum(spent) / len(spent)
    known = [(expected, taken) for expected, taken in done if expected is not None]
    fixed, factor = _fit_line(known) if len(known) >= LINE_POINTS else (mean, 0.0)
    return sum(mean if expected is None else fixed + factor * expected for expected in left)


def _fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares with both coefficients at least zero."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread <= 1e-12 * max(1.0, mean_x * mean_x):
        return mean_y, 0.0
    factor = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    if factor <= 0:
        return mean_y, 0.0
    fixed = mean_y - factor * mean_x
    if fixed >= 0:
        return fixed, factor
    return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
