"""What all kernels share about the optimizers of rows: their numbers, their state and their memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rowstead.kernels.cpu.memory import prefer_large_pages
from rowstead.spec.train import SparseOptimizerSpec

RowState = dict[str, Tensor]
"""The optimizer's memory of one table: `sum` [N, 1] or [N, D], or `moment1` and `moment2` [N, D]."""

KINDS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3}
"""Optimizers by the number under which compiled kernels know them."""


def compute_dtype(rows: torch.dtype) -> torch.dtype:
    """In which type pooled vectors, gradients and optimizer state of rows of a type are kept."""
    return torch.float64 if rows == torch.float64 else torch.float32


def state_columns(kind: str, width: int) -> dict[str, int]:
    """What an optimizer remembers of a row of `width` numbers: names, and columns of each."""
    return {
        "sgd": {},
        "rowwise_adagrad": {"sum": 1},
        "adagrad": {"sum": width},
        "adam": {"moment1": width, "moment2": width},
    }[kind]


def new_row_state(kind: str, rows: Tensor) -> RowState:
    """Zeroed optimizer state for one table's `rows` [N, D]."""
    return {name: _zeros(rows, columns) for name, columns in state_columns(kind, rows.shape[1]).items()}


def _zeros(rows: Tensor, width: int) -> Tensor:
    empty = torch.empty(rows.shape[0], width, dtype=compute_dtype(rows.dtype), device=rows.device)
    return prefer_large_pages(empty).zero_()


def adam_correction(optimizer: SparseOptimizerSpec, step: int) -> float:
    """By which Adam makes up for moments that start at zero, at `step` from 1."""
    return float((1 - optimizer.beta2**step) ** 0.5 / (1 - optimizer.beta1**step))


def numbers_of(optimizer: SparseOptimizerSpec, *, lr: float, step: int) -> list[float]:
    """What compiled kernels take: learning rate, eps, 1 - beta1, 1 - beta2, Adam's correction.

    In FP32 the difference of 1 and 0.999 would be off by 1e-5: it is made here.
    """
    return [lr, optimizer.eps, 1 - optimizer.beta1, 1 - optimizer.beta2, adam_correction(optimizer, step)]


def state_addresses(states: Sequence[RowState]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Addresses of the first and of the second state of every table; 0 where the optimizer has none."""
    none = (0,) * len(states)
    first = next((name for name in ("sum", "moment1") if name in states[0]), None)
    return (
        none if first is None else tuple(state[first].data_ptr() for state in states),
        tuple(state["moment2"].data_ptr() for state in states) if "moment2" in states[0] else none,
    )
