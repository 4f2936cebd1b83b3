"""How far a run has come, when it stops early, and who is told: callbacks, the event file and TensorBoard."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.data.row_order import Cursor
from rowstead.records.events import EventLog
from rowstead.records.tensorboard import ScalarWriter
from rowstead.spec.errors import DataError
from rowstead.spec.features import SparseFeatureSpec
from rowstead.spec.heads import TaskSpec
from rowstead.spec.record import Record
from rowstead.spec.run import RunSpec
from rowstead.spec.train import EarlyStopSpec, TrainSpec
from rowstead.training.metrics import Quality


@dataclass
class Position:
    """How far a run has come; saved with every checkpoint."""

    step: int = 0
    epoch: int = 0
    cursor: Cursor | None = None
    """The reader's position within the epoch; None at its start."""
    num_samples: int = 0
    train_s: float = 0.0
    best: float | None = None
    """The lowest evaluation measure so far, for early stopping; the negative of one that should be high."""
    evaluations_since_best: int = 0
    lr_scale: float = 1.0
    """What evaluations have multiplied the learning rates by (`schedule.decay: plateau`)."""
    evaluations_since_lr: int = 0
    """Evaluations since the best one, or since the learning rates were lowered."""
    label_weight: float = 0.0
    """Total weight of the examples trained on."""
    label_sum: float = 0.0
    """Weighted sum of their labels."""
    num_lost_updates: int = 0
    """Updates of rows that a fleet's sparse servers have lost; each server counts."""
    num_lost_steps: int = 0
    """Steps that were lost with a killed coordinator of a fleet, because they were in no checkpoint; they are trained again."""

    def train_rate(self, negative_keep_rate: float) -> float | None:
        """The mean label of the examples trained on, corrected for downsampled negatives; None while all labels are equal."""
        positive, negative = self.label_sum, (self.label_weight - self.label_sum) / negative_keep_rate
        return positive / (positive + negative) if positive > 0 and negative > 0 else None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of training after a step."""

    step: int
    total_steps: int
    num_samples: int
    """Examples trained on so far, including those before a resume."""
    loss: float
    """Mean over the last steps."""
    samples_per_s: float
    """Samples over training time so far, see `Throughput`."""
    waiting_share: float
    """Share of the time spent waiting for data."""
    ne: float | None = None
    """NE over the last steps, of predictions made before each update; None while all their labels are equal."""


class EarlyStopping:
    """Counts evaluations without improvement, to end a run or to lower its learning rates.

    Its state is part of `position`, so that checkpoints keep it.
    """

    def __init__(self, spec: TrainSpec, position: Position, tasks: Sequence[TaskSpec] = ()) -> None:
        self._spec, self._position, self._tasks = spec, position, tasks

    def observe(self, quality: Quality) -> bool:
        """Count one evaluation; true if it is the best so far, whose weights should be kept."""
        rule, schedule, position = self._spec.early_stop, self._spec.schedule, self._position
        if rule is None and schedule.decay != "plateau":
            return False
        rule = rule or EarlyStopSpec()
        measure = self._measure_of(quality, rule)
        is_best = position.best is None or measure < position.best - rule.min_delta
        if is_best:
            position.best, position.evaluations_since_best, position.evaluations_since_lr = measure, 0, 0
        else:
            position.evaluations_since_best += 1
            position.evaluations_since_lr += 1
        if schedule.decay == "plateau" and position.evaluations_since_lr >= schedule.patience:
            position.lr_scale = max(position.lr_scale * schedule.factor, schedule.final)
            position.evaluations_since_lr = 0
        return is_best and self._spec.early_stop is not None

    def _measure_of(self, quality: Quality, rule: EarlyStopSpec) -> float:
        if not self._tasks:
            return quality.monitored(rule.monitor, self._spec.loss)
        task = next((task for task in self._tasks if task.name == rule.task), self._tasks[0])
        if task.name not in quality.tasks:
            raise DataError(
                f"early stopping follows task `{task.name}`, but no evaluated example has a label in `{task.label}`: "
                "follow another task (train.early_stop.task), or evaluate examples that have it"
            )
        return quality.tasks[task.name].monitored(rule.monitor, task.loss)

    @property
    def keeps_best(self) -> bool:
        """Whether the weights of the best evaluation are those of the run."""
        return self._spec.early_stop is not None

    @property
    def should_stop(self) -> bool:
        """Whether the patience is used up."""
        rule = self._spec.early_stop
        return rule is not None and self._position.evaluations_since_best >= rule.patience


class Callback:
    """Follows a run of `rowstead.train`: derive from it, and define the methods that you need; the others do nothing.

    The training thread calls them, so they must return quickly. Of several processes only the first calls them. An exception that a
    method raises ends the run.
    """

    def on_start(self, spec: RunSpec, folder: Path) -> None:
        """Called before the first step, or the first one after a resume, with the resolved recipe and the run's folder."""

    def on_step(self, progress: Progress) -> None:
        """Called after every step."""

    def on_evaluation(self, step: int, quality: Quality) -> None:
        """Called after every evaluation on the evaluation split; `quality.figures()` has its numbers by name."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called once a checkpoint of a step is complete, with its folder; old ones are removed later."""

    def on_message(self, text: str) -> None:
        """Called with one line of text for the user."""

    def on_end(self, record: Record | None) -> None:
        """Called once the run has ended, with what it measured; None if it was interrupted. Not called for a run that fails."""


class CallbackList(Callback):
    """Calls several callbacks in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def on_start(self, spec: RunSpec, folder: Path) -> None:
        for callback in self._callbacks:
            callback.on_start(spec, folder)

    def on_step(self, progress: Progress) -> None:
        for callback in self._callbacks:
            callback.on_step(progress)

    def on_evaluation(self, step: int, quality: Quality) -> None:
        for callback in self._callbacks:
            callback.on_evaluation(step, quality)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        for callback in self._callbacks:
            callback.on_checkpoint(step, folder)

    def on_message(self, text: str) -> None:
        for callback in self._callbacks:
            callback.on_message(text)

    def on_end(self, record: Record | None) -> None:
        for callback in self._callbacks:
            callback.on_end(record)


class MovingLoss:
    """Loss and NE over the last steps, each step weighted by its examples."""

    def __init__(self, num_steps: int = 100) -> None:
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=num_steps)
        """Weight, loss and mean label of each step."""

    def add(self, weight: float, loss: float, mean_label: float) -> None:
        self._steps.append((weight, loss, mean_label))

    @property
    def has_steps(self) -> bool:
        return bool(self._steps)

    @property
    def loss(self) -> float:
        """The weighted mean; NaN without steps."""
        return self._mean(1)

    @property
    def ne(self) -> float | None:
        """The loss over the entropy of the mean label; None if all labels are equal."""
        p = self._mean(2)
        if not 0 < p < 1:
            return None
        return self.loss / -(p * math.log(p) + (1 - p) * math.log1p(-p))

    def _mean(self, column: int) -> float:
        total = sum(step[0] for step in self._steps)
        return sum(step[0] * step[column] for step in self._steps) / total if total else math.nan


class MeanIds:
    """Mean ids per example of each sparse feature, over a sample of batches, and how often histories are as long as they may be."""

    def __init__(self, features: Sequence[SparseFeatureSpec] = ()) -> None:
        self._num_ids: Tensor | None = None
        self._num_samples = 0
        self._histories = {index: feature for index, feature in enumerate(features) if feature.is_history}
        self._num_full = dict.fromkeys(self._histories, 0)

    def add(self, sparse: Sparse) -> None:
        """Add a batch in system memory."""
        num_samples = (sparse.offsets.numel() - 1) // max(1, sparse.num_features)
        if sparse.num_features and num_samples:
            num_ids = sparse.offsets[::num_samples].diff()
            self._num_ids = num_ids if self._num_ids is None else self._num_ids + num_ids
            self._num_samples += num_samples
            for index, feature in self._histories.items():
                lengths = sparse.offsets[index * num_samples : (index + 1) * num_samples + 1].diff()
                self._num_full[index] += int((lengths >= (feature.max_ids or 0)).sum())

    def truncation_texts(self) -> list[str]:
        """A sentence for each history that was truncated, or may have been."""
        return [
            f"{self._num_full[index] / self._num_samples:.0%} of the histories of `{feature.name}` have as many ids as max_ids, "
            f"{feature.max_ids:,}: only the most recent ones are used. Raise max_ids to use more"
            for index, feature in self._histories.items()
            if self._num_full[index]
        ]

    def figures(self) -> dict[str, list[float]]:
        """The means, in the order of the features; nothing before the first batch."""
        return {} if self._num_ids is None else {"mean_ids": (self._num_ids / self._num_samples).tolist()}


class RunReporter(Callback):
    """A `Callback` that writes to the run's folder and then calls another callback.

    Without a `folder` nothing is written, as in all processes of a job but the first. `resumed_step` is the step of the checkpoint
    that a resumed run starts from: later events of its earlier part no longer count.
    """

    def __init__(self, folder: Path | None, callback: Callback, *, log_every: int, resumed_step: int | None = None) -> None:
        self._callback, self._log_every = callback, log_every
        self._logged_step = resumed_step or 0
        self._events = self._scalars = None
        if folder is not None:
            self._events = EventLog(folder / "events.jsonl")
            self._scalars = ScalarWriter(folder / "tensorboard", resumed_step=resumed_step)
            if resumed_step is not None:
                self._events.resumed(resumed_step)

    def on_step(self, progress: Progress) -> None:
        """Report a step; every `log_every` steps its figures are also written."""
        self._callback.on_step(progress)
        if progress.step // self._log_every > self._logged_step // self._log_every:
            self._logged_step = progress.step
            figures = {name: value for name, value in vars(progress).items() if value is not None}
            self.write("train", progress.step, {k: v for k, v in figures.items() if k not in ("step", "total_steps")})

    def on_evaluation(self, step: int, quality: Quality) -> None:
        """Report an evaluation, with its calibration where that was measured."""
        self.write("evaluation", step, quality.figures())
        if self._events is not None and quality.reliability is not None:
            self._events.write("calibration", step=step, **vars(quality.reliability))
        self._write_segments(step, "evaluation", quality)
        self._callback.on_evaluation(step, quality)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Report a complete checkpoint."""
        self._callback.on_checkpoint(step, folder)

    def on_test(self, step: int, quality: Quality) -> None:
        """Write the evaluation on the test split."""
        self.write("test", step, quality.figures())
        self._write_segments(step, "test", quality)

    def _write_segments(self, step: int, of: str, quality: Quality) -> None:
        if self._events is not None and quality.segments is not None:
            self._events.write("segments", step=step, of=of, **quality.segments.to_plain())

    def on_message(self, text: str) -> None:
        """Report one line of text for the user."""
        self._callback.on_message(text)

    def write(self, kind: str, step: int, figures: dict[str, Any] | None = None) -> None:
        """Write an event; its numbers are also written as scalars `kind/name`."""
        figures = figures or {}
        if self._events is None or self._scalars is None:
            return
        self._events.write(kind, step=step, **figures)
        scalars = {f"{kind}/{name}": value for name, value in figures.items() if isinstance(value, (int, float))}
        if scalars:
            self._scalars.write(step, scalars)

    def report_features(self, step: int, mean_ids: MeanIds) -> None:
        """Write what a run has seen of its sparse features, and say which histories were truncated."""
        self.write("features", step, mean_ids.figures())
        for sentence in mean_ids.truncation_texts():
            self.on_message(sentence)

    def close(self) -> None:
        for writer in (self._events, self._scalars):
            if writer is not None:
                writer.close()
