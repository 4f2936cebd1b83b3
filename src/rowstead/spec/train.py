"""How a model is trained: optimizers, schedule, evaluation, checkpoints."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

from rowstead.spec.bounds import (
    AboveZero,
    AtLeastOne,
    BelowOne,
    Count,
    InsideZeroToOne,
    NotNegative,
    PlainName,
    Spec,
    ZeroToOne,
    at_most,
    each_between,
    up_to,
)
from rowstead.spec.errors import require
from rowstead.spec.heads import HEADS, HeadKind, Measure
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.sync import SyncSpec

DenseOptimizer = Literal["sgd", "adagrad", "adam", "adamw"]
DENSE_STATE: dict[DenseOptimizer, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
"""State tensors per parameter, under torch.optim's names."""
LR_EXPONENT: dict[DenseOptimizer, float] = {"sgd": 1.0, "adagrad": 0.5, "adam": 1.0, "adamw": 1.0}
"""With T steps at learning rate lr an optimizer gets as far as lr * T ** exponent."""
DENSE_LR: dict[DenseOptimizer, float] = {"sgd": 0.02, "adagrad": 0.02, "adam": 0.001, "adamw": 0.001}
"""Default learning rates."""
MAX_WARMUP = 6
"""The warm-up of `sync` takes at most one in so many steps of a run."""
CheckpointFormat = Literal["exact", "fp16", "int8"]


@dataclass(frozen=True, kw_only=True)
class DenseOptimizerSpec(Spec):
    """The optimizer of the MLPs and the interaction."""

    kind: DenseOptimizer = "adagrad"
    """Which optimizer of torch.optim."""
    lr: AboveZero = None  # type: ignore[assignment]  # never None after `__post_init__`
    """Learning rate after warm-up. Default: 0.02, and 0.001 for `adam` and `adamw`."""
    eps: AboveZero = 1e-8
    """Added to denominators."""
    beta1: BelowOne = 0.9
    """Adam's decay of the first moment; SGD's momentum is 0."""
    beta2: BelowOne = 0.999
    """Adam's decay of the second moment."""
    weight_decay: NotNegative = 0.0
    """L2 penalty: gradients get weight_decay * parameter. With `adamw` decoupled: parameters shrink by lr * weight_decay of themselves."""
    clip: AboveZero | None = None
    """Largest global norm of the dense gradients; larger ones are scaled down to it."""

    def __post_init__(self) -> None:
        if self.lr is None:
            object.__setattr__(self, "lr", DENSE_LR.get(self.kind, 0.02))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec(Spec):
    """Schedule of both learning rates: warm-up, then decay."""

    warmup_steps: Count = 0
    """Steps over which learning rates rise linearly from 0."""
    decay: Literal["none", "linear", "cosine", "plateau"] = "none"
    """Shape of the decay after the warm-up, to `final` at the last step. `plateau` lowers the rates when evaluations stop improving."""
    final: ZeroToOne = 0.0
    """Fraction of the learning rate at the last step; with `plateau` the lowest fraction."""
    factor: InsideZeroToOne = 0.1
    """With `plateau`: what the learning rates are multiplied by."""
    patience: AtLeastOne = 1
    """With `plateau`: evaluations without a better `early_stop.monitor` before the learning rates are lowered."""


@dataclass(frozen=True, kw_only=True)
class EarlyStopSpec(Spec):
    """Stop when the evaluation no longer improves. The weights of the best evaluation are those of the run, whatever ended it."""

    monitor: Measure | None = None
    """The measure that must improve. Default: NE, or MSE under `loss: mse` and `loss: regression`."""
    task: PlainName | None = None
    """Of several labels, the task whose measure it is. Default: the first of `model.tasks`."""
    patience: AtLeastOne = 3
    """Evaluations without a better measure before the run stops."""
    min_delta: NotNegative = 0.0
    """By how much it must be better to count."""


@dataclass(frozen=True, kw_only=True)
class TrainSpec(Spec):
    """The training loop."""

    batch_size: Annotated[AtLeastOne, up_to(10**8)] = 1024
    """Examples per step."""
    epochs: AtLeastOne = 1
    """Passes over the training split."""
    max_steps: AtLeastOne | None = None
    """Stop after so many steps, if that is before the last epoch ends."""
    loss: HeadKind = "bce"
    """The loss, which also decides what a prediction is. With `model.tasks` each task has its own."""
    label_smoothing: BelowOne = 0.0
    """In training, labels move by this share towards 0.5: 0.1 makes 0 and 1 to 0.05 and 0.95."""
    sparse_optimizer: SparseOptimizerSpec = SparseOptimizerSpec()
    """For embedding rows."""
    dense_optimizer: DenseOptimizerSpec = DenseOptimizerSpec()
    """For everything else."""
    schedule: ScheduleSpec = ScheduleSpec()
    """Warm-up and decay, for both optimizers."""
    sync: SyncSpec = SyncSpec()
    """How the trainers of a fleet synchronize, and how many threads each has."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Number format of the dense arithmetic; parameters stay FP32. `tf32` rounds the inputs of a GPU's matrix products, and is FP32
    on a CPU; `bf16` is FP32 on a CPU without instructions for it."""
    wire: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format in which processes exchange pooled vectors, their gradients and dense gradients."""
    cuda_graphs: bool = True
    """On a GPU, replay steps as CUDA graphs."""
    eval_every: AtLeastOne | None = None
    """Evaluate every so many steps; by default only at the end."""
    eval_samples: AtLeastOne | None = None
    """Examples per evaluation during training; the final one uses all."""
    eval_top_k: Annotated[tuple[int, ...], at_most(16), each_between(1, 10_000)] = (10,)
    """With `group` of the log: recall and NDCG at these k."""
    early_stop: EarlyStopSpec | None = None
    """Stop early; needs `eval_every`."""
    checkpoint_every: AtLeastOne | None = None
    """Save every so many steps, while training goes on; a run always saves at the end and when it is stopped (Ctrl-C, SIGTERM, SIGHUP)."""
    keep_checkpoints: AtLeastOne = 2
    """How many of the last checkpoints stay on disk, besides the full ones that these depend on."""
    full_checkpoint_every: AtLeastOne = 1
    """Every so many checkpoints one is full; those between hold only the rows changed since, and depend on it."""
    checkpoint_format: CheckpointFormat = "exact"
    """Row format of checkpoints that are not full: `fp16` and `int8` are smaller and do not resume bit for bit."""
    log_every: AtLeastOne = 50
    """Write one line to the event file every so many steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_used = self.checkpoint_format == "exact" or self.full_checkpoint_every > 1
        require(
            is_used, "checkpoint_format", "applies only to checkpoints that are not full: set `full_checkpoint_every` above 1"
        )
        require(
            HEADS[self.loss].is_probability, "loss", f"`{self.loss}` is the loss of a task: name its label in `model.tasks`"
        )
        require(self.early_stop is None or self.eval_every is not None, "early_stop", "needs `eval_every` to be set")
        follows = self.schedule.decay == "plateau"
        require(not follows or self.eval_every is not None, "schedule.decay", "`plateau` needs `eval_every` to be set")

    def resolve_sync(self, num_trainers: int) -> TrainSpec:
        """Fill in what `sync` leaves to the number of trainers."""
        sync = self.sync.resolve(num_trainers, lr_exponent=LR_EXPONENT[self.dense_optimizer.kind])
        return dataclasses.replace(self, sync=sync)

    def with_warmup(self, total_steps: int) -> TrainSpec:
        """The spec of the steps of a trainer, once `sync` is resolved: with the warm-up that its threads need."""
        warmup = max(self.schedule.warmup_steps, min(self.sync.warmup_steps or 0, total_steps // MAX_WARMUP))
        return dataclasses.replace(self, schedule=dataclasses.replace(self.schedule, warmup_steps=warmup))
