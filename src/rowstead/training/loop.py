"""The training loop: batches in, steps, evaluations and checkpoints in between, until the log or the patience ends."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from rowstead.data.batch import Batch
from rowstead.data.prefetch import Prefetch
from rowstead.data.source import Cursor, Source
from rowstead.distributed.process_group import ProcessGroup, SingleProcess
from rowstead.records.cost import Cost, counted
from rowstead.records.events import EventLog
from rowstead.records.tensorboard import ScalarWriter
from rowstead.records.timers import Timers
from rowstead.records.usage import usable_cores
from rowstead.spec.errors import DataError, TrainingError
from rowstead.spec.phases import Phase
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.checkpoint_changes import CheckpointChanges
from rowstead.training.checkpoint_increment import Increment
from rowstead.training.evaluate import evaluate
from rowstead.training.metrics import Quality
from rowstead.training.prefetch import copy_ahead, prefetch_rows
from rowstead.training.profile import Profiler
from rowstead.training.progress import Progress, ProgressCallback, Window
from rowstead.training.step import Stepper
from rowstead.training.throughput import ReadingReport, Throughput, reading_line, reading_of

PREFETCH_BATCHES = 4
LOSSES_BEHIND = 4
"""Steps by which the host may be ahead of a GPU before it waits for a loss."""
Ending = Literal["finished", "interrupted", "stopped early"]


@dataclass
class Position:
    """How far a run has come; saved with every checkpoint."""

    step: int = 0
    epoch: int = 0
    cursor: Cursor | None = None
    """Where the reader stands inside the epoch; none at its start."""
    num_samples: int = 0
    train_s: float = 0.0
    best: float | None = None
    """Lowest evaluation measure so far, for early stopping."""
    evaluations_since_best: int = 0

    def to_plain(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class TrainOutcome:
    """How a loop ended, and what it measured."""

    ending: Ending
    position: Position
    quality: Quality | None
    samples_per_s: float | None
    """Over this process's part of the run but for its first steps; evaluations and checkpoints not counted."""
    phase_s: dict[Phase, float] = field(default_factory=dict)
    num_skipped: int | None = None
    """Bad rows that were left out of this process's part; absent for a log that cannot have any."""
    reading: ReadingReport | None = None
    """Whether reading kept up; absent where nothing was trained."""


class Loop:
    """Drives a Stepper over a training split."""

    def __init__(
        self,
        spec: RunSpec,
        stepper: Stepper,
        train_source: Source,
        eval_source: Source,
        *,
        device: torch.device,
        folder: Path,
        facts: dict[str, Any],
        callback: ProgressCallback,
        position: Position | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        profile: bool = False,
        changes: CheckpointChanges | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.spec = spec
        self.stepper = stepper
        self.train_source = train_source.pin_memory() if device.type == "cuda" else train_source
        self.eval_source = eval_source
        self.device = device
        self.folder = folder
        self.facts = facts
        self.callback = callback
        self.position = position or Position()
        self.stop_requested = stop_requested
        self.timers: Timers = stepper.timers
        self.process_group: ProcessGroup = process_group or SingleProcess()
        self.events: EventLog | None = None
        self.scalars: ScalarWriter | None = None
        if self.process_group.rank == 0:
            self.events = EventLog(folder / "events.jsonl")
            self.scalars = ScalarWriter(folder / "tensorboard", resumed_step=position.step if position else None)
        if stepper.together is not None:
            stepper.together.wants_stop, self.stop_requested = stop_requested, lambda: _agreed(stepper)
        self._profiler = None
        if profile and self.process_group.rank == 0:
            trace, step = folder / "trace.json", self.position.step
            self._profiler = Profiler(trace, self.timers, device, callback.on_message, steps_before=step)
        self._window = Window()
        self._losses: deque[tuple[float, float, Callable[[], float], str]] = deque()
        """Of steps that a GPU may still be busy with: weight, mean label, the loss to wait for, and where the reader was."""
        self._pace = Throughput()
        self._making = Cost()
        """What a sample costs the thread that hands over batches."""
        self._saved_step = self.position.step if position else -1
        self._changes = changes or CheckpointChanges(spec.train, stepper.model.store.tables)

    def run(self) -> TrainOutcome:
        """Train to the end; on a request to stop, save and return early."""
        try:
            return self._run()
        except DataError as error:
            if (
                self.position.step == 0 or self.process_group.world_size > 1
            ):  # the others may not know of it, and would not save with us
                raise
            self.save()
            raise DataError(
                f"{error}. The model after step {self.position.step:,} is saved: once the log is right, go on with "
                f"`rowstead train --resume {self.folder}`"
            ) from None
        finally:
            self._end_profile()
            for written in (self.events, self.scalars):
                if written is not None:
                    written.close()

    def _run(self) -> TrainOutcome:
        position = self.position
        ending: Ending = "stopped early" if self._out_of_patience() else "finished"
        while ending == "finished" and position.epoch < self.spec.train.epochs and not self._done():
            ending = self._epoch()
            if ending == "finished" and not self._done():
                position.epoch, position.cursor = position.epoch + 1, None
        if position.step == 0 and ending == "finished":
            raise DataError("there is nothing to train on: every row of the training split is bad and was skipped")
        self.save()
        self._end_profile()
        reading = self._reading()
        quality = None if ending == "interrupted" else self._evaluate(max_samples=None)
        return TrainOutcome(
            ending=ending,
            position=position,
            quality=quality,
            samples_per_s=self._pace.samples_per_s,
            phase_s=self.timers.totals_s(),
            num_skipped=self._skipped(),
            reading=reading,
        )

    def _reading(self) -> ReadingReport | None:
        """Whether reading kept up; says so where it did not."""
        pace, making_s = self._pace, self._making.s_per_item
        if pace.samples_per_s is None or making_s is None:
            return None
        reading = reading_of(
            samples_per_s=pace.samples_per_s,
            waiting_share=pace.waiting_share,
            core_s_per_sample=making_s + self.train_source.background_cpu_s_per_sample,
            thread_s_per_sample=making_s,
            alone_s_per_sample=self.stepper.gpu_s_per_sample,
        )
        on_gpu = self.device.type == "cuda"
        if line := reading_line(reading, spent_s=pace.spent_s, num_cores=usable_cores(), on_gpu=on_gpu):
            self.callback.on_message(line)
        return reading

    def _end_profile(self) -> None:
        if self._profiler is not None:
            self._profiler.close()

    def _skipped(self) -> int | None:
        """Bad rows of the training split that were left out; None for a log that cannot have any."""
        for what, source in (("training", self.train_source), ("evaluation", self.eval_source)):
            if num_skipped := source.num_skipped:
                self.callback.on_message(f"skipped {num_skipped:,} bad rows while reading the {what} split (on_bad_row: skip)")
        return self.train_source.num_skipped

    def _done(self) -> bool:
        return self.position.step >= self.stepper.total_steps

    def _epoch(self) -> Ending:
        """The rest of the current epoch."""
        spec, position = self.spec.train, self.position
        batches: Iterator[tuple[Batch, Cursor]] = self.train_source.batches(
            spec.batch_size, epoch=position.epoch, cursor=position.cursor
        )
        if self._profiler is not None:
            batches = self._profiler.reading(batches)
        batches = counted(batches, self._making, lambda item: item[0].num_samples)
        with Prefetch(batches, depth=PREFETCH_BATCHES) as ahead:
            started = time.perf_counter()
            for batch, here, cursor in prefetch_rows(self._on_device(self._waiting_for(iter(ahead))), self.stepper.model.store):
                where = f"epoch {position.epoch}, after {position.num_samples} examples, reader at {cursor}"
                with _saying(where):
                    self._changes.mark(batch.sparse)
                    loss = self.stepper.start(here, position.step + 1)
                whole = batch.totals
                self._losses.append((whole.weight, whole.mean_label, loss, where))
                position.step += 1
                position.cursor = cursor
                position.num_samples += whole.num_samples
                self._take_losses(self._behind())
                now = time.perf_counter()
                waited_s = self.timers.phase(Phase.DATA).total_ns * 1e-9
                self._pace.add(whole.num_samples, now - started, waited_s=waited_s)
                position.train_s += now - started
                self._tell()
                if self._profiler is not None:
                    self._profiler.after_step()
                if self._after_step():
                    self._take_back_best()
                    return "stopped early"
                if self.stop_requested():
                    return "interrupted"
                if self._done():
                    return "finished"
                started = time.perf_counter()
        return "finished"

    def _on_device(self, batches: Iterator[tuple[Batch, Cursor]]) -> Iterator[tuple[Batch, Batch, Cursor]]:
        """Each batch as it was read, and on the device that trains."""
        if self.device.type == "cuda":
            return copy_ahead(batches, self.device)
        return ((batch, batch, cursor) for batch, cursor in batches)

    def _behind(self) -> int:
        """By how many steps the host may be ahead now: none where figures are taken, so that their time counts all steps."""
        spec, step = self.spec.train, self.position.step
        counts = (spec.log_every, spec.eval_every, spec.checkpoint_every)
        is_taken = any(every is not None and step % every == 0 for every in counts)
        most = LOSSES_BEHIND if self.device.type == "cuda" else self.stepper.steps_ahead
        return 0 if not self._window.has_steps or is_taken or self._done() or self.stop_requested() else most

    def _take_losses(self, behind: int = 0) -> None:
        """Wait for the losses of all steps but the last `behind`."""
        while len(self._losses) > behind:
            weight, mean_label, loss, where = self._losses.popleft()
            with _saying(where):
                self._window.add(weight, loss(), mean_label)

    def _waiting_for(self, batches: Iterator[tuple[Batch, Cursor]]) -> Iterator[tuple[Batch, Cursor]]:
        """The batches, the time spent waiting for each counted."""
        while True:
            with self.timers.phase(Phase.DATA):
                item = next(batches, None)
            if item is None:
                return
            yield item

    def _tell(self) -> None:
        position = self.position
        progress = Progress(
            step=position.step,
            total_steps=self.stepper.total_steps,
            num_samples=position.num_samples,
            loss=self._window.loss,
            samples_per_s=self._pace.samples_per_s or 0.0,
            waiting_share=self._pace.waiting_share,
            ne=self._window.ne if self.spec.train.loss == "bce" else None,
        )
        self.callback.on_step(progress)
        if position.step % self.spec.train.log_every == 0:
            figures = {name: value for name, value in vars(progress).items() if value is not None}
            self._record("train", {k: v for k, v in figures.items() if k not in ("step", "total_steps")})

    def _after_step(self) -> bool:
        """Evaluate and save when it is time; true when training should stop early."""
        spec, position = self.spec.train, self.position
        if spec.eval_every is not None and position.step % spec.eval_every == 0 and not self._done():
            quality = self._evaluate(max_samples=spec.eval_samples)
            if self._lost_patience(quality):
                return True
        if spec.checkpoint_every is not None and position.step % spec.checkpoint_every == 0:
            self.save()
        return False

    def _evaluate(self, *, max_samples: int | None) -> Quality:
        self._take_losses()
        with self.timers.phase(Phase.EVALUATION):
            quality = evaluate(
                self.stepper.model,
                self.eval_source,
                device=self.device,
                negative_keep_rate=self.spec.data.negative_keep_rate,
                max_samples=max_samples,
                process_group=self.process_group,
            )
        self._record("evaluation", quality.figures())
        if self.events is not None and quality.reliability is not None:
            self.events.write("calibration", step=self.position.step, **vars(quality.reliability))
        self.callback.on_evaluation(self.position.step, quality)
        return quality

    def _lost_patience(self, quality: Quality) -> bool:
        spec, position = self.spec.train.early_stop, self.position
        if spec is None:
            return False
        measure = quality.early_stop_measure(self.spec.train.loss)
        if position.best is None or measure < position.best - spec.min_delta:
            position.best, position.evaluations_since_best = measure, 0
            self._write_checkpoint(self.folder / "best", keep=1)
        else:
            position.evaluations_since_best += 1
        return self._out_of_patience()

    def _out_of_patience(self) -> bool:
        spec = self.spec.train.early_stop
        return spec is not None and self.position.evaluations_since_best >= spec.patience

    def _record(self, kind: str, figures: dict[str, float]) -> None:
        if self.events is None or self.scalars is None:
            return
        self.events.write(kind, step=self.position.step, **figures)
        self.scalars.write(self.position.step, {f"{kind}/{name}": value for name, value in figures.items()})

    def save(self) -> None:
        """Write a checkpoint of this moment, unless it is on disk already."""
        step = self.position.step
        if step == self._saved_step:
            return
        folder = self.folder / "checkpoints"
        increment = self._changes.next(folder, self.process_group)
        path = self._write_checkpoint(folder, keep=self.spec.train.keep_checkpoints, increment=increment)
        self._changes.saved(path, increment)
        self._saved_step = step
        if self.events is not None:
            self.events.write("checkpoint", step=step)

    def _write_checkpoint(self, folder: Path, *, keep: int, increment: Increment | None = None) -> Path:
        self._take_losses()
        facts = {**self.facts, "position": self.position.to_plain()}
        with self.timers.phase(Phase.CHECKPOINT):
            return checkpoint.save(
                folder,
                self.position.step,
                self.stepper.dense_state(),
                facts,
                keep=keep,
                parts=self.stepper.model.store.parts(),
                increment=increment,
                process_group=self.process_group,
            )

    def _take_back_best(self) -> None:
        """After early stopping, return to the weights of the best evaluation."""
        best = checkpoint.load_latest(self.folder / "best", self.callback.on_message, process_group=self.process_group)
        self.stepper.load_state(best.tensors)
        self._changes.forget()
        self.callback.on_message(f"no better evaluation for a while: took back the weights of step {best.step}")


@contextlib.contextmanager
def _saying(where: str) -> Iterator[None]:
    """Adds to a TrainingError where in the log it happened."""
    try:
        yield
    except TrainingError as error:
        raise TrainingError(f"{error} ({where})") from None


def _agreed(stepper: Stepper) -> bool:
    """Whether all processes stop here, as one of them was asked to."""
    return stepper.together is not None and stepper.together.stops
