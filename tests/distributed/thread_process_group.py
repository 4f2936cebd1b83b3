"""A job whose processes are threads: the same exchanges without starting processes, for tests of many small cases."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from rowstead.distributed.process_group import CompletedWork, Work

T = TypeVar("T")


class ThreadProcessGroup:
    """One of `world_size` threads, which meet at a barrier for each exchange."""

    def __init__(self, rank: int, world_size: int, shown: list[Any], meeting: threading.Barrier) -> None:
        self.rank, self.world_size, self.processes_per_gpu = rank, world_size, 1
        self._shown, self._meeting = shown, meeting

    def for_other_thread(self) -> ThreadProcessGroup:
        world = self._all(([None] * self.world_size, threading.Barrier(self.world_size)))[0]
        return ThreadProcessGroup(self.rank, self.world_size, *world)

    def _all(self, value: T) -> list[T]:
        """What everybody shows, in the order of ranks."""
        self._shown[self.rank] = value
        self._meeting.wait()
        seen = list(self._shown)
        self._meeting.wait()
        return seen

    def barrier(self) -> None:
        self._meeting.wait()

    def gather(self, value: Any) -> list[Any]:
        return self._all(json.loads(json.dumps(value)))

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> None:
        stacked = torch.stack(self._all(tensor.clone()))
        tensor.copy_(stacked.sum(dim=0) if op == "sum" else stacked.amax(dim=0))

    def start_all_reduce(self, tensor: Tensor, *, of_rows: bool = False) -> Work:
        self.all_reduce(tensor)
        return CompletedWork()

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Work:
        assert sum(sent_sizes) == sent.numel()
        shares = [everybody[self.rank] for everybody in self._all([part.clone() for part in sent.split(list(sent_sizes))])]
        assert [share.numel() for share in shares] == list(received_sizes)
        received.copy_(torch.cat(shares))
        return CompletedWork()


def in_threads(world_size: int, work: Callable[[ThreadProcessGroup], T]) -> list[T]:
    """What `work` returns in each of `world_size` threads; the first error ends them all."""
    meeting = threading.Barrier(world_size)
    shown: list[Any] = [None] * world_size

    def one(rank: int) -> T:
        try:
            return work(ThreadProcessGroup(rank, world_size, shown, meeting))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(one, rank) for rank in range(world_size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
