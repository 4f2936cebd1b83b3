"""`ProcessGroup`: collectives between the processes of a synchronous job, over torch.distributed or in one process."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rowstead.spec.errors import LostProcessError, RowsteadError
from rowstead.spec.job import MEETING_FILE, RESTARTS, is_one_of_many


class Work(Protocol):
    """Something that is on its way."""

    def wait(self) -> None:
        """Return once it has arrived; on a GPU, once work that is queued from now on will find it there."""
        ...


class ProcessGroup(Protocol):
    """The processes of one synchronous job. Every process makes the same calls in the same order.

    A tensor that was handed to a `start_…` belongs to the channel until it has been waited for.
    """

    rank: int
    world_size: int

    def barrier(self) -> None:
        """Wait until every process is here."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """What every process gave, in the order of ranks; plain JSON values."""
        ...

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> None:
        """Sum, or `max`, over all processes, in place."""
        ...

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Begin to sum a contiguous tensor over all processes, in place; every process ends with the same bits."""
        ...

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Work:
        """Begin to send to each process, in the order of ranks, its share of `sent`, and to receive the others' shares for us.

        Both are contiguous with one dimension; the sizes count elements.
        """
        ...


class CompletedWork:
    """What need not be waited for."""

    def wait(self) -> None:
        """Nothing to wait for."""


class SingleProcess:
    """The channel of a job that is one process."""

    rank = 0
    world_size = 1

    def barrier(self) -> None:
        """Nobody to wait for."""

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> None:
        """Already the sum of all."""

    def start_all_reduce(self, tensor: Tensor) -> Work:
        return CompletedWork()

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Work:
        received.copy_(sent)
        return CompletedWork()


@dataclass
class Traffic:
    """What went over a channel so far."""

    sent_bytes: int = 0
    """By this process to others; a sum over all processes counts as what a ring sends for it."""
    flight_s: float = 0.0
    """Seconds between the start of each exchange and its end, added up; only where the channel takes times."""
    waited_s: float = 0.0
    """Seconds of these in which this process could do nothing else."""


@contextlib.contextmanager
def open_process_group(device: torch.device) -> Iterator[ProcessGroup]:
    """The channel to the other processes of this job; that of a lone process where nobody has started us as one of many."""
    if not is_one_of_many():
        yield SingleProcess()
        return
    process_group = TorchProcessGroup.join(device)
    try:
        yield process_group
    except BaseException:
        process_group.close(in_peace=False)
        raise
    process_group.close()


class TorchProcessGroup:
    """The processes of a torch.distributed job.

    Sums go over a group of their own, so that they keep no order with the exchanges: a backward pass starts both. CPU tensors
    always go by gloo. With `takes_times` every exchange leaves in `traffic` how long it took and how long it was waited for.
    """

    def __init__(self, device: torch.device, *, takes_times: bool = False) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self.traffic = Traffic()
        self.takes_times = takes_times
        self._sums = dist.new_group(backend=_backend(device))

    @classmethod
    def join(cls, device: torch.device, *, takes_times: bool = False) -> TorchProcessGroup:
        """Meet the other processes that the environment tells of."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            if MEETING_FILE in os.environ:
                store: Store = FileStore(os.environ[MEETING_FILE], world_size)
            else:
                store, rank, world_size = next(iter(rendezvous("env://")))
                # torchrun's store outlives its workers, and still has the addresses of those that it has started before.
                store = PrefixStore(f"rowstead/{os.environ.get(RESTARTS, '0')}", store)
            dist.init_process_group(_backend(device), store=store, rank=rank, world_size=world_size)
        except (RuntimeError, ValueError) as error:
            raise RowsteadError(f"process {rank} of {world_size} could not meet the others: {_first_line(error)}") from error
        return cls(device, takes_times=takes_times)

    def close(self, *, in_peace: bool = True) -> None:
        """Part from the others; after a failure without waiting for what is still on its way."""
        if in_peace:
            self.barrier()
            dist.destroy_process_group()

    def barrier(self) -> None:
        with _lost():
            dist.all_reduce(torch.zeros(1))

    def gather(self, value: Any) -> list[Any]:
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with _lost():
            dist.all_gather(sizes, torch.tensor([text.numel()]))
            longest = max(int(size) for size in sizes)
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
            dist.all_gather(texts, torch.cat([text, text.new_zeros(longest - text.numel())]))
        return [json.loads(bytes(all_[: int(size)].tolist())) for all_, size in zip(texts, sizes, strict=True)]

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> None:
        self._count_sum(tensor)
        with _lost():
            dist.all_reduce(tensor, op={"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op])

    def start_all_reduce(self, tensor: Tensor) -> Work:
        self._count_sum(tensor)
        start_s = time.perf_counter()
        with _lost():
            return self._under_way(dist.all_reduce(tensor, group=self._sums, async_op=True), start_s)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Work:
        self.traffic.sent_bytes += (sent.numel() - sent_sizes[self.rank]) * sent.element_size()
        start_s = time.perf_counter()
        with _lost():
            work = dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), async_op=True)
        return self._under_way(work, start_s, keeps=(received, sent))

    def _count_sum(self, tensor: Tensor) -> None:
        self.traffic.sent_bytes += 2 * (self.world_size - 1) * tensor.numel() * tensor.element_size() // self.world_size

    def _under_way(self, work: Any, start_s: float, keeps: tuple[Tensor, ...] = ()) -> Work:
        under_way = _TimedWork(work, self.traffic, start_s, keeps)
        if self.takes_times:
            under_way.watch()
        return under_way


@dataclass
class _TimedWork:
    """An exchange that torch.distributed is busy with."""

    work: Any
    traffic: Traffic
    start_s: float
    keeps: tuple[Tensor, ...]
    ended_s: list[float] | None = field(default=None)

    def watch(self) -> None:
        """Note when it ends."""
        self.ended_s = ended_s = []
        self.work.get_future().add_done_callback(lambda _: ended_s.append(time.perf_counter()))

    def wait(self) -> None:
        wait_s = time.perf_counter()
        with _lost():
            self.work.wait()
        if self.ended_s is None:
            return
        now_s = time.perf_counter()
        end_s = self.ended_s[0] if self.ended_s else now_s  # its note may come a moment after we wake up
        self.traffic.flight_s += max(end_s, self.start_s) - self.start_s
        self.traffic.waited_s += min(now_s, max(end_s, wait_s)) - wait_s


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """What torch.distributed says of a process that has gone, as an error of ours."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(f"another process of this job has gone: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
