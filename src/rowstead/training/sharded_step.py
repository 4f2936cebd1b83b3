"""A training step in one of several processes, each with its share of the batch.

Exchanges overlap with other work: ids are sent ahead of their batch, pooled vectors while the bottom MLP runs, the gradients of pooled
vectors and of the top MLP while the rest of the backward pass runs, and the loss during all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rowstead.data.batch import Batch
from rowstead.distributed.process_group import ProcessGroup, Work
from rowstead.nn.dlrm import DLRM
from rowstead.nn.encoders import HistoryEncoder
from rowstead.nn.layers import BatchNorm
from rowstead.records.timers import Timers
from rowstead.spec.train import TrainSpec
from rowstead.training.step import Execution, check_finite

BUCKET_BYTES = 1 << 20
"""Dense gradients per all-reduce: enough to be worth a message, few enough to start early."""
WIRE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Wire types by their names in specs; None is the type that they are computed in."""


class ShardedExecution(Execution):
    """Runs steps in one of several processes, over a store whose tables are shared by all of them."""

    has_exchange = True

    def __init__(self, model: DLRM, spec: TrainSpec, timers: Timers, process_group: ProcessGroup) -> None:
        super().__init__(model, spec, timers)
        self._group = process_group
        for module in model.net.modules():
            if isinstance(module, BatchNorm):
                module.all_reduce = lambda tensor: process_group.start_all_reduce(tensor).wait()
        self._gradients = GradientBuckets(model.net, process_group, WIRE_DTYPES[spec.wire])
        self._questions: Sequence[Callable[[], bool]] = ()
        self._answers: list[bool] = []
        self._row_updates: list[Callable[[float, int], None]] = []
        self._loss_and_answers: tuple[Tensor, Work] | None = None

    def start_lookup(self, batch: Batch) -> Callable[[], Tensor]:
        finish, self._row_updates = super().start_lookup(batch), []
        if not self.model.store.tables:
            return finish

        def send_gradient(rows: Tensor) -> None:
            assert rows.grad is not None
            self._row_updates.append(self.model.store.start_update(batch.sparse, rows.grad))

        def finish_lookup() -> Tensor:
            rows = finish()
            rows.register_post_accumulate_grad_hook(send_gradient)
            return rows

        return finish_lookup

    def report_loss(self, loss: Tensor, number: int) -> None:
        """Start to sum the loss over all processes, together with what they have to agree on."""
        answers = loss.new_tensor([ask() for ask in self._questions], dtype=torch.float64)
        reported = torch.cat([loss.detach().double().reshape(1), answers])
        self._loss_and_answers = reported, self._group.start_all_reduce(reported)

    def backward(self, loss: Tensor, rows: Tensor, batch: Batch) -> Callable[[float, int], None] | None:
        """Gradients are sent as soon as they are there: those of rows by `start_lookup`'s hook, dense ones bucket by bucket."""
        self.optimizer.zero_grad(set_to_none=True)
        self._gradients.begin()
        loss.backward()
        if not self.model.store.tables:
            return None
        if not self._row_updates:  # the loss does not depend on the rows, but other processes wait for this one
            self._row_updates.append(self.model.store.start_update(batch.sparse, torch.zeros_like(rows)))
        return self._row_updates[0]

    def exchange(self, number: int) -> None:
        assert self._loss_and_answers is not None
        reported, work = self._loss_and_answers
        work.wait()
        loss, *counts = reported.tolist()
        self._answers = [count > 0 for count in counts]
        self._value = check_finite(loss, number)
        self._gradients.finish()

    def agree_on(self, *questions: Callable[[], bool]) -> Sequence[Callable[[], bool]]:
        """True in all processes after the same step, if it was true in one of them."""
        self._questions, self._answers = questions, [False] * len(questions)

        def answer(index: int) -> Callable[[], bool]:
            return lambda: self._answers[index]

        return [answer(index) for index in range(len(questions))]


@dataclass
class _Bucket:
    """Parameters whose gradients are summed together."""

    parameters: list[nn.Parameter]
    num_pending: int = 0
    flat: Tensor | None = None
    work: Work | None = field(default=None, repr=False)


class GradientBuckets:
    """Sums the gradients of a module's parameters over processes, bucket by bucket, as the backward pass computes them.

    All processes start their buckets in the same order, that of a backward pass: the last parameters first, and those of history encoders
    after the others.
    """

    def __init__(self, module: nn.Module, process_group: ProcessGroup, wire: torch.dtype | None = None) -> None:
        self._group, self._wire = process_group, wire
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        size = BUCKET_BYTES
        encoders = {one for part in module.modules() if isinstance(part, HistoryEncoder) for one in part.parameters()}
        last_first = reversed(list(module.parameters()))
        for parameter in sorted(last_first, key=encoders.__contains__):
            if size >= BUCKET_BYTES:
                self._buckets.append(_Bucket([]))
                size = 0
            self._buckets[-1].parameters.append(parameter)
            self._bucket_of[parameter] = len(self._buckets) - 1
            size += parameter.numel() * (wire or parameter.dtype).itemsize
            parameter.register_post_accumulate_grad_hook(self._ready)
        self._num_started = 0
        self._is_open = False

    def begin(self) -> None:
        """Start to watch a backward pass; gradients of other passes are not summed."""
        for bucket in self._buckets:
            bucket.num_pending = len(bucket.parameters)
        self._num_started, self._is_open = 0, True

    def finish(self) -> None:
        """Wait for the sums and replace the gradients by them."""
        self._is_open = False
        while self._num_started < len(self._buckets):
            self._start(self._buckets[self._num_started])
        for bucket in self._buckets:
            assert bucket.work is not None
            assert bucket.flat is not None
            bucket.work.wait()
            parts = bucket.flat.split([parameter.numel() for parameter in bucket.parameters])
            for parameter, part in zip(bucket.parameters, parts, strict=True):
                parameter.grad = part.to(parameter.dtype).view_as(parameter)
            bucket.work = bucket.flat = None

    def _ready(self, parameter: Tensor) -> None:
        if not self._is_open:
            return
        assert isinstance(parameter, nn.Parameter)
        self._buckets[self._bucket_of[parameter]].num_pending -= 1
        while self._num_started < len(self._buckets) and self._buckets[self._num_started].num_pending == 0:
            self._start(self._buckets[self._num_started])

    def _start(self, bucket: _Bucket) -> None:
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in bucket.parameters
        ]
        flat = torch.cat([gradient.detach().flatten() for gradient in gradients])
        bucket.flat = flat if self._wire is None else flat.to(self._wire)
        bucket.work = self._group.start_all_reduce(bucket.flat)
        self._num_started += 1
