"""What the learning rate is multiplied by at a step."""

from __future__ import annotations

import math

from rowstead.spec.train import ScheduleSpec


def factor(spec: ScheduleSpec, step: int, total_steps: int) -> float:
    """Factor of the learning rate at `step`, counted from 1 to `total_steps`."""
    if step <= spec.warmup_steps:
        return step / spec.warmup_steps
    if spec.decay == "none":
        return 1.0
    span = max(1, total_steps - spec.warmup_steps)
    done = min(1.0, (step - spec.warmup_steps) / span)
    fall = 1 - done if spec.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return spec.final + (1 - spec.final) * fall
