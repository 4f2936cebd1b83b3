"""Predictions of the points of a study, on this machine and on others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rowstead.plan.choose import choose
from rowstead.plan.predict import Prediction, build_predicted_record, predict
from rowstead.plan.setup import Setup, fewest_devices
from rowstead.plan.setups import SetupBuilder
from rowstead.plan.work import step_work
from rowstead.records.store import StoreEntry
from rowstead.spec.axis import with_settings
from rowstead.spec.catalogue import HERE, calibrated_machine, calibrated_path, load_machine, load_software
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import FleetSpec, parse_fleet
from rowstead.spec.machine import Machine
from rowstead.spec.parse import parse, to_plain
from rowstead.spec.record import Record
from rowstead.spec.run import RunSpec
from rowstead.spec.sweep import OnSpec
from rowstead.study.points import Point

NOT_CALIBRATED = "not calibrated: run `rowstead calibrate`"
"""Why there is no prediction for this machine before it was calibrated."""


def predict_point(
    point: Point, machines: Sequence[OnSpec], date: str, samples_per_s: float | None = None
) -> list[tuple[Record, str | None]]:
    """The prediction of a point on each machine: its record, and why it has no figures."""
    return [_predict_on(point, on, date, samples_per_s) for on in machines]


def expected_s(point: Point, predicted: Sequence[StoreEntry]) -> float | None:
    """The training time of a point by its first usable prediction."""
    speeds = [speed for entry in predicted if (speed := entry.record.figures.get("samples_per_s"))]
    spec = point.spec
    if spec is None or not speeds:
        return None
    per_epoch = spec.data.log.num_train_samples or math.inf
    num_samples = min(spec.train.epochs * per_epoch, (spec.train.max_steps or math.inf) * spec.train.batch_size)
    return num_samples / speeds[0] if math.isfinite(num_samples) else None


def _predict_on(point: Point, on: OnSpec, date: str, samples_per_s: float | None) -> tuple[Record, str | None]:
    spec = point.spec
    name = "" if spec is None else spec.name
    empty = Record(kind="predicted", name=name, spec_digest=point.digest, date=date, machine={"name": on.title})
    if spec is None:
        return empty, point.problem
    if (gap := _unsupported(point, on)) is not None:
        return empty, f"not predicted: {gap}"
    wanted = point.settings.get("plan.samples_per_s", samples_per_s)
    try:
        on = _with_plan(on, point.settings)
        there = parse(RunSpec, with_settings(to_plain(spec), on.set))
        made = _prediction(there, on, None if wanted is None else float(wanted), _setup_here(point, on))
    except RowsteadError as error:
        return empty, str(error)
    if not made.fits:
        return empty, f"does not fit: {made.shortfalls[0]}"
    record = build_predicted_record(made, spec, date=date)
    return dataclasses.replace(record, machine={**record.machine, "name": on.title}), None


def _load_machine(on: OnSpec, spec: RunSpec) -> Machine:
    """The machine of the catalogue, or this one as `rowstead calibrate` measured it for the run's device."""
    if on.machine != HERE:
        return load_machine(on.machine, on.change)
    for kind in ("cpu",) if spec.device == "cpu" else ("cuda", "cpu"):
        if calibrated_machine(kind) is not None:
            return load_machine(str(calibrated_path(kind)), on.change)
    raise RowsteadError(NOT_CALIBRATED)


def _unsupported(point: Point, on: OnSpec) -> str | None:
    """What the cost model does not support in a point; None where it supports all of it."""
    assert point.spec is not None
    fleet = _fleet_of(point)
    if on.title == HERE and fleet is not None and fleet.tables == "local":
        return "the cost model does not cover fleets whose trainer holds the tables"
    return None


def _fleet_of(point: Point) -> FleetSpec | None:
    """The fleet that runs a point; None without one."""
    assert point.spec is not None
    return point.spec.fleet if point.fleet is None else parse_fleet(point.fleet, point.spec.fleet)


def _setup_here(point: Point, on: OnSpec) -> Setup | None:
    """The set-up of a point that takes several processes of this machine; None if it takes one, and on other machines."""
    assert point.spec is not None
    train, fleet, num_processes = point.spec.train, _fleet_of(point), point.num_processes
    if on.title != HERE or (fleet is None and num_processes == 1):
        return None
    if fleet is None:
        share = max(1, train.batch_size // num_processes)
        return Setup(
            placement="device",
            batch_size=share,
            num_trainers=num_processes,
            has_input=False,
            on_one_machine=True,
            wire=train.wire,
        )
    mode = train.sync.mode_for(fleet.num_trainers)
    return Setup(
        placement="remote",
        batch_size=train.batch_size,
        num_trainers=fleet.num_trainers,
        num_sparse_servers=fleet.num_sparse,
        num_dense_servers=0 if mode == "none" else fleet.num_dense,
        in_flight=max(train.sync.hogwild_threads, 1 + train.sync.staleness),
        sync="easgd" if mode == "none" else mode,
        sync_every=train.sync.period,
        on_one_machine=True,
    )


def _with_plan(on: OnSpec, settings: Mapping[str, Any]) -> OnSpec:
    """A machine set up as the point's `plan.` settings say."""
    named = {key.removeprefix("plan."): value for key, value in settings.items() if key.startswith("plan.")}
    if on.title == HERE:  # the set-up of other machines does not apply to this one
        return on
    if "batch_size" in named:
        on = dataclasses.replace(on, set={**on.set, "train.batch_size": named["batch_size"]})
    fields = {f.name for f in dataclasses.fields(OnSpec)}
    return parse(OnSpec, {**to_plain(on), **{key: value for key, value in named.items() if key in fields}})


def _prediction(spec: RunSpec, on: OnSpec, wanted: float | None, setup: Setup | None) -> Prediction:
    """The prediction; `setup` is that of several processes on this machine."""
    machine, server = _load_machine(on, spec), load_machine(on.server)
    measured = machine.software if on.software == "rowstead" else None
    software = measured or load_software(on.software)
    if setup is not None:
        return predict(step_work(spec), machine, software, setup, precision=spec.train.precision)
    if on.placement is None:
        choice = choose(spec, machine, software, server=server, samples_per_s=wanted, prefer="speed")
        if choice.best is None:
            raise RowsteadError(f"does not fit {on.title}")
        return choice.best
    work, batch_size, num_devices = step_work(spec), spec.train.batch_size, on.num_devices or machine.num_devices
    if on.placement == "device" and on.num_devices is None and machine.accelerators is not None:
        fewest = fewest_devices(work, machine, batch_size)
        if fewest is None:
            raise RowsteadError(f"the tables do not fit the accelerators of {on.title}")
        num_devices, batch_size = fewest, max(1, batch_size // fewest)
    counts: dict[str, Any] = {"num_devices": num_devices, "num_dense_servers": on.num_dense_servers, "in_flight": on.in_flight}
    if on.placement == "remote" and on.num_sparse_servers is not None:
        counts["num_sparse_servers"] = on.num_sparse_servers
    if on.num_dense_servers:
        counts["server"] = server
    builder = SetupBuilder(spec=spec, work=work, machine=machine, server=server)
    setups = builder.build(on.placement, batch_size=batch_size, num_trainers=on.num_trainers, **counts)
    made = [predict(work, machine, software, setup, precision=spec.train.precision) for setup in setups]
    if not made:
        raise RowsteadError(f"{on.title} cannot have tables in {on.placement}")
    return max(made, key=lambda one: (one.fits, one.samples_per_s))
