"""How far are predicted step times from measured ones, on this machine, for models that calibration has not seen?

The machine is measured first (`rowstead calibrate`), unless `--machine` names a file. Then random models are drawn: dense features
from 64 to 4,096 in steps of 8, sparse features from 4 to 128, batch, rows of a table, width, ids of a bag, skew of the ids, and widths
and numbers of layers. Each is trained on batches that are there already, after a warm-up; its step time is the median, on a GPU of
steps back to back. All models are gone through several times, since the speed of a shared machine drifts within minutes, and the median over these
passes counts. Beside it stands what `rowstead plan` predicts, with the same equations as for every machine of the catalogue. On
a CPU the parts of the step stand beside each other too, so that it can be seen which is off.

On a CPU some of the models are trained by a fleet of processes that share this machine's cores (`by: fleet`, `benchmarks/fleet_models.py`):
trainers, sparse servers, a dense server where there are two trainers, and a reader that hands over batches which it has already. Their
step is the time from one step of a trainer to its next, from what trainers have sampled of themselves. They count among all models, and by
themselves as `fleet_error_…`. On a GPU there are none.
Beside the models, which are DLRMs, each other built-in network is trained once, with few features: they count among all models, and by
themselves as `networks_error_…`.

`error` is exp(mean |ln(predicted / measured)|) - 1; `repeatability` is the same between the first pass and the last. Rank
correlation is Spearman's. `…_at_pace`: a CPU's times are brought to the pace that the machine had when it was calibrated, by a small piece
of work that is always the same and timed beside them (`src/rowstead/study/calibration/machine_speed.py`); `pace` is how many times as long it took. `best_placement_hit_share`: of models whose tables do not fit the memory that they are given, the share for
which the placement that `placement: auto` chooses is measured to be fastest, or at most 5 % slower than the fastest; `hit_share_by_chance`: the
same of a placement that is chosen by chance.

python -m benchmarks.prediction --device cpu --quick
python -m benchmarks.prediction --device cuda --machine here.yaml --json
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fleet_models import FleetShape, FleetTime, measured_fleet, predicted_cpu_s, predicted_fleet, random_fleets
from benchmarks.harness import OtherLoad, arguments, noise_of, publish
from benchmarks.placements import placed_models, placement_summary
from benchmarks.timing import give_back_gpu_memory
from rowstead.plan.cost import device_processor
from rowstead.plan.predict import Prediction, predict
from rowstead.plan.setup import Setup
from rowstead.plan.work import step_work
from rowstead.spec.catalogue import load_machine, load_software, machine_text
from rowstead.spec.machine import Machine
from rowstead.spec.networks import NETWORKS
from rowstead.spec.phases import Phase
from rowstead.study.calibration.calibrate import calibrate
from rowstead.study.calibration.fit import predict_parts
from rowstead.study.calibration.machine_speed import MachineSpeed
from rowstead.study.calibration.steps import Shape, Steps, StepTime
from rowstead.training.device import container_cores

NUM_MODELS, NUM_QUICK = 40, 6
NUM_FLEETS, NUM_QUICK_FLEETS = 6, 1
"""Of the models, on a CPU."""
FLEET_PASSES, FLEET_S = 2, 3.0
NUM_NETWORKS, NUM_QUICK_NETWORKS = len(NETWORKS) - 1, 2
"""Beside the models, which are DLRMs: each other built-in network once."""
LARGEST = {"cpu": {"bytes": 8e8, "ids": 6e5}, "cuda": {"bytes": 2e10, "ids": 1.2e7}}
BATCHES = {"cpu": (7, 11), "cuda": (9, 14)}
"""Powers of two."""
ROWS = {"cpu": (1e4, 1e6), "cuda": (1e5, 1e7)}
LAYERS = (64, 128, 256, 512, 1024)
NUM_PASSES = {"cpu": 5, "cuda": 2}
SECONDS = {"cpu": 0.4, "cuda": 0.2}
"""Of one pass."""


def random_shapes(device: str, count: int, seed: int) -> list[Shape]:
    """Models drawn by chance; those that would take too long or too much memory are drawn again."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        shape = Shape(
            num_dense=8 * round(_between(draw, 64, 4096) / 8),
            num_sparse=round(_between(draw, 4, 128)),
            batch_size=2 ** draw.randint(*BATCHES[device]),
            num_rows=round(_between(draw, *ROWS[device])),
            width=draw.choice((16, 32, 64, 128)),
            mean_ids=round(_between(draw, 1, 32)),
            skew=round(draw.uniform(0, 1.3), 2),
            bottom=tuple(draw.choice(LAYERS) for _ in range(draw.randint(1, 3))),
            top=tuple(draw.choice(LAYERS) for _ in range(draw.randint(1, 3))),
            precision="tf32" if device == "cuda" else "fp32",
        )
        if shape.table_bytes <= LARGEST[device]["bytes"] and shape.num_ids <= LARGEST[device]["ids"]:
            found.append(shape)
    return found


def network_shapes(device: str, count: int, seed: int) -> list[Shape]:
    """Models with the other built-in networks, in turn; with few features, since some of them take all pairs of features."""
    draw, found = random.Random(seed), []
    names = [name for name in NETWORKS if name != "dlrm"]
    for index, shape in enumerate(random_shapes(device, count, seed)):
        num_dense, num_sparse = round(_between(draw, 2, 32)), round(_between(draw, 4, 32))
        few = dataclasses.replace(shape, num_dense=num_dense, num_sparse=min(num_sparse, shape.num_sparse))
        found.append(dataclasses.replace(few, network=names[index % len(names)]))
    return found


def _between(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def predicted(shape: Shape, machine: Machine) -> Prediction:
    """What `rowstead plan` would say of the step."""
    software = machine.software or load_software("rowstead")
    setup = Setup(placement="device", batch_size=shape.batch_size, has_input=False)
    return predict(step_work(shape.spec("cpu")), machine, software, setup, precision=shape.precision)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Measured:
    """A model's steps in one pass."""

    time: StepTime
    cores_used_by_others: float


def measured(shape: Shape, device: torch.device, seconds: float, pace: MachineSpeed | None) -> Measured:
    """Train a model for so long."""
    steps = Steps.of(shape, device, speed=pace)
    with OtherLoad() as others:
        time = steps.measure(seconds)
    return Measured(time, others.cores)


def model_row(shape: Shape, machine: Machine, device: torch.device, passes: Sequence[Measured]) -> dict[str, Any]:
    """One model, predicted, and as it was measured."""
    found = predicted(shape, machine)
    times = sorted((one.time for one in passes), key=lambda time: time.step_s)
    middle = times[len(times) // 2]
    measured_s = statistics.median(time.step_s for time in times)
    paced_s = statistics.median(time.at_standard_speed().step_s for time in times)
    row: dict[str, Any] = {
        **_shape_row(shape, by="process"),
        "measured_ms": 1e3 * measured_s,
        "predicted_ms": 1e3 * found.step_s,
        "ratio": found.step_s / measured_s,
        "again": passes[-1].time.step_s / passes[0].time.step_s,
        "pace": statistics.median(time.slowdown for time in times),
        "ratio_at_pace": found.step_s / paced_s,
        "again_at_pace": passes[-1].time.at_standard_speed().step_s / passes[0].time.at_standard_speed().step_s,
        "spread": middle.spread,
    }
    row |= _parts_row(shape, machine, middle.at_standard_speed().phases_s)
    row["held_up_by"] = found.bottlenecks[0].resource
    if device.type == "cpu":
        row["cores_used_by_others"] = max(one.cores_used_by_others for one in passes)
    return row


def _shape_row(shape: Shape, *, by: str) -> dict[str, Any]:
    """The model, and what trains it."""
    return {
        "by": by,
        "network": shape.network,
        "dense": shape.num_dense,
        "sparse": shape.num_sparse,
        "batch": shape.batch_size,
        "rows": shape.num_rows,
        "width": shape.width,
        "ids": shape.mean_ids,
        "skew": shape.skew,
        "mlps": "/".join("-".join(map(str, widths)) for widths in (shape.bottom, shape.top)),
    }


def fleet_row(fleet: FleetShape, machine: Machine, passes: Sequence[FleetTime]) -> dict[str, Any]:
    """One model that a fleet has trained, predicted, and as it was measured."""
    found = predicted_fleet(fleet, machine)
    measured_s = statistics.median(one.step_s for one in passes)
    paced_s = [one.step_s / one.pace for one in passes]
    row: dict[str, Any] = {
        **_shape_row(fleet.model, by="fleet"),
        "trainers": fleet.num_trainers,
        "sparse_servers": fleet.num_sparse,
        "staleness": fleet.staleness,
        "measured_ms": 1e3 * measured_s,
        "predicted_ms": 1e3 * found.step_s,
        "ratio": found.step_s / measured_s,
        "again": passes[-1].step_s / passes[0].step_s,
        "pace": statistics.median(one.pace for one in passes),
        "ratio_at_pace": found.step_s / statistics.median(paced_s),
        "again_at_pace": paced_s[-1] / paced_s[0],
    }
    for kind in passes[0].cpu_s:
        row[f"{kind}_cpu_ms"] = 1e3 * statistics.median(one.cpu_s[kind] for one in passes)
    row |= {f"{kind}_cpu_predicted_ms": 1e3 * seconds for kind, seconds in predicted_cpu_s(found).items()}
    row["held_up_by"] = found.bottlenecks[0].resource
    row["cores_used_by_others"] = max(one.cores_used_by_others for one in passes)
    return row


def _parts_row(shape: Shape, machine: Machine, phases_s: dict[Phase, float]) -> dict[str, float]:
    """Predicted parts in milliseconds, and over the measured ones where the trainer counts them."""
    software = machine.software or load_software("rowstead")
    processor = device_processor(machine, software)
    if processor.timings is None:
        return {}
    parts = predict_parts(shape, processor, software)
    row = {f"{name.removesuffix('_s')}_ms": 1e3 * value for name, value in vars(parts).items()}
    if phases_s:
        dense_s = phases_s[Phase.FORWARD] + phases_s[Phase.BACKWARD]
        row |= {
            "dense_ratio": (parts.dense_s + processor.timings.dense.fixed_s) / dense_s,
            "lookup_ratio": parts.lookup_s / phases_s[Phase.LOOKUP],
            "update_ratio": parts.update_s / phases_s[Phase.ROW_UPDATE],
            "dense_update_ratio": parts.dense_update_s / phases_s[Phase.DENSE_UPDATE],
        }
    return row


def fleet_rows(
    fleets: Sequence[FleetShape], machine: Machine, pace: MachineSpeed | None, *, is_quick: bool, tell: Callable[[str], Any]
) -> list[dict[str, Any]]:
    """A row for each model that a fleet trains."""
    found: list[list[FleetTime]] = [[] for _ in fleets]
    num_passes, seconds = (1, 1.0) if is_quick else (FLEET_PASSES, FLEET_S)
    for number in range(num_passes):
        for place, fleet in enumerate(fleets):
            last = measured_fleet(fleet, seconds, pace)
            found[place].append(last)
            ratio = predicted_fleet(fleet, machine).step_s / last.step_s
            progress = f"pass {number + 1} of {num_passes}, fleet {place + 1} of {len(fleets)}"
            tell(f"{progress}: predicted {ratio:.2f} of what was measured, pace {last.pace:.2f}")
    return [fleet_row(fleet, machine, passes) for fleet, passes in zip(fleets, found, strict=True)]


def error(ratios: Sequence[float]) -> float:
    """exp of the mean of |ln(ratio)|, minus 1."""
    return math.exp(sum(abs(math.log(ratio)) for ratio in ratios) / len(ratios)) - 1


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How far predictions are off, all in all and part by part."""
    ratios = [row["ratio"] for row in rows]
    found = {
        "num_models": float(len(rows)),
        "error_geomean_pct": 100 * error(ratios),
        "error_max_pct": 100 * max(error([ratio]) for ratio in ratios),
        "rank_correlation": rank_correlation([row["measured_ms"] for row in rows], [row["predicted_ms"] for row in rows]),
        "rank_correlation_at_pace": rank_correlation(
            [row["measured_ms"] for row in rows], [row["measured_ms"] * row["ratio_at_pace"] for row in rows]
        ),
        "repeatability_geomean_pct": 100 * error([row["again"] for row in rows]),
        "error_at_pace_geomean_pct": 100 * error([row["ratio_at_pace"] for row in rows]),
        "error_at_pace_max_pct": 100 * max(error([row["ratio_at_pace"]]) for row in rows),
        "repeatability_at_pace_geomean_pct": 100 * error([row["again_at_pace"] for row in rows]),
        "pace_median": statistics.median(row["pace"] for row in rows),
        "predicted_over_measured_geomean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
    }
    if fleets := [row for row in rows if row.get("by") == "fleet"]:
        found |= {
            "num_fleet_models": float(len(fleets)),
            "fleet_error_geomean_pct": 100 * error([row["ratio"] for row in fleets]),
            "fleet_error_at_pace_geomean_pct": 100 * error([row["ratio_at_pace"] for row in fleets]),
            "fleet_error_at_pace_max_pct": 100 * max(error([row["ratio_at_pace"]]) for row in fleets),
            "fleet_repeatability_at_pace_geomean_pct": 100 * error([row["again_at_pace"] for row in fleets]),
        }
    if networks := [row for row in rows if row.get("network", "dlrm") != "dlrm"]:
        found |= {
            "num_network_models": float(len(networks)),
            "networks_error_geomean_pct": 100 * error([row["ratio"] for row in networks]),
            "networks_error_at_pace_geomean_pct": 100 * error([row["ratio_at_pace"] for row in networks]),
        }
    for part in ("dense", "lookup", "update", "dense_update"):
        if of_part := [row[f"{part}_ratio"] for row in rows if f"{part}_ratio" in row]:
            found[f"{part}_error_geomean_pct"] = 100 * error(of_part)
    return found


def _progress(text: str, start: float) -> None:
    print(f"{time.perf_counter() - start:5.0f} s  {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = arguments(__doc__, devices=("cpu", "cuda"))
    parser.add_argument("--machine", metavar="FILE", help="a file that `rowstead calibrate` wrote here [default: measure now]")
    parser.add_argument("--models", type=int, metavar="N", help=f"how many models [default: {NUM_MODELS}; quick: {NUM_QUICK}]")
    parser.add_argument("--seed", type=int, default=2026, help="by which models are drawn")
    parser.add_argument("--write-machine", metavar="FILE", help="keep what was measured of the machine")
    parser.add_argument("--no-placements", action="store_true", help="leave out the choice of placements, which takes longest")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(min(torch.get_num_threads(), container_cores() or torch.get_num_threads()))
    start = time.perf_counter()
    if options.machine is not None:
        machine = load_machine(options.machine)
    else:
        with tempfile.TemporaryDirectory() as folder:
            machine = calibrate(
                device,
                name="measured-now",
                folder=Path(folder),
                is_short=options.quick,
                on_message=lambda line: _progress(line, start),
            )
    calibrate_s = time.perf_counter() - start
    _progress("the machine is known", start)
    if options.write_machine is not None:
        Path(options.write_machine).write_text(machine_text(machine))
    give_back_gpu_memory()
    count = options.models or (NUM_QUICK if options.quick else NUM_MODELS)
    num_passes, seconds = (1, 0.3) if options.quick else (NUM_PASSES[options.device], SECONDS[options.device])
    num_fleets = min(count, NUM_QUICK_FLEETS if options.quick else NUM_FLEETS)
    if options.device == "cuda" or machine.software is None or machine.software.sharing is None:
        _progress("no fleets: nothing was measured of processes that share this machine's cores", start)
        num_fleets = 0
    shapes = random_shapes(options.device, count - num_fleets, options.seed)
    shapes += network_shapes(options.device, min(count, NUM_QUICK_NETWORKS if options.quick else NUM_NETWORKS), options.seed)
    fleets = random_fleets(num_fleets, options.seed)
    timings = machine.software.cpu_timings if machine.software is not None else None
    pace = (
        MachineSpeed(timings.reference_s) if options.device == "cpu" and timings is not None and timings.reference_s else None
    )
    found: list[list[Measured]] = [[] for _ in shapes]
    for number in range(num_passes):
        for place, shape in enumerate(shapes):
            found[place].append(measured(shape, device, seconds, pace))
            last = found[place][-1].time
            ratio = predicted(shape, machine).step_s / last.step_s
            progress = f"pass {number + 1} of {num_passes}, model {place + 1} of {len(shapes)}"
            _progress(f"{progress}: predicted {ratio:.2f} of what was measured, pace {last.slowdown:.2f}", start)
            give_back_gpu_memory()
    rows = [model_row(shape, machine, device, passes) for shape, passes in zip(shapes, found, strict=True)]
    rows += fleet_rows(fleets, machine, pace, is_quick=options.quick, tell=lambda line: _progress(line, start))
    summary = {**summary_of(rows), **noise_of(rows)}
    if not options.no_placements:
        cases, placed = placed_models(
            machine, device, seed=options.seed, is_quick=options.quick, tell=lambda line: _progress(line, start)
        )
        summary |= placement_summary(cases)
        rows += cases + placed
    if options.machine is None:
        summary["calibrate_s"] = calibrate_s
    publish("prediction", rows, summary, options)


if __name__ == "__main__":
    main()
