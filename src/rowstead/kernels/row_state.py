"""Row optimizers as all kernels see them: state tensors, scalars of a step, and the accumulation dtype.

`spec/row_optimizers.py` registers the optimizers; `reference.py`, `cpu/row_optimizers.py` and `gpu/row_optimizers.py` have their rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rowstead.kernels.cpu.memory import advise_huge_pages
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, RowOptimizerName, SparseOptimizerSpec

RowState = dict[str, Tensor]
"""Optimizer state of one table: for each state tensor's name a tensor [N, D], or [N, 1] if it is per row."""

NUM_SCALARS = 7
"""That compiled rules read of a step: the learning rate, up to four of the optimizer's own, `l2`, and the share of a decoupled decay."""


def compute_dtype(rows: torch.dtype) -> torch.dtype:
    """The accumulation dtype: that of pooled vectors, gradients and optimizer state for rows of a dtype."""
    return torch.float64 if rows == torch.float64 else torch.float32


def new_row_state(kind: RowOptimizerName, rows: Tensor) -> RowState:
    """Zeroed optimizer state for one table's `rows` [N, D]."""
    return {name: _zeros(rows, columns) for name, columns in ROW_OPTIMIZERS[kind].state_columns(rows.shape[1]).items()}


def _zeros(rows: Tensor, width: int) -> Tensor:
    empty = torch.empty(rows.shape[0], width, dtype=compute_dtype(rows.dtype), device=rows.device)
    return advise_huge_pages(empty).zero_()


def step_scalars(optimizer: SparseOptimizerSpec, *, lr: float, step: int) -> list[float]:
    """What compiled rules read of a step: see `NUM_SCALARS`; the optimizer's own scalars are padded with zeros."""
    own = ROW_OPTIMIZERS[optimizer.kind].scalars(optimizer, step)
    return [lr, *own, *[0.0] * (NUM_SCALARS - 3 - len(own)), optimizer.l2, lr * optimizer.weight_decay]


def state_tensors(kind: RowOptimizerName, states: Sequence[RowState]) -> tuple[list[Tensor], list[Tensor]]:
    """The first and the second state tensor of every table; empty lists where the optimizer has none."""
    found = [[state[tensor.name] for state in states] for tensor in ROW_OPTIMIZERS[kind].state] + [[], []]
    return found[0], found[1]
