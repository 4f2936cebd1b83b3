"""Measures the cost of cached rows: trains models with all rows in memory and with a cache, and fits the difference.

The models differ in the number of ids, in the number of cache misses, in how close rows are in their file, and in whether steps wait
for rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rowstead.plan.caching import CacheModel, build_cache_models
from rowstead.plan.setup import CachedTable, Setup
from rowstead.plan.work import step_work
from rowstead.records.temporary import temporary_folder
from rowstead.spec.curve import Curve, CurveAxis
from rowstead.spec.machine import Machine
from rowstead.spec.software import Software
from rowstead.spec.timings import Timings
from rowstead.study.calibration.machine_speed import MachineSpeed
from rowstead.study.calibration.steady_state import SampledBatches, mean_step_s, run_to_steady_state
from rowstead.study.calibration.steps import WARM_GPU_S, Shape, Steps

RECORDS = (36.0, 68.0, 132.0, 260.0, 516.0)
"""Sizes in bytes of a row with its state, for which times are given."""
ROWS_PREFIX = ".rowstead-rows-"
TURNS, STEPS_PER_TURN, REFERENCES_PER_TURN = 5, 8, 2
SHARES = tuple(share / 20 for share in range(21))
"""Candidates for the share by which moving rows and training slow each other down."""
NUM_SWEEPS = 400
STEPS_PER_ROUND, LEAST_ROUNDS, MOST_ROUNDS = 64, 3, 15
"""On a GPU."""
MIN_OVER_HOST = 1.15
"""A GPU step must take at least this many times the host time to say anything about the GPU."""


@dataclass(frozen=True, kw_only=True)
class CacheMeasurement:
    """Step times of one model with and without a cache, and its load on the cache."""

    in_memory_s: float
    """With all rows in memory."""
    step_s: float
    num_ids: float
    """Ids looked up through the cache."""
    num_rows: float
    """Cache misses."""
    num_reads: float
    row_bytes: float
    num_plans: float = 1.0
    """Plans made by the device that computes the step: 0 on a GPU, whose host plans."""


def cpu_shapes(*, is_short: bool) -> list[tuple[Shape, float]]:
    """Return models for caches on a CPU, with the share of rows that the cache holds."""
    shapes = [
        # dense, sparse, batch, rows, width, ids, skew, MLPs, share
        (Shape(16, 8, 128, 10_000, 16, 1, 1.6, (32,), (32,)), 0.2),  # almost no work
        (Shape(16, 8, 512, 20_000, 16, 8, 1.6, (32,), (32,)), 0.3),  # many ids, few rows
        (Shape(16, 4, 512, 20_000, 16, 3, 0.0, (32,), (32,)), 0.1),  # many rows, close together
        (Shape(16, 4, 256, 20_000, 128, 4, 0.2, (32,), (32,)), 0.1),  # wide ones
        (Shape(16, 4, 256, 150_000, 16, 1, 0.2, (32,), (32,)), 0.05),  # rows far apart
        (Shape(16, 6, 256, 80_000, 32, 2, 1.0, (32,), (32,)), 0.1),  # some of each
        (Shape(16, 4, 512, 20_000, 16, 2, 0.3, (32,), (512, 512)), 0.2),  # steps that take longer than their rows
        (Shape(16, 6, 256, 80_000, 32, 1, 0.9, (32,), (1024, 512)), 0.1),
    ]
    return shapes[:2] + shapes[6:7] if is_short else shapes


def measure_cache(
    shape: Shape, share: float, folder: Path, speed: MachineSpeed | None, *, num_turns: int = TURNS
) -> CacheMeasurement:
    """Train a model with all rows in memory and with this share of them cached, alternately."""
    cpu, work = torch.device("cpu"), step_work(shape.spec("cpu"))
    with contextlib.ExitStack() as stack:
        rows_folder = stack.enter_context(temporary_folder(folder, prefix=ROWS_PREFIX))
        drawn = SampledBatches.of(shape, cpu)
        in_memory = run_to_steady_state(shape, cpu, placement={"*": "device"}, kept_share=0.0, folder=rows_folder, drawn=drawn)
        rule = {"*": {"where": "ssd", "cache_fraction": share}}
        behind = run_to_steady_state(shape, cpu, placement=rule, kept_share=share, folder=rows_folder, drawn=drawn)
        stack.callback(behind.close)
        turns: dict[str, list[float]] = {"in_memory": [], "behind": []}
        for _ in range(num_turns):
            for name, steps in (("in_memory", in_memory), ("behind", behind)):
                turns[name].append(_turn_s(steps, speed))
    (group,) = build_cache_models(work.tables, _setup(shape, [table.name for table in work.tables], share))
    return CacheMeasurement(
        in_memory_s=statistics.median(turns["in_memory"]),
        step_s=statistics.median(turns["behind"]),
        num_ids=float(shape.num_ids),
        num_rows=group.missing_rows,
        num_reads=group.num_reads(group.missing_rows),
        row_bytes=float(group.row_bytes),
    )


def _turn_s(steps: Steps, speed: MachineSpeed | None) -> float:
    """Return the seconds of a step at standard machine speed."""
    if speed is None:
        return mean_step_s(steps, STEPS_PER_TURN)
    before = [speed.time_reference() for _ in range(REFERENCES_PER_TURN)]
    seconds = mean_step_s(steps, STEPS_PER_TURN)
    return seconds / speed.slowdown(before + [speed.time_reference() for _ in range(REFERENCES_PER_TURN)])


def _setup(shape: Shape, tables: Sequence[str], share: float) -> Setup:
    behind = tuple(CachedTable(table=name, cache_fraction=share) for name in tables)
    return Setup(placement="device", batch_size=shape.batch_size, has_input=False, behind=behind)


def fit_cache_costs(timings: Timings, models: Sequence[CacheMeasurement]) -> Timings:
    """Return the timings with the cache costs that best explain these steps, by least squares of relative errors.

    Moving rows takes `moved = rows * (row_s + byte_s * bytes) + reads * read_s`, finding slots `placed = batch_s + ids * id_s`, and a step the longer
    of `in_memory + placed + share * moved` and `moved + share * (in_memory + placed)`. A cost that no model exercises becomes 0.
    """
    best, least = None, np.inf
    for share in SHARES:
        found = np.array([1e-4, 1e-8, 1e-6, 1e-9, 5e-6])
        for _ in range(8):  # which steps wait for rows depends on the costs, and the costs on that
            terms, known, waits = _equations(models, found, share)
            taken = np.array([one.step_s for one in models])
            found = _coordinate_descent(terms / taken[:, None], (taken - known) / taken)
            if np.array_equal(waits, _equations(models, found, share)[2]):
                break
        off = float(np.sum(np.log(_steps_s(models, found, share) / taken) ** 2))
        if off < least:
            best, least = (found, share), off
    assert best is not None
    (batch_s, id_s, row_s, byte_s, read_s), share = best
    moves = tuple(max(1e-12, float(row_s + byte_s * record)) for record in RECORDS)
    return dataclasses.replace(
        timings,
        cache_batch_s=float(batch_s),
        cache_id_s=float(id_s),
        move_row=Curve(axes=(CurveAxis(name="record_bytes", sizes=RECORDS),), seconds=moves),
        move_read_s=float(read_s),
        move_share=share,
    )


def _equations(
    models: Sequence[CacheMeasurement], found: NDArray[np.float64], share: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return for each model the coefficients of the unknown costs, the known time, and whether its steps wait for rows."""
    placed = np.array([[one.num_plans, one.num_ids, 0.0, 0.0, 0.0] for one in models])
    moved = np.array([[0.0, 0.0, one.num_rows, one.num_rows * one.row_bytes, one.num_reads] for one in models])
    in_memory = np.array([one.in_memory_s for one in models])
    waits = moved @ found > in_memory + placed @ found
    terms = np.where(waits[:, None], moved + share * placed, placed + share * moved)
    return terms, np.where(waits, share * in_memory, in_memory), waits


def _steps_s(models: Sequence[CacheMeasurement], found: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    terms, known, _ = _equations(models, found, share)
    return np.maximum(terms @ found + known, 1e-9)


def _coordinate_descent(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative least squares by coordinate descent."""
    sizes = np.maximum(np.linalg.norm(left, axis=0), 1e-300)
    scaled = left / sizes
    found, rest = np.zeros(left.shape[1]), right.copy()
    for _ in range(NUM_SWEEPS):
        for column in range(left.shape[1]):
            new = max(0.0, found[column] + float(scaled[:, column] @ rest))
            rest -= scaled[:, column] * (new - found[column])
            found[column] = new
    return found / sizes


def measure_caches(
    machine: Machine, software: Software, device: torch.device, folder: Path, speed: MachineSpeed | None, *, is_short: bool
) -> Software:
    """Measure the cost of cached rows and return the software with it."""
    if device.type == "cuda":
        return _measure_gpu_caches(machine, software, device, folder, is_short=is_short)
    timings = software.cpu_timings
    assert timings is not None
    shapes = cpu_shapes(is_short=is_short)
    models = [measure_cache(shape, share, folder, speed, num_turns=2 if is_short else TURNS) for shape, share in shapes]
    return dataclasses.replace(software, cpu_timings=fit_cache_costs(timings, models))


# On a GPU

FEW = Shape(16, 4, 256, 10_000, 16, 1, 1.0, (16,), (16,), "tf32")
"""A model so small that its steps with a cache take only host time."""
FEW_KEPT = 0.5
"""Share of its rows in the cache."""
NUM_TURNS_OF_FEW = 2


def gpu_shapes(*, is_short: bool) -> list[tuple[Shape, float]]:
    """Return models for caches on a GPU, with the share of rows that the cache holds; all take longer than the host."""
    shapes = [
        # dense, sparse, batch, rows, width, ids, skew, MLPs, share
        (Shape(16, 31, 4096, 200_000, 64, 4, 0.0, (32,), (32,)), 0.05),  # many cache misses
        (Shape(16, 15, 8192, 200_000, 128, 4, 0.0, (32,), (32,)), 0.05),  # wide ones
        (Shape(16, 15, 16384, 50_000, 16, 2, 1.6, (32,), (1024, 1024)), 0.5),  # many ids, few rows
        (Shape(16, 15, 8192, 100_000, 128, 2, 0.0, (32,), (4096, 4096, 4096)), 0.05),  # steps that take longer than their rows
    ]
    less = 4 if is_short else 1
    return [
        (dataclasses.replace(one, batch_size=one.batch_size // less, num_rows=one.num_rows // less, precision="tf32"), share)
        for one, share in shapes
    ]


def steady_step_s(steps: Steps, seconds: float, *, warm_s: float = 0.0) -> float:
    """Return the median seconds per step over rounds in the steady state, with batches prefetched as early as in a run."""
    wait = functools.partial(torch.cuda.synchronize, steps.device) if steps.device.type == "cuda" else lambda: None
    end = np.inf if warm_s else 0.0
    while True:
        began = time.perf_counter()
        for _ in steps.take(STEPS_PER_ROUND):
            pass
        wait()
        now = time.perf_counter()
        if now >= end:
            break
        end = min(end, now + warm_s)  # only after the first round, which compiles and captures
    ahead = steps.stepper.model.store.batches_ahead + 1
    num_rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, round(seconds / (now - began))))
    marks: list[float] = []
    for number, _ in enumerate(steps.take(ahead + num_rounds * STEPS_PER_ROUND + ahead), 1):
        if number >= ahead and (number - ahead) % STEPS_PER_ROUND == 0:
            wait()
            marks.append(time.perf_counter())
    wait()
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(marks)) / STEPS_PER_ROUND


def _measure_gpu_caches(
    machine: Machine, software: Software, device: torch.device, folder: Path, *, is_short: bool
) -> Software:
    """Measure caches in GPU memory: host costs with a tiny model, GPU costs with larger ones."""
    seconds, timings = 0.1 if is_short else 0.4, software.device_timings
    assert timings is not None

    def step_s(shape: Shape, rule: Mapping[str, Any], *, max_set: int | None = None) -> float:
        with temporary_folder(folder, prefix=ROWS_PREFIX) as rows_folder:
            steps = Steps.of(shape, device, placement={"*": rule}, memory={"folder": str(rows_folder)})
            store = steps.stepper.model.store
            if max_set is not None:
                store.limit_prefetch(max_set)
            try:
                return steady_step_s(steps, seconds, warm_s=WARM_GPU_S)
            finally:
                steps.close()

    cached = {"where": "cached", "cache_fraction": FEW_KEPT}
    turns = [
        (step_s(FEW, {"where": "device"}), step_s(FEW, cached), step_s(FEW, cached, max_set=1)) for _ in range(NUM_TURNS_OF_FEW)
    ]
    # The minimum, as the first steps of a process take 1.5 times as long.
    in_memory_s, in_sets_s, one_by_one_s = map(min, zip(*turns, strict=True))
    set_s, batch_s = split_plan_cost(in_memory_s, in_sets_s, one_by_one_s, _group(FEW, FEW_KEPT).set_size)
    known = dataclasses.replace(timings, cache_batch_s=batch_s, cache_set_s=set_s)
    models = []
    for shape, share in gpu_shapes(is_short=is_short):
        group = _group(shape, share)
        taken_s = step_s(shape, {"where": "cached", "cache_fraction": share})
        if taken_s < MIN_OVER_HOST * (in_memory_s + batch_s + set_s / group.set_size):
            continue  # a step bound by the host says nothing about the GPU
        models.append(
            CacheMeasurement(
                in_memory_s=step_s(shape, {"where": "device"}),
                step_s=taken_s,
                num_ids=float(shape.num_ids),
                num_rows=group.missing_rows,
                num_reads=0.0,
                row_bytes=float(group.row_bytes),
                num_plans=0.0,
            )
        )
    if not any(model.num_rows * model.row_bytes for model in models):
        # Assume half the rate of the link, as measured on other machines.
        assert machine.accelerators is not None
        byte_s = 2 / machine.accelerators.host_link.bandwidth_bytes_per_s
        moves = Curve(
            axes=(CurveAxis(name="record_bytes", sizes=RECORDS),), seconds=tuple(byte_s * record for record in RECORDS)
        )
        return dataclasses.replace(software, device_timings=dataclasses.replace(known, move_row=moves))
    found = dataclasses.replace(fit_cache_costs(known, models), cache_batch_s=batch_s)
    return dataclasses.replace(software, device_timings=found)


def split_plan_cost(in_memory_s: float, in_sets_s: float, one_by_one_s: float, set_size: int) -> tuple[float, float]:
    """Return the host seconds per plan and per batch in it, from steps without a cache, with plans for sets, and with plans for single batches."""
    set_s = max(0.0, one_by_one_s - in_sets_s) / (1 - 1 / set_size)
    return set_s, max(0.0, in_sets_s - in_memory_s - set_s / set_size)


def _group(shape: Shape, share: float) -> CacheModel:
    """Return the cache model of a shape's tables on a GPU."""
    work = step_work(shape.spec("cpu"))
    (group,) = build_cache_models(work.tables, _setup(shape, [table.name for table in work.tables], share), in_sets=True)
    return group
