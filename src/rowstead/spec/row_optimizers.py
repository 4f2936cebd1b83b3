"""The registry of row optimizers: names, state tensors, hyper-parameters and what kernels read of each.

Whatever depends on the optimizer of embedding rows reads it here: validation, kernels, stores, planner, UI and docs. A new one is an
entry here and a rule in `kernels/reference.py`, `kernels/cpu/row_optimizers.py` and `kernels/gpu/row_optimizers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from rowstead.spec.bounds import AboveZero, BelowOne, NotNegative, Spec

RowOptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "momentum", "rowwise_adam"]
"""In the order of their codes, which compiled kernels are cached with: append new names."""

STATE_ELEMENT_BYTES = 4
"""State is FP32, whatever the format of the rows (FP64 for FP64 rows, which only tests have)."""


@dataclass(frozen=True, kw_only=True)
class SparseOptimizerSpec(Spec):
    """The optimizer of embedding rows, fused with the backward pass. It is lazy: rows that a batch does not read do not change."""

    kind: RowOptimizerName = "rowwise_adagrad"
    """Which one: see the table below."""
    lr: AboveZero = None  # type: ignore[assignment]  # never None after `__post_init__`
    """Learning rate after warm-up. Default: 0.05, and 0.001 for the Adams, whose steps have the size of the learning rate."""
    eps: AboveZero = 1e-8
    """Added to denominators."""
    l2: NotNegative = 0.0
    """L2 penalty: the loss gets l2 / 2 times the squared norm of the rows that a batch reads, so that their gradient gets l2 * row."""
    weight_decay: NotNegative = 0.0
    """Decoupled, as in AdamW: a row that a batch reads shrinks by lr * weight_decay of itself, whatever its gradient."""
    beta1: BelowOne = 0.9
    """Adam's decay of the first moment."""
    beta2: BelowOne = 0.999
    """Adam's decay of the second moment."""
    momentum: BelowOne = 0.9
    """Decay of the velocity under `momentum`."""
    clip: AboveZero | None = None
    """Largest norm of the gradient of one pooled vector; larger ones are scaled down to it."""

    def __post_init__(self) -> None:
        if self.lr is None:
            object.__setattr__(self, "lr", ROW_OPTIMIZERS[self.kind].lr if self.kind in ROW_OPTIMIZERS else 0.05)
        super().__post_init__()

    @property
    def decays(self) -> bool:
        """Whether rows that are read shrink."""
        return self.l2 > 0 or self.weight_decay > 0

    @property
    def moves_without_gradient(self) -> bool:
        """Whether a row that is read changes even if its gradient is zero."""
        return self.decays or ROW_OPTIMIZERS[self.kind].has_memory


@dataclass(frozen=True)
class StateTensor:
    """State that an optimizer keeps of every row: a tensor [N, D], or [N, 1] if it is per row."""

    name: str
    is_per_row: bool = False


@dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """What everything but its rule knows of one optimizer."""

    name: RowOptimizerName
    title: str
    rule: str
    """The update of a row, for the docs."""
    state: tuple[StateTensor, ...] = ()
    """Two at most."""
    hyper_parameters: tuple[str, ...] = ()
    """Fields of the spec that it reads, besides `lr` and `clip`."""
    scalars: Callable[[SparseOptimizerSpec, int], tuple[float, ...]] = lambda spec, step: ()
    """What compiled rules read of a step (from 1) besides the learning rate, four numbers at most. They are computed in double precision:
    in FP32, 1 - 0.999 would be off by 1e-5."""
    lr: float = 0.05
    """The default learning rate."""
    extends: RowOptimizerName | None = None
    """The optimizer that torch.optim has one class with, for both: this one is meant if its own hyper-parameters are given and not 0."""
    has_memory: bool = False
    """Whether a row that is read changes even if its gradient is zero, because of earlier ones."""
    couples_columns: bool = False
    """Whether the update of an element depends on the others of its row, so that columns of a row cannot be updated apart."""

    @property
    def code(self) -> int:
        """The number by which compiled kernels know it."""
        return get_args(RowOptimizerName).index(self.name)

    @property
    def has_element_state(self) -> bool:
        """Whether its state grows with the width of rows."""
        return not all(tensor.is_per_row for tensor in self.state)

    def state_columns(self, width: int) -> dict[str, int]:
        """Name and columns of each state tensor, for rows of `width` elements."""
        return {tensor.name: 1 if tensor.is_per_row else width for tensor in self.state}

    def state_bytes(self, width: int) -> int:
        """Bytes of state per row of `width` elements."""
        return STATE_ELEMENT_BYTES * sum(self.state_columns(width).values())


def adam_correction(spec: SparseOptimizerSpec, step: int) -> float:
    """Adam's correction of the bias of moments that start at zero, at `step` from 1."""
    return float((1 - spec.beta2**step) ** 0.5 / (1 - spec.beta1**step))


def _adam_scalars(spec: SparseOptimizerSpec, step: int) -> tuple[float, ...]:
    return spec.eps, 1 - spec.beta1, 1 - spec.beta2, adam_correction(spec, step)


ROW_OPTIMIZERS: dict[RowOptimizerName, RowOptimizer] = {
    entry.name: entry
    for entry in (
        RowOptimizer(name="sgd", title="SGD", rule="row -= lr * g"),
        RowOptimizer(
            name="rowwise_adagrad",
            title="row-wise Adagrad",
            rule="sum += mean(g²); row -= lr * g / (√sum + eps)",
            state=(StateTensor("sum", is_per_row=True),),
            hyper_parameters=("eps",),
            scalars=lambda spec, step: (spec.eps,),
            couples_columns=True,
        ),
        RowOptimizer(
            name="adagrad",
            title="Adagrad",
            rule="sum += g²; row -= lr * g / (√sum + eps)",
            state=(StateTensor("sum"),),
            hyper_parameters=("eps",),
            scalars=lambda spec, step: (spec.eps,),
        ),
        RowOptimizer(
            name="adam",
            title="Adam",
            rule="moment1 += (1 - beta1) * (g - moment1); moment2 += (1 - beta2) * (g² - moment2); "
            "row -= lr * correction(step) * moment1 / (√moment2 + eps)",
            state=(StateTensor("moment1"), StateTensor("moment2")),
            hyper_parameters=("eps", "beta1", "beta2"),
            scalars=_adam_scalars,
            lr=0.001,
            has_memory=True,
        ),
        RowOptimizer(
            name="momentum",
            title="SGD with momentum",
            rule="velocity = momentum * velocity + g; row -= lr * velocity",
            state=(StateTensor("velocity"),),
            hyper_parameters=("momentum",),
            scalars=lambda spec, step: (spec.momentum,),
            extends="sgd",
            has_memory=True,
        ),
        RowOptimizer(
            name="rowwise_adam",
            title="row-wise Adam",
            rule="moment1 += (1 - beta1) * (g - moment1); moment2 += (1 - beta2) * (mean(g²) - moment2); "
            "row -= lr * correction(step) * moment1 / (√moment2 + eps)",
            state=(StateTensor("moment1"), StateTensor("moment2", is_per_row=True)),
            hyper_parameters=("eps", "beta1", "beta2"),
            scalars=_adam_scalars,
            lr=0.001,
            has_memory=True,
            couples_columns=True,
        ),
    )
}

LEAN_OPTIMIZER: RowOptimizerName = "rowwise_adagrad"
"""What to suggest where the state of another does not fit."""
