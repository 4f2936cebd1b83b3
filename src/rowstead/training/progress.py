"""How far a run has come, and the callbacks that follow it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from rowstead.data.source import Cursor
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
    """The lowest evaluation measure so far, for early stopping."""
    evaluations_since_best: int = 0

    def to_plain(self) -> dict[str, Any]:
        return dict(vars(self))


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
    """Of this process, without its first steps once there are enough others."""
    waiting_share: float
    """Share of the time spent waiting for data."""
    ne: float | None = None
    """NE over the last steps, of predictions made before each update; None while all their labels are equal."""


class ProgressCallback(Protocol):
    """Callbacks of a run. The training thread calls them, so they must return quickly."""

    def on_step(self, progress: Progress) -> None:
        """Called after every step."""
        ...

    def on_evaluation(self, step: int, quality: Quality) -> None:
        """Called after every evaluation."""
        ...

    def on_message(self, text: str) -> None:
        """Called with one line of text for the user."""
        ...


class NoProgress:
    """No-op progress callback."""

    def on_step(self, progress: Progress) -> None: ...

    def on_evaluation(self, step: int, quality: Quality) -> None: ...

    def on_message(self, text: str) -> None: ...


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
