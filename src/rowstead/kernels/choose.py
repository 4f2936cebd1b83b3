"""Chooses the kernels: by device, or as the recipe says."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from rowstead.kernels import reference
from rowstead.kernels.cpu import embedding as cpu
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_state import RowState
from rowstead.spec.errors import RowsteadError
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.run import Kernel


class EmbeddingKernels(Protocol):
    """The two functions of every set of kernels; `reference` documents them."""

    def lookup(
        self, tables: Sequence[Tensor], layout: Layout, ids: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> Tensor: ...

    def update(
        self,
        tables: Sequence[Tensor],
        states: Sequence[RowState],
        layout: Layout,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        grad: Tensor,
        *,
        optimizer: SparseOptimizerSpec,
        lr: float,
        step: int,
    ) -> None: ...


@cache
def kernels_for(choice: Kernel, device: torch.device) -> tuple[str, EmbeddingKernels]:
    """Name and functions of the kernels for tables on `device`."""
    if choice == "auto":
        choice = "cpu" if device.type == "cpu" else "gpu" if device.type == "cuda" and has_triton() else "reference"
    if choice == "cpu" and device.type != "cpu":
        raise RowsteadError(f"kernel: cpu needs tables in system memory, but this run trains on {device}: use `auto`")
    is_interpreted = has_triton() and os.environ.get("TRITON_INTERPRET") == "1"
    if choice == "gpu" and device.type == "cpu" and not is_interpreted:
        raise RowsteadError("kernel: gpu needs tables in GPU memory, but this run trains on the CPU: use `auto`")
    if choice == "gpu":
        from rowstead.kernels.gpu import embedding as gpu

        return "gpu", gpu
    return ("cpu", cpu) if choice == "cpu" else ("reference", reference)


@cache
def has_triton() -> bool:
    """Whether the GPU kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None
