"""Reports what happens in a run: event file, TensorBoard scalars and progress callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rowstead.records.events import EventLog
from rowstead.records.tensorboard import ScalarWriter
from rowstead.training.metrics import Quality
from rowstead.training.progress import Progress, ProgressCallback


class RunReporter:
    """A `ProgressCallback` that writes to the run's folder and then calls another callback.

    Without a `folder` nothing is written, as in all processes of a job but the first. `resumed_step` is the step of the checkpoint
    that a resumed run starts from: later events of its earlier part no longer count.
    """

    def __init__(
        self, folder: Path | None, callback: ProgressCallback, *, log_every: int, resumed_step: int | None = None
    ) -> None:
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
        self._callback.on_evaluation(step, quality)

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

    def close(self) -> None:
        for writer in (self._events, self._scalars):
            if writer is not None:
                writer.close()
