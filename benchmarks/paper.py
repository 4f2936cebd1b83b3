"""The HPCA 2021 study of training efficiency, reproduced by prediction: the same equations as `rowstead plan`, on its platforms.

Nothing is measured here. One constant of the software is fitted to the sweep (`python -m benchmarks.fit_paper`), two are set by hand;
everything else is in rowstead/machines/. Figures of the study stand beside ours where it gives them.

python -m benchmarks.paper --dense 64,1024 --sparse 4,128 --json
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, publish
from benchmarks.production import read_shape
from rowstead.plan.choose import fewest_servers
from rowstead.plan.predict import Prediction, predict
from rowstead.plan.setup import Setup, fewest_devices
from rowstead.plan.work import StepWork, step_work
from rowstead.spec.catalogue import load_machine, load_software
from rowstead.spec.machine import Machine
from rowstead.spec.parse import parse
from rowstead.spec.run import RunSpec
from rowstead.spec.software import Software
from rowstead.spec.stores import PlannedStore

FITS = Path(__file__).parent / "paper_fit.json"
"""What `benchmarks.fit_paper` found, on all data and with parts of them left out."""
DENSE, SPARSE = (64, 256, 1024, 4096), (4, 16, 64, 128)
FIG10 = {
    64: dict(zip(SPARSE, (1.92, 2.42, 3.58, 2.53), strict=True)),
    1024: dict(zip(SPARSE, (4.38, 5.62, 3.53, 3.03), strict=True)),
    4096: dict(zip(SPARSE, (4.50, 5.45, 3.64, 4.44), strict=True)),
}
"""Throughput of one Big Basin over that of one trainer with two parameter servers, by dense and sparse features."""
TABLE3 = {"m1": 2.25, "m2": 0.85, "m3": 0.67}
"""Throughput of one Big Basin over that of the CPU fleet, by production model."""
NUM_CPU_SERVERS = 3
"""Trainer, sparse and dense parameter server of the sweeps."""
SET_BY_HAND = ("operator_s", "message_bytes_per_s_per_core")
"""Constants of the software that were chosen with the study's figures in view, besides those that `benchmarks.fit_paper` fits."""
CPU_BATCH = 200
"""Examples a step of one CPU trainer: the study's default. For the production models it is not given; with the best of 100, 200 and 400 M1's
ratio would leave its bound."""


@dataclasses.dataclass(frozen=True)
class Fleets:
    """How the study trained one production model on CPUs, and on one Big Basin."""

    num_trainers: int
    num_servers: int
    in_flight: int
    place: PlannedStore
    batch_size: int
    num_remote: int = 0


FLEETS = {
    "m1": Fleets(6, 8, 1, "device", 1600),
    "m2": Fleets(20, 16, 1, "device", 3200),
    "m3": Fleets(8, 8, 4, "remote", 800, num_remote=18),
}


@functools.cache
def machines() -> tuple[Machine, Machine, Machine]:
    """The CPU server, Big Basin with 32 GB a GPU, and the Zion prototype."""
    return load_machine("cpu-2s"), load_machine("bigbasin-32"), load_machine("zion-prototype")


@functools.cache
def work_of(name: str) -> StepWork:
    """What a step of a production model asks for, with the mean hash size and length for every feature."""
    return step_work(read_shape(name))


@functools.cache
def suite_work(num_dense: int, num_sparse: int) -> StepWork:
    """What a step of one cell of the sweep asks for."""
    return step_work(suite_model(num_dense, num_sparse))


def suite_model(num_dense: int, num_sparse: int, *, num_rows: int = 100_000, mlp: tuple[int, ...] = (512, 512, 512)) -> RunSpec:
    """The study's parameterised model. Its width, optimizer and law of ids are not published: 64, Adagrad, our log's default."""
    return parse(
        RunSpec,
        {
            "name": "suite",
            "data": {"synth": {"num_dense": num_dense, "num_sparse": num_sparse, "num_ids": num_rows, "mean_ids": 32}},
            "features": {
                "dense": [{"name": "dense_{i}", "repeat": num_dense}],
                "sparse": [{"name": "sparse_{i}", "repeat": num_sparse, "num_rows": num_rows, "max_ids": 32}],
            },
            "model": {"width": 64, "bottom": list(mlp), "top": list(mlp)},
            "train": {"sparse_optimizer": {"kind": "adagrad"}},
        },
    )


def on_cpu(
    work: StepWork, software: Software, *, batch_size: int = CPU_BATCH, num_trainers: int = 1, num_sparse: int = 1
) -> Prediction:
    """Trainers, with one dense and some sparse parameter servers."""
    cpu, _, _ = machines()
    setup = Setup(
        placement="remote",
        batch_size=batch_size,
        num_trainers=num_trainers,
        num_sparse_servers=num_sparse,
        num_dense_servers=1,
        server=cpu,
    )
    return predict(work, cpu, software, setup)


def on_big_basin(work: StepWork, software: Software, *, batch_size: int = 1600) -> Prediction:
    """As few of Big Basin's GPUs as hold the tables, which share the batch."""
    _, big_basin, _ = machines()
    num_devices = fewest_devices(work, big_basin, batch_size)
    assert num_devices is not None, "the sweeps' tables fit"
    setup = Setup(placement="device", batch_size=max(1, batch_size // num_devices), num_devices=num_devices)
    return predict(work, big_basin, software, setup)


def cell(num_dense: int, num_sparse: int, software: Software) -> dict[str, float]:
    """One cell of the sweep."""
    work = suite_work(num_dense, num_sparse)
    cpu, gpu = on_cpu(work, software), on_big_basin(work, software)
    assert cpu.watts is not None
    assert gpu.watts is not None
    ratio = gpu.samples_per_s / cpu.samples_per_s
    return {
        "cpu_samples_per_s": cpu.samples_per_s,
        "gpu_samples_per_s": gpu.samples_per_s,
        "gpu_over_cpu_throughput": ratio,
        "gpu_over_cpu_efficiency": ratio * cpu.watts / gpu.watts,
    }


def production(name: str, software: Software, work: StepWork | None = None) -> tuple[Prediction, Prediction]:
    """A production model on its CPU fleet, and on one Big Basin with all GPUs, each with its own batch."""
    cpu, big_basin, _ = machines()
    work, fleets = work or work_of(name), FLEETS[name]
    of_cpus = Setup(
        placement="remote",
        batch_size=CPU_BATCH,
        num_trainers=fleets.num_trainers,
        num_sparse_servers=fleets.num_servers - 1,
        num_dense_servers=1,
        in_flight=fleets.in_flight,
        server=cpu,
    )
    return predict(work, cpu, software, of_cpus), placed(
        work, big_basin, fleets.place, fleets.batch_size, software, fleets.num_remote, fleets.in_flight
    )


def placed(
    work: StepWork,
    machine: Machine,
    place: PlannedStore,
    batch_size: int,
    software: Software,
    num_remote: int = 15,
    in_flight: int = 1,
) -> Prediction:
    """All eight GPUs of a server, with tables in one place; by default as many sparse servers as M2's fleet has."""
    cpu, _, _ = machines()
    remote = {"num_sparse_servers": num_remote, "server": cpu, "in_flight": in_flight} if place == "remote" else {}
    setup = Setup(placement=place, batch_size=batch_size, num_devices=machine.num_devices, **remote)  # type: ignore[arg-type]
    return predict(work, machine, software, setup)


def fig1(software: Software) -> dict[str, dict[str, float]]:
    """Samples a second of each production model on one CPU trainer, on Big Basin and on Zion, with the placement that the study names."""
    cpu, big_basin, zion = machines()
    found = {}
    for name, fleets in FLEETS.items():
        work = work_of(name)
        one = on_cpu(work, software, num_sparse=fewest_servers(work, cpu))
        found[name] = {cpu.name: one.samples_per_s} | {
            machine.name: placed(
                work, machine, place, fleets.batch_size, software, fleets.num_remote, fleets.in_flight
            ).samples_per_s
            for machine, place in ((big_basin, fleets.place), (zion, "host"))
        }
    return found


def placements(software: Software) -> dict[str, dict[str, float]]:
    """M2's samples a second by platform and place."""
    _, big_basin, zion = machines()
    work = work_of("m2")
    places: tuple[PlannedStore, ...] = ("device", "host", "remote")
    return {
        machine.name: {place: placed(work, machine, place, 3200, software).samples_per_s for place in places}
        for machine in (big_basin, zion)
    }


def error(ratios: Iterable[float]) -> float:
    """How far predicted figures are from the study's: exp of the mean of |ln(predicted / paper)|, minus 1."""
    logs = [abs(math.log(ratio)) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) - 1


def refitted(software: Software, constants: Mapping[str, float]) -> Software:
    """The same software with other values of the fitted constants."""
    return dataclasses.replace(software, **constants)  # type: ignore[arg-type]


def left_out_errors(software: Software) -> dict[str, float]:
    """Errors in the cells that a fit did not see, rows and columns left out one at a time."""
    fits = json.loads(FITS.read_text())["left_out"]
    rows, columns = [], []
    for row in FIG10:
        for column in SPARSE:
            for left_out, ratios in ((f"row {row}", rows), (f"column {column}", columns)):
                found = cell(row, column, refitted(software, fits[left_out]))
                ratios.append(found["gpu_over_cpu_throughput"] / FIG10[row][column])
    return {
        "leave_one_row_out_error_geomean_pct": 100 * error(rows),
        "leave_one_row_out_error_max_pct": 100 * max(error([one]) for one in rows),
        "leave_one_column_out_error_geomean_pct": 100 * error(columns),
        "leave_one_column_out_error_max_pct": 100 * max(error([one]) for one in columns),
    }


def main() -> None:
    """Print the cells that are asked for, the production models, and how far they are from the study's figures."""
    parser = arguments(__doc__)
    parser.add_argument("--dense", metavar="N,N", help="dense features of the cells [default: the study's]")
    parser.add_argument("--sparse", metavar="N,N", help="sparse features of the cells [default: the study's]")
    parser.add_argument("--software", default="operators-2020", help="whose overheads to use; a name or a file")
    options = parser.parse_args()
    software = load_software(options.software)
    rows: list[dict[str, Any]] = []
    known = []
    for num_dense in _numbers(options.dense, DENSE):
        for num_sparse in _numbers(options.sparse, SPARSE):
            row: dict[str, Any] = {"dense": num_dense, "sparse": num_sparse, **cell(num_dense, num_sparse, software)}
            paper = FIG10.get(num_dense, {}).get(num_sparse)
            if paper is not None:
                row |= {"paper_throughput": paper, "off_pct": 100 * (row["gpu_over_cpu_throughput"] / paper - 1)}
                known.append(row["gpu_over_cpu_throughput"] / paper)
            rows.append(row)
    summary: dict[str, float] = {}
    if known:
        summary |= {"error_geomean_pct": 100 * error(known), "error_max_pct": 100 * max(error([one]) for one in known)}
    for name, paper in TABLE3.items():
        cpu, gpu = production(name, software)
        ratio = gpu.samples_per_s / cpu.samples_per_s
        assert cpu.watts is not None
        assert gpu.watts is not None
        rows.append(
            {
                "model": name,
                "cpu_samples_per_s": cpu.samples_per_s,
                "gpu_samples_per_s": gpu.samples_per_s,
                "gpu_over_cpu_throughput": ratio,
                "gpu_over_cpu_efficiency": ratio * cpu.watts / gpu.watts,
                "paper_throughput": paper,
                "off_pct": 100 * (ratio / paper - 1),
                "cpu_bottleneck": cpu.bottlenecks[0].resource,
                "gpu_bottleneck": gpu.bottlenecks[0].resource,
            }
        )
    for name, speeds in fig1(software).items():
        cpu_speed, basin_speed, zion_speed = speeds.values()
        rows.append(
            {
                "fig1": name,
                "cpu_samples_per_s": cpu_speed,
                "bigbasin_samples_per_s": basin_speed,
                "zion_samples_per_s": zion_speed,
                "bigbasin_over_cpu": basin_speed / cpu_speed,
                "zion_over_bigbasin": zion_speed / basin_speed,
            }
        )
    summary["fig1_rising_models"] = sum(a < b < c for a, b, c in (speeds.values() for speeds in fig1(software).values()))
    for machine, of_place in placements(software).items():
        rows.append({"m2_on": machine, **{f"{place}_samples_per_s": figure for place, figure in of_place.items()}})
    if software.name == "operators-2020" and FITS.exists():
        summary |= left_out_errors(software)
    publish("paper", rows, summary, options)


def _numbers(text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    try:
        numbers = tuple(int(number) for number in text.split(",")) if text else default
    except ValueError:
        raise SystemExit(f"cannot read `{text}`: give whole numbers with commas between them") from None
    if min(numbers) < 1:
        raise SystemExit("features are counted from 1")
    return numbers


if __name__ == "__main__":
    main()
