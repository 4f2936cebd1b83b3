"""A sweep: every point is measured once, even if the sweep is killed in between, with its predictions beside it.

The result of a point is one line of the run store, added atomically together with its predictions. A sweep that was killed and is
started again skips the points that are stored; a point that had finished without being stored is read from its folder. So no point
is lost, and none is measured twice.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rowstead.records.run_folder import DEFAULT_ROOT
from rowstead.records.store import Contents, RunStore, Source, StoreEntry
from rowstead.records.usage import machine_facts
from rowstead.spec.catalogue import HERE
from rowstead.spec.record import Record, date_now
from rowstead.spec.sweep import OnSpec, SweepSpec
from rowstead.study.points import Point, points_of
from rowstead.study.predictions import NOT_CALIBRATED, expected_s, predict_point
from rowstead.study.run_points import PointRunner, build_failed_record, lock_study

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


SweepCallback = Callable[[SweepProgress], None]


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
    return run_sweep(
        points_of(spec),
        study=spec.name,
        source="sweep",
        root=root,
        machines=machines_of(spec, on, with_here=not predict_only),
        predict_only=predict_only,
        retry_failed=retry_failed,
        limit_s=spec.limit_s,
        samples_per_s=spec.samples_per_s,
        callback=callback,
    )


def machines_of(spec: SweepSpec, on: Sequence[str] | None, *, with_here: bool) -> list[OnSpec]:
    """The machines to predict on: those named, set up as in the recipe if it has them; by default this one and all of the recipe's."""
    if on is None:
        return [*([OnSpec(machine=HERE)] if with_here or not spec.machines else []), *spec.machines]
    known = {name: [one for one in spec.machines if name in (one.title, one.machine)] for name in on}
    return [one for name in on for one in known[name] or [OnSpec(machine=name)]]


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
    store = RunStore(root)
    folder = store.study_folder(study)

    def entry_of(point: Point, record: Record, failure: str | None) -> StoreEntry:
        return StoreEntry(
            record=record,
            source=source,
            study=study,
            point=point.key,
            axes=dict(point.axes),
            settings=dict(point.settings),
            seed=point.seed,
            failure=failure,
        )

    with lock_study(folder) as lock:
        contents = store.read()
        predicted = {
            point.key: [entry_of(point, *one) for one in predict_point(point, machines, date_now(), samples_per_s)]
            for point in points
        }
        known = {_where(entry): entry for entry in contents.of(study=study, kind="predicted")}
        new = {
            key: [one for one in entries if one.failure != NOT_CALIBRATED and not _is_same(one, known.get(_where(one)))]
            for key, entries in predicted.items()
        }
        stored = {} if predict_only else _measured_in(contents, study, retry_failed=retry_failed)
        measured = {point.key: stored[point.key] for point in points if point.key in stored}
        num_found, done = len(measured), list[tuple[float | None, float]]()
        store.add(*(entry for key in (new if predict_only else measured) for entry in new[key]))
        left = [] if predict_only else [point for point in points if point.key not in measured]

        def report(left_s: float | None, last: StoreEntry | None = None) -> None:
            if callback is not None:
                progress = SweepProgress(
                    num_done=len(measured),
                    num_failed=sum(entry.failure is not None for entry in measured.values()),
                    num_points=len(predicted),
                    num_found=num_found,
                    left_s=left_s,
                    last=last,
                )
                callback(progress)

        if not predict_only:
            report(None)
        if left:
            with PointRunner(folder / "points", fresh=fresh, limit_s=limit_s, held=(lock,)) as runner:
                for index, point in enumerate(left):
                    if point.key in measured:
                        continue  # two points of a study may be the same run
                    outcome = runner.finished(point) or runner.run(point)
                    record = outcome.record or build_failed_record(point.spec.name if point.spec else study, point.digest)
                    entry = entry_of(point, record, outcome.failure)
                    store.add(entry, *new[point.key])
                    runner.forget(point)
                    measured[point.key] = entry
                    if outcome.spent_s is not None and point.spec is not None:
                        done.append((expected_s(point, predicted[point.key]), outcome.spent_s))
                    ahead = [expected_s(p, predicted[p.key]) for p in left[index + 1 :] if p.spec is not None]
                    report(remaining_s(done, ahead), entry)
    return StudyResult(
        name=study,
        points=tuple(points),
        # under the present axes, which may differ from those under which an entry was stored
        measured=tuple(
            dataclasses.replace(measured[point.key], axes=dict(point.axes), settings=dict(point.settings))
            for point in points
            if point.key in measured
        ),
        predicted=tuple(entry for point in points for entry in predicted[point.key]),
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


def _where(entry: StoreEntry) -> tuple[str | None, object]:
    """The point and the machine of a prediction."""
    return entry.point, entry.record.machine.get("name")


def _is_same(entry: StoreEntry, before: StoreEntry | None) -> bool:
    """Whether a prediction is stored already; one by a changed cost model is added."""
    return before is not None and before.record.figures == entry.record.figures and before.failure == entry.failure


def remaining_s(done: Sequence[tuple[float | None, float]], left: Sequence[float | None]) -> float | None:
    """Seconds that the remaining points will take; None before the first has ended.

    `done` has the predicted training time and the wall time of each point that ended, `left` the predicted times of the others.
    A point takes a fixed time, the start of its process, plus a multiple of the prediction; both are fitted to the points that
    ended. Without predictions, or if all are the same, the mean is used.
    """
    if not done:
        return None
    mean = statistics.fmean(taken for _, taken in done)
    known = [(expected, taken) for expected, taken in done if expected is not None]
    fixed, factor = _fit_line(known) if len(known) >= LINE_POINTS else (mean, 0.0)
    return sum(mean if expected is None else fixed + factor * expected for expected in left)


def _fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares with both coefficients at least zero."""
    expected, taken = zip(*points, strict=True)
    if max(expected) - min(expected) <= 1e-6 * max(1.0, *expected):
        return statistics.fmean(taken), 0.0
    factor, fixed = statistics.linear_regression(expected, taken)
    if factor <= 0:
        return statistics.fmean(taken), 0.0
    if fixed < 0:
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x in expected)
    return fixed, factor
