"""`Channel`: what a process may say to the other processes of its job, whatever carries it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Waiting(Protocol):
    """Something that is on its way."""

    def wait(self) -> None:
        """Return once it has arrived; on a GPU, once work that is queued from now on will find it there."""
        ...


class Channel(Protocol):
    """The processes of one synchronous job. Every process makes the same calls in the same order.

    A tensor that was handed to a `start_…` belongs to the channel until it has been waited for.
    """

    rank: int
    world: int

    def barrier(self) -> None:
        """Wait until every process is here."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """What every process gave, in the order of ranks; plain JSON values."""
        ...

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> None:
        """Sum, or `max`, over all processes, in place."""
        ...

    def start_all_reduce(self, tensor: Tensor) -> Waiting:
        """Begin to sum a contiguous tensor over all processes, in place; every process ends with the same bits."""
        ...

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Waiting:
        """Begin to send to each process, in the order of ranks, its share of `sent`, and to receive the others' shares for us.

        Both are contiguous with one dimension; the sizes count elements.
        """
        ...


class Arrived:
    """What need not be waited for."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Alone:
    """The channel of a job that is one process."""

    rank = 0
    world = 1

    def barrier(self) -> None:
        """Nobody to wait for."""

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> None:
        """Already the sum of all."""

    def start_all_reduce(self, tensor: Tensor) -> Waiting:
        return Arrived()

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Waiting:
        received.copy_(sent)
        return Arrived()
