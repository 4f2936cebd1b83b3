"""Shows a run of training: a progress bar on a terminal, or plain lines."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from rowstead.report.terminal import terminal
from rowstead.training.compile import COMPILING
from rowstead.training.metrics import Quality
from rowstead.training.progress import Callback
from rowstead.training.progress import Progress as TrainProgress

LOGGER = logging.getLogger("rowstead")

PLAIN_EVERY_S = 5.0
FULL_WIDTH, HALF_WIDTH = 145, 90
"""Columns of a terminal from which on the bar has all figures beside it, or two of them."""
BAR_WIDTHS = ((FULL_WIDTH, 40), (HALF_WIDTH, 20), (0, 8))
"""Columns of a terminal, and of the bar in one that has at least so many."""
BAR_EVERY_S = 0.1


@contextmanager
def progress_callback(console: Console) -> Iterator[Callback]:
    """The Callback for a console: a bar on a terminal and in a notebook, else lines."""
    if not (console.is_terminal or console.is_jupyter):
        yield PlainProgress(console)
        return
    bar_width = next(width for least, width in BAR_WIDTHS if console.width >= least)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width),
        _Steps(),
        TextColumn("{task.fields[figures]}"),
        _TimeLeft(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield ProgressBar(bar)


@contextmanager
def shown_progress(progress: bool | None) -> Iterator[Callback]:
    """What Python code gets: a bar on standard error where that is a terminal or a notebook, else messages for `logging`.

    With `progress` lines where there is no bar; without it (False) never a bar. Of several processes only the first shows something.
    """
    console = terminal(stderr=True, quiet=int(os.environ.get("RANK", "0")) > 0)
    has_bar = (console.is_terminal or console.is_jupyter) and progress is not False
    if not has_bar and not progress:
        yield LogLines()
        return
    with progress_callback(console) as callback:
        yield callback


class LogLines(Callback):
    """Hands evaluations and messages to the logger `rowstead`, at level INFO."""

    def on_evaluation(self, step: int, quality: Quality) -> None:
        LOGGER.info("step %d: %s", step, quality_line(quality))

    def on_message(self, text: str) -> None:
        LOGGER.info("%s", text)


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


def brief_figures_of(progress: TrainProgress, width: int) -> str:
    """As many figures as fit beside a bar in a terminal of so many columns."""
    if width >= FULL_WIDTH:
        return figures_of(progress)
    quality = f"NE {progress.ne:.4f}" if progress.ne is not None else f"loss {progress.loss:.4f}"
    return quality if width < HALF_WIDTH else f"{quality} · {progress.samples_per_s:,.0f} samples/s"


def quality_line(quality: Quality) -> str:
    """An evaluation on one line."""
    if quality.tasks:
        measured = [f"{task}: {quality_line(one)}" for task, one in quality.tasks.items()]
        return "; ".join([*measured, *(f"{task}: no example has its label" for task in quality.tasks_without_labels)])
    if quality.log_loss is None:
        return f"MSE {quality.mse:.4g} · mean prediction {quality.mean_prediction:.4g}"
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


class ConsoleLines(Callback):
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
    """Shows training as a progress bar; until the first step it says that the run starts, or that kernels are compiled."""

    def __init__(self, bar: Progress) -> None:
        super().__init__(bar.console)
        self._bar = bar
        self._task = bar.add_task("starting", total=None, figures="")
        self._throttle = Throttle(BAR_EVERY_S)

    def on_message(self, text: str) -> None:
        super().on_message(text)
        if text.startswith(COMPILING):
            self._bar.update(self._task, description=COMPILING)

    def on_step(self, progress: TrainProgress) -> None:
        if self._throttle.is_due() or progress.step == progress.total_steps:
            figures = brief_figures_of(progress, self._bar.console.width)
            facts: dict[str, Any] = {"total": progress.total_steps, "completed": progress.step, "figures": figures}
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
