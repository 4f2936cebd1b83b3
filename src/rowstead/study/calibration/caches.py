"""What rows behind a cache cost: models are trained with all rows in memory and with most of them behind a cache, and the difference is explained.

Some models have few ids, some many; some lack few rows, some many; some rows are near each other in their file, others are not; some
steps wait for their rows, others do not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
import tempfile
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
from rowstead.spec.curve import Curve, CurveAxis
from rowstead.spec.machine import Machine
from rowstead.spec.software import Software
from rowstead.spec.timings import Timings
from rowstead.study.calibration.machine_speed import MachineSpeed
from rowstead.study.calibration.steady_state import SampledBatches, mean_step_s, run_to_steady_state
from rowstead.study.calibration.steps import WARM_GPU_S, Shape, Steps

RECORDS = (36.0, 68.0, 132.0, 260.0, 516.0)
"""Bytes of rows with their state for which times are given."""
TURNS, STEPS_PER_TURN, REFERENCES_PER_TURN = 5, 8, 2
SHARES = tuple(share / 20 for share in range(21))
"""That are tried for the share by which moving rows and training slow each other down."""
NUM_SWEEPS = 400
STEPS_PER_ROUND, LEAST_ROUNDS, MOST_ROUNDS = 64, 3, 15
"""On a GPU."""
MIN_OVER_HOST = 1.15
"""How many times as long as its host a GPU's step takes at least that says something of the GPU."""


@dataclass(frozen=True, kw_only=True)
class CacheMeasurement:
    """Steps of one model, and what they ask of its cache."""

    alone_s: float
    """With all rows in memory."""
    step_s: float
    num_ids: float
    """Behind the cache."""
    num_rows: float
    """That the cache lacks."""
    num_reads: float
    row_bytes: float
    num_plans: float = 1.0
    """That are made by what computes the step: none on a GPU, for which its host plans."""


def cpu_shapes(*, is_short: bool) -> list[tuple[Shape, float]]:
    """Models whose rows are put behind a cache of a CPU, with the share of them that the cache keeps."""
    sizes = [
        # sparse, batch, rows, width, ids, skew, top MLP, share
        (8, 128, 10_000, 16, 1, 1.6, (32,), 0.2),  # next to nothing
        (8, 512, 20_000, 16, 8, 1.6, (32,), 0.3),  # many ids, few rows
        (4, 512, 20_000, 16, 3, 0.0, (32,), 0.1),  # many rows, near each other
        (4, 256, 20_000, 128, 4, 0.2, (32,), 0.1),  # wide ones
        (4, 256, 150_000, 16, 1, 0.2, (32,), 0.05),  # rows far from each other
        (6, 256, 80_000, 32, 2, 1.0, (32,), 0.1),  # some of each
        (4, 512, 20_000, 16, 2, 0.3, (512, 512), 0.2),  # beside steps that take longer than that
        (6, 256, 80_000, 32, 1, 0.9, (1024, 512), 0.1),
    ]
    if is_short:
        sizes = sizes[:2] + sizes[6:7]
    return [
        (
            Shape(
                num_dense=16, num_sparse=sparse, batch_size=batch, num_rows=rows, width=width, mean_ids=ids, skew=skew,
                bottom=(32,), top=top,
            ),
            share,
        )
        for sparse, batch, rows, width, ids, skew, top, share in sizes
    ]  # fmt: skip


def measure_cache(
    shape: Shape, share: float, folder: Path, speed: MachineSpeed | None, *, num_turns: int = TURNS
) -> CacheMeasurement:
    """Train a model with all rows in memory and with this share of them there, in turns."""
    cpu, work = torch.device("cpu"), step_work(shape.spec("cpu"))
    with contextlib.ExitStack() as opened:
        place = opened.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=".rowstead-rows-"))
        drawn = SampledBatches.of(shape, cpu)
        alone = run_to_steady_state(shape, cpu, placement={"*": "device"}, kept_share=0.0, folder=place, drawn=drawn)
        rule = {"*": {"where": "ssd", "cache_fraction": share}}
        behind = run_to_steady_state(shape, cpu, placement=rule, kept_share=share, folder=place, drawn=drawn)
        opened.callback(behind.close)
        turns: dict[str, list[float]] = {"alone": [], "behind": []}
        for _ in range(num_turns):
            for name, steps in (("alone", alone), ("behind", behind)):
                turns[name].append(_turn_s(steps, speed))
    (group,) = build_cache_models(work.tables, _setup(shape, [table.name for table in work.tables], share))
    return CacheMeasurement(
        alone_s=statistics.median(turns["alone"]),
        step_s=statistics.median(turns["behind"]),
        num_ids=float(shape.num_ids),
        num_rows=group.missing_rows,
        num_reads=group.num_reads(group.missing_rows),
        row_bytes=float(group.row_bytes),
    )


def _turn_s(steps: Steps, speed: MachineSpeed | None) -> float:
    """Seconds of a step at the standard pace."""
    if speed is None:
        return mean_step_s(steps, STEPS_PER_TURN)
    before = [speed.time_reference() for _ in range(REFERENCES_PER_TURN)]
    seconds = mean_step_s(steps, STEPS_PER_TURN)
    return seconds / speed.slowdown(before + [speed.time_reference() for _ in range(REFERENCES_PER_TURN)])


def _setup(shape: Shape, tables: Sequence[str], share: float) -> Setup:
    behind = tuple(CachedTable(table=name, cache_fraction=share) for name in tables)
    return Setup(placement="device", batch_size=shape.batch_size, has_input=False, behind=behind)


def fit_cache_costs(timings: Timings, models: Sequence[CacheMeasurement]) -> Timings:
    """The timings with what explains the steps of these models best, errors taken as shares of what was measured.

    Rows take `moved = rows * (row_s + byte_s * bytes) + reads * read_s`, finding places `placed = batch_s + ids * id_s`, and a step the longer of
    `alone + placed + share * moved` and `moved + share * (alone + placed)`. What no model asks for is taken to cost nothing.
    """
    best, least = None, np.inf
    for share in SHARES:
        found = np.array([1e-4, 1e-8, 1e-6, 1e-9, 5e-6])
        for _ in range(8):  # which steps wait for their rows follows from the times, and these from that
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
        place_batch_s=float(batch_s),
        place_id_s=float(id_s),
        move_row=Curve(axes=(CurveAxis(name="record_bytes", sizes=RECORDS),), seconds=moves),
        move_read_s=float(read_s),
        move_share=share,
    )


def _equations(
    models: Sequence[CacheMeasurement], found: NDArray[np.float64], share: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """For each model what the unknown times are multiplied by, what is known, and whether its steps wait for rows."""
    placed = np.array([[one.num_plans, one.num_ids, 0.0, 0.0, 0.0] for one in models])
    moved = np.array([[0.0, 0.0, one.num_rows, one.num_rows * one.row_bytes, one.num_reads] for one in models])
    alone = np.array([one.alone_s for one in models])
    waits = moved @ found > alone + placed @ found
    terms = np.where(waits[:, None], moved + share * placed, placed + share * moved)
    return terms, np.where(waits, share * alone, alone), waits


def _steps_s(models: Sequence[CacheMeasurement], found: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    terms, known, _ = _equations(models, found, share)
    return np.maximum(terms @ found + known, 1e-9)


def _coordinate_descent(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares without negative numbers, one unknown after the other again and again."""
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
    """The trainer with what rows behind a cache cost it."""
    if device.type == "cuda":
        return _measure_gpu_caches(machine, software, device, folder, is_short=is_short)
    timings = software.cpu_timings
    assert timings is not None
    shapes = cpu_shapes(is_short=is_short)
    models = [measure_cache(shape, share, folder, speed, num_turns=2 if is_short else TURNS) for shape, share in shapes]
    return dataclasses.replace(software, cpu_timings=fit_cache_costs(timings, models))


# On a GPU

FEW = Shape(
    num_dense=16, num_sparse=4, batch_size=256, num_rows=10_000, width=16, mean_ids=1, skew=1.0, bottom=(16,), top=(16,),
    precision="tf32",
)  # fmt: skip
"""A model so small that its steps behind a cache show the host's time alone."""
FEW_KEPT = 0.5
"""Share of its rows that a cache keeps."""
NUM_TURNS_OF_FEW = 2


def gpu_shapes(*, is_short: bool) -> list[tuple[Shape, float]]:
    """Models whose rows are put behind a cache of a GPU, with the share of them that the cache keeps; all take longer than the host does."""
    sizes = [
        # sparse, batch, rows, width, ids, skew, top MLP, share
        (31, 4096, 200_000, 64, 4, 0.0, (32,), 0.05),  # many rows that are missing
        (15, 8192, 200_000, 128, 4, 0.0, (32,), 0.05),  # wide ones
        (15, 16384, 50_000, 16, 2, 1.6, (1024, 1024), 0.5),  # many ids, few rows
        (15, 8192, 100_000, 128, 2, 0.0, (4096, 4096, 4096), 0.05),  # beside steps that take longer than that
    ]
    less = 4 if is_short else 1
    return [
        (
            Shape(
                num_dense=16, num_sparse=sparse, batch_size=batch // less, num_rows=rows // less, width=width, mean_ids=ids,
                skew=skew, bottom=(32,), top=top, precision="tf32",
            ),
            share,
        )
        for sparse, batch, rows, width, ids, skew, top, share in sizes
    ]  # fmt: skip


def steady_step_s(steps: Steps, seconds: float, *, warm_s: float = 0.0) -> float:
    """Seconds of a step in the middle of many, when the batches that follow are announced as early as in a run: the median of rounds."""
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
        end = min(end, now + warm_s)  # not from the start: the first round compiles and captures
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
    """What rows behind a cache in a GPU's memory cost: the host, by a model that is next to nothing; the GPU, by models that are more than that."""
    seconds, timings = 0.1 if is_short else 0.4, software.device_timings
    assert timings is not None

    def step_s(shape: Shape, rule: Mapping[str, Any], *, max_set: int | None = None) -> float:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".rowstead-rows-") as place:
            steps = Steps.of(shape, device, placement={"*": rule}, memory={"folder": place})
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
    alone_s, in_sets_s, one_by_one_s = map(
        min, zip(*turns, strict=True)
    )  # the first steps of a process take half as long again
    set_s, batch_s = split_plan_cost(alone_s, in_sets_s, one_by_one_s, _group(FEW, FEW_KEPT).set_size)
    known = dataclasses.replace(timings, place_batch_s=batch_s, place_set_s=set_s)
    models = []
    for shape, share in gpu_shapes(is_short=is_short):
        group = _group(shape, share)
        taken_s = step_s(shape, {"where": "cached", "cache_fraction": share})
        if taken_s < MIN_OVER_HOST * (alone_s + batch_s + set_s / group.set_size):
            continue  # what the host holds up says nothing of the GPU
        models.append(
            CacheMeasurement(
                alone_s=step_s(shape, {"where": "device"}),
                step_s=taken_s,
                num_ids=float(shape.num_ids),
                num_rows=group.missing_rows,
                num_reads=0.0,
                row_bytes=float(group.row_bytes),
                num_plans=0.0,
            )
        )
    if not any(
        model.num_rows * model.row_bytes for model in models
    ):  # rows cross the bus at half its rate at most, by what was seen elsewhere
        assert machine.accelerators is not None
        byte_s = 2 / machine.accelerators.host_link.bandwidth_bytes_per_s
        moves = Curve(
            axes=(CurveAxis(name="record_bytes", sizes=RECORDS),), seconds=tuple(byte_s * record for record in RECORDS)
        )
        return dataclasses.replace(software, device_timings=dataclasses.replace(known, move_row=moves))
    found = dataclasses.replace(fit_cache_costs(known, models), place_batch_s=batch_s)
    return dataclasses.replace(software, device_timings=found)


def split_plan_cost(alone_s: float, in_sets_s: float, one_by_one_s: float, set_size: int) -> tuple[float, float]:
    """Host seconds of a plan, and of each batch in it, by steps without a cache, with plans of sets, and with plans of single batches."""
    set_s = max(0.0, one_by_one_s - in_sets_s) / (1 - 1 / set_size)
    return set_s, max(0.0, in_sets_s - alone_s - set_s / set_size)


def _group(shape: Shape, share: float) -> CacheModel:
    """The tables of a shape behind a GPU's cache."""
    work = step_work(shape.spec("cpu"))
    (group,) = build_cache_models(work.tables, _setup(shape, [table.name for table in work.tables], share), in_sets=True)
    return group
