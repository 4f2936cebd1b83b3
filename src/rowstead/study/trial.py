"""One trial of a search: a run with some settings, which can be pruned."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rowstead import run
from rowstead.spec.errors import RowsteadError, TrainingError
from rowstead.spec.record import Record
from rowstead.spec.run import RunSpec
from rowstead.spec.tune import num_steps_of
from rowstead.study.points import Point
from rowstead.study.run_points import PointRunner
from rowstead.training.device import check_precision
from rowstead.training.metrics import Quality
from rowstead.training.progress import Callback

CONSTANT_NE = 1.0
"""NE of always predicting the mean label: the objective of a run that diverged."""


class PrunedError(Exception):
    """Raised to prune a run."""

    def __init__(self, step: int, ne: float) -> None:
        super().__init__(f"pruned after step {step:,}: NE {ne:.4f}")
        self.ne = ne


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """The result of a trial."""

    record: Record | None
    objective: float | None
    """What the sampler gets: NE; of a pruned run the NE at that step, of a run that diverged `CONSTANT_NE`."""
    failure: str | None
    """Starts with `pruned` for a trial that was pruned."""
    spent_s: float


def with_evaluations(spec: RunSpec, evaluations: int) -> RunSpec:
    """The same run with that many evaluations and without checkpoints in between; it trains the same model."""
    num_steps = num_steps_of(spec)
    every = spec.train.eval_every
    if num_steps is not None and evaluations > 1:
        every = max(1, num_steps // evaluations)
    elif spec.train.early_stop is None:
        every = None
    return dataclasses.replace(spec, train=dataclasses.replace(spec.train, eval_every=every, checkpoint_every=None))


def objective_in(figures: dict[str, float]) -> float | None:
    """NE without label noise where the log is synthetic, else plain NE."""
    return figures.get("ne_expected", figures.get("ne"))


class _PruningCallback(Callback):
    """A Callback that reports each evaluation but the last, and prunes the run."""

    def __init__(self, is_bad: Callable[[int, float], bool], last_step: int | None) -> None:
        self._is_bad = is_bad
        self._last_step = last_step
        self._number = 0

    def on_evaluation(self, step: int, quality: Quality) -> None:
        self._number += 1
        ne = objective_in(quality.figures())
        if ne is not None and step != self._last_step and self._is_bad(self._number, ne):
            raise PrunedError(step, ne)


def run_trial(spec: RunSpec, folder: Path, *, is_bad: Callable[[int, float], bool]) -> TrialOutcome:
    """Train in this process. `is_bad` gets the number of each evaluation and its NE, and decides whether to prune."""
    started, record, objective, failure = time.monotonic(), None, None, None
    shutil.rmtree(folder, ignore_errors=True)
    try:
        check_precision(spec)
        result = run.train(spec, out=folder, callback=_PruningCallback(is_bad, num_steps_of(spec)), progress=False)
        record = result.record
        if record is None:
            raise KeyboardInterrupt(result.stopped_by)  # the loop has handled the signal
        objective = objective_in(record.figures)
        failure = None if objective is not None else "NE is undefined: all labels of the evaluation split are equal"
    except PrunedError as error:
        objective, failure = error.ne, str(error)
    except TrainingError as error:  # such as a loss that is not finite
        objective, failure = CONSTANT_NE, str(error)
    except RowsteadError as error:
        failure = str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return TrialOutcome(record=record, objective=objective, failure=failure, spent_s=time.monotonic() - started)


def run_trial_in_processes(spec: RunSpec, point: Point, runner: PointRunner) -> TrialOutcome:
    """Train in separate processes, with the command line."""
    outcome = runner.run(dataclasses.replace(point, spec=spec))
    runner.forget(point)
    objective = objective_in(outcome.record.figures) if outcome.record is not None else None
    return TrialOutcome(record=outcome.record, objective=objective, failure=outcome.failure, spent_s=outcome.spent_s or 0.0)
