"""From parts measured alone to steps: what a step takes besides them, and by how much each part is slower in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rowstead.measure.steps import Shape, StepTime
from rowstead.plan import cost
from rowstead.plan.cost import Processor
from rowstead.plan.work import step_work
from rowstead.spec.machine import Software
from rowstead.spec.timings import Timings

PULL = 0.05
"""How much a factor that is not 1 counts beside an error of the same share of a step: few steps decide little."""
FACTORS = (0.4, 3.0)
"""Within which they must be."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the parts of one step take by the timings, each alone."""

    dense_s: float
    lookup_s: float
    update_s: float
    dense_update_s: float
    plan_s: float
    fill_s: float


def parts_of(shape: Shape, processor: Processor, software: Software) -> Parts:
    """The parts of a model's step, as the cost model has them."""
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


def fitted(
    timings: Timings, processor: Processor, software: Software, shapes: Sequence[Shape], times: Sequence[StepTime]
) -> Timings:
    """The timings with what whole steps have shown: fixed time and factors of least squares, errors taken as shares of a step.

    Where the trainer counts its phases, each is an equation of its own; on a GPU there is one for each step.
    """
    plain = dataclasses.replace(timings, fixed_s=0.0, dense_factor=1.0, lookup_factor=1.0, update_factor=1.0, plan_factor=0.0)
    processor = dataclasses.replace(processor, timings=plain)
    rows, wanted = [], []

    def equation(fixed: float, dense: float, lookup: float, update: float, plan: float, known: float, taken: float) -> None:
        """`known` seconds have no factor; all are shares of what was taken."""
        rows.append([fixed / taken, dense / taken, lookup / taken, update / taken, plan / taken])
        wanted.append((taken - known) / taken)

    for shape, time in zip(shapes, times, strict=True):
        parts = parts_of(shape, processor, software)
        lookup_s, update_s = parts.lookup_s - plain.lookup_call_s, parts.update_s - plain.update_call_s
        calls_s = plain.lookup_call_s + plain.update_call_s
        equation(
            1.0, parts.dense_s, lookup_s, update_s, parts.plan_s, calls_s + parts.dense_update_s + parts.fill_s, time.step_s
        )
        if time.phases_s:
            dense_s = time.phases_s["forward"] + time.phases_s["backward"]
            equation(1.0, parts.dense_s, 0, 0, 0, 0.0, dense_s)
            equation(0, 0, lookup_s, 0, 0, plain.lookup_call_s, time.phases_s["look-up"])
            equation(0, 0, 0, update_s, 0, plain.update_call_s, time.phases_s["row update"])
    pulls = np.diag([0.0, PULL, PULL, PULL, PULL if plain.plan is not None else 1.0])
    toward = pulls @ np.array([0.0, 1.0, 1.0, 1.0, 0.5 if plain.plan is not None else 0.0])
    left, right = np.vstack([np.array(rows), pulls]), np.concatenate([wanted, toward])
    found, *_ = np.linalg.lstsq(left, right, rcond=None)
    if found[0] < 0:  # a step takes no less than its parts
        found[1:], *_ = np.linalg.lstsq(left[:, 1:], right, rcond=None)
    fixed_s, plan_factor = max(0.0, float(found[0])), float(np.clip(found[4], 0.0, 1.0))
    dense, lookup, update = (float(np.clip(one, *FACTORS)) for one in found[1:4])
    return dataclasses.replace(
        timings, fixed_s=fixed_s, dense_factor=dense, lookup_factor=lookup, update_factor=update, plan_factor=plan_factor
    )
