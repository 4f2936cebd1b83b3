"""Random models that a fleet trains: real trainers, sparse servers, a dense server and a reader as processes of this machine.

They are the roles that `rowstead train --fleet` starts, each with one thread. Only the reader's log is another: batches that were drawn
before, so that reading is handing them over, and nothing is decoded. The speed is taken from what the trainers have sampled of
themselves, after a warm-up, while others left them the cores. `python -m benchmarks.fleet_models FOLDER` is the process that is forked for each role.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import OtherLoad
from rowstead.data.batch import Batch
from rowstead.data.row_order import Cursor
from rowstead.data.source import Batches, Source
from rowstead.distributed.launch import exit_with_launcher
from rowstead.fleet.build import resolve_fleet
from rowstead.fleet.fork_server import ForkServer, serve_forks
from rowstead.fleet.local_process import GRACE_S, POLL_INTERVAL_S, STOP_SIGNAL, install_stop_handlers, role_environment
from rowstead.fleet.partition import partition_tables
from rowstead.fleet.reader_server import build_reader_server
from rowstead.fleet.role_usage import RoleSampler
from rowstead.fleet.roles import SAMPLE_EVERY_S, run_role
from rowstead.fleet.roster import RoleFiles, report_ready
from rowstead.fleet.supervisor import Supervisor
from rowstead.kernels.layout import layout_of
from rowstead.plan.predict import Prediction, predict
from rowstead.plan.setup import Setup
from rowstead.plan.work import step_work
from rowstead.records.run_folder import RunFolder
from rowstead.spec.catalogue import load_software
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import RoleKind
from rowstead.spec.machine import Machine
from rowstead.spec.run import RunSpec
from rowstead.stores.build import mean_ids_of
from rowstead.study.calibration.machine_speed import MachineSpeed
from rowstead.study.calibration.steps import Shape, sample_batches

MOST_BYTES, MOST_IDS = 1e8, 6e4
"""Of the tables, and of a batch: each pass starts the fleet anew."""
ROWS, BATCHES, LAYERS = (1e4, 1e5), (7, 9), (64, 128, 256, 512)
WARM_STEPS, WARM_S = 20, 1.0
"""Of every trainer, before anything counts."""
LEAST_STEPS, MOST_S = 60, 240.0
"""Of every trainer, that count; and how long a fleet may take for it all."""
NUM_BEATS = 12
"""That are taken right before a fleet trains, and right after it."""
SHAPE_FILE = "shape.json"
NUM_SAMPLES = 1 << 40
"""Of a log that does not end."""


@dataclass(frozen=True, kw_only=True)
class FleetShape:
    """A model, and the fleet that trains it."""

    model: Shape
    num_trainers: int
    num_sparse: int
    staleness: int
    period: int
    """Steps between two exchanges of a trainer with the dense server."""

    @property
    def num_dense(self) -> int:
        """One trainer has nobody to meet."""
        return int(self.num_trainers > 1)

    def spec(self) -> RunSpec:
        """The run that `rowstead train --fleet` would make of it."""
        fleet = {
            "num_trainers": self.num_trainers,
            "num_sparse": self.num_sparse,
            "num_dense": self.num_dense,
            "num_readers": 1,
            "snapshot_every_s": 3600,
        }
        spec = self.model.spec("cpu", fleet=fleet, check_ids=False, threads=1)
        sync = dataclasses.replace(spec.train.sync, staleness=self.staleness, period=self.period)
        return resolve_fleet(dataclasses.replace(spec, train=dataclasses.replace(spec.train, sync=sync)))


def random_fleets(count: int, seed: int) -> list[FleetShape]:
    """Models drawn by chance, from the ranges of the others but for tables and batches, which are smaller; each with its fleet.

    One trainer and two take turns, since they are held up by other things.
    """
    draw, found = random.Random(f"fleets {seed}"), []

    def between(low: float, high: float) -> float:
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    while len(found) < count:
        shape = Shape(
            num_dense=8 * round(between(64, 4096) / 8),
            num_sparse=round(between(4, 128)),
            batch_size=2 ** draw.randint(*BATCHES),
            num_rows=round(between(*ROWS)),
            width=draw.choice((16, 32, 64, 128)),
            mean_ids=round(between(1, 32)),
            skew=round(draw.uniform(0, 1.3), 2),
            bottom=tuple(draw.choice(LAYERS) for _ in range(draw.randint(1, 3))),
            top=tuple(draw.choice(LAYERS) for _ in range(draw.randint(1, 3))),
        )
        fleet = FleetShape(
            model=shape,
            num_trainers=1 + len(found) % 2,
            num_sparse=draw.randint(1, 2),
            staleness=draw.randint(0, 2),
            period=draw.choice((4, 8, 16)),
        )
        if shape.table_bytes <= MOST_BYTES and shape.num_ids <= MOST_IDS:
            found.append(fleet)
    return found


def predicted_fleet(fleet: FleetShape, machine: Machine) -> Prediction:
    """What the planner says of the fleet's step, all its processes on one machine."""
    software = machine.software or load_software("rowstead")
    setup = Setup(
        placement="remote",
        batch_size=fleet.model.batch_size,
        num_trainers=fleet.num_trainers,
        num_sparse_servers=fleet.num_sparse,
        num_dense_servers=fleet.num_dense,
        in_flight=1 + fleet.staleness,
        sync_every=fleet.period,
        on_one_machine=True,
    )
    return predict(step_work(fleet.spec()), machine, software, setup)


def predicted_cpu_s(prediction: Prediction) -> dict[str, float]:
    """Processor time of a step of all trainers, by kind of role, as far as the planner tells roles apart; where a step alone takes longer than
    all cores, with the time for which its threads wait for one."""
    setup, names = prediction.setup, {"trainer": "trainer", "sparse": "sparse servers"}
    each_s = {
        kind: sum(task.seconds for task in prediction.tasks if task.resource == resource) for kind, resource in names.items()
    }
    return {
        "trainer": setup.num_trainers * each_s["trainer"],
        "sparse": setup.num_trainers * setup.num_sparse_servers * each_s["sparse"],
    }


@dataclass(frozen=True, kw_only=True)
class FleetTime:
    """What a fleet took."""

    step_s: float
    """From one step of each trainer to its next, on average."""
    cpu_s: dict[str, float]
    """Processor time of a step of all trainers, by kind of role."""
    pace: float
    """How many times as long as at the standard pace the machine took, right before and after."""
    cores_used_by_others: float


def measured_fleet(fleet: FleetShape, seconds: float, pace: MachineSpeed | None) -> FleetTime:
    """Train with a fleet for so long."""
    spec = fleet.spec()
    assert spec.fleet is not None
    with tempfile.TemporaryDirectory(prefix="rowstead-fleet-") as name:
        folder = RunFolder.create_at(Path(name) / "run")
        folder.write_spec(spec)
        (folder.path / SHAPE_FILE).write_text(json.dumps(dataclasses.asdict(fleet.model)))
        environ = {**role_environment(1), "OMP_NUM_THREADS": "1"}
        beats_s = _beats(pace)
        with ForkServer(folder.path, "benchmarks.fleet_models", environ=environ) as server:
            supervisor = Supervisor(folder.path, spec.fleet, server, _facts(spec), on_message=_print_line)
            try:
                supervisor.start("sparse", "dense", "reader")
                supervisor.wait_ready()
                supervisor.start("trainer")
                found = _watched(supervisor, seconds)
                supervisor.stop("trainer")  # before the servers that it still calls as it stops
                supervisor.stop("reader", "dense", "sparse")
            finally:
                supervisor.close()
        beats_s += _beats(pace)
    cpu_s = {kind: found.cpu_s[kind] / found.num_steps for kind in found.cpu_s}
    return FleetTime(
        step_s=found.wall_s / found.num_steps,
        cpu_s=cpu_s,
        pace=1.0 if pace is None else pace.slowdown(beats_s),
        cores_used_by_others=max(0.0, found.other_cores),
    )


def _facts(spec: RunSpec) -> dict[str, Any]:
    """What the coordinator shares with all roles, but for what it learns from a log."""
    assert spec.fleet is not None
    layout, means = layout_of(spec.features, spec.tables), mean_ids_of(spec)
    assert means is not None
    lookups = {table.name: float(sum(means[place] for place in table.features)) for table in layout.tables}
    partition = partition_tables(
        layout.tables, spec.fleet.num_sparse, lookups=lookups, optimizer=spec.train.sparse_optimizer.kind
    )
    return {"dtype": "float32", "total_steps": 1_000_000, "partition": partition.to_json()}


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _beats(pace: MachineSpeed | None) -> list[float]:
    return [] if pace is None else [pace.time_reference() for _ in range(NUM_BEATS)]


@dataclass(frozen=True, kw_only=True)
class _Watched:
    """A stretch of a fleet's training."""

    wall_s: float
    num_steps: float
    """Of each trainer, on average."""
    cpu_s: dict[str, float]
    other_cores: float


def _watched(supervisor: Supervisor, seconds: float) -> _Watched:
    """Look after the roles until their trainers have trained for so long after the warm-up; what they have sampled of that stretch."""
    ends_s = time.monotonic() + MOST_S
    begins: float | None = None
    load: list[tuple[float, float]] = []
    """What the cores have done for anybody but this process, by time."""
    while True:
        supervisor.poll()
        if not supervisor.is_training:
            raise RowsteadError("the trainers of a fleet have ended before they were measured")
        if time.monotonic() > ends_s:
            raise RowsteadError(f"a fleet has not trained long enough to be measured in {MOST_S:.0f} s")
        lines = {
            handle.name: _samples(RoleFiles(supervisor.folder, handle.kind, handle.number).usage)
            for handle in supervisor.handles
        }
        trainers = [lines[handle.name] for handle in supervisor.of_kind("trainer")]
        steps = [one[-1].get("num_steps", 0) if one else 0 for one in trainers]
        load.append((time.time(), OtherLoad.of_others()))
        if begins is None and min(steps) >= WARM_STEPS:
            begins = max(one[-1]["time_s"] for one in trainers) + WARM_S
            warm_steps = steps
        elif begins is not None:
            enough = all(now - before >= LEAST_STEPS for now, before in zip(steps, warm_steps, strict=True))
            if enough and all(one[-1]["time_s"] >= begins + seconds + SAMPLE_EVERY_S for one in trainers):
                break
        time.sleep(POLL_INTERVAL_S)
    of_roles = {handle.name: (handle.kind, lines[handle.name]) for handle in supervisor.handles}
    stops = min(one[-1]["time_s"] for one in lines.values())
    return in_quiet_windows(begins, stops, of_roles, load)


def in_quiet_windows(
    start_s: float,
    stop_s: float,
    roles: Mapping[str, tuple[str, Sequence[Mapping[str, Any]]]],
    load: Sequence[tuple[float, float]],
) -> _Watched:
    """What the roles did, by their samples, in that half of the windows between two times in which others took least of the cores.

    On a shared machine its host takes cores away for some seconds and gives them back; a fleet, whose processes wait for each other,
    then takes twice as long. `roles`: kind and samples of each. `load`: what the cores had done by some times for anybody else.
    """
    edges = np.linspace(start_s, stop_s, max(2, round((stop_s - start_s) / SAMPLE_EVERY_S)) + 1)

    def grown(samples: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
        """By how much a total grew in each window."""
        return np.diff(np.interp(edges, [one["time_s"] for one in samples], [one[name] for one in samples]))

    cpu_s: dict[str, NDArray[np.float64]] = {}
    num_steps = []
    for kind, samples in roles.values():
        cpu_s[kind] = cpu_s.get(kind, 0.0) + grown(samples, "cpu_s")
        if kind == "trainer":
            num_steps.append(grown([one for one in samples if "num_steps" in one], "num_steps"))
    busy_s = np.diff(np.interp(edges, [at for at, _ in load], [used for _, used in load]))
    others_s = busy_s - sum(cpu_s.values())
    quiet = np.argsort(others_s, kind="stable")[: math.ceil(len(others_s) / 2)]
    wall_s = float(np.diff(edges)[quiet].sum())
    return _Watched(
        wall_s=wall_s,
        num_steps=float(np.mean(num_steps, axis=0)[quiet].sum()),
        cpu_s={kind: float(each[quiet].sum()) for kind, each in cpu_s.items()},
        other_cores=float(others_s[quiet].sum()) / wall_s,
    )


def _samples(path: Path) -> list[dict[str, Any]]:
    """The lines that a role has written of itself so far."""
    try:
        return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    except FileNotFoundError:
        return []


# In the processes of the fleet


class Drawn(Source):
    """A Source of batches that were drawn before, over and over."""

    num_samples = NUM_SAMPLES

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def batches(
        self, batch_size: int, *, epoch: int = 0, rank: int = 0, world_size: int = 1, cursor: Cursor | None = None
    ) -> Batches:
        place = 0 if cursor is None else cursor["place"]
        while True:
            yield self._batches[place % len(self._batches)], {"place": place + 1}
            place += 1


def drawn_for(folder: Path) -> Drawn:
    """The batches of a fleet's model, their ids as they travel."""
    plain = json.loads((folder / SHAPE_FILE).read_text())
    shape = Shape(**{name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()})
    batches = sample_batches(shape, torch.device("cpu"))
    ids = [dataclasses.replace(one.sparse, ids=one.sparse.ids.to(torch.int32)) for one in batches]
    return Drawn([dataclasses.replace(one, sparse=sparse) for one, sparse in zip(batches, ids, strict=True)])


def run_drawn_role(kind: RoleKind, folder: Path, number: int, incarnation: int) -> int:
    """Run a role of the fleet; the reader serves the drawn batches."""
    if kind != "reader":
        return run_role(kind, folder, number, incarnation)
    is_stop_requested = install_stop_handlers()
    exit_with_launcher(STOP_SIGNAL, GRACE_S)
    usage, batch_size = RoleFiles(folder, kind, number).usage, RunFolder(folder).read_spec().train.batch_size
    with (
        build_reader_server(drawn_for(folder), folder, number, num_readers=1, batch_size=batch_size) as server,
        RoleSampler(usage, server.status, incarnation=incarnation, interval_s=SAMPLE_EVERY_S),
    ):
        report_ready(folder, kind, number, server.address, incarnation)
        server.serve(is_stop_requested)
    return 0


if __name__ == "__main__":
    serve_forks(Path(sys.argv[1]), run_drawn_role)
