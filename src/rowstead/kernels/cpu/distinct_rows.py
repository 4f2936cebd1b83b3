"""Read distinct rows of several tables on the CPU, or apply the optimizer to them.

Letters: T tables, D width, U distinct rows in all; rows bounds[t] to bounds[t + 1] - 1 are of table t.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.kernels.cpu.embedding import _SCALARS, _memory, _rule
from rowstead.kernels.cpu.memory import AHEAD, item, prefetch_all
from rowstead.kernels.cpu.row_optimizers import apply_row, scalars_tuple
from rowstead.kernels.cpu.vectors import bytes_of
from rowstead.kernels.row_state import RowState
from rowstead.spec.row_optimizers import SparseOptimizerSpec

_WORDS: dict[int, Any] = {2: np.uint16(0), 4: np.uint32(0), 8: np.uint64(0)}
_TORCH_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather_rows(tables: Sequence[Tensor], ids: NDArray[Any], bounds: NDArray[np.int64]) -> Tensor:
    """The rows `ids` [U] of tables [N, D], concatenated in one flat tensor. Ids must be in range."""
    widths = np.array([table.shape[1] for table in tables], np.int64)
    dtype = tables[0].dtype
    flat = torch.empty(int((np.diff(bounds) * widths).sum()), dtype=dtype)
    word = _WORDS[dtype.itemsize]
    out = flat.view(_TORCH_WORDS[dtype.itemsize]).numpy().view(word.dtype)
    _gather(np.array([table.data_ptr() for table in tables], np.int64), widths, ids, bounds, out, word)
    return flat


def update_rows(
    tables: Sequence[Tensor],
    states: Sequence[RowState],
    ids: NDArray[Any],
    bounds: NDArray[np.int64],
    grad: Tensor,
    *,
    optimizer: SparseOptimizerSpec,
    lr: float,
    step: int,
) -> None:
    """One optimizer step on the rows `ids` [U], in place, with summed gradients `grad`, flat like the result of `gather_rows`.

    Ids must be in range, and those of one table distinct. Nothing is clipped.
    """
    widths = np.array([table.shape[1] for table in tables], np.int64)
    _, *rule = _rule(optimizer, lr, step, grad.dtype)
    _update(
        *_memory(optimizer.kind, tables, states), widths, ids, bounds, grad.data_ptr(), _SCALARS[tables[0].dtype],
        _SCALARS[grad.dtype], *rule,
    )  # fmt: skip


@numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def _gather(addresses, widths, ids, bounds, out, word):  # type: ignore[no-untyped-def]
    """Copy rows word by word; the type of `word` has as many bytes as an element."""
    target = 0
    for table in range(len(addresses)):
        width, row_bytes = widths[table], widths[table] * bytes_of(word)
        for index in range(bounds[table], bounds[table + 1]):
            if index + AHEAD < bounds[table + 1]:
                prefetch_all(addresses[table] + np.int64(ids[index + AHEAD]) * row_bytes, row_bytes)
            source = addresses[table] + np.int64(ids[index]) * row_bytes
            for d in range(width):
                out[target + d] = item(source, d, word)
            target += width


@numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def _update(  # type: ignore[no-untyped-def]
    addresses, first, second, first_bytes, second_bytes, widths, ids, bounds, grad, rows, real, kind, scalars, step
):
    """Apply the optimizer to each row with its gradient; they follow each other from the address `grad` on."""
    plain = scalars_tuple(scalars)
    for table in range(len(addresses)):
        width, row_bytes = widths[table], widths[table] * bytes_of(rows)
        for index in range(bounds[table], bounds[table + 1]):
            if index + AHEAD < bounds[table + 1]:
                prefetch_all(addresses[table] + np.int64(ids[index + AHEAD]) * row_bytes, row_bytes)
            apply_row(
                table, np.int64(ids[index]), addresses[table], first[table], second[table], first_bytes[table],
                second_bytes[table], grad, width, rows, real, kind, plain, step,
            )  # fmt: skip
            grad += width * bytes_of(real)
