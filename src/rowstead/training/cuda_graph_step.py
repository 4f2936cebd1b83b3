"""A training step that the GPU does on its own: captured in CUDA graphs, replayed without waiting for the host.

Batches are copied into fixed memory with room for some more ids than the batch has, so that one graph serves many batches.
The losses come back some steps later. A loss that is not finite keeps its own step from changing anything.

Letters: B examples, F features, nnz ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rowstead.data.batch import Batch, Sparse
from rowstead.kernels.gpu.dense_optimizer import GpuDenseOptimizer
from rowstead.kernels.gpu.embedding import host_scalars
from rowstead.kernels.gpu.linear import defer_weight_gradients
from rowstead.kernels.row_optimizer import step_scalars
from rowstead.nn.dlrm import DLRM
from rowstead.records.cost import Cost
from rowstead.spec.train import TrainSpec
from rowstead.training.device import dense_precision

EAGER_STEPS = 2
"""Steps of one shape that run launch by launch before it is captured, which compiles and loads all that the graph needs."""
MAX_GRAPHS = 8
SLOTS = 64
"""Steps that may be under way before the host waits for the oldest."""
_DENSE_NUMBERS = slice(8, 15)
_ROW_NUMBERS = slice(0, 6)

LossOf = Callable[[Tensor, Batch], Tensor]


def can_run(model: DLRM) -> bool:
    """Whether a model's step can run here: on a GPU, with rows in its memory or without any, and no FP64."""
    if any(parameter.device.type != "cuda" or parameter.dtype != torch.float32 for parameter in model.net.parameters()):
        return False
    return model.store.graph_rows() is not None


@dataclass
class _Captured:
    """One shape of batches: the fixed memory that its steps read, and their graph once there is one."""

    batch: Batch
    gradients_at: Tensor
    num_steps: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    loss: Tensor | None = None
    keeps: object = None
    """What the graph reads besides."""


class CudaGraphStep:
    """The steps of one model on one GPU."""

    def __init__(self, model: DLRM, spec: TrainSpec, loss_of: LossOf) -> None:
        self._model, self._spec, self._loss_of = model, spec, loss_of
        rows = model.store.graph_rows()
        assert rows is not None, "see `can_run`"
        self._rows, self._generation, self._store = rows, rows.generation, rows.resident
        self.optimizer = GpuDenseOptimizer(model.net.parameters(), spec.dense_optimizer)
        self._device = next(model.net.parameters()).device
        # The network's small launches go before the large ones of rows, and those before the planning of their update; a cache's go first.
        self._planning = torch.cuda.Stream(self._device)
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._network = torch.cuda.Stream(self._device, priority=-2)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[Any, ...], _Captured] = {}
        self._numbers = torch.zeros(16, device=self._device)
        self._host_numbers = torch.zeros(SLOTS, 16).pin_memory()
        self._losses = torch.zeros(SLOTS).pin_memory()
        self._began, self._done = ([torch.cuda.Event(enable_timing=True) for _ in range(SLOTS)] for _ in range(2))
        self._step_in = [0] * SLOTS
        self._num_replayed = [0] * SLOTS
        self.busy = Cost()
        """How long the GPU is busy for each sample, by the graphs whose loss was asked for."""

    def forget(self) -> None:
        """Drop the graphs: what they read or write has moved."""
        torch.cuda.synchronize(self._device)
        self._captured.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def start(self, batch: Batch, number: int, *, row_lr: float, dense_lr: float) -> Callable[[], float]:
        """Begin step `number` on a batch in GPU memory; what is returned waits for its loss."""
        batch = dataclasses.replace(batch, sparse=self._rows.enter(self._rows.check_batch(batch.sparse)))
        if self._rows.generation != self._generation:
            self._generation = self._rows.generation
            self.forget()
        slot = number % SLOTS
        self._done[slot].synchronize()
        self._step_in[slot] = number
        numbers = self._host_numbers[slot]
        rows = step_scalars(self._spec.sparse_optimizer, lr=row_lr, step=number)
        numbers[_ROW_NUMBERS] = host_scalars(rows, number, torch.float32)
        numbers[_DENSE_NUMBERS] = torch.tensor(self.optimizer.numbers(dense_lr, number))
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._numbers.copy_(numbers, non_blocking=True)
            captured = self._shape_of(batch)
            _fill(captured.batch, batch)
            self._num_replayed[slot] = batch.num_samples if captured.num_steps > EAGER_STEPS else 0
            loss = self._replay(captured, self._began[slot])
            self._losses[slot].copy_(loss, non_blocking=True)
            self._done[slot].record(self._stream)
        current.wait_stream(self._stream)
        self._rows.leave()
        self.optimizer.count_step(number)
        return lambda: self._loss_of_step(number)

    def _loss_of_step(self, number: int) -> float:
        slot = number % SLOTS
        assert self._step_in[slot] == number, f"the loss of step {number} was asked for too late"
        self._done[slot].synchronize()
        if self._num_replayed[slot]:
            self.busy.add(self._began[slot].elapsed_time(self._done[slot]) * 1e-3, self._num_replayed[slot])
        return float(self._losses[slot])

    def _shape_of(self, batch: Batch) -> _Captured:
        """Fixed memory into which the batch fits. Its size follows from the batch alone, and so does the order of sums."""
        sparse = batch.sparse
        room = capacity_for(sparse.ids.numel(), sparse.offsets.numel() - 1)
        shapes = tuple(None if tensor is None else tensor.shape for tensor in (batch.dense, batch.labels, batch.weights))
        key = (shapes, sparse.offsets.shape, sparse.ids.dtype, sparse.weights is None, room)
        captured = self._captured.get(key)
        if captured is None:
            ids_dtype = torch.int64 if any(table.num_rows >= 2**31 for table in self._store.tables) else torch.int32
            gradients_at = torch.zeros(sum(1 for _ in self._model.net.parameters()), dtype=torch.int64, device=self._device)
            captured = _Captured(_with_capacity(batch, room, ids_dtype), gradients_at)
            if len(self._captured) == MAX_GRAPHS:  # one that came a few times at most makes way
                rarest = min(self._captured, key=lambda known: self._captured[known].num_steps)
                if self._captured[rarest].graph is None:
                    del self._captured[rarest]
            if len(self._captured) < MAX_GRAPHS:
                self._captured[key] = captured
        return captured

    def _replay(self, captured: _Captured, began: torch.cuda.Event) -> Tensor:
        captured.num_steps += 1
        if captured.num_steps <= EAGER_STEPS:
            return self._run(captured.batch, None)[0]
        if captured.graph is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on with CUDA meanwhile: the reader's copies batches into page-locked memory.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                captured.loss, captured.keeps = self._run(captured.batch, captured.gradients_at)
            captured.gradients_at.copy_(self.optimizer.gradient_addresses())
            self._model.net.zero_grad(set_to_none=True)
            captured.graph = graph
        began.record(self._stream)  # the host has nothing left to do but this launch: from here on the GPU is busy
        captured.graph.replay()
        assert captured.loss is not None
        return captured.loss

    def _run(self, batch: Batch, gradients_at: Tensor | None) -> tuple[Tensor, object]:
        """One step, launch by launch: its loss, and what has to live as long as a graph of it.

        `gradients_at` is where a captured launch will find the gradients' addresses.
        """
        net, spec, store = self._model.net, self._spec, self._store
        rows, network = self._stream, self._network
        net.zero_grad(set_to_none=True)
        plan, numbers = None, self._numbers[_ROW_NUMBERS]
        if store.tables:
            # The update's plan needs no gradient.
            self._planning.wait_stream(rows)
            with torch.cuda.stream(self._planning):
                plan = store.plan_update(batch.sparse, scalars=numbers)
        network.wait_stream(rows)
        with dense_precision(spec.precision, self._device):
            with defer_weight_gradients() as later:
                with torch.cuda.stream(network):
                    projected = net.project(batch.dense)
                if store.tables:
                    pooled = store.lookup_unchecked(batch.sparse).requires_grad_()
                else:
                    pooled = batch.dense.new_zeros(batch.num_samples, 0)
                network.wait_stream(rows)
                with torch.cuda.stream(network):
                    met = None if projected is None else projected.detach().requires_grad_()
                    loss = self._loss_of(net.join(met, pooled), batch)
                    loss.backward()
                    loss = loss.detach().float()
            rows.wait_stream(network)
            # Rows have their gradients now. What is left of the backward pass goes on beside their update.
            if plan is not None:
                assert pooled.grad is not None
                rows.wait_stream(self._planning)
                store.apply_plan(plan, batch.sparse, pooled.grad, scalars=numbers, guard=loss)
            with torch.cuda.stream(network):
                if projected is not None and met is not None:
                    projected.backward(met.grad)
                for give_gradients in later:
                    give_gradients()
                if spec.dense_optimizer.clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), spec.dense_optimizer.clip)
                if gradients_at is None:
                    gradients_at = self.optimizer.gradient_addresses().to(self._device)
                self.optimizer.step_by(self._numbers[_DENSE_NUMBERS], loss, gradients_at)
        rows.wait_stream(network)  # before what one stream made and the other reads makes way
        return loss, None if plan is None else plan.keeps


def capacity_for(num_ids: int, num_bags: int) -> int:
    """A little more than `num_ids`, to the same number for batches that differ little; no more where each bag may hold as many as all others,
    as in a log with one id a feature: then the next batches have as many."""
    if num_ids and num_ids % num_bags == 0:
        return num_ids
    wanted = max(16, num_ids + num_ids // 50)
    unit = max(16, 1 << (wanted.bit_length() - 4))
    return -(-wanted // unit) * unit


def _with_capacity(batch: Batch, room: int, ids_dtype: torch.dtype) -> Batch:
    """Memory for batches like this one with up to `room` ids."""
    sparse = batch.sparse
    return Batch(
        dense=torch.empty_like(batch.dense),
        sparse=Sparse(
            ids=sparse.ids.new_zeros(room, dtype=ids_dtype),
            offsets=torch.empty_like(sparse.offsets),
            num_features=sparse.num_features,
            weights=None if sparse.weights is None else sparse.weights.new_zeros(room),
        ),
        labels=None if batch.labels is None else torch.empty_like(batch.labels),
        weights=None if batch.weights is None else torch.empty_like(batch.weights),
    )


def _fill(target: Batch, batch: Batch) -> None:
    """Copy a batch into fixed memory, by one launch where types are the same: small copies take longer to begin than to do."""
    own, given = target.sparse, batch.sparse
    count = given.ids.numel()
    pairs = [
        (target.dense, batch.dense), (own.ids[:count], given.ids), (own.offsets, given.offsets),
        (target.labels, batch.labels), (target.weights, batch.weights),
        (None if own.weights is None else own.weights[:count], given.weights),
    ]  # fmt: skip
    alike = []
    for into, values in pairs:
        if into is None or values is None or not values.numel():
            continue
        if into.dtype == values.dtype and values.element_size() % 4 == 0 and into.is_contiguous() and values.is_contiguous():
            alike.append((into.view(torch.int32), values.view(torch.int32)))
        else:
            into.copy_(values)
    if alike:
        torch._foreach_copy_([into for into, _ in alike], [values for _, values in alike])
