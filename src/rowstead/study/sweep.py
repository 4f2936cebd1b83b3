"""A sweep: every point measured once, whatever happens in between, with what was predicted beside it.

What a point came to is one line of the run store, added in one piece together with its predictions. A sweep that was killed is
started again and passes over the points that are there; one that had finished without being written down is taken from its folder.
So no point is lost, and none is measured twice.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rowstead.records.run_folder import DEFAULT_ROOT
from rowstead.records.store import Contents, RunStore, Source, StoreEntry
from rowstead.records.usage import machine_facts, versions
from rowstead.spec.parse import digest
from rowstead.spec.record import Record
from rowstead.spec.sweep import OnSpec, SweepSpec
from rowstead.study.points import Point, points_of
from rowstead.study.predictions import Forecast, expected_s, forecasts, here
from rowstead.study.remaining import remaining_s
from rowstead.study.run_points import PointResult, PointRunner, study_held

SAME_MACHINE = ("cpu", "num_usable_cores")
"""Facts by which a record was measured here; a store that was copied here is not taken for our own figures."""


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """Where a study stands."""

    num_done: int
    num_failed: int
    num_points: int
    num_found: int
    """Of those done, how many were there before."""
    left_s: float | None
    """How long the others will take; none before the first of this time has ended."""
    last: StoreEntry | None = None
    """The point that has just ended."""


class SweepCallback(Protocol):
    """Is told how a study goes."""

    def on_progress(self, progress: SweepProgress) -> None: ...


class NoSweepProgress:
    """A SweepCallback that looks away."""

    def on_progress(self, progress: SweepProgress) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a study came to."""

    name: str
    points: tuple[Point, ...]
    measured: tuple[StoreEntry, ...]
    """In the order of the points; none when only predictions were asked for."""
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
) -> Finished:
    """Measure every point of a sweep that is not measured yet, or with `predict_only` none; predict all of them.

    `on` names machines to predict on, instead of this one and those of the recipe.
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
    """Where to predict: the machines named, set up as the recipe says where it says so; else this one and all of the recipe's."""
    if on is None:
        return [*([here()] if with_here or not spec.machines else []), *spec.machines]
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
) -> Finished:
    """Run the points of a study that are not in the store yet, and predict all of them."""
    store, callback = RunStore(root), callback or NoSweepProgress()
    folder = store.study_folder(study)
    with study_held(folder) as lock:
        contents = store.read()
        foreseen = {p.key: forecasts(p, machines, date=_now(), samples_per_s=samples_per_s) for p in points}
        known = _predictions_in(contents, study)
        predicted = {p.key: [_predicted(p, one, study, source) for one in foreseen[p.key]] for p in points}
        fresh_of = {key: [e for e in entries if not _is_known(e, known)] for key, entries in predicted.items()}
        measured = _measured_in(contents, study, retry_failed=retry_failed)
        measured = {point.key: measured[point.key] for point in points if point.key in measured}
        if predict_only:
            measured = {}
            store.add(*(entry for entries in fresh_of.values() for entry in entries))
        else:
            store.add(*(entry for key in measured for entry in fresh_of[key]))
            num_found, done = len(measured), []
            with PointRunner(folder / "points", fresh=fresh, limit_s=limit_s, held=(lock,)) as performer:
                left = [point for point in points if point.key not in measured]
                callback.on_progress(_progress(measured, points, num_found, None))
                for place, point in enumerate(left):
                    if point.key in measured:
                        continue  # two places of a study may ask for the same run
                    outcome = performer.finished(point) or performer.run(point)
                    entry = _measured(point, outcome, study, source)
                    store.add(entry, *fresh_of[point.key])
                    performer.forget(point)
                    measured[point.key] = entry
                    if outcome.spent_s is not None and point.spec is not None:
                        done.append((expected_s(point, _records(foreseen[point.key])), outcome.spent_s))
                    ahead = [expected_s(p, _records(foreseen[p.key])) for p in left[place + 1 :] if p.spec is not None]
                    callback.on_progress(_progress(measured, points, num_found, remaining_s(done, ahead), entry))
    return Finished(
        name=study,
        points=tuple(points),
        measured=tuple(_at(measured[point.key], point) for point in points if point.key in measured),
        predicted=tuple(entry for point in points for entry in predicted[point.key]),
    )


def _at(entry: StoreEntry, point: Point) -> StoreEntry:
    """An entry under the names that the study has now, which may not be those under which it was added."""
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
    """What this machine has measured of a study, the newest of each point."""
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
    """Whether the store has the same prediction already; another one, of a changed model, is added after it."""
    before = known.get((entry.point, entry.record.machine.get("name")))
    return before is not None and before.record.figures == entry.record.figures and before.failure == entry.failure


def _records(foreseen: Iterable[Forecast]) -> list[Record]:
    return [one.record for one in foreseen]


def _predicted(point: Point, forecast: Forecast, study: str, source: Source) -> StoreEntry:
    return dataclasses.replace(_placed(point, study, source), record=forecast.record, failure=forecast.failure)


def _measured(point: Point, outcome: PointResult, study: str, source: Source) -> StoreEntry:
    record = outcome.record
    if record is None:
        spec = point.spec
        record = Record(
            kind="measured",
            name=spec.name if spec is not None else study,
            spec_digest=digest(spec) if spec is not None else point.key,
            date=_now(),
            machine=machine_facts(),
            versions=versions(),
        )
    return dataclasses.replace(_placed(point, study, source), record=record, failure=outcome.failure)


def _placed(point: Point, study: str, source: Source) -> StoreEntry:
    """An entry at the place of a point, its record still to come."""
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


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
