"""Predictions of the points of a study, on this machine and on others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rowstead.plan.choose import choose, fewest_servers
from rowstead.plan.predict import Prediction, build_predicted_record, predict
from rowstead.plan.setup import Setup, fewest_devices
from rowstead.plan.work import step_work
from rowstead.records.usage import usable_cores
from rowstead.spec.axis import with_settings
from rowstead.spec.catalogue import HERE, calibrated_machine, calibrated_path, load_machine, load_software
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Machine
from rowstead.spec.parse import digest, parse, to_plain
from rowstead.spec.placement import rules_for
from rowstead.spec.record import Record
from rowstead.spec.run import RunSpec
from rowstead.spec.sweep import OnSpec
from rowstead.study.points import Point


@dataclass(frozen=True, kw_only=True)
class PointPrediction:
    """The prediction of a point on one machine, or why there is none."""

    record: Record
    failure: str | None = None


def this_machine() -> OnSpec:
    """This machine."""
    return OnSpec(machine=HERE)


def load_machine_of(on: OnSpec, spec: RunSpec) -> tuple[Machine, str]:
    """The machine, and the source of its description.

    This machine is described by `rowstead calibrate` for the run's device; before calibration, as a laptop with as many cores
    as this process may use.
    """
    if on.machine != HERE:
        return load_machine(on.machine, on.change), "catalogue"
    for kind in ("cpu",) if spec.device == "cpu" else ("cuda", "cpu"):
        if calibrated_machine(kind) is not None:
            return load_machine(str(calibrated_path(kind)), on.change), "calibration"
    return load_machine("laptop", (f"host.num_cores={usable_cores()}", *on.change)), "laptop, not calibrated"


def predict_point(
    point: Point, machines: Sequence[OnSpec], *, date: str, samples_per_s: float | None = None
) -> list[PointPrediction]:
    """The predictions of a point, one per machine."""
    return [_predict_on(point, on, date, samples_per_s) for on in machines]


def expected_s(point: Point, records: Sequence[Record]) -> float | None:
    """The training time of a point by its first usable prediction."""
    speeds = [record.figures["samples_per_s"] for record in records if record.figures.get("samples_per_s")]
    spec = point.spec
    if spec is None or not speeds:
        return None
    per_epoch = spec.data.synth.num_train_samples if spec.data.synth is not None else math.inf
    num_samples = min(spec.train.epochs * per_epoch, (spec.train.max_steps or math.inf) * spec.train.batch_size)
    return num_samples / speeds[0] if math.isfinite(num_samples) else None


def _predict_on(point: Point, on: OnSpec, date: str, samples_per_s: float | None) -> PointPrediction:
    spec = point.spec
    if spec is None:
        record = Record(kind="predicted", name="", spec_digest=point.key, date=date, machine={"name": on.title})
        return PointPrediction(record=record, failure=point.problem)
    empty = Record(kind="predicted", name=spec.name, spec_digest=digest(spec), date=date, machine={"name": on.title})
    if (gap := _unsupported(point, on)) is not None:
        return PointPrediction(record=empty, failure=f"not predicted: {gap}")
    try:
        there = parse(RunSpec, with_settings(to_plain(spec), on.set))
        made = _prediction(there, _with_plan(on, point.settings), _target_speed(point, samples_per_s))
    except RowsteadError as error:
        return PointPrediction(record=empty, failure=str(error))
    if isinstance(made, str):
        return PointPrediction(record=empty, failure=made)
    if not made.fits:
        return PointPrediction(record=empty, failure=f"does not fit: {made.shortfalls[0]}")
    record = build_predicted_record(made, spec, date=date)
    facts = {**record.machine, "name": on.title, "described_by": load_machine_of(on, spec)[1]}
    return PointPrediction(record=dataclasses.replace(record, machine=facts))


def _unsupported(point: Point, on: OnSpec) -> str | None:
    """What the cost model does not support in a point; None where it supports all of it."""
    assert point.spec is not None
    rules = rules_for(point.spec.placement, [table.name for table in point.spec.tables])
    if any(rule.where == "ssd" for rule in rules.values()):
        return "the cost model does not cover tables on SSD"
    if on.title == HERE and (point.num_processes > 1 or point.fleet is not None):
        return "the cost model does not cover several processes on one machine"
    return None


def _target_speed(point: Point, samples_per_s: float | None) -> float | None:
    given = point.settings.get("plan.samples_per_s", samples_per_s)
    return None if given is None else float(given)


def _with_plan(on: OnSpec, settings: Any) -> OnSpec:
    """A machine with the point's `plan.` settings, except batch size and speed, which are not part of it."""
    named = {key.removeprefix("plan."): value for key, value in settings.items() if key.startswith("plan.")}
    if on.title == HERE:  # the set-up of other machines does not apply to this one
        return on
    if "batch_size" in named:
        on = dataclasses.replace(on, set={**on.set, "train.batch_size": named["batch_size"]})
    fields = {f.name for f in dataclasses.fields(OnSpec)}
    return parse(OnSpec, {**to_plain(on), **{key: value for key, value in named.items() if key in fields}})


def _prediction(spec: RunSpec, on: OnSpec, wanted: float | None) -> Prediction | str:
    """The prediction, or why there is none."""
    machine, server = load_machine_of(on, spec)[0], load_machine(on.server)
    measured = machine.software if on.software == "rowstead" else None
    software = measured or load_software(on.software)
    if on.place is None:
        choice = choose(spec, machine, software, server=server, samples_per_s=wanted, prefer="speed")
        return choice.best if choice.best is not None else f"does not fit {on.title}"
    work, batch_size, num_devices = step_work(spec), spec.train.batch_size, on.num_devices or machine.num_devices
    if on.place == "device" and on.num_devices is None and machine.accelerators is not None:
        fewest = fewest_devices(work, machine, batch_size)
        if fewest is None:
            return f"the tables do not fit the accelerators of {on.title}"
        num_devices, batch_size = fewest, max(1, batch_size // fewest)
    is_remote = on.place == "remote"
    setup = Setup(
        placement=on.place,
        batch_size=batch_size,
        num_devices=num_devices,
        num_trainers=on.num_trainers,
        num_sparse_servers=(on.num_sparse_servers or fewest_servers(work, server)) if is_remote else 0,
        num_dense_servers=on.num_dense_servers,
        in_flight=on.in_flight,
        server=server if is_remote or on.num_dense_servers else None,
    )
    return predict(work, machine, software, setup, precision=spec.train.precision)
