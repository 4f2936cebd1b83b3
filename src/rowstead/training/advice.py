"""What a run says at its end about how it went, each in one sentence with what to do."""

from __future__ import annotations

from rowstead.spec.train import TrainSpec
from rowstead.training.metrics import Quality

FAR_BELOW = 0.85
"""Training NE over the evaluation's from which on the model has learned its examples by heart."""


def closing_advice(spec: TrainSpec, num_steps: int, quality: Quality | None, train_ne: float | None = None) -> list[str]:
    """Sentences on a run of `num_steps` steps that ended with this evaluation; `train_ne` is the training NE of its last steps."""
    said = []
    warmup = spec.schedule.warmup_steps
    if num_steps < warmup:
        said.append(
            f"The run ended at step {num_steps:,}, within its warm-up of {warmup:,} steps, so the learning rates never reached their "
            "values: lower train.schedule.warmup_steps, or train longer"
        )
    if quality is None or quality.ne is None:
        return said
    if quality.ne > 1:
        said.append(
            f"NE is {quality.ne:.4f}: above 1, predictions are worse than always predicting the mean label. Train longer, lower the "
            "learning rates, or check that the labels of both splits mean the same"
        )
    if train_ne is not None and train_ne < FAR_BELOW * quality.ne:
        remedy = "" if spec.early_stop is not None else "train.early_stop, "
        said.append(
            f"The training NE, {train_ne:.4f}, is far below the evaluation's, {quality.ne:.4f}: the model learns its examples by heart. "
            f"Set {remedy}train.sparse_optimizer.l2 or model.top_dropout, or train fewer epochs"
        )
    return said
