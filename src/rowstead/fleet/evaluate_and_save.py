"""What is made of a fleet's model on its way and at its end: evaluations, checkpoints, and the decision to stop early."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from rowstead.data.open_log import Sources
from rowstead.fleet.background import InBackground
from rowstead.fleet.build import readers_progress
from rowstead.fleet.gathered_model import GatheredModel, TrainersModel
from rowstead.fleet.role_table import FleetCallback
from rowstead.records.run_folder import RunFolder
from rowstead.spec.errors import LostProcessError
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.metrics import Quality
from rowstead.training.progress import Position
from rowstead.training.sync_base import DenseServerUnavailable

NOUNS = {"evaluation": "evaluated", "checkpoint": "saved"}


class Keep(Protocol):
    """Puts something that happened at a step into the run's records."""

    def __call__(self, kind: str, step: int, figures: dict[str, Any]) -> None: ...


class EvaluateAndSave:
    """Evaluates and saves the model of one run; `position` is how far it has come, which others keep up to date.

    `look` and `wait` are for while training goes on, the rest for when it has ended. One thread calls them all; what `look`
    begins runs in another, and until it has ended that one has the model to itself.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        sources: Sources,
        model: GatheredModel | TrainersModel,
        position: Position,
        *,
        total_steps: int,
        keep: Keep,
        callback: FleetCallback,
        is_saved: bool,
    ) -> None:
        """`is_saved`: there is a checkpoint of where the run stands now."""
        self._spec, self._folder, self._sources, self._model, self._position = spec, folder, sources, model, position
        self._total_steps, self._keep, self._watcher = total_steps, keep, callback
        self._every = {"evaluation": spec.train.eval_every, "checkpoint": spec.train.checkpoint_every}
        self._due = {what: self._next(what) for what in self._every}
        self._saved_step = position.step if is_saved else None
        self._job: InBackground[bool] | None = None
        self._what = ""

    def look(self) -> bool:
        """Begin what is due, in the background; true when training should stop early."""
        if self._job is not None:
            return self._result() if self._job.is_done else False
        step = self._position.step
        for what, due in self._due.items():
            if due is not None and due <= step < self._total_steps:
                self._due[what], self._what = self._next(what), what
                self._job = InBackground(lambda what=what: self._reached(what))  # type: ignore[misc]
                return False
        return False

    def wait(self, timeout_s: float = 0.0) -> bool:
        """Whether nothing runs in the background any more, after so long."""
        if self._job is not None:
            self._job.wait(timeout_s)
            if self._job.is_done:
                self._result()
        return self._job is None

    def is_idle(self, timeout_s: float) -> bool:
        """The same, whatever came of it."""
        if self._job is not None:
            self._job.wait(timeout_s)
        return self._job is None or self._job.is_done

    def save(self, *, is_changed: bool = False) -> None:
        """Save the model as it is gathered, unless the newest checkpoint is of this step; `is_changed`: then too."""
        if is_changed or self._position.step != self._saved_step:
            self._write(self._position, readers_progress(self._spec, self._folder.path))

    def evaluate(self) -> Quality:
        """Score the model as it is gathered on all of the evaluation split."""
        quality = self._model.evaluate(self._sources.eval, None)
        self._tell(self._position.step, quality)
        return quality

    def take_back_best(self) -> None:
        """Give the fleet the model of the best evaluation."""
        best = checkpoint.load_latest(self._folder.path / "best", self._watcher.on_message)
        self._model.put(best, with_optimizer=True)
        self._watcher.on_message(f"no better evaluation for a while: took back the weights of step {best.step}")

    def _next(self, what: str) -> int | None:
        every = self._every[what]
        return None if every is None else (self._position.step // every + 1) * every

    def _result(self) -> bool:
        assert self._job is not None
        job, self._job = self._job, None
        try:
            return job.result()
        except (LostProcessError, DenseServerUnavailable) as error:  # trainers wait for it, or go on without: so does this
            step = self._position.step
            self._watcher.on_message(f"step {step:,}: not {NOUNS[self._what]}: {error}")
            self._keep("missed", step, {"what": self._what, "why": str(error)})
            return False

    # In the background

    def _reached(self, what: str) -> bool:
        position = dataclasses.replace(self._position)
        progress = readers_progress(self._spec, self._folder.path)  # before the rows: what is newer in them is trained on again
        self._model.take()
        if what == "checkpoint":
            self._write(position, progress)
            return False
        quality = self._model.evaluate(self._sources.eval, self._spec.train.eval_samples)
        self._tell(position.step, quality)
        return self._has_lost_patience(quality, position, progress)

    def _has_lost_patience(self, quality: Quality, position: Position, progress: list[str]) -> bool:
        spec = self._spec.train.early_stop
        if spec is None:
            return False
        measure = quality.early_stop_measure(self._spec.train.loss)
        if self._position.best is None or measure < self._position.best - spec.min_delta:
            self._position.best, self._position.evaluations_since_best = measure, 0
            self._model.save(self._folder.path / "best", position, keep=1, progress=progress)
        else:
            self._position.evaluations_since_best += 1
        return self._position.evaluations_since_best >= spec.patience

    def _write(self, position: Position, progress: list[str]) -> None:
        self._model.save(self._folder.checkpoints, position, keep=self._spec.train.keep_checkpoints, progress=progress)
        self._saved_step = position.step
        self._keep("checkpoint", position.step, {})

    def _tell(self, step: int, quality: Quality) -> None:
        self._keep("evaluation", step, quality.figures())
        self._watcher.on_evaluation(step, quality)
