"""A training step on a GPU: captured as a CUDA graph, and replayed without waiting for the host.

Batches are copied into fixed memory with capacity for some more ids than they have, so that one graph serves many batches. Losses
are read some steps later. A step whose loss is not finite changes nothing.

Letters: B examples, F features, nnz ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rowstead.data.batch import Batch, Sparse
from rowstead.kernels.gpu.dense_optimizer import GpuDenseOptimizer
from rowstead.kernels.gpu.embedding import UpdatePlan, host_scalars, summing_order
from rowstead.kernels.gpu.linear import defer_weight_gradients
from rowstead.kernels.row_state import NUM_SCALARS, step_scalars
from rowstead.nn.dlrm import DLRM
from rowstead.records.cost import Cost
from rowstead.records.timers import Timers
from rowstead.spec.phases import Phase
from rowstead.spec.train import TrainSpec
from rowstead.training.gpu_network import GpuNetwork
from rowstead.training.step import Execution, check_finite, run_step

EAGER_STEPS = 2
"""Steps of one shape that run launch by launch before it is captured, so that all kernels are compiled and loaded; one if only its
capacity is new."""
MAX_GRAPHS = 32
MAX_SPARE = 1.5
"""A batch takes a graph that is there already if its capacity is at most this many times the batch's own: of unused capacity only the
sort of the row update takes notice."""
SLOTS = 64
"""Steps that may be in flight before the host waits for the oldest."""
_DENSE_NUMBERS = slice(8, 15)
_ROW_NUMBERS = slice(0, NUM_SCALARS + 1)


def can_capture(model: DLRM) -> bool:
    """Whether steps of this model can be captured: all on a GPU, without FP64, and with a store that does not need the host."""
    if any(parameter.device.type != "cuda" or parameter.dtype != torch.float32 for parameter in model.net.parameters()):
        return False
    return model.store.graph_rows() is not None


@dataclass
class _Captured:
    """Batches of one shape: the fixed memory that their steps read, and the graph once there is one."""

    batch: Batch
    gradients_at: Tensor
    num_eager: int
    """Steps that run launch by launch before there is a graph."""
    num_steps: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    loss: Tensor | None = None
    keeps: object = None
    """Other memory that the graph reads."""


class CudaGraphExecution(Execution):
    """Runs steps on one GPU, on three streams: rows, the network, and the plan of the row update.

    `start` runs a step on its batch's fixed memory: launch by launch at first, then as a graph. Both run `run_step`, whose parts are
    launched on the stream that each belongs to.
    """

    optimizer: GpuDenseOptimizer

    def __init__(self, model: DLRM, spec: TrainSpec, timers: Timers, report: Callable[[str], None]) -> None:
        self._net = GpuNetwork(model.net, bf16=spec.precision == "bf16", batch_size=spec.batch_size, report=report)
        copies = self._net.parameters() if self._net.is_copy else None
        super().__init__(model, spec, timers, GpuDenseOptimizer(model.net.parameters(), spec.dense_optimizer, copies))
        self.phase = self._on_stream
        self._report = report
        rows = model.store.graph_rows()
        assert rows is not None, "see `can_capture`"
        self._rows, self._generation, self._store = rows, rows.generation, rows.resident
        self._device = next(model.net.parameters()).device
        # The network's small launches go before the large ones of rows, and those before the planning of their update; a cache's go first.
        self._planning = torch.cuda.Stream(self._device)
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._network = torch.cuda.Stream(self._device, priority=-2)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[Any, ...], _Captured] = {}
        self._can_capture = True
        self._numbers = torch.zeros(16, device=self._device)
        self._host_numbers = torch.zeros(SLOTS, 16).pin_memory()
        self._losses = torch.zeros(SLOTS).pin_memory()
        self._began, self._done = ([torch.cuda.Event(enable_timing=True) for _ in range(SLOTS)] for _ in range(2))
        self._step_in = [0] * SLOTS
        self._num_replayed = [0] * SLOTS
        self.num_steps = self.num_replayed = 0
        """Steps so far, and those of them that replayed a graph."""
        self._busy = Cost()
        """GPU time per sample of replayed graphs whose loss was waited for."""
        self._current: _Launches = _Launches(None)

    @property
    def gpu_s_per_sample(self) -> float | None:
        return self._busy.s_per_item

    def state_loaded(self) -> None:
        """Drop the graphs: the memory that they read or write has moved."""
        torch.cuda.synchronize(self._device)
        self.optimizer.refresh_copies()
        self._captured.clear()
        self._pool = torch.cuda.graph_pool_handle()

    # A step, from the host

    def start(self, batch: Batch, number: int, rate: float) -> Callable[[], float]:
        """Start a step on a batch in GPU memory without waiting for it."""
        with self.timers.phase(Phase.GPU_STEP):
            self._start(batch, number, rate)

        def wait() -> float:
            with self.timers.phase(Phase.GPU_STEP):
                return check_finite(self._loss_of_step(number), number)

        return wait

    def _start(self, batch: Batch, number: int, rate: float) -> None:
        batch = dataclasses.replace(batch, sparse=self._rows.enter(self._rows.check_batch(batch.sparse)))
        if self._rows.generation != self._generation:
            self._generation = self._rows.generation
            self.state_loaded()
        slot = number % SLOTS
        self._done[slot].synchronize()
        self._step_in[slot] = number
        numbers = self._host_numbers[slot]
        rows = step_scalars(self.spec.sparse_optimizer, lr=self.spec.sparse_optimizer.lr * rate, step=number)
        numbers[_ROW_NUMBERS] = host_scalars(rows, number, torch.float32)
        numbers[_DENSE_NUMBERS] = torch.tensor(self.optimizer.numbers(self.spec.dense_optimizer.lr * rate, number))
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._numbers.copy_(numbers, non_blocking=True)
            captured = self._shape_of(batch)
            _fill(captured.batch, batch)
            self._num_replayed[slot] = 0
            loss = self._replay(captured, slot)
            self._losses[slot].copy_(loss, non_blocking=True)
            self._done[slot].record(self._stream)
        current.wait_stream(self._stream)
        self._rows.leave()
        self.optimizer.count_step(number)

    def _loss_of_step(self, number: int) -> float:
        slot = number % SLOTS
        assert self._step_in[slot] == number, f"the loss of step {number} was read too late"
        self._done[slot].synchronize()
        if self._num_replayed[slot]:
            self._busy.add(self._began[slot].elapsed_time(self._done[slot]) * 1e-3, self._num_replayed[slot])
        return float(self._losses[slot])

    def _shape_of(self, batch: Batch) -> _Captured:
        """Fixed memory that the batch fits; the order of sums depends on the batch only."""
        sparse = batch.sparse
        num_bags = sparse.offsets.numel() - 1
        capacity = capacity_for(sparse.ids.numel(), batch.num_samples)
        shapes = tuple(None if tensor is None else tensor.shape for tensor in (batch.dense, batch.labels, batch.weights))
        kind = (shapes, num_bags, sparse.ids.dtype, sparse.weights is None, summing_order(capacity, num_bags))
        key = (kind, capacity)
        captured = self._captured.get(key)
        if captured is None:
            larger = [size for known, size in self._captured if known == kind and capacity < size <= MAX_SPARE * capacity]
            if larger:
                return self._captured[kind, min(larger)]
            ids_dtype = torch.int64 if any(table.num_rows >= 2**31 for table in self._store.tables) else torch.int32
            gradients_at = torch.zeros(sum(1 for _ in self.model.net.parameters()), dtype=torch.int64, device=self._device)
            is_known = any(known == kind and other.graph is not None for (known, _), other in self._captured.items())
            num_eager = 1 if is_known else EAGER_STEPS
            captured = _Captured(_with_capacity(batch, capacity, ids_dtype), gradients_at, num_eager)
            if len(self._captured) == MAX_GRAPHS:  # evict one that has not been captured
                rarest = min(self._captured, key=lambda known: self._captured[known].num_steps)
                if self._captured[rarest].graph is None:
                    del self._captured[rarest]
            if len(self._captured) < MAX_GRAPHS:
                self._captured[key] = captured
        return captured

    def _replay(self, captured: _Captured, slot: int) -> Tensor:
        """Run the step on its fixed memory, launch by launch for the first few times and then as a graph; its loss."""
        captured.num_steps += 1
        self.num_steps += 1
        if captured.num_steps <= captured.num_eager or not self._can_capture:
            return self._run(captured.batch, None)[0]
        if captured.graph is None:
            try:
                self._capture(captured)
            except RuntimeError as error:
                self._can_capture = False
                with contextlib.suppress(RuntimeError):  # a failed capture leaves the allocator in capture mode
                    torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
                first = error.__context__ or error  # the end of a failed capture raises, too
                self._report(f"CUDA graph capture failed; steps run without graphs from now on: {str(first).splitlines()[0]}")
                self._reset_random_numbers(self._step_in[slot])
                return self._run(captured.batch, None)[0]
        assert captured.graph is not None
        assert captured.loss is not None
        if captured.num_steps > captured.num_eager + 1:
            self._num_replayed[slot] = captured.batch.num_samples
        self.num_replayed += 1
        self._began[slot].record(self._stream)  # this launch is all that the host has left to do: from here on the GPU is busy
        captured.graph.replay()
        return captured.loss

    def _capture(self, captured: _Captured) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with CUDA meanwhile: the reader's copies batches into pinned memory.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            captured.loss, captured.keeps = self._run(captured.batch, captured.gradients_at)
        captured.gradients_at.copy_(self.optimizer.gradient_addresses())
        self._net.module.zero_grad(set_to_none=True)
        captured.graph = graph

    def _reset_random_numbers(self, number: int) -> None:
        """A failed capture leaves the device's generator in capture mode: give it a new state, seeded for this step."""
        fresh = torch.Generator(self._device)
        torch.cuda.default_generators[self._device.index or 0].graphsafe_set_state(fresh.graphsafe_get_state())
        self.model.net.seed_step(number)

    def _run(self, batch: Batch, gradients_at: Tensor | None) -> tuple[Tensor, object]:
        """Launch one step: its loss, and what has to live as long as a graph of it.

        `gradients_at` is where a captured launch will find the gradients' addresses.
        """
        launches = self._current = _Launches(gradients_at)
        self._net.module.zero_grad(set_to_none=True)
        with defer_weight_gradients() as launches.deferred:
            run_step(self, batch, 0, 0.0)  # the number and the rate are in `_numbers`
        self._stream.wait_stream(self._network)  # before memory that one stream allocated and the other reads is reused
        assert launches.loss is not None
        return launches.loss, None if launches.plan is None else launches.plan.keeps

    # The parts of a step, as launches on the stream of each

    @contextlib.contextmanager
    def _on_stream(self, phase: Phase) -> Iterator[None]:
        """The forward pass and the dense update are launched on the network's stream, all else on that of the rows."""
        if phase is Phase.FORWARD:
            self._network.wait_stream(self._stream)
        with torch.cuda.stream(self._network if phase in (Phase.FORWARD, Phase.DENSE_UPDATE) else self._stream):
            yield

    def start_lookup(self, batch: Batch) -> Callable[[], Tensor]:
        """Plan the row update, which needs no gradient; the returned function launches the look-up."""
        if not self._store.tables:
            return super().start_lookup(batch)
        self._planning.wait_stream(self._stream)
        with torch.cuda.stream(self._planning):
            self._current.plan = self._store.plan_update(batch.sparse, scalars=self._numbers[_ROW_NUMBERS])
        return lambda: self._store.lookup_unchecked(batch.sparse, self._net.pooled_dtype).requires_grad_()

    def project(self, dense: Tensor) -> Tensor | None:
        return self._net.project(dense)

    def join(self, projected: Any, pooled: Tensor) -> Tensor:
        return self._net.join(projected, pooled)

    def cut(self, projected: Any) -> Any:
        """Cut the backward pass, so that rows get their gradients before the first part of the network does."""
        if not isinstance(projected, Tensor) or not projected.requires_grad:
            return projected
        self._current.projected, self._current.joined = projected, projected.detach().requires_grad_()
        return self._current.joined

    def report_loss(self, loss: Tensor, number: int) -> None:
        """The loss stays on the GPU: if it is not finite, the updates change nothing, and `start`'s result raises."""

    def backward(self, loss: Tensor, pooled: Tensor, batch: Batch) -> None:
        """The rest of the backward pass, below the cut and for the weights, runs beside the row update."""
        launches, rows, network = self._current, self._stream, self._network
        with torch.cuda.stream(network):
            loss.backward()
            launches.loss = loss.detach().float()
        rows.wait_stream(network)
        if launches.plan is not None:
            gradient = torch.zeros_like(pooled) if pooled.grad is None else pooled.grad  # a network may ignore its rows
            rows.wait_stream(self._planning)
            self._store.apply_plan(
                launches.plan, batch.sparse, gradient, scalars=self._numbers[_ROW_NUMBERS], guard=launches.loss
            )
        with torch.cuda.stream(network):
            if launches.projected is not None and launches.joined is not None and launches.joined.grad is not None:
                launches.projected.backward(launches.joined.grad)
            for give_gradients in launches.deferred:
                give_gradients()

    def update_dense(self, rate: float) -> None:
        launches, parameters = self._current, self._net.parameters()
        assert launches.loss is not None
        for parameter in parameters:  # a network of the user's own may leave some without
            if parameter.grad is None or not parameter.grad.is_contiguous():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        if self.spec.dense_optimizer.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.spec.dense_optimizer.clip)
        gradients_at = launches.gradients_at
        if gradients_at is None:
            gradients_at = self.optimizer.gradient_addresses().to(self._device)
        self.optimizer.step_by(self._numbers[_DENSE_NUMBERS], launches.loss, gradients_at)


@dataclass
class _Launches:
    """What the parts of one step pass to each other."""

    gradients_at: Tensor | None
    """Where a captured launch will find the gradients' addresses; None outside of a capture."""
    deferred: list[Callable[[], None]] = field(default_factory=list)
    """Calls that compute the gradients of weights."""
    plan: UpdatePlan | None = None
    projected: Tensor | None = None
    joined: Tensor | None = None
    """`projected` on the other side of the cut."""
    loss: Tensor | None = None


def capacity_for(num_ids: int, num_samples: int) -> int:
    """Capacity for a batch of `num_ids` ids: a little more, rounded so that batches of similar size share it.

    Exactly `num_ids` where all examples may hold the same number, as in a log with one id per feature: then so will the next batches.
    """
    if num_ids and num_ids % num_samples == 0:
        return num_ids
    wanted = max(16, num_ids + num_ids // 50)
    unit = max(16, 1 << (wanted.bit_length() - 4))
    return -(-wanted // unit) * unit


def _with_capacity(batch: Batch, capacity: int, ids_dtype: torch.dtype) -> Batch:
    """Memory for batches like this one with up to `capacity` ids."""
    sparse = batch.sparse
    return Batch(
        dense=torch.empty_like(batch.dense),
        sparse=Sparse(
            ids=sparse.ids.new_zeros(capacity, dtype=ids_dtype),
            offsets=torch.empty_like(sparse.offsets),
            num_features=sparse.num_features,
            weights=None if sparse.weights is None else sparse.weights.new_zeros(capacity),
        ),
        labels=None if batch.labels is None else torch.empty_like(batch.labels),
        weights=None if batch.weights is None else torch.empty_like(batch.weights),
    )


def _fill(target: Batch, batch: Batch) -> None:
    """Copy a batch into fixed memory, by one launch for all tensors of the same type: small copies are dominated by launches."""
    own, given = target.sparse, batch.sparse
    count = given.ids.numel()
    pairs = [
        (target.dense, batch.dense), (own.ids[:count], given.ids), (own.offsets, given.offsets),
        (target.labels, batch.labels), (target.weights, batch.weights),
        (None if own.weights is None else own.weights[:count], given.weights),
    ]  # fmt: skip
    same_type = []
    for into, values in pairs:
        if into is None or values is None or not values.numel():
            continue
        if into.dtype == values.dtype and values.element_size() % 4 == 0 and into.is_contiguous() and values.is_contiguous():
            same_type.append((into.view(torch.int32), values.view(torch.int32)))
        else:
            into.copy_(values)
    if same_type:
        torch._foreach_copy_([into for into, _ in same_type], [values for _, values in same_type])
