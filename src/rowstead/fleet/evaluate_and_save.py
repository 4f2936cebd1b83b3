"""Evaluations and checkpoints of a fleet's model, during and after training."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from rowstead.data.open_log import Sources
from rowstead.fleet.batch_assignments import parse_log
from rowstead.fleet.build import read_reader_progress
from rowstead.fleet.gathered_model import GatheredModel, LocalTablesModel
from rowstead.records.run_folder import BEST, RunFolder
from rowstead.spec.errors import LostProcessError
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.metrics import Quality
from rowstead.training.progress import EarlyStopping, Position, RunReporter
from rowstead.training.sync_base import DenseServerUnavailable

T = TypeVar("T")
PARTICIPLES = {"evaluation": "evaluated", "checkpoint": "saved"}


def run_in_background(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread; unlike an executor's, it does not keep the process from exiting."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001, RUF100 - raised by `future.result`
            future.set_exception(error)

    threading.Thread(target=run, name="rowstead-coordinator", daemon=True).start()
    return future


def wait_for(future: Future[Any], timeout_s: float) -> bool:
    """Wait for at most `timeout_s`; return whether the work is done."""
    return bool(concurrent.futures.wait([future], timeout_s).done)


def position_in_logs(position: Position, progress: Sequence[str]) -> Position:
    """Return the position of a checkpoint with these assignment logs: what trainers have reported is up to half a second older."""
    try:
        readers = [parse_log(text.encode())[1] for text in progress]
    except ValueError:  # there is none yet
        return dataclasses.replace(position)
    num_done, num_assigned = sum(reader.num_done for reader in readers), sum(reader.next_number for reader in readers)
    num_samples = sum(reader.num_samples for reader in readers)
    return dataclasses.replace(
        position, step=num_done, num_samples=round(num_samples * num_done / num_assigned) if num_assigned else 0
    )


class EvaluateAndSave:
    """Evaluates and saves the model of one run; the caller keeps `position` up to date.

    `poll` and `wait` are for use during training, the other methods for after it. One thread calls them all; what `poll`
    starts runs in another thread, and has exclusive use of the model until it is done.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        sources: Sources,
        model: GatheredModel | LocalTablesModel,
        position: Position,
        *,
        total_steps: int,
        reporter: RunReporter,
        is_saved: bool,
    ) -> None:
        """`is_saved`: there is a checkpoint of the current position."""
        self._spec, self._folder, self._sources, self._model, self._position = spec, folder, sources, model, position
        self._total_steps, self._reporter = total_steps, reporter
        self._early_stopping = EarlyStopping(spec.train, position, spec.model.tasks)
        self._every = {"evaluation": spec.train.eval_every, "checkpoint": spec.train.checkpoint_every}
        self._due = {task: self._next(task) for task in self._every}
        self._saved_step = position.step if is_saved else None
        self._future: Future[bool] | None = None
        self._task = ""

    def poll(self) -> bool:
        """Start what is due in the background; true when training should stop early."""
        if self._future is not None:
            return self._take_result() if self._future.done() else False
        step = self._position.step
        for task, due in self._due.items():
            if due is not None and due <= step < self._total_steps:
                self._due[task], self._task = self._next(task), task
                self._future = run_in_background(lambda task=task: self._run_task(task))  # type: ignore[misc]
                return False
        return False

    def wait(self, timeout_s: float = 0.0) -> bool:
        """Wait for the background task, and return whether none is running any more."""
        if self._future is not None and wait_for(self._future, timeout_s):
            self._take_result()
        return self._future is None

    def is_idle(self, timeout_s: float) -> bool:
        """The same, but ignore the result of the task."""
        return self._future is None or wait_for(self._future, timeout_s)

    def save(self, *, is_changed: bool = False) -> None:
        """Save the gathered model, unless the newest checkpoint is of this step and the model has not changed since."""
        if is_changed or self._position.step != self._saved_step:
            progress = read_reader_progress(self._spec, self._folder.path)
            self._write(position_in_logs(self._position, progress), progress)

    def evaluate(self) -> tuple[Quality, Quality | None]:
        """Evaluate the gathered model on the whole evaluation split and, if there is one, on the test split."""
        quality, test = self._evaluate(None), None
        if self._sources.test is not None:
            test = self._model.evaluate(self._sources.test, None)
            self._reporter.on_test(self._position.step, test)
        return quality, test

    def take_best(self, ending: str) -> bool:
        """At the end of a run with `early_stop`, load the model of the best evaluation into the fleet, unless it is the last; whether it did."""
        if ending == "interrupted" or not self._early_stopping.keeps_best:
            return False
        if ending == "finished" and self._early_stopping.observe(self._evaluate(self._spec.train.eval_samples)):
            return False
        best = checkpoint.load_latest(self._folder.path / BEST, self._reporter.on_message)
        self._model.load(best, with_optimizer=True)
        self._reporter.on_message(f"{ending}: restored the weights of the best evaluation, at step {best.step:,}")
        return True

    def _evaluate(self, max_samples: int | None) -> Quality:
        quality = self._model.evaluate(self._sources.eval, max_samples)
        self._reporter.on_evaluation(self._position.step, quality)
        return quality

    def _next(self, task: str) -> int | None:
        every = self._every[task]
        return None if every is None else (self._position.step // every + 1) * every

    def _take_result(self) -> bool:
        assert self._future is not None
        future, self._future = self._future, None
        try:
            return future.result()
        except (LostProcessError, DenseServerUnavailable) as error:  # trainers wait for it, or continue without; so do we
            step = self._position.step
            self._reporter.on_message(f"step {step:,}: not {PARTICIPLES[self._task]}: {error}")
            self._reporter.write("missed", step, {"what": self._task, "why": str(error)})
            return False

    # In the background

    def _run_task(self, task: str) -> bool:
        progress = read_reader_progress(self._spec, self._folder.path)  # before the rows: newer batches are trained on again
        position = position_in_logs(self._position, progress)
        self._model.gather(is_training=True)
        if task == "checkpoint":
            self._write(position, progress)
            return False
        quality = self._model.evaluate(self._sources.eval, self._spec.train.eval_samples)
        self._reporter.on_evaluation(position.step, quality)
        if self._early_stopping.observe(quality):
            self._model.save(self._folder.path / BEST, position, keep=1, progress=progress)
        return self._early_stopping.should_stop

    def _write(self, position: Position, progress: list[str]) -> None:
        self._model.save(self._folder.checkpoints, position, keep=self._spec.train.keep_checkpoints, progress=progress)
        self._saved_step = position.step
        self._reporter.write("checkpoint", position.step)
