"""`SyncPolicy`: what a trainer does about the others; `DenseServer`: the place where they meet, whatever carries what they say."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rowstead.spec.errors import RowsteadError


class DenseServerUnavailable(RowsteadError):  # noqa: N818 - it says what happened
    """The centre did not answer in time. A trainer goes on alone and tries again later."""


class DenseServer(Protocol):
    """What one member, a thread of a trainer, sees of the centre. All parameters are one flat tensor.

    One thread at a time calls it. Whatever is handed over may be changed by its owner right after the call, and what is returned
    belongs to the caller. Every method may raise DenseServerUnavailable.
    """

    def join(self, parameters: Tensor) -> Tensor:
        """The centre's parameters; it takes these, if it has none yet. From now on rounds wait for this member."""
        ...

    def leave(self) -> None:
        """No round waits for this member any more."""
        ...

    def finish(self, parameters: Tensor) -> None:
        """Leave after the last step: the centre becomes the mean of what all that have finished so far have handed over."""
        ...

    def pull(self) -> Tensor:
        """The centre's parameters."""
        ...

    def push(self, parameters: Tensor) -> None:
        """Replace the centre's parameters."""
        ...

    def elastic_average(self, local: Tensor, alpha: float) -> Tensor:
        """Move the centre by alpha * (local - centre), and return by how much it moved."""
        ...

    def average(self, tensor: Tensor, group: str) -> tuple[Tensor, int]:
        """The mean over the members that are in this round of `group`: all that are alive, or who has come by a deadline.

        And the number of the round, the same for all that are in it.
        """
        ...

    def average_parameters(self, local: Tensor, *, momentum: float = 0.0, lr: float = 1.0) -> Tensor:
        """A round over parameters that moves the centre, and returns it.

        With m the mean of the round, c the centre and d its last change: d <- momentum * d + lr * (m - c), c <- c + d. Without
        momentum and with lr 1 the centre becomes the mean.
        """
        ...

    def save_state(self, name: str, tensor: Tensor) -> None:
        """Leave something with the centre for whoever comes next, such as the state of the optimizer."""
        ...

    def load_state(self, name: str) -> Tensor | None:
        """What was left under that name last."""
        ...


class Replica(Protocol):
    """What a policy may touch of a trainer: its own dense parameters, gradients and optimizer state.

    `parameters` is the memory that the trainer trains: a policy adds to it in place, between steps or, as Hogwild does, during one.
    """

    parameters: Tensor

    def gradients(self) -> Tensor:
        """Of all parameters, in their order, as a copy."""
        ...

    def set_gradients(self, gradients: Tensor) -> None:
        """Replace them."""
        ...

    def optimizer_state(self) -> Tensor:
        """What the dense optimizer remembers, as a copy; empty where it remembers nothing."""
        ...

    def set_optimizer_state(self, state: Tensor) -> None:
        """Take over what `optimizer_state` gave in another trainer."""
        ...


class SyncPolicy(Protocol):
    """What a trainer, or one of its threads, does about the other trainers. Steps are numbered from 1."""

    def begin(self, replica: Replica) -> None:
        """Before the first step: take over the common parameters."""
        ...

    def gradients_ready(self, step: int) -> None:
        """Gradients are there, and nothing has been updated yet."""
        ...

    def after_step(self, step: int) -> None:
        """Parameters and rows are updated."""
        ...

    def close(self) -> None:
        """After the last step: hand over what was learned."""
        ...
