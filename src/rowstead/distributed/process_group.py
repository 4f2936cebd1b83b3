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
from rowstead.spec.job import RENDEZVOUS_FILE, RESTARTS, is_multi_process


class Work(Protocol):
    """A collective that was started, as in torch.distributed."""

    def wait(self) -> None:
        """Block until it has completed; on a GPU, until work that is queued from now on sees its result."""
        ...


class ProcessGroup(Protocol):
    """The processes of one synchronous job. Every process makes the same calls in the same order.

    A tensor passed to a `start_…` method must not be touched before its `Work` was waited for.
    """

    rank: int
    world_size: int

    def barrier(self) -> None:
        """Wait until every process has called it."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of ranks; plain JSON values."""
        ...

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> None:
        """Sum, or `max`, over all processes, in place."""
        ...

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Start to sum a contiguous tensor over all processes, in place; every process gets the same bits."""
        ...

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Work:
        """Start to send each process its part of `sent`, in the order of ranks, and to receive the others' parts for this one.

        Both tensors are contiguous with one dimension; sizes count elements.
        """
        ...


class CompletedWork:
    """Work that has completed already."""

    def wait(self) -> None:
        """Return at once."""


class SingleProcess:
    """The process group of a job with one process."""

    rank = 0
    world_size = 1

    def barrier(self) -> None:
        """Return at once."""

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> None:
        """Leave the tensor as it is."""

    def start_all_reduce(self, tensor: Tensor) -> Work:
        return CompletedWork()

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Work:
        received.copy_(sent)
        return CompletedWork()


@dataclass
class Traffic:
    """What a process group has transferred so far."""

    sent_bytes: int = 0
    """Bytes sent by this process to others; an all-reduce counts as what a ring all-reduce sends."""
    flight_s: float = 0.0
    """Sum over all collectives of the seconds between start and completion; only with `takes_times`."""
    waited_s: float = 0.0
    """Seconds of these in which this process was blocked."""


@contextlib.contextmanager
def open_process_group(device: torch.device) -> Iterator[ProcessGroup]:
    """The process group of this job; a `SingleProcess` unless a launcher started this process as one of several."""
    if not is_multi_process():
        yield SingleProcess()
        return
    process_group = TorchProcessGroup.join(device)
    try:
        yield process_group
    except BaseException:
        raise  # without waiting: others may never complete what was started
    process_group.close()


class TorchProcessGroup:
    """The processes of a torch.distributed job.

    All-reduces have a group of their own, so that they need no order relative to all-to-alls: a backward pass starts both. CPU
    tensors always use gloo. With `takes_times`, `traffic` also records how long collectives took and were waited for.
    """

    def __init__(self, device: torch.device, *, takes_times: bool = False) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self.traffic = Traffic()
        self.takes_times = takes_times
        self._sums = dist.new_group(backend=_backend(device))

    @classmethod
    def join(cls, device: torch.device, *, takes_times: bool = False) -> TorchProcessGroup:
        """Join the process group that the environment variables describe."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            if RENDEZVOUS_FILE in os.environ:
                store: Store = FileStore(os.environ[RENDEZVOUS_FILE], world_size)
            else:
                store, rank, world_size = next(iter(rendezvous("env://")))
                # torchrun's store outlives its workers, and still has the addresses of the workers before a restart.
                store = PrefixStore(f"rowstead/{os.environ.get(RESTARTS, '0')}", store)
            dist.init_process_group(_backend(device), store=store, rank=rank, world_size=world_size)
        except (RuntimeError, ValueError) as error:
            raise RowsteadError(
                f"process {rank} of {world_size} could not join the process group: {_first_line(error)}"
            ) from error
        return cls(device, takes_times=takes_times)

    def close(self) -> None:
        """Leave the group once every process does."""
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
            return self._timed(dist.all_reduce(tensor, group=self._sums, async_op=True), start_s)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Work:
        self.traffic.sent_bytes += (sent.numel() - sent_sizes[self.rank]) * sent.element_size()
        start_s = time.perf_counter()
        with _lost():
            work = dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), async_op=True)
        return self._timed(work, start_s, keeps=(received, sent))

    def _count_sum(self, tensor: Tensor) -> None:
        self.traffic.sent_bytes += 2 * (self.world_size - 1) * tensor.numel() * tensor.element_size() // self.world_size

    def _timed(self, work: Any, start_s: float, keeps: tuple[Tensor, ...] = ()) -> Work:
        timed = _TimedWork(work, self.traffic, start_s, keeps)
        if self.takes_times:
            timed.watch()
        return timed


@dataclass
class _TimedWork:
    """A collective of torch.distributed, timed if asked to."""

    work: Any
    traffic: Traffic
    start_s: float
    keeps: tuple[Tensor, ...]
    ended_s: list[float] | None = field(default=None)

    def watch(self) -> None:
        """Record when it completes."""
        self.ended_s = ended_s = []
        self.work.get_future().add_done_callback(lambda _: ended_s.append(time.perf_counter()))

    def wait(self) -> None:
        wait_s = time.perf_counter()
        with _lost():
            self.work.wait()
        if self.ended_s is None:
            return
        now_s = time.perf_counter()
        end_s = self.ended_s[0] if self.ended_s else now_s  # the callback may run a moment after the wait returns
        self.traffic.flight_s += max(end_s, self.start_s) - self.start_s
        self.traffic.waited_s += min(now_s, max(end_s, wait_s)) - wait_s


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """Turn the error of torch.distributed for a lost process into a LostProcessError."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(f"another process of this job was lost: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
