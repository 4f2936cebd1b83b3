"""A training step of all processes of a job at once, each with its share of the batch.

What goes over the channel goes while there is other work: ids ahead of their batch, pooled vectors while the bottom MLP runs, the
gradients of pooled vectors and of the top MLP while the rest of the backward pass runs, the loss while all of it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rowstead.data.batch import Batch
from rowstead.distributed.process_group import ProcessGroup, Work
from rowstead.nn.dlrm import DLRM
from rowstead.records.timers import Timers
from rowstead.spec.phases import Phase
from rowstead.spec.train import TrainSpec
from rowstead.training.device import dense_precision

BUCKET_BYTES = 1 << 20
"""Dense gradients that are added up at a time: enough to be worth a message, few enough to be under way early."""
WIRE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types on the wire by the names that specs have for them; none is the type in which they are computed."""

LossOf = Callable[[Tensor, Batch], Tensor]


class ShardedStep:
    """The steps of one model in one of several processes.

    `wants_stop` says whether this process was asked to stop; `stops` is then true in all of them after the same step.
    """

    def __init__(
        self,
        model: DLRM,
        spec: TrainSpec,
        loss_of: LossOf,
        optimizer: torch.optim.Optimizer,
        timers: Timers,
        process_group: ProcessGroup,
    ) -> None:
        self._model, self._spec, self._loss_of = model, spec, loss_of
        self._optimizer, self._timers, self._channel = optimizer, timers, process_group
        self._store = model.store if model.store.tables else None
        self._gradients = DenseGradients(model.net, process_group, WIRE_DTYPES[spec.wire])
        self.wants_stop: Callable[[], bool] = lambda: False
        self.stops = False

    def step(self, batch: Batch, number: int, rate: float, finite: Callable[[float, int], float]) -> float:
        """Train on this process's share of a batch as step `number`; returns the loss of the whole batch.

        `finite` is given the loss before anything changes, and may raise.
        """
        model, spec, timers, store = self._model, self._spec, self._timers, self._store
        with timers.phase(Phase.LOOKUP):
            pooled_later = store.start_lookup(batch.sparse) if store is not None else None
        with dense_precision(spec.precision, batch.dense.device):
            with timers.phase(Phase.FORWARD):
                projected = model.net.project(batch.dense)
            with timers.phase(Phase.LOOKUP):
                pooled = pooled_later() if pooled_later is not None else batch.dense.new_zeros(batch.num_samples, 0)
            update: list[Callable[[float, int], None]] = []
            if store is not None:
                pooled.requires_grad_()
                pooled.register_post_accumulate_grad_hook(lambda own: update.append(self._send(batch, own)))
            with timers.phase(Phase.FORWARD):
                loss = self._loss_of(model.net.join(projected, pooled), batch)
                told = torch.stack([loss.detach().double(), loss.new_tensor(self.wants_stop(), dtype=torch.float64)])
                telling = self._channel.start_all_reduce(told)
            with timers.phase(Phase.BACKWARD):
                self._optimizer.zero_grad(set_to_none=True)
                self._gradients.begin()
                loss.backward()
                if store is not None and not update:  # rows that the loss does not depend on
                    update.append(store.start_update(batch.sparse, torch.zeros_like(pooled)))
        with timers.phase(Phase.EXCHANGE):
            telling.wait()
            value, stops = told.tolist()
            self.stops = stops > 0
            value = finite(value, number)
            self._gradients.finish()
        with timers.phase(Phase.DENSE_UPDATE):
            if spec.dense_optimizer.clip is not None:
                nn.utils.clip_grad_norm_(model.net.parameters(), spec.dense_optimizer.clip)
            for group in self._optimizer.param_groups:
                group["lr"] = spec.dense_optimizer.lr * rate
            self._optimizer.step()
        with timers.phase(Phase.ROW_UPDATE):
            for apply in update:
                apply(spec.sparse_optimizer.lr * rate, number)
        return value

    def _send(self, batch: Batch, pooled: Tensor) -> Callable[[float, int], None]:
        """Begin to send the gradient of the pooled rows, as soon as there is one."""
        assert self._store is not None
        assert pooled.grad is not None
        return self._store.start_update(batch.sparse, pooled.grad)


@dataclass
class _Bucket:
    """Parameters whose gradients are added up together."""

    parameters: list[nn.Parameter]
    num_missing: int = 0
    flat: Tensor | None = None
    waiting: Work | None = field(default=None, repr=False)


class DenseGradients:
    """Adds up the gradients of a module's parameters over processes, bucket by bucket, as the backward pass makes them.

    Buckets begin in one order everywhere, that in which a backward pass comes to them: the last parameters first.
    """

    def __init__(self, module: nn.Module, process_group: ProcessGroup, wire: torch.dtype | None = None) -> None:
        self._channel, self._wire = process_group, wire
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        size = BUCKET_BYTES
        for parameter in reversed(list(module.parameters())):
            if size >= BUCKET_BYTES:
                self._buckets.append(_Bucket([]))
                size = 0
            self._buckets[-1].parameters.append(parameter)
            self._bucket_of[parameter] = len(self._buckets) - 1
            size += parameter.numel() * (wire or parameter.dtype).itemsize
            parameter.register_post_accumulate_grad_hook(self._ready)
        self._num_begun = 0
        self._is_open = False

    def begin(self) -> None:
        """A backward pass is about to make gradients; those of other passes are left alone."""
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.parameters)
        self._num_begun, self._is_open = 0, True

    def finish(self) -> None:
        """Wait for the sums and leave them where the gradients were."""
        self._is_open = False
        while self._num_begun < len(self._buckets):
            self._start(self._buckets[self._num_begun])
        for bucket in self._buckets:
            assert bucket.waiting is not None
            assert bucket.flat is not None
            bucket.waiting.wait()
            parts = bucket.flat.split([parameter.numel() for parameter in bucket.parameters])
            for parameter, part in zip(bucket.parameters, parts, strict=True):
                parameter.grad = part.to(parameter.dtype).view_as(parameter)
            bucket.waiting = bucket.flat = None

    def _ready(self, parameter: Tensor) -> None:
        if not self._is_open:
            return
        assert isinstance(parameter, nn.Parameter)
        self._buckets[self._bucket_of[parameter]].num_missing -= 1
        while self._num_begun < len(self._buckets) and self._buckets[self._num_begun].num_missing == 0:
            self._start(self._buckets[self._num_begun])

    def _start(self, bucket: _Bucket) -> None:
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in bucket.parameters
        ]
        flat = torch.cat([gradient.detach().flatten() for gradient in gradients])
        bucket.flat = flat if self._wire is None else flat.to(self._wire)
        bucket.waiting = self._channel.start_all_reduce(bucket.flat)
        self._num_begun += 1
