"""What a run says of its input at its start and of how it went at its end, each in one sentence with what to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rowstead.spec.train import TrainSpec
from rowstead.training.metrics import Quality

FAR_BELOW = 0.85
"""Training NE over the evaluation's from which on the model has learned its examples by heart."""
LARGE = 1000.0
"""A root mean square above this, after a feature's transforms, is warned of; standardised features have 1."""


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


def scale_warning(dense: torch.Tensor, names: Sequence[str]) -> str | None:
    """A sentence about the features of dense [B, Fd] whose values are too large; None if none are."""
    if not dense.numel():
        return None
    sizes = dense.double().square().mean(dim=0).sqrt().tolist()
    large = sorted(((size, name) for size, name in zip(sizes, names, strict=True) if not size <= LARGE), reverse=True)
    if not large:
        return None
    size, name = large[0]
    more = f" (and of {len(large) - 1} more dense features)" if len(large) > 1 else ""
    return (
        f"values of dense feature `{name}` are around {size:.2g}{more}, so that training may diverge: set `standardise: true`, with "
        "`log: true` for a long tail, or list it under features.sparse if it contains ids"
    )
