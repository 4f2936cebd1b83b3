"""How a model is trained: optimizers, schedule, evaluation, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rowstead.spec.errors import require
from rowstead.spec.heads import HeadKind
from rowstead.spec.row_optimizers import SparseOptimizerSpec, check_hyper_parameters
from rowstead.spec.sync import SyncSpec

DenseOptimizer = Literal["sgd", "adagrad", "adam"]
DENSE_STATE: dict[DenseOptimizer, tuple[str, ...]] = {"sgd": (), "adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}
"""State tensors per parameter, under torch.optim's names."""
CheckpointFormat = Literal["exact", "fp16", "int8"]


@dataclass(frozen=True, kw_only=True)
class DenseOptimizerSpec:
    """The optimizer of the MLPs and the interaction."""

    kind: DenseOptimizer = "adagrad"
    """Which optimizer of torch.optim."""
    lr: float = 0.02
    """Learning rate after warm-up."""
    eps: float = 1e-8
    """Added to denominators."""
    beta1: float = 0.9
    """Adam's decay of the first moment; SGD's momentum is 0."""
    beta2: float = 0.999
    """Adam's decay of the second moment."""
    weight_decay: float = 0.0
    """L2 penalty."""
    clip: float | None = None
    """Largest global norm of the dense gradients; larger ones are scaled down to it."""

    def __post_init__(self) -> None:
        check_hyper_parameters(self)
        require(self.weight_decay >= 0, "weight_decay", "must not be negative")


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """Schedule of both learning rates: warm-up, then decay."""

    warmup_steps: int = 0
    """Steps over which learning rates rise linearly from 0."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """Shape of the decay after the warm-up, to `final` at the last step."""
    final: float = 0.0
    """Fraction of the learning rate at the last step."""

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, "warmup_steps", "must not be negative")
        require(0 <= self.final <= 1, "final", "must be between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class EarlyStopSpec:
    """Stop when the evaluation no longer improves."""

    patience: int = 3
    """Evaluations without a better NE (a better MSE under `loss: mse`) before the run stops."""
    min_delta: float = 0.0
    """How much lower it must be to count as better."""

    def __post_init__(self) -> None:
        require(self.patience >= 1, "patience", "must be at least 1")
        require(self.min_delta >= 0, "min_delta", "must not be negative")


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """The training loop."""

    batch_size: int = 1024
    """Examples per step."""
    epochs: int = 1
    """Passes over the training split."""
    max_steps: int | None = None
    """Stop after so many steps, if that is before the last epoch ends."""
    loss: HeadKind = "bce"
    """The loss, which also decides what a prediction is."""
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
    eval_every: int | None = None
    """Evaluate every so many steps; by default only at the end."""
    eval_samples: int | None = None
    """Examples per evaluation during training; the final one uses all."""
    early_stop: EarlyStopSpec | None = None
    """Stop early; needs `eval_every`."""
    checkpoint_every: int | None = None
    """Save every so many steps; a run always saves at the end and on Ctrl-C."""
    keep_checkpoints: int = 2
    """How many of the last checkpoints stay on disk, besides the full ones that these depend on."""
    full_checkpoint_every: int = 1
    """Every so many checkpoints one is full; those between hold only the rows changed since, and depend on it."""
    checkpoint_format: CheckpointFormat = "exact"
    """Row format of checkpoints that are not full: `fp16` and `int8` are smaller and do not resume bit for bit."""
    log_every: int = 50
    """Write one line to the event file every so many steps."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "keep_checkpoints", "full_checkpoint_every", "log_every"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        for name in ("max_steps", "eval_every", "eval_samples", "checkpoint_every"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, f"must be at least 1, got {value}")
        is_used = self.checkpoint_format == "exact" or self.full_checkpoint_every > 1
        require(
            is_used, "checkpoint_format", "applies only to checkpoints that are not full: set `full_checkpoint_every` above 1"
        )
        require(self.early_stop is None or self.eval_every is not None, "early_stop", "needs `eval_every` to be set")
