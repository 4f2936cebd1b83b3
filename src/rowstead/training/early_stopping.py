"""Early stopping: ends a run whose evaluations have stopped improving."""

from __future__ import annotations

from rowstead.spec.train import TrainSpec
from rowstead.training.metrics import Quality
from rowstead.training.progress import Position


class EarlyStopping:
    """Counts evaluations without improvement. Its state is part of `position`, so that checkpoints keep it."""

    def __init__(self, spec: TrainSpec, position: Position) -> None:
        self._spec, self._position = spec, position

    def observe(self, quality: Quality) -> bool:
        """Count one evaluation; true if it is the best so far, whose weights should be kept."""
        rule, position = self._spec.early_stop, self._position
        if rule is None:
            return False
        measure = quality.early_stop_measure(self._spec.loss)
        is_best = position.best is None or measure < position.best - rule.min_delta
        if is_best:
            position.best, position.evaluations_since_best = measure, 0
        else:
            position.evaluations_since_best += 1
        return is_best

    @property
    def should_stop(self) -> bool:
        """Whether the patience is used up."""
        rule = self._spec.early_stop
        return rule is not None and self._position.evaluations_since_best >= rule.patience
