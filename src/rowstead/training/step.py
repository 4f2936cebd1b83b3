"""One training step: `run_step` is the order of its parts, and an `Execution` says how each part runs.

An `Execution` runs the parts one after the other in this thread. `sharded_step.py` runs them over the processes of a job,
`cuda_graph_step.py` on the streams of a GPU and as CUDA graphs. Hogwild (`hogwild.py`) runs whole steps in several threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rowstead.data.batch import Batch
from rowstead.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from rowstead.kernels.choose import has_triton
from rowstead.nn.dlrm import DLRM
from rowstead.records.timers import Timers
from rowstead.spec.errors import CheckpointError, TrainingError
from rowstead.spec.phases import Phase
from rowstead.spec.train import DenseOptimizerSpec, ScheduleSpec, TrainSpec
from rowstead.training.checkpoint_manifest import STORE
from rowstead.training.device import dense_precision
from rowstead.training.flat_parameters import Replica
from rowstead.training.prefetch import Staged, Where, prefetch_rows
from rowstead.training.saved_tensors import StoreTensors
from rowstead.training.sync_base import SyncPolicy


def run_step(run: Execution, batch: Batch, number: int, rate: float) -> None:
    """Train on `batch` as step `number` (from 1), with the learning rates multiplied by `rate`.

    The rows of the batch may have been prefetched (`Stepper.prefetch`). Their update may start during the backward pass, as soon as
    they have a gradient.
    """
    sync = run.sync
    with run.phase(Phase.LOOKUP):
        finish_lookup = run.start_lookup(batch)
    with dense_precision(run.spec.precision, batch.dense.device):
        with run.phase(Phase.FORWARD):
            projected = run.project(batch.dense)
        with run.phase(Phase.LOOKUP):
            rows = finish_lookup()
        with run.phase(Phase.FORWARD):
            loss = run.loss(run.join(run.cut(projected), run.pool(rows, batch)), batch)
            run.report_loss(loss, number)
        with run.phase(Phase.BACKWARD):
            finish_row_update = run.backward(loss, rows, batch)
    if run.has_exchange:
        with run.phase(Phase.EXCHANGE):
            run.exchange(number)
    if sync is not None:
        with run.phase(Phase.SYNC):
            sync.gradients_ready(number)
    with run.phase(Phase.DENSE_UPDATE):
        run.update_dense(rate if sync is None else rate * sync.dense_lr_factor(number))
    if finish_row_update is not None:
        with run.phase(Phase.ROW_UPDATE):
            finish_row_update(run.spec.sparse_optimizer.lr * rate, number)
    if sync is not None:
        with run.phase(Phase.SYNC):
            sync.after_step(number)


class Execution:
    """How the parts of a step run: here one after the other, in this thread. Subclasses override the parts that run differently."""

    has_exchange = False
    """Whether a step has an exchange with other processes."""

    def __init__(self, model: DLRM, spec: TrainSpec, timers: Timers, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model, self.spec, self.timers = model, spec, timers
        self.optimizer = optimizer or build_dense_optimizer(spec.dense_optimizer, model.net)
        self.sync: SyncPolicy | None = None
        """How the dense parameters are kept in sync with other trainers of a fleet."""
        self.phase: Callable[[Phase], AbstractContextManager[Any]] = timers.phase
        self._value = math.nan
        """The loss of the last step."""

    def start(self, batch: Batch, number: int, rate: float) -> Callable[[], float]:
        """Start a step; the returned function waits for its loss, and raises if that is not finite."""
        run_step(self, batch, number, rate)
        value = self._value
        return lambda: value

    def start_lookup(self, batch: Batch) -> Callable[[], Tensor]:
        """Start the look-up; the returned function waits for what the store finds, usually pooled rows, which requires a gradient."""
        if not self.model.store.tables:
            return lambda: batch.dense.new_zeros(batch.num_samples, 0)
        finish = self.model.store.start_lookup(batch.sparse)
        return lambda: finish().requires_grad_()

    def project(self, dense: Tensor) -> Tensor | None:
        """The part of the forward pass that needs no rows."""
        return self.model.net.project(dense)

    def pool(self, rows: Tensor, batch: Batch) -> Tensor:
        """Pooled rows [B, sum of widths] of what the look-up found, with histories encoded."""
        return self.model.pool(rows, batch.sparse)

    def join(self, projected: Any, pooled: Tensor) -> Tensor:
        """The rest of the forward pass: logits [B]."""
        return self.model.net.join(projected, pooled)

    def cut(self, projected: Any) -> Any:
        """What `join` gets of `project`'s result; an execution may cut the backward pass in two here."""
        return projected

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean loss over the batch, or over this process's share of it; computed in the type of the labels."""
        assert batch.labels is not None
        with torch.autocast(logits.device.type, enabled=False):
            labels = batch.labels
            if self.spec.label_smoothing:
                labels = labels + self.spec.label_smoothing * (0.5 - labels)
            return self.model.head.loss(logits.to(labels.dtype), labels, batch.weights, batch.global_totals)

    def report_loss(self, loss: Tensor, number: int) -> None:
        """Check the loss before anything changes, where its value is known already."""
        self._value = check_finite(loss.item(), number)

    def backward(self, loss: Tensor, rows: Tensor, batch: Batch) -> Callable[[float, int], None] | None:
        """Compute all gradients and start the row update; the returned function takes `lr` and `step`, and finishes it."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return None if rows.grad is None else self.model.store.start_update(batch.sparse, rows.grad)

    def exchange(self, number: int) -> None:
        """Wait for the dense gradients and the loss of all processes."""

    def update_dense(self, rate: float) -> None:
        """Apply the dense optimizer."""
        spec = self.spec.dense_optimizer
        if spec.clip is not None:
            nn.utils.clip_grad_norm_(self.model.net.parameters(), spec.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = spec.lr * rate
        self.optimizer.step()

    def agree_on(self, *questions: Callable[[], bool]) -> Sequence[Callable[[], bool]]:
        """For each question a function that is true once it was true in any process of the job; polled after each step."""
        return questions

    @property
    def gpu_s_per_sample(self) -> float | None:
        """How long a GPU is busy for each sample, where that is measured."""
        return None

    def state_loaded(self) -> None:
        """Called after parameters or optimizer state were replaced."""


class Stepper:
    """A model with its optimizers; `step` trains it on one batch.

    On a GPU steps are captured and replayed as CUDA graphs, unless the spec or the store does not allow it. With a `process_group`
    of several processes each trains on its share of the batch. With a sync policy it is one of the trainers of a fleet.
    """

    steps_ahead = 0
    """Steps that are worth starting before the loss of one is waited for."""

    def __init__(
        self,
        model: DLRM,
        spec: TrainSpec,
        *,
        total_steps: int,
        process_group: ProcessGroup = SINGLE_PROCESS,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.model, self.spec, self.total_steps = model, spec, total_steps
        self.timers = Timers()
        self.lr_scale = 1.0
        """What evaluations have multiplied the learning rates by (`schedule.decay: plateau`)."""
        self.on_message: Callable[[str], None] = lambda text: None
        """Called with messages for the user."""
        self._rank = process_group.rank
        self.execution = self._choose_execution(process_group, optimizer)

    def _choose_execution(self, process_group: ProcessGroup, optimizer: torch.optim.Optimizer | None) -> Execution:
        model, spec, timers = self.model, self.spec, self.timers
        if process_group.world_size > 1:
            from rowstead.training.sharded_step import ShardedExecution

            return ShardedExecution(model, spec, timers, process_group)
        if spec.cuda_graphs and next(model.net.parameters()).device.type == "cuda" and has_triton():
            from rowstead.training.cuda_graph_step import CudaGraphExecution, can_capture

            if can_capture(model):
                return CudaGraphExecution(model, spec, timers, lambda text: self.on_message(text))
        return Execution(model, spec, timers, optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The dense optimizer."""
        return self.execution.optimizer

    def set_sync_policy(self, policy: SyncPolicy) -> None:
        """Keep in sync with other trainers by this policy from the next step on; it may replace the dense parameters now.

        The caller calls `policy.close()` after the last step.
        """
        assert type(self.execution) is Execution, "a sync policy needs eager steps in one process: set `cuda_graphs` to false"
        policy.begin(Replica(self.model.net, self.optimizer))
        self.execution.sync = policy

    def prefetch(self, items: Iterator[tuple[Staged, Batch, Where]]) -> Iterator[tuple[Staged, Batch, Where]]:
        """The same items; the rows of each batch are prefetched as many batches ahead as the store wants."""
        return prefetch_rows(items, self.model.store, self.timers)

    def step(self, batch: Batch, number: int) -> float:
        """Train on `batch` as step `number` (from 1) and return its loss, as of before the update.

        A loss that is not finite raises TrainingError before anything changes.
        """
        return self.start(batch, number)()

    def start(self, batch: Batch, number: int) -> Callable[[], float]:
        """Start a step; the returned function waits for its loss, and raises if that is not finite."""
        self.model.net.seed_step(number, self._rank)
        return self.execution.start(batch, number, self.lr_scale * lr_factor(self.spec.schedule, number, self.total_steps))

    def state(self) -> dict[str, Tensor]:
        """Everything that training changes: `net.*`, `optimizer.*` and `store.*`."""
        return self.dense_state() | {f"{STORE}{name}": value for name, value in self.model.store.state().items()}

    def dense_state(self) -> dict[str, Tensor]:
        """Everything that training changes except the tables: `net.*` and `optimizer.*`."""
        tensors = {f"net.{name}": value.detach() for name, value in self.model.net.state_dict().items()}
        for index, entry in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in entry.items() if isinstance(value, Tensor)}
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state` returned, so that the next step is the same bit for bit."""
        self.load_dense_state(tensors)
        self.model.store.load_state(StoreTensors(tensors))

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Load rows and dense parameters, and leave the optimizers as they are."""
        load_model(self.model, tensors, with_optimizer=False)
        self.execution.state_loaded()

    def load_dense_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `dense_state` returned; the optimizer keeps its state if there is none in `tensors`."""
        load_net(self.model, tensors)
        plain = self.optimizer.state_dict()
        state: dict[int, dict[str, Tensor]] = {}
        for name in tensors:
            part, _, rest = name.partition(".")
            if part == "optimizer":
                index, _, key = rest.partition(".")
                state.setdefault(int(index), {})[key] = tensors[name].clone()
        if state:
            self.optimizer.load_state_dict({"state": state, "param_groups": plain["param_groups"]})
        self.execution.state_loaded()


def build_dense_optimizer(spec: DenseOptimizerSpec, module: nn.Module) -> torch.optim.Optimizer:
    """torch.optim's optimizer of that name over the module's parameters; on the CPU the fused one."""
    kinds: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
        "sgd": (torch.optim.SGD, {}),
        "adagrad": (torch.optim.Adagrad, {"eps": spec.eps}),
        "adam": (torch.optim.Adam, {"eps": spec.eps, "betas": (spec.beta1, spec.beta2)}),
        "adamw": (torch.optim.AdamW, {"eps": spec.eps, "betas": (spec.beta1, spec.beta2)}),
    }
    build, options = kinds[spec.kind]
    parameters = list(module.parameters())
    fused = True if all(parameter.device.type == "cpu" for parameter in parameters) else None
    return build(parameters, lr=spec.lr, weight_decay=spec.weight_decay, fused=fused, **options)


def lr_factor(spec: ScheduleSpec, step: int, total_steps: int) -> float:
    """What the learning rates are multiplied by at `step`, from 1 to `total_steps`."""
    if step <= spec.warmup_steps:
        return step / spec.warmup_steps
    if spec.decay in ("none", "plateau"):
        return 1.0
    span = max(1, total_steps - spec.warmup_steps)
    done = min(1.0, (step - spec.warmup_steps) / span)
    remaining = 1 - done if spec.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return spec.final + (1 - spec.final) * remaining


def check_finite(loss: float, number: int) -> float:
    """The loss of step `number`; raises if it is not finite."""
    if math.isfinite(loss):
        return loss
    raise TrainingError(
        f"the loss is {loss} at step {number}, which updated no parameters. Lower train.sparse_optimizer.lr and "
        "train.dense_optimizer.lr, set their `clip`, or look for extreme values in that batch"
    )


def load_model(model: DLRM, tensors: Mapping[str, Tensor], *, with_optimizer: bool = True) -> None:
    """Load rows and dense parameters from a checkpoint's tensors, and the row optimizer's state."""
    load_net(model, tensors)
    model.store.load_state(StoreTensors(tensors), rows_only=not with_optimizer)


def load_net(model: DLRM, tensors: Mapping[str, Tensor]) -> None:
    """Load dense parameters from a checkpoint's tensors."""
    own = model.net.state_dict()
    for name, value in own.items():
        saved = f"net.{name}"
        if saved not in tensors or tensors[saved].shape != value.shape:
            found = tuple(tensors[saved].shape) if saved in tensors else "nothing"
            raise CheckpointError(
                f"the checkpoint does not match the model: `{name}` has shape {tuple(value.shape)} in the model and {found} in the checkpoint"
            )
    model.net.load_state_dict({name: tensors[f"net.{name}"] for name in own})
