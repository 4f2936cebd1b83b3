"""`ProcessGroup`: collectives between the processes of a synchronous job, over torch.distributed or in one process."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rowstead.spec.errors import LostProcessError, RowsteadError
from rowstead.spec.job import RENDEZVOUS_FILE, RESTARTS, is_multi_process

Group = TypeVar("Group", bound="TorchProcessGroup")


class Work(Protocol):
    """A collective that was started, as in torch.distributed."""

    def wait(self) -> None:
        """Block until it has completed; on a GPU, until work that is queued from now on sees its result."""


class ProcessGroup(Protocol):
    """The processes of one synchronous job. Every process makes the same calls in the same order.

    A tensor passed to a `start_…` method must not be touched before its `Work` was waited for.
    """

    rank: int
    world_size: int
    processes_per_gpu: int
    """Processes that compute on this one's GPU, itself included; 1 on a CPU."""

    def barrier(self) -> None:
        """Wait until every process has called it."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of ranks; plain JSON values."""

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> None:
        """Sum, or `max`, over all processes, in place."""

    def start_all_reduce(self, tensor: Tensor, *, of_rows: bool = False) -> Work:
        """Start to sum a contiguous tensor over all processes, in place; every process gets the same bits.

        Sums of dense gradients and sums `of_rows` need no order relative to each other; the latter keep that of all-to-alls.
        """

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Work:
        """Start to send each process its part of `sent`, in the order of ranks, and to receive the others' parts for this one.

        Both tensors are contiguous with one dimension; sizes count elements.
        """

    def for_other_thread(self) -> ProcessGroup:
        """The same processes for `gather` in another thread, which needs no order relative to the calls of this group."""


class CompletedWork:
    """Work that has completed already."""

    def wait(self) -> None:
        """Return at once."""


class SingleProcess:
    """The process group of a job with one process."""

    rank = 0
    world_size = 1
    processes_per_gpu = 1

    def barrier(self) -> None:
        """Return at once."""

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> None:
        """Leave the tensor as it is."""

    def start_all_reduce(self, tensor: Tensor, *, of_rows: bool = False) -> Work:
        return CompletedWork()

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Work:
        received.copy_(sent)
        return CompletedWork()

    def for_other_thread(self) -> ProcessGroup:
        return self


SINGLE_PROCESS = SingleProcess()


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

    CPU tensors use gloo, and tensors in GPU memory NCCL. NCCL refuses processes that share a GPU: in their job tensors in GPU memory
    are staged through pinned host memory, and use gloo as well. Sums of dense gradients have a group of their own, so that they need no
    order relative to what is exchanged of rows: a backward pass starts both, and which comes first may depend on a process's examples.
    """

    def __init__(self, device: torch.device, *, is_staged: bool = False) -> None:
        """With `is_staged`, tensors on `device` are staged even if each process has a GPU of its own, or none."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._texts: Any = None
        """The group of `gather`, by default that of all processes."""
        gpus = self.gather(str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else f"CPU {self.rank}")
        self.processes_per_gpu = gpus.count(gpus[self.rank])
        self._is_staged = is_staged or len(set(gpus)) < self.world_size
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and not self._is_staged else "gloo"
        self._exchanges, self._sums = (dist.new_group(backend=backend) for _ in range(2))

    @classmethod
    def join(cls: type[Group], device: torch.device, **options: Any) -> Group:
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
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        except (RuntimeError, ValueError) as error:
            raise RowsteadError(
                f"process {rank} of {world_size} could not join the process group: {_first_line(error)}"
            ) from error
        return cls(device, **options)

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
            dist.all_gather(sizes, torch.tensor([text.numel()]), group=self._texts)
            longest = max(int(size) for size in sizes)
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
            dist.all_gather(texts, torch.cat([text, text.new_zeros(longest - text.numel())]), group=self._texts)
        return [json.loads(bytes(all_[: int(size)].tolist())) for all_, size in zip(texts, sizes, strict=True)]

    def for_other_thread(self) -> ProcessGroup:
        other = copy.copy(self)
        with _lost():
            other._texts = dist.new_group(backend="gloo")
        return other

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> None:
        self._start_all_reduce(tensor, self._exchanges, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]).wait()

    def start_all_reduce(self, tensor: Tensor, *, of_rows: bool = False) -> TorchWork:
        return self._start_all_reduce(tensor, self._exchanges if of_rows else self._sums, dist.ReduceOp.SUM)

    def _start_all_reduce(self, tensor: Tensor, group: Any, op: Any) -> TorchWork:
        wired = self._stage(tensor)
        with _lost():
            return TorchWork(dist.all_reduce(wired, op=op, group=group, async_op=True), tensor, wired)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> TorchWork:
        wired, wired_sent = self._stage(received, copies=False), self._stage(sent)
        sizes = list(received_sizes), list(sent_sizes)
        with _lost():
            work = dist.all_to_all_single(wired, wired_sent, *sizes, group=self._exchanges, async_op=True)
        return TorchWork(work, received, wired, wired_sent)

    def _stage(self, tensor: Tensor, *, copies: bool = True) -> Tensor:
        """The tensor that the backend gets: this one, or pinned host memory of its shape with a copy of it."""
        if not self._is_staged or tensor.device.type != self.device.type:
            return tensor
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return staged.copy_(tensor) if copies else staged  # waits for the GPU


@dataclass(frozen=True)
class TorchWork:
    """A collective of torch.distributed."""

    work: Any
    result: Tensor
    wired: Tensor
    """What torch.distributed writes to: the result, or host memory that is copied to it."""
    wired_sent: Tensor | None = None
    """In use until it has completed."""

    def wait(self) -> None:
        with _lost():
            self.work.wait()
        if self.wired is not self.result:
            self.result.copy_(self.wired, non_blocking=True)


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """Turn the error of torch.distributed for a lost process into a LostProcessError."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(f"another process of this job was lost: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
