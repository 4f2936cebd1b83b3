"""The phases of a training step and of a run, in their order: timers, records, charts and the planner share this list."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """One phase; its value is the name that people read."""

    DATA = "waiting for data"
    PREFETCH = "prefetch"
    LOOKUP = "look-up"
    FORWARD = "forward"
    BACKWARD = "backward"
    EXCHANGE = "exchange"
    """Gradients and pooled vectors between the processes of a synchronous job."""
    DENSE_UPDATE = "dense update"
    ROW_UPDATE = "row update"
    SYNC = "sync"
    """Parameters between the trainers of a fleet."""
    GPU_STEP = "GPU step"
    """A whole step that a GPU runs on its own, as a CUDA graph."""
    HOGWILD = "Hogwild threads"
    """Whole steps in Hogwild threads, as the thread that waits for them sees them."""
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"

    @property
    def key(self) -> str:
        """The key of its seconds in a record, such as `lookup_s`."""
        return f"{self.name.lower()}_s"


STEP: tuple[Phase, ...] = tuple(phase for phase in Phase if phase not in (Phase.EVALUATION, Phase.CHECKPOINT))
"""The phases that belong to a step, in order."""
