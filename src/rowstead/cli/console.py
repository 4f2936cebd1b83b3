"""Console output of long commands: a progress bar, or plain lines if output is not a terminal."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rowstead.distributed.stop import exit_code_of
from rowstead.report.terminal import count, two_columns
from rowstead.run import Result
from rowstead.training.metrics import Quality
from rowstead.training.progress import Progress as TrainProgress
from rowstead.training.progress import ProgressCallback

PLAIN_EVERY_S = 5.0
BAR_EVERY_S = 0.1


@contextmanager
def progress_callback(console: Console) -> Iterator[ProgressCallback]:
    """The ProgressCallback for a console."""
    if not console.is_terminal:
        yield PlainProgress(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), _Steps(), TextColumn("{task.fields[figures]}"), _TimeLeft())
    with Progress(*columns, console=console, transient=True) as bar:
        yield ProgressBar(bar)


class _Steps(MofNCompleteColumn):
    """Steps, once there is one."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class _TimeLeft(TimeRemainingColumn):
    """The time left, once there is a step."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else Text("ETA ") + super().render(task)


def figures_of(progress: TrainProgress) -> str:
    """The figures of one progress line."""
    ne = f" · NE {progress.ne:.4f}" if progress.ne is not None else ""
    return (
        f"{progress.samples_per_s:,.0f} samples/s · loss {progress.loss:.4f}{ne} · "
        f"waiting for data {progress.waiting_share:.0%}"
    )


def quality_line(quality: Quality) -> str:
    """An evaluation on one line."""
    parts = [f"log loss {quality.log_loss:.4f}"]
    parts.insert(0, f"NE {quality.ne:.4f}" if quality.ne is not None else "NE undefined (all labels are equal)")
    if quality.auc is not None:
        parts.append(f"AUC {quality.auc:.4f}")
    if quality.calibration is not None:
        parts.append(f"calibration {quality.calibration:.3f}")
    return " · ".join(parts)


class Throttle:
    """Limits how often something is shown."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._last = every_s, time.monotonic()

    def is_due(self) -> bool:
        """Whether `every_s` seconds have passed since it was last due."""
        now = time.monotonic()
        if now - self._last < self._every_s:
            return False
        self._last = now
        return True


class ConsoleLines:
    """Prints evaluations and messages as lines."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_evaluation(self, step: int, quality: Quality) -> None:
        self.on_message(f"step {step:,}: {quality_line(quality)}")

    def on_message(self, text: str) -> None:
        try:
            self._console.print(text, soft_wrap=True)
        except OSError as error:
            if error.errno != errno.EIO:  # a terminal that is gone: SIGHUP follows
                raise


class ProgressBar(ConsoleLines):
    """Shows training as a progress bar; until the first step it says that the run starts."""

    def __init__(self, bar: Progress) -> None:
        super().__init__(bar.console)
        self._bar = bar
        self._task = bar.add_task("starting", total=None, figures="")
        self._throttle = Throttle(BAR_EVERY_S)

    def on_step(self, progress: TrainProgress) -> None:
        if self._throttle.is_due() or progress.step == progress.total_steps:
            facts: dict[str, Any] = {"total": progress.total_steps, "completed": progress.step, "figures": figures_of(progress)}
            self._bar.update(self._task, description="training", **facts)


class PlainProgress(ConsoleLines):
    """Prints a line every few seconds."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._started: tuple[float, int] | None = None
        self._throttle = Throttle(PLAIN_EVERY_S)

    def on_step(self, progress: TrainProgress) -> None:
        if self._started is None:
            self._started = (time.monotonic(), progress.step)
        elif self._throttle.is_due():
            start_s, first_step = self._started
            left_s = (time.monotonic() - start_s) / (progress.step - first_step) * (progress.total_steps - progress.step)
            self.on_message(f"{progress_line(progress)} · {left_s:,.0f} s left")


def progress_line(progress: TrainProgress) -> str:
    """The progress of training on one line."""
    return f"step {progress.step:,} of {progress.total_steps:,} · {figures_of(progress)}"


def quality_rows(quality: Quality) -> list[tuple[str, str]]:
    """An evaluation as names and values."""
    rows = [("NE", f"{quality.ne:.4f}" if quality.ne is not None else "undefined: all labels are equal")]
    if quality.ne_train_rate is not None:
        rows.append(
            (
                "NE by training's rate",
                f"{quality.ne_train_rate:.4f} (against always predicting the training split's mean label)",
            )
        )
    if quality.ne_best is not None and quality.ne_expected is not None:
        above = quality.ne_expected / quality.ne_best - 1
        rows.append(("best possible NE", f"{quality.ne_best:.4f} (the model's is {above:.2%} above it, label noise aside)"))
    if quality.auc is not None:
        error = f" ± {quality.auc_error:.1g}" if quality.auc_error else ""
        rows.append(("AUC", f"{quality.auc:.4f}{error}"))
    if quality.gauc is not None:
        rows.append(("GAUC", f"{quality.gauc:.4f} (AUC within groups)"))
    rows.append(("log loss", f"{quality.log_loss:.4f}"))
    if quality.calibration is not None:
        rows.append(("calibration", f"{quality.calibration:.4f} (mean prediction over mean label; 1 is right)"))
    rows.append(("MSE", f"{quality.mse:.4f}"))
    return rows


def command_name() -> str:
    """How to call this program again: `rowstead`, or its path if it is not on PATH."""
    called = Path(sys.argv[0])
    found = called.name != "rowstead" or shutil.which("rowstead") is not None or not called.is_file()
    return "rowstead" if found else os.path.relpath(called)


def as_typed(path: Path) -> str:
    """A path quoted for a shell, so that it is one argument and not an option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def summary(result: Result) -> Table:
    """The summary of a run: quality, speed and where the time went."""
    outcome = result.outcome
    rows = quality_rows(outcome.quality) if outcome.quality is not None else []
    if outcome.test is not None:
        rows.append((f"test ({outcome.test.num_samples:,})", quality_line(outcome.test)))
    if outcome.samples_per_s is not None:
        rows.append(("samples/s", f"{outcome.samples_per_s:,.0f}"))
    total_s = sum(outcome.phase_s.values())
    if total_s > 0:
        parts = sorted(outcome.phase_s.items(), key=lambda item: -item[1])
        rows.append(("where the time went", " · ".join(f"{phase.value} {s / total_s:.0%}" for phase, s in parts)))
    title = f"{result.folder.name}: {outcome.ending} after {count(outcome.position.step, 'step')}"
    return two_columns(title, rows)


def print_ending(console: Console, result: Result, *, options: str = "") -> None:
    """Print the summary of a run; of one that was interrupted, how to resume it, with these options."""
    step = result.outcome.position.step
    if result.outcome.ending != "interrupted":
        console.print(summary(result))
        me, run = command_name(), as_typed(result.folder)
        for line in (f"model: {result.folder}", "next:", f"  {me} evaluate {run}", f"  {me} export {run} --to exported"):
            console.print(line, soft_wrap=True)  # not in the table, whose borders and line breaks a shell would get
        return
    console.print(f"Stopped after step {step:,}; the checkpoint is saved." if step else "Stopped before the first step.")
    console.print(f"Resume with: {command_name()} train --resume {as_typed(result.folder)}{options}", soft_wrap=True)
    raise typer.Exit(exit_code_of(result.stopped_by))


@contextmanager
def doing(console: Console, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of work; the yielded function takes how much is done, and of how much (0: unknown)."""
    if not console.is_terminal:
        yield _plain_counter(console, unit)
        return
    columns = (BarColumn(), TextColumn("{task.completed:,.0f} " + unit), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def _plain_counter(console: Console, unit: str) -> Callable[[int, int], None]:
    """Prints a line every few seconds."""
    throttle = Throttle(PLAIN_EVERY_S)

    def advance(done: int, total: int) -> None:
        if throttle.is_due():
            of_all = f" of {total:,}" if total else ""
            console.print(f"{done:,}{of_all} {unit}", soft_wrap=True)

    return advance
