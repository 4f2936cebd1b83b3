"""Fits the timings of separately measured parts to whole steps: a fixed time, a factor and a cost per byte for each phase."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowstead.plan import cost
from rowstead.plan.cost import Processor
from rowstead.plan.work import step_work
from rowstead.spec.phases import Phase
from rowstead.spec.software import Software
from rowstead.spec.timings import InStep, Timings
from rowstead.study.calibration.steps import Shape, StepTime

PULL = 0.05
"""Regularisation of the factors towards 1, relative to errors as a share of a step: a few steps should not move them far."""
STEP_PULL = 0.3
"""The same where each step gives a single equation for all its parts."""
FACTORS = (0.3, 3.0)
"""Bounds of the factors."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Times of the parts of one step, predicted from the timings."""

    dense_s: float
    lookup_s: float
    update_s: float
    dense_update_s: float
    plan_s: float
    fill_s: float


def predict_parts(shape: Shape, processor: Processor, software: Software) -> Parts:
    """Predict the parts of a model's step with the cost model."""
    work, batch = step_work(shape.spec("cpu")), shape.batch_size
    timings, precision = processor.timings, shape.precision
    assert timings is not None
    dense_s = cost.layers_s(processor, work, work.bottom, batch, precision, passes=3)  # type: ignore[arg-type]
    dense_s += cost.layers_s(processor, work, work.top, batch, precision, passes=3)  # type: ignore[arg-type]
    dense_s += cost.interaction_s(processor, work, batch, precision, passes=3)  # type: ignore[arg-type]
    return Parts(
        dense_s=dense_s,
        lookup_s=cost.lookup_s(processor, work.tables, batch),
        update_s=cost.update_s(processor, work.tables, batch, software),
        dense_update_s=cost.dense_update_s(processor, work),
        plan_s=timings.plan.at(max(1.0, batch * work.ids_per_sample)) if timings.plan is not None else 0.0,
        fill_s=cost.fill_s(processor, work, batch),
    )


def fit_timings(
    timings: Timings, processor: Processor, software: Software, shapes: Sequence[Shape], times: Sequence[StepTime]
) -> Timings:
    """Fit the timings to whole steps, by least squares of relative errors.

    Where the trainer times its phases, each phase of each step gives an equation; on a GPU each step gives one.
    """
    base = dataclasses.replace(
        timings, dense=InStep(), lookup=InStep(), update=InStep(), dense_optimizer=InStep(), plan_factor=0.0
    )
    processor = dataclasses.replace(processor, timings=base)
    parts = [predict_parts(shape, processor, software) for shape in shapes]
    if all(time.phases_s for time in times):
        return _fit_phases(base, shapes, parts, times)
    return _fit_steps(base, parts, times)


def _fit_phases(base: Timings, shapes: Sequence[Shape], parts: Sequence[Parts], times: Sequence[StepTime]) -> Timings:
    """Fit a fixed time, a factor and a cost per byte for each phase."""
    works = [step_work(shape.spec("cpu")) for shape in shapes]
    pooled = [shape.batch_size * work.pooled_bytes for shape, work in zip(shapes, works, strict=True)]
    moved = [
        shape.batch_size * (cost.layer_bytes((*work.bottom, *work.top)) + 2.0 * work.pooled_bytes)
        for shape, work in zip(shapes, works, strict=True)
    ]
    phases = [time.phases_s for time in times]
    found = dataclasses.replace(
        base,
        dense=_fit_phase([one.dense_s for one in parts], moved, [one[Phase.FORWARD] + one[Phase.BACKWARD] for one in phases]),
        lookup=_fit_phase(
            [one.lookup_s - base.lookup_call_s for one in parts],
            pooled,
            [one[Phase.LOOKUP] - base.lookup_call_s for one in phases],
        ),
        update=_fit_phase(
            [one.update_s - base.update_call_s for one in parts],
            pooled,
            [one[Phase.ROW_UPDATE] - base.update_call_s for one in phases],
        ),
        dense_optimizer=_fit_phase(
            [one.dense_update_s for one in parts], [0.0] * len(parts), [one[Phase.DENSE_UPDATE] for one in phases]
        ),
    )
    return _scale_to_steps(found, parts, pooled, moved, times)


def _scale_to_steps(
    found: Timings, parts: Sequence[Parts], pooled: Sequence[float], moved: Sequence[float], times: Sequence[StepTime]
) -> Timings:
    """Scale all phases so that half of the steps are predicted too long and half too short.

    Least squares of relative errors underestimates noisy times, and the medians of the phases add up to less than the median step.
    """
    calls_s = found.lookup_call_s + found.update_call_s
    over = []
    for one, pooled_bytes, moved_bytes, time in zip(parts, pooled, moved, times, strict=True):
        terms = (
            (found.dense, one.dense_s, moved_bytes),
            (found.lookup, one.lookup_s - found.lookup_call_s, pooled_bytes),
            (found.update, one.update_s - found.update_call_s, pooled_bytes),
            (found.dense_optimizer, one.dense_update_s, 0.0),
        )
        phases_s = sum(phase.fixed_s + phase.seconds(parts_s, num_bytes) for phase, parts_s, num_bytes in terms)
        over.append((time.step_s - calls_s) / phases_s)
    times_longer = statistics.median(over)
    longer = {
        name: InStep(**{key: times_longer * value for key, value in vars(getattr(found, name)).items()})
        for name in ("dense", "lookup", "update", "dense_optimizer")
    }
    return dataclasses.replace(found, **longer)  # type: ignore[arg-type]


def _fit_phase(parts_s: Sequence[float], moved_bytes: Sequence[float], taken_s: Sequence[float]) -> InStep:
    """Fit one phase."""
    taken = np.maximum(taken_s, 1e-9)
    terms = np.stack([np.ones(len(taken)), np.array(parts_s), np.array(moved_bytes)], axis=1) / taken[:, None]
    pulls = PULL * np.median(terms, axis=0)
    found = nonnegative_least_squares(
        np.vstack([terms, np.diag(pulls)]), np.concatenate([np.ones(len(taken)), [0.0, pulls[1], 0.0]])
    )
    return InStep(fixed_s=float(found[0]), factor=float(np.clip(found[1], *FACTORS)), byte_s=float(found[2]))


def _fit_steps(base: Timings, parts: Sequence[Parts], times: Sequence[StepTime]) -> Timings:
    """Fit one fixed time, a factor for each phase, and one for update plans, which overlap."""
    taken = np.array([time.step_s for time in times])
    calls_s = base.lookup_call_s + base.update_call_s
    known = np.array([calls_s + one.dense_update_s + one.fill_s for one in parts])
    terms = np.array(
        [[1.0, one.dense_s, one.lookup_s - base.lookup_call_s, one.update_s - base.update_call_s, one.plan_s] for one in parts]
    )
    has_plan = base.plan is not None
    pulls = np.diag([0.0, STEP_PULL, STEP_PULL, STEP_PULL, STEP_PULL if has_plan else 1.0])
    toward = pulls @ np.array([0.0, 1.0, 1.0, 1.0, 0.5 if has_plan else 0.0])
    found = nonnegative_least_squares(
        np.vstack([terms / taken[:, None], pulls]), np.concatenate([(taken - known) / taken, toward])
    )
    dense, lookup, update = (float(np.clip(one, *FACTORS)) for one in found[1:4])
    return dataclasses.replace(
        base,
        dense=InStep(fixed_s=float(found[0]), factor=dense),
        lookup=InStep(factor=lookup),
        update=InStep(factor=update),
        plan_factor=float(min(found[4], 1.0)),
    )


def take_shorter(one: Any, other: Any) -> Any:
    """Return the element-wise shorter times of two measurements of the same thing."""
    if isinstance(one, float):
        return min(one, other)
    if isinstance(one, tuple):
        return tuple(map(take_shorter, one, other))
    if isinstance(one, dict):
        return {name: take_shorter(value, other[name]) for name, value in one.items()}
    if not dataclasses.is_dataclass(one) or isinstance(one, type):
        return one
    return dataclasses.replace(one, **take_shorter(vars(one), vars(other)))


def nonnegative_least_squares(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative least squares: drop the most negative unknown until none is negative."""
    sizes = np.maximum(np.linalg.norm(left, axis=0), 1e-300)  # columns have different units
    kept, whole = list(range(left.shape[1])), np.zeros(left.shape[1])
    while kept:
        found, *_ = np.linalg.lstsq(left[:, kept] / sizes[kept], right, rcond=None)
        if found.min() >= 0:
            whole[kept] = found / sizes[kept]
            break
        kept.pop(int(found.argmin()))
    return whole
