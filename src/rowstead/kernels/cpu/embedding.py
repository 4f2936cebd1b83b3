"""Pooled look-up and exact fused update on the CPU, in Numba: all tables in one call, without locks or the GIL.

Threads share a look-up by bags. An update is split into tasks, each some rows of one table: a thread sorts the ids of a task,
which groups equal ids, then sums each group in the order of the batch and applies the optimizer. Idle threads take the next
bags or task. No two tasks share a row, so the result does not depend on the number of threads, bit for bit.

Rows are FP32, FP64, or BF16 or FP16 with gradients and state in FP32 (`rounding.py`).

Letters: B examples, F features, T tables, N rows, D width, nnz ids in the batch, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.kernels.check import fault_of
from rowstead.kernels.cpu.embedding_kernels import (
    copy_distinct,
    pool_bags,
    split_into_tasks,
    update_distinct,
    update_tables,
)
from rowstead.kernels.cpu.thread_team import run_on_threads
from rowstead.kernels.cpu.traffic import add_bytes
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_state import RowState, compute_dtype, state_tensors, step_scalars
from rowstead.spec.errors import DataError
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, RowOptimizerName, SparseOptimizerSpec

TURNS = 16
"""Parts of a look-up per thread, so that no thread waits long for the last one."""
TASKS = 6
"""Tasks of an update per thread, at least."""

_SCALARS: dict[torch.dtype, Any] = {
    torch.float32: np.float32(0),
    torch.float64: np.float64(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
    torch.int64: np.int64(0),
    torch.int32: np.int32(0),
}
"""A scalar for each dtype, whose type tells the compiled functions how elements are stored."""


def lookup(tables: Sequence[Tensor], layout: Layout, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """`reference.lookup`, for contiguous tables of one dtype."""
    arrays, ids, offsets = _layout_arrays(layout), ids.contiguous(), offsets.contiguous()
    num_bags = offsets.numel() - 1
    num_samples = num_bags // layout.num_features
    pooled = torch.empty(num_samples, layout.total_width, dtype=compute_dtype(tables[0].dtype))
    if not num_samples:
        return pooled
    given = weights if weights is None else weights.to(pooled.dtype).contiguous()
    bounds = offsets.numpy()
    addresses = np.array([table.data_ptr() for table in tables], np.int64)
    threads = _num_parts(ids.numel() + num_bags // 4)
    counter, bags_per_turn = np.zeros(1, np.int64), -(-num_bags // (threads * TURNS))

    def pool() -> int:
        return int(
            pool_bags(
                counter, bags_per_turn, num_samples, addresses, arrays.num_rows, arrays.widths, arrays.table_of, arrays.columns,
                arrays.is_mean, *_batch(tables[0], ids, bounds, given), pooled.data_ptr(), _SCALARS[pooled.dtype],
            )
        )  # fmt: skip

    if max(run_on_threads(pool, threads)) >= 0:
        raise DataError(fault_of(layout, ids.numpy(), bounds, num_samples))
    add_bytes(pooled.nbytes + tables[0].element_size() * float(np.diff(bounds[::num_samples]) @ np.diff(arrays.columns)))
    return pooled


def update(
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
) -> None:
    """`reference.update`; ids must be in range."""
    if not ids.numel():
        return
    arrays, ids, grad = _layout_arrays(layout), ids.contiguous(), grad.contiguous()
    bounds = offsets.contiguous().numpy()
    threads = _num_parts(ids.numel())
    tasks, counts = split_into_tasks(bounds, len(grad), arrays.table_of, len(tables), threads * TASKS if threads > 1 else 1)
    memory = _memory(optimizer.kind, tables, states)
    given = weights if weights is None else weights.to(grad.dtype).contiguous()
    rule = _rule(optimizer, lr, step, grad.dtype)
    scaled = given is not None or rule[0] > 0 or arrays.has_means
    arguments = (
        np.zeros(1, np.int64), tasks, int(counts.max()) + 1, max(arrays.width_of), len(grad), *memory, arrays.num_rows, arrays.widths, arrays.columns,
        arrays.is_mean, arrays.features_from, arrays.features, *_batch(tables[0], ids, bounds, given), grad.data_ptr(),
        _SCALARS[grad.dtype], *rule, scaled,
    )  # fmt: skip
    run_on_threads(lambda: update_tables(*arguments), threads)
    add_bytes(counts @ _updated_bytes(optimizer.kind, arrays.width_of, tables[0].dtype, grad.dtype))


# Distinct rows, for a server that others send summed gradients to: ids must be in range


def gather_rows(tables: Sequence[Tensor], ids: NDArray[Any], bounds: NDArray[np.int64]) -> Tensor:
    """The rows `ids` [U] of tables [N, D], concatenated in one flat tensor; those from bounds[t] on are of table t."""
    widths = np.array([table.shape[1] for table in tables], np.int64)
    dtype = tables[0].dtype
    flat = torch.empty(int((np.diff(bounds) * widths).sum()), dtype=dtype)
    word: Any = {2: np.uint16(0), 4: np.uint32(0), 8: np.uint64(0)}[dtype.itemsize]
    out = flat.view(torch.uint8).numpy().view(word.dtype)
    copy_distinct(np.array([table.data_ptr() for table in tables], np.int64), widths, ids, bounds, out, word)
    add_bytes(2 * flat.nbytes)
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

    Ids of one table must be distinct. Nothing is clipped.
    """
    widths, memory = tuple(table.shape[1] for table in tables), _memory(optimizer.kind, tables, states)
    _, *rule = _rule(optimizer, lr, step, grad.dtype)
    formats = _SCALARS[tables[0].dtype], _SCALARS[grad.dtype]
    update_distinct(*memory, np.array(widths, np.int64), ids, bounds, grad.data_ptr(), *formats, *rule)
    add_bytes(float(np.diff(bounds) @ _updated_bytes(optimizer.kind, widths, tables[0].dtype, grad.dtype)))


@lru_cache(maxsize=64)
def _updated_bytes(kind: RowOptimizerName, widths: tuple[int, ...], rows: torch.dtype, real: torch.dtype) -> NDArray[np.int64]:
    """Bytes that an update moves per row of each table [T]: the gradient is read, row and state are read and written."""
    state_columns = [sum(ROW_OPTIMIZERS[kind].state_columns(width).values()) for width in widths]
    return (2 * np.array(state_columns, np.int64) + widths) * real.itemsize + 2 * rows.itemsize * np.array(widths, np.int64)


# Arguments of the compiled functions


def _batch(rows: Tensor, ids: Tensor, offsets: NDArray[np.int64], weights: Tensor | None) -> tuple[Any, ...]:
    """A batch as the compiled functions take it: format of rows, address and type of ids, offsets, address of weights or None."""
    return _SCALARS[rows.dtype], ids.data_ptr(), _SCALARS[ids.dtype], offsets, None if weights is None else weights.data_ptr()


def _rule(optimizer: SparseOptimizerSpec, lr: float, step: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """An optimizer as the compiled functions take it: largest norm or 0, code, scalars of the step, step."""
    clip = 0.0 if optimizer.clip is None else optimizer.clip
    scalars = np.array(step_scalars(optimizer, lr=lr, step=step), type(_SCALARS[dtype]))
    return clip, ROW_OPTIMIZERS[optimizer.kind].code, scalars, step


def _memory(kind: RowOptimizerName, tables: Sequence[Tensor], states: Sequence[RowState]) -> NDArray[np.int64]:
    """Addresses of rows and of the first and second state tensor, and bytes per row of those [5, T]; 0 where there is none."""
    memory = np.zeros((5, len(tables)), np.int64)
    memory[0] = [table.data_ptr() for table in tables]
    for number, tensors in enumerate(state_tensors(kind, states), start=1):
        if tensors:
            memory[number] = [tensor.data_ptr() for tensor in tensors]
            memory[number + 2] = [tensor.shape[1] * tensor.element_size() for tensor in tensors]
    return memory


@dataclass(frozen=True)
class _LayoutArrays:
    """A layout as arrays; table t is read by features[features_from[t] : features_from[t + 1]]."""

    num_rows: NDArray[np.int64]  # [T]
    widths: NDArray[np.int64]  # [T]
    width_of: tuple[int, ...]
    """The same."""
    table_of: NDArray[np.int64]  # [F]
    columns: NDArray[np.int64]  # [F + 1]
    is_mean: NDArray[np.bool_]  # [F]
    has_means: bool
    features_from: NDArray[np.int64]  # [T + 1]
    features: NDArray[np.int64]  # [F]


@lru_cache(maxsize=64)
def _layout_arrays(layout: Layout) -> _LayoutArrays:
    assert all(table.num_rows <= 2**32 for table in layout.tables), "a table has at most 2**32 rows"
    return _LayoutArrays(
        num_rows=np.array([table.num_rows for table in layout.tables], np.int64),
        widths=np.array([table.width for table in layout.tables], np.int64),
        width_of=tuple(table.width for table in layout.tables),
        table_of=np.array(layout.table_of, np.int64),
        columns=np.array(layout.columns, np.int64),
        is_mean=np.array(layout.is_mean, np.bool_),
        has_means=any(layout.is_mean),
        features_from=np.cumsum([0] + [len(table.features) for table in layout.tables], dtype=np.int64),
        features=np.array([feature for table in layout.tables for feature in table.features], np.int64),
    )


def _num_parts(num_ids: int) -> int:
    """How many threads are worth waking for so many ids."""
    return max(1, min(torch.get_num_threads(), num_ids // 512))
