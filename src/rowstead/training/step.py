"""One training step: look-up, forward, loss, backward, dense optimizer, fused row update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rowstead.data.batch import Batch
from rowstead.distributed.process_group import ProcessGroup, SingleProcess
from rowstead.kernels.choose import has_triton
from rowstead.nn.dlrm import DLRM
from rowstead.nn.heads import head_of
from rowstead.records.timers import Timers
from rowstead.spec.errors import CheckpointError, TrainingError
from rowstead.spec.phases import Phase
from rowstead.spec.train import DenseOptimizerSpec, TrainSpec
from rowstead.training.device import dense_precision
from rowstead.training.flat_parameters import FlatReplica
from rowstead.training.saved_tensors import STORE, StoreTensors
from rowstead.training.schedule import factor
from rowstead.training.sharded_step import ShardedStep
from rowstead.training.sync_base import SyncPolicy

if TYPE_CHECKING:
    from rowstead.training.cuda_graph_step import CudaGraphStep


def dense_optimizer(spec: DenseOptimizerSpec, module: nn.Module) -> torch.optim.Optimizer:
    """torch.optim's optimizer of that name over the module's parameters; on the CPU the one that reads them once a step."""
    parameters = list(module.parameters())
    fused = True if all(parameter.device.type == "cpu" for parameter in parameters) else None
    if spec.kind == "sgd":
        return torch.optim.SGD(parameters, lr=spec.lr, weight_decay=spec.weight_decay, fused=fused)
    if spec.kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=spec.lr, eps=spec.eps, weight_decay=spec.weight_decay, fused=fused)
    betas = (spec.beta1, spec.beta2)
    return torch.optim.Adam(parameters, lr=spec.lr, eps=spec.eps, betas=betas, weight_decay=spec.weight_decay, fused=fused)


class Stepper:
    """A model with its optimizers; `step` trains it on one batch.

    On a GPU steps are replayed as CUDA graphs, unless the spec says no or the store is one that needs the host. With a `process_group`
    all processes of a job step together, each with its share of the batch. With `follow` it is one of the trainers of a fleet.
    """

    steps_ahead = 0
    """How many more steps it is of use to start before the loss of one is waited for."""

    def __init__(
        self,
        model: DLRM,
        spec: TrainSpec,
        *,
        total_steps: int,
        timers: Timers | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.model = model
        self.spec = spec
        self._head = head_of(spec.loss)
        self._rank = 0 if process_group is None else process_group.rank
        self.total_steps = total_steps
        self.timers = timers or Timers()
        is_alone = process_group is None or isinstance(process_group, SingleProcess)
        self._on_gpu = _gpu_step(model, spec, self._loss) if spec.cuda_graphs and is_alone else None
        self.optimizer: torch.optim.Optimizer = (
            dense_optimizer(spec.dense_optimizer, model.net) if self._on_gpu is None else self._on_gpu.optimizer
        )
        self.together: ShardedStep | None = None
        """The other processes, where there are any."""
        if process_group is not None and not is_alone:
            self.together = ShardedStep(model, spec, self._loss, self.optimizer, self.timers, process_group)
        self._sync: SyncPolicy | None = None

    def follow(self, policy: SyncPolicy) -> None:
        """Keep together with other trainers as the policy says, from the next step on; it may replace the dense parameters now.

        Whoever calls this calls `policy.close()` after the last step.
        """
        assert self.together is None, "processes that step together need no other policy"
        assert self._on_gpu is None, "a policy has a say between gradients and update: set `cuda_graphs` to false"
        policy.begin(FlatReplica(self.model.net, self.optimizer))
        self._sync = policy

    def step(self, batch: Batch, number: int) -> float:
        """Train on `batch` as step `number` (from 1) and return its loss, taken before the update.

        A loss that is not finite raises TrainingError before anything changes.
        """
        return self.start(batch, number)()

    def start(self, batch: Batch, number: int) -> Callable[[], float]:
        """`step`, but on a GPU without waiting for it: what is returned waits for the loss, and raises if it is not finite."""
        self.model.net.seed_step(number, self._rank)
        rate = factor(self.spec.schedule, number, self.total_steps)
        if self.together is not None:
            value = self.together.step(batch, number, rate, _finite)
            return lambda: value
        if self._on_gpu is None:
            value = self._step(batch, number, rate)
            return lambda: value
        row_lr, dense_lr = self.spec.sparse_optimizer.lr * rate, self.spec.dense_optimizer.lr * rate
        with self.timers.phase(Phase.GPU_STEP):
            loss = self._on_gpu.start(batch, number, row_lr=row_lr, dense_lr=dense_lr)

        def wait() -> float:
            with self.timers.phase(Phase.GPU_STEP):
                return _finite(loss(), number)

        return wait

    def _step(self, batch: Batch, number: int, rate: float) -> float:
        """One step, each of its parts timed."""
        model, spec, timers = self.model, self.spec, self.timers
        with timers.phase(Phase.LOOKUP):
            if model.store.tables:
                pooled = model.store.lookup(batch.sparse).requires_grad_()
            else:
                pooled = batch.dense.new_zeros(batch.num_samples, 0)
        with dense_precision(spec.precision, batch.dense.device):
            with timers.phase(Phase.FORWARD):
                loss = self._loss(model.net(batch.dense, pooled), batch)
                value = _finite(loss.item(), number)
            with timers.phase(Phase.BACKWARD):
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
        if self._sync is not None:
            with timers.phase(Phase.SYNC):
                self._sync.gradients_ready(number)
        with timers.phase(Phase.DENSE_UPDATE):
            if spec.dense_optimizer.clip is not None:
                nn.utils.clip_grad_norm_(model.net.parameters(), spec.dense_optimizer.clip)
            for group in self.optimizer.param_groups:
                group["lr"] = spec.dense_optimizer.lr * rate
            self.optimizer.step()
        if pooled.grad is not None:
            with timers.phase(Phase.ROW_UPDATE):
                model.store.update(batch.sparse, pooled.grad, lr=spec.sparse_optimizer.lr * rate, step=number)
        if self._sync is not None:
            with timers.phase(Phase.SYNC):
                self._sync.after_step(number)
        return value

    def _loss(self, log_odds: Tensor, batch: Batch) -> Tensor:
        assert batch.labels is not None
        with torch.autocast(log_odds.device.type, enabled=False):
            total = None if batch.global_totals is None else batch.global_totals.weight
            log_odds = log_odds.to(batch.labels.dtype)
            return self._head.loss(log_odds, batch.labels, batch.weights, total)

    @property
    def gpu_s_per_sample(self) -> float | None:
        """How long a GPU is busy for each sample; absent where steps are not replayed, and before some were."""
        return None if self._on_gpu is None else self._on_gpu.busy.s_per_item

    def state(self) -> dict[str, Tensor]:
        """Everything that training changes: `net.*`, `optimizer.*` and `store.*`."""
        return self.dense_state() | {f"{STORE}{name}": value for name, value in self.model.store.state().items()}

    def dense_state(self) -> dict[str, Tensor]:
        """Everything that training changes but the tables: `net.*` and `optimizer.*`."""
        tensors = {f"net.{name}": value.detach() for name, value in self.model.net.state_dict().items()}
        for place, entry in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{place}.{name}": value for name, value in entry.items() if isinstance(value, Tensor)}
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, so that the next step is the same bit for bit."""
        self.load_dense_state(tensors)
        self.model.store.load_state(StoreTensors(tensors))

    def load_dense_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `dense_state` gave; the tables stay as they are, and the optimizer where none of it is given."""
        load_net(self.model, tensors)
        plain = self.optimizer.state_dict()
        state: dict[int, dict[str, Tensor]] = {}
        for name in tensors:
            part, _, rest = name.partition(".")
            if part == "optimizer":
                place, _, key = rest.partition(".")
                state.setdefault(int(place), {})[key] = tensors[name].clone()
        if state:
            self.optimizer.load_state_dict({"state": state, "param_groups": plain["param_groups"]})
        if self._on_gpu is not None:
            self._on_gpu.forget()


def _gpu_step(model: DLRM, spec: TrainSpec, loss: Callable[[Tensor, Batch], Tensor]) -> CudaGraphStep | None:
    """What runs the steps of a model whose rows and parameters are all on a GPU; none for other models."""
    if next(model.net.parameters()).device.type != "cuda" or not has_triton():
        return None
    from rowstead.training.cuda_graph_step import CudaGraphStep, can_run

    return CudaGraphStep(model, spec, loss) if can_run(model) else None


def _finite(value: float, number: int) -> float:
    if math.isfinite(value):
        return value
    raise TrainingError(
        f"the loss is {value} at step {number}, which changed nothing. Lower train.sparse_optimizer.lr and "
        "train.dense_optimizer.lr, set their `clip`, or look for extreme values in that batch"
    )


def load_model(model: DLRM, tensors: Mapping[str, Tensor], *, with_optimizer: bool = True) -> None:
    """Take over rows and dense parameters from a checkpoint's tensors, and what the store's optimizer remembers."""
    load_net(model, tensors)
    model.store.load_state(StoreTensors(tensors), rows_only=not with_optimizer)


def load_net(model: DLRM, tensors: Mapping[str, Tensor]) -> None:
    """Take over dense parameters from a checkpoint's tensors."""
    own = model.net.state_dict()
    for name, value in own.items():
        saved = f"net.{name}"
        if saved not in tensors or tensors[saved].shape != value.shape:
            found = tuple(tensors[saved].shape) if saved in tensors else "nothing"
            raise CheckpointError(f"the saved model is another one: `{name}` is {tuple(value.shape)} here and {found} there")
    model.net.load_state_dict({name: tensors[f"net.{name}"] for name in own})
