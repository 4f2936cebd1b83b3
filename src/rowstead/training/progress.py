"""What a training loop tells whoever watches it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from rowstead.training.metrics import Quality


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where training stands after a step."""

    step: int
    total_steps: int
    num_samples: int
    """Examples trained on so far, earlier parts of a resumed run included."""
    loss: float
    """Mean over the window."""
    samples_per_s: float
    """Of this process, its first steps left out once there are enough others."""
    waiting_share: float
    """Share of the time that went into waiting for data."""
    ne: float | None = None
    """NE over the window, of predictions made before each update; absent while all labels in it are equal."""


class ProgressCallback(Protocol):
    """Is told what happens; must return quickly."""

    def on_step(self, progress: Progress) -> None: ...

    def on_evaluation(self, step: int, quality: Quality) -> None: ...

    def on_message(self, text: str) -> None: ...


class NoProgress:
    """A ProgressCallback that looks away."""

    def on_step(self, progress: Progress) -> None: ...

    def on_evaluation(self, step: int, quality: Quality) -> None: ...

    def on_message(self, text: str) -> None: ...


class Window:
    """Loss and labels of the last steps, for a loss and an NE that move; each step counts by its examples' weight."""

    def __init__(self, num_steps: int = 100) -> None:
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=num_steps)

    def add(self, weight: float, loss: float, mean_label: float) -> None:
        self._steps.append((weight, loss, mean_label))

    @property
    def has_steps(self) -> bool:
        return bool(self._steps)

    @property
    def loss(self) -> float:
        return self._mean(1)

    @property
    def ne(self) -> float | None:
        """The window's loss over the entropy of its mean label."""
        p = self._mean(2)
        if not 0 < p < 1:
            return None
        return self.loss / -(p * math.log(p) + (1 - p) * math.log1p(-p))

    def _mean(self, place: int) -> float:
        total = sum(step[0] for step in self._steps)
        return sum(step[0] * step[place] for step in self._steps) / total if total else math.nan
