"""What all kernels share about the optimizers of rows: their numbers, their state and their memory."""

from __future__ import annotations

import torch
from torch import Tensor

from rowstead.spec.train import SparseOptimizerSpec

RowState = dict[str, Tensor]
"""The optimizer's memory of one table: `sum` [N, 1] or [N, D], or `moment1` and `moment2` [N, D]."""

KINDS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3}
"""Optimizers by the number under which compiled kernels know them."""


def new_row_state(kind: str, rows: Tensor) -> RowState:
    """Zeroed optimizer state for one table's `rows` [N, D]."""
    if kind == "sgd":
        return {}
    if kind == "rowwise_adagrad":
        return {"sum": torch.zeros_like(rows[:, :1])}
    if kind == "adagrad":
        return {"sum": torch.zeros_like(rows)}
    assert kind == "adam", kind
    return {"moment1": torch.zeros_like(rows), "moment2": torch.zeros_like(rows)}


def adam_correction(optimizer: SparseOptimizerSpec, step: int) -> float:
    """By which Adam makes up for moments that start at zero, at `step` from 1."""
    return float((1 - optimizer.beta2**step) ** 0.5 / (1 - optimizer.beta1**step))


def numbers_of(optimizer: SparseOptimizerSpec, *, lr: float, step: int) -> list[float]:
    """What compiled kernels take: learning rate, eps, beta1, beta2, Adam's correction."""
    return [lr, optimizer.eps, optimizer.beta1, optimizer.beta2, adam_correction(optimizer, step)]


def state_addresses(state: RowState) -> tuple[int, int]:
    """Addresses of a table's first and second state; 0 where the optimizer has none."""
    first = state.get("sum", state.get("moment1"))
    second = state.get("moment2")
    return 0 if first is None else first.data_ptr(), 0 if second is None else second.data_ptr()
