"""Contracts of synchronisation: `SyncPolicy`, what a trainer exchanges when, and `DenseServer`, whom it exchanges with."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rowstead.spec.errors import RowsteadError
from rowstead.training.flat_parameters import Replica


class DenseServerUnavailable(RowsteadError):  # noqa: N818 - names what happened
    """The dense server did not answer in time. A trainer continues without it and tries again later."""


class DenseServer(Protocol):
    """The shared dense parameters as seen by one member, a thread of a trainer. All parameters are one flat tensor.

    One thread at a time calls it. Arguments may be changed right after the call, and results belong to the caller. Every method
    may raise DenseServerUnavailable.
    """

    def join(self, parameters: Tensor) -> Tensor:
        """Return the shared parameters, initialised from these if there are none. From now on rounds wait for this member."""

    def leave(self) -> None:
        """Stop rounds from waiting for this member."""

    def finish(self, parameters: Tensor) -> None:
        """Leave after the last step; the shared parameters become the mean of those of all finished members."""

    def pull(self) -> Tensor:
        """Return the shared parameters."""

    def push(self, parameters: Tensor) -> None:
        """Replace the shared parameters."""

    def elastic_average(self, local: Tensor, alpha: float) -> Tensor:
        """Move the shared parameters c by alpha * (local - c), and return the change."""

    def average(self, tensor: Tensor, group: str) -> tuple[Tensor, int]:
        """Return the mean over the members in this round of `group`: all live ones, or those that came before a deadline.

        Also return the number of the round, which is the same for all its members.
        """

    def average_parameters(self, local: Tensor, *, momentum: float = 0.0, lr: float = 1.0) -> Tensor:
        """Enter a round over parameters that updates the shared ones, and return those.

        With m the mean of the round, c the shared parameters and d their last change: d <- momentum * d + lr * (m - c),
        c <- c + d. Without momentum and with lr 1 they become the mean.
        """

    def save_state(self, name: str, tensor: Tensor) -> None:
        """Save a tensor on the server for other members, such as the optimizer state."""

    def load_state(self, name: str) -> Tensor | None:
        """Return the tensor last saved under a name; None if there is none."""


class SyncPolicy:
    """How a trainer, or one of its threads, synchronises with other trainers; this one, that of a single trainer, never does.

    Steps are numbered from 1.
    """

    num_exchanges = 0
    num_missed = 0
    """Exchanges that failed because the dense server was unavailable."""
    factor = 1.0
    """`train.sync.dense_lr_factor`."""
    factor_steps = 0.0
    """Steps of the run over which the factor rises from 1."""

    def begin(self, replica: Replica) -> None:
        """Before the first step: load the shared parameters."""

    def gradients_ready(self, step: int) -> None:
        """After backward, before any update."""

    def dense_lr_factor(self, step: int) -> float:
        """What the dense learning rate of a step is multiplied by: it rises from 1 to `factor`."""
        return 1 + (self.factor - 1) * min(1.0, step / self.factor_steps) if self.factor_steps else self.factor

    def after_step(self, step: int) -> None:
        """After parameters and rows are updated."""

    def pause(self) -> None:
        """While there are no batches: do not let others wait for this trainer."""

    def close(self) -> None:
        """After the last step: send the final parameters."""
