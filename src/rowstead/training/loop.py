"""The training loop: reads batches, runs steps, evaluates and saves in between, until the data or the patience ends."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from rowstead.data.batch import StagedBatch
from rowstead.data.open_log import Sources
from rowstead.data.prefetch import Prefetch
from rowstead.data.row_order import Cursor
from rowstead.data.source import Source
from rowstead.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from rowstead.records.cost import Cost, counted
from rowstead.records.run_folder import BEST
from rowstead.records.timers import Timers
from rowstead.records.usage import usable_cores
from rowstead.spec.errors import DataError, LostProcessError, TrainingError
from rowstead.spec.heads import HEADS
from rowstead.spec.phases import Phase
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.checkpoint_increment import CheckpointChanges, Increment
from rowstead.training.checkpoint_writer import CheckpointWriter
from rowstead.training.evaluate import evaluate
from rowstead.training.input_check import InputCheck
from rowstead.training.metrics import Quality
from rowstead.training.prefetch import move_batches, read_epochs, time_waiting
from rowstead.training.profile import Profiler
from rowstead.training.progress import EarlyStopping, MeanIds, MovingLoss, Position, Progress, RunReporter
from rowstead.training.step import Stepper
from rowstead.training.throughput import ReaderReport, Throughput, reader_report, reader_warning

PREFETCH_BATCHES = 4
MAX_PENDING_STEPS = 4
"""Steps that the host may be ahead of a GPU before it waits for a loss."""
ReaderAt = tuple[int, Cursor]
"""Epoch, and where its reader is after a batch."""
Ending = Literal["finished", "interrupted", "stopped early"]


@dataclass
class TrainOutcome:
    """How a loop ended, and what it measured."""

    ending: Ending
    position: Position
    quality: Quality | None
    """On the evaluation split, of the weights that the run ships."""
    samples_per_s: float | None
    """Samples over training time, see `Throughput`; None without steps."""
    phase_s: dict[Phase, float] = field(default_factory=dict)
    num_skipped: int | None = None
    """Bad rows that this process skipped; None for a log that cannot have any."""
    reading: ReaderReport | None = None
    """Whether the reader kept up; None without steps."""
    test: Quality | None = None
    """On the test split, of the same weights; None without one."""
    train_ne: float | None = None
    """Of the last steps, of predictions made before each update."""


@dataclass
class _PendingLoss:
    """The loss of a step that may still be running."""

    weight: float
    mean_label: float
    wait: Callable[[], float]
    where: str
    """Where in the log the batch is, for error messages."""


class Loop:
    """Drives a Stepper over the training split of `sources`.

    `position` is that of the checkpoint to continue from, which is one of the run's newest ones if it `is_saved`. `facts` go into every checkpoint. `stop_requested` is polled after each step.
    """

    def __init__(
        self,
        spec: RunSpec,
        stepper: Stepper,
        sources: Sources,
        *,
        device: torch.device,
        folder: Path,
        facts: dict[str, Any],
        reporter: RunReporter,
        position: Position | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        profile: bool = False,
        changes: CheckpointChanges | None = None,
        is_saved: bool = True,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self.spec, self.stepper = spec, stepper
        self.train_source = sources.train.pin_memory() if device.type == "cuda" else sources.train
        self.eval_source, self.test_source = sources.eval, sources.test
        self.device, self.folder, self.facts, self.reporter = device, folder, facts, reporter
        self.position = position or Position()
        self.timers: Timers = stepper.timers
        self.process_group = process_group
        self._writer = CheckpointWriter(process_group)
        self._stop_requested, self._save_failed = stepper.execution.agree_on(stop_requested, self._writer.has_failed)
        stepper.on_message = reporter.on_message
        self._early_stopping = EarlyStopping(spec.train, self.position, spec.model.tasks)
        stepper.lr_scale = self.position.lr_scale
        self._profiler = None
        if profile and self.process_group.rank == 0:
            trace, step = folder / "trace.json", self.position.step
            self._profiler = Profiler(trace, self.timers, device, reporter.on_message, steps_before=step)
        self._moving_loss = MovingLoss()
        self._pending: deque[_PendingLoss] = deque()
        self._throughput = Throughput()
        self._mean_ids = MeanIds(spec.features.expanded_sparse())
        step, num_rows = self.position.step, sources.train.num_samples
        self._input_check = InputCheck(spec, num_rows=num_rows, first_step=step, on_message=reporter.on_message)
        self._reader_cost = Cost()
        """Processor time per sample of the thread that reads batches."""
        self._saved_step = self.position.step if position and is_saved else -1
        self._changes = changes or CheckpointChanges(spec.train, stepper.model.store.tables)

    def run(self) -> TrainOutcome:
        """Train to the end; on a request to stop, save and return early."""
        try:
            return self._run()
        except DataError as error:
            if self.position.step == 0 or self.process_group.world_size > 1:  # other processes would not save with this one
                raise
            self.save()
            raise DataError(
                f"{error}. The model after step {self.position.step:,} is saved: fix the log, then continue with "
                f"`rowstead train --resume {self.folder} --accept-changed-log`"
            ) from None
        except (KeyboardInterrupt, LostProcessError):
            self._writer.close(cancel=True)
            raise
        finally:
            self._writer.close()
            self._end_profile()

    def _run(self) -> TrainOutcome:
        position = self.position
        ending: Ending = "stopped early" if self._early_stopping.should_stop else "finished"
        if ending == "finished" and position.epoch < self.spec.train.epochs and not self._is_done():
            ending = self._run_epochs()
            if ending == "finished" and not self._is_done():
                position.epoch, position.cursor = self.spec.train.epochs, None
        if position.step == 0 and ending == "finished":
            raise DataError("there is nothing to train on: every row of the training split is bad and was skipped")
        self._end_profile()
        quality = test = None
        if ending == "interrupted":
            self.save()
        else:
            quality = self._finish(ending)
            test = self._evaluate_on_test()
        self.reporter.report_features(position.step, self._mean_ids)
        reading = self._report_reader()
        return TrainOutcome(
            ending=ending,
            position=position,
            quality=quality,
            samples_per_s=self._throughput.samples_per_s,
            phase_s=self.timers.totals_s(),
            num_skipped=self._report_skipped(),
            reading=reading,
            test=test,
            train_ne=self._train_ne(),
        )

    def _finish(self, ending: Ending) -> Quality:
        """Save the weights that the run ships, those of the best evaluation if it looks for one, and evaluate them."""
        quality = None
        if self._early_stopping.keeps_best and ending == "finished":
            quality = self._evaluate(max_samples=self.spec.train.eval_samples)
            if not self._early_stopping.observe(quality):
                self._restore_best(ending)
                quality = None
            elif self.spec.train.eval_samples is not None:
                quality = None
        self.save()
        return quality or self._evaluate(max_samples=None)

    def _run_epochs(self) -> Ending:
        """Train on the rest of the current epoch, and on those after it."""
        position = self.position
        with Prefetch(self._batches(), depth=PREFETCH_BATCHES) as batches:
            started = time.perf_counter()
            on_device = move_batches(time_waiting(iter(batches), self.timers), self.device)
            for batch, device_batch, (epoch, cursor) in self.stepper.prefetch(on_device):
                position.epoch = epoch
                where = f"epoch {position.epoch}, after {position.num_samples} examples, reader at {cursor}"
                self._input_check.add(position.step, batch, device_batch)
                with _name_location(where):
                    if self._changes.marks_rows:
                        self._changes.mark(batch.sparse)
                    loss = self.stepper.start(device_batch, position.step + 1)
                if position.step % self.spec.train.log_every == 0:  # a sample: ids may have to be unpacked for it
                    self._mean_ids.add(batch.sparse)
                totals = batch.totals
                self._pending.append(_PendingLoss(totals.weight, totals.mean_label, loss, where))
                position.step += 1
                position.cursor = cursor
                position.num_samples += totals.num_samples
                position.label_weight += totals.weight
                position.label_sum += totals.weight * totals.mean_label
                self._collect_losses(self._max_pending())
                step_s = time.perf_counter() - started
                waited_s = self.timers.phase(Phase.DATA).total_ns * 1e-9
                self._throughput.add(totals.num_samples, step_s, waited_s=waited_s)
                position.train_s += step_s
                self._report_step()
                if self._profiler is not None:
                    self._profiler.after_step()
                if self._writer.is_saved() or self._save_failed():
                    self._finish_save()
                if self._evaluate_and_save():
                    self._restore_best("stopped early")
                    return "stopped early"
                if self._stop_requested():
                    return "interrupted"
                if self._is_done():
                    return "finished"
                started = time.perf_counter()
        return "finished"

    def _is_done(self) -> bool:
        return self.position.step >= self.stepper.total_steps

    # Batches

    def _batches(self) -> Iterator[tuple[StagedBatch, ReaderAt]]:
        """The rest of this epoch, and those after it. The thread that prefetches runs all of it."""
        epochs, position = range(self.position.epoch, self.spec.train.epochs), self.position
        batches: Iterator[tuple[StagedBatch, ReaderAt]]
        batches = read_epochs(self.train_source, self.spec.train.batch_size, epochs, position.cursor, self.device)
        if self._profiler is not None:
            batches = self._profiler.reading(batches)
        return counted(batches, self._reader_cost, lambda item: item[0].num_samples)

    # Losses

    def _max_pending(self) -> int:
        """Losses that may stay pending now: none at a step that is logged, evaluated or saved, so that its figures cover all steps."""
        spec, step = self.spec.train, self.position.step
        intervals = (spec.log_every, spec.eval_every, spec.checkpoint_every)
        needs_all = any(every is not None and step % every == 0 for every in intervals)
        if needs_all or not self._moving_loss.has_steps or self._is_done() or self._stop_requested():
            return 0
        return MAX_PENDING_STEPS if self.device.type == "cuda" else self.stepper.steps_ahead

    def _collect_losses(self, max_pending: int = 0) -> None:
        """Wait for the losses of all steps but the last `max_pending`."""
        while len(self._pending) > max_pending:
            pending = self._pending.popleft()
            with _name_location(pending.where):
                self._moving_loss.add(pending.weight, pending.wait(), pending.mean_label)

    # Evaluations and checkpoints

    def _evaluate_and_save(self) -> bool:
        """Evaluate and save if it is time; true if training should stop early."""
        spec, step = self.spec.train, self.position.step
        if spec.eval_every is not None and step % spec.eval_every == 0 and not self._is_done():
            if self._early_stopping.observe(self._evaluate(max_samples=spec.eval_samples)):
                self._start_save(self.folder / BEST, keep=1)
            self.stepper.lr_scale = self.position.lr_scale
            if self._early_stopping.should_stop:
                return True
        if spec.checkpoint_every is not None and step % spec.checkpoint_every == 0:
            self.save(wait=False)
        return False

    def _evaluate(self, *, max_samples: int | None) -> Quality:
        quality = self._measure(self.eval_source, max_samples)
        self.reporter.on_evaluation(self.position.step, quality)
        return quality

    def _evaluate_on_test(self) -> Quality | None:
        """Evaluate on the test split, if there is one: once, at the end, so that nothing is chosen by it."""
        if self.test_source is None:
            return None
        quality = self._measure(self.test_source)
        self.reporter.on_test(self.position.step, quality)
        return quality

    def _measure(self, source: Source, max_samples: int | None = None) -> Quality:
        self._collect_losses()
        keep_rate = self.spec.data.negative_keep_rate
        with self.timers.phase(Phase.EVALUATION):
            return evaluate(
                self.stepper.model,
                source,
                device=self.device,
                negative_keep_rate=keep_rate,
                max_samples=max_samples,
                process_group=self.process_group,
                train_rate=self.position.train_rate(keep_rate),
                top_k=self.spec.train.eval_top_k,
            )

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint, unless there is one of this step; without `wait` it is written while training goes on."""
        step = self.position.step
        if step != self._saved_step:
            if not wait and (warning := self._writer.too_slow_for(step)):
                self.reporter.on_message(warning)
            self._finish_save()
            folder = self.folder / "checkpoints"
            increment = self._changes.next(folder, self.process_group)
            self._start_save(folder, keep=self.spec.train.keep_checkpoints, increment=increment)
            self._saved_step = step
        if wait:
            self._finish_save()

    def _start_save(self, folder: Path, *, keep: int, increment: Increment | None = None) -> None:
        """Start to write a checkpoint, once the one before is complete."""
        self._collect_losses()
        self._finish_save()
        with self.timers.phase(Phase.CHECKPOINT):
            self._writer.start(
                folder,
                self.position.step,
                self.stepper.dense_state(),
                {**self.facts, "position": dict(vars(self.position))},
                keep=keep,
                store=self.stepper.model.store,
                increment=increment,
            )

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        with self.timers.phase(Phase.CHECKPOINT):
            written = self._writer.finish()
        if written is None:
            return
        if written.path.parent.name != BEST:
            self._changes.saved(written.path, written.increment)
            self.reporter.write("checkpoint", written.step, {"write_s": written.write_s, "waited_s": written.waited_s})
        self.reporter.on_checkpoint(written.step, written.path)
        if warning := written.warning:
            self.reporter.on_message(warning)

    def _restore_best(self, ending: Ending) -> None:
        """At the end of a run, load the weights of the best evaluation."""
        self._finish_save()
        best = checkpoint.load_latest(self.folder / BEST, self.reporter.on_message, process_group=self.process_group)
        self.stepper.load_state(best.tensors)
        self._changes.forget()
        self._saved_step = -1
        self.reporter.on_message(f"{ending}: restored the weights of the best evaluation, at step {best.step:,}")

    # Reports

    def _train_ne(self) -> float | None:
        return self._moving_loss.ne if HEADS[self.spec.train.loss].is_log_loss else None

    def _report_step(self) -> None:
        position, moving = self.position, self._moving_loss
        self.reporter.on_step(
            Progress(
                step=position.step,
                total_steps=self.stepper.total_steps,
                num_samples=position.num_samples,
                loss=moving.loss,
                samples_per_s=self._throughput.samples_per_s or 0.0,
                waiting_share=self._throughput.waiting_share,
                ne=self._train_ne(),
            )
        )

    def _report_reader(self) -> ReaderReport | None:
        """Whether the reader kept up; warns if it did not."""
        throughput, thread_s = self._throughput, self._reader_cost.s_per_item
        if throughput.samples_per_s is None or thread_s is None:
            return None
        report = reader_report(
            samples_per_s=throughput.samples_per_s,
            waiting_share=throughput.waiting_share,
            core_s_per_sample=thread_s + self.train_source.background_cpu_s_per_sample,
            thread_s_per_sample=thread_s,
            gpu_s_per_sample=self.stepper.execution.gpu_s_per_sample,
        )
        on_gpu = self.device.type == "cuda"
        if warning := reader_warning(report, spent_s=throughput.spent_s, num_cores=usable_cores(), on_gpu=on_gpu):
            self.reporter.on_message(warning)
        return report

    def _report_skipped(self) -> int | None:
        """Bad rows of the training split that were skipped; None for a log that cannot have any."""
        for split, source in (("training", self.train_source), ("evaluation", self.eval_source)):
            if num_skipped := source.num_skipped:
                self.reporter.on_message(f"skipped {num_skipped:,} bad rows of the {split} split (on_bad_row: skip)")
        return self.train_source.num_skipped

    def _end_profile(self) -> None:
        if self._profiler is not None:
            self._profiler.close()


@contextlib.contextmanager
def _name_location(where: str) -> Iterator[None]:
    """Adds to a TrainingError where in the log it happened."""
    try:
        yield
    except TrainingError as error:
        raise TrainingError(f"{error} ({where})") from None
