"""Pooled look-up and exact fused update on the CPU, in Numba: all tables in one call, without locks or the GIL.

Threads share a look-up by bags. An update is split into tasks, each some rows of one table: a thread sorts the ids of a task,
which groups equal ids, then sums each group in the order of the batch and applies the optimizer. Idle threads take the next
bags or task. No two tasks share a row, so the result does not depend on the number of threads, bit for bit.

Rows are FP32, FP64, or BF16 or FP16 with gradients and state in FP32 (`rounding.py`).

Letters: B examples, F features, T tables, N rows, D width, nnz ids in the batch.
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

from rowstead.kernels.cpu.embedding_kernels import pool_bags, split_into_tasks, update_each_id, update_tables
from rowstead.kernels.cpu.thread_team import run_on_threads
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
    """Pooled rows of all features, concatenated: [B, sum of widths].

    tables: T tensors [N, D] of one dtype; ids int32 or int64 [nnz]; offsets int64 [F*B + 1]; weights [nnz] or None.
    """
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

    failed = [index for index in run_on_threads(pool, threads) if index >= 0]
    if failed:
        raise _out_of_range(min(failed), layout, ids.numpy(), bounds, num_samples)
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
    """One exact optimizer step on every row in `ids`, in place; grad [B, sum of widths]. Ids must be in range."""
    if not ids.numel():
        return
    arrays, ids, grad = _layout_arrays(layout), ids.contiguous(), grad.contiguous()
    bounds = offsets.contiguous().numpy()
    threads = _num_parts(ids.numel())
    tasks = split_into_tasks(bounds, len(grad), arrays.table_of, len(layout.tables), threads * TASKS if threads > 1 else 1)
    memory = _memory(optimizer.kind, tables, states)
    given = weights if weights is None else weights.to(grad.dtype).contiguous()
    rule = _rule(optimizer, lr, step, grad.dtype)
    counter = np.zeros(1, np.int64)

    def work() -> None:
        update_tables(
            counter, tasks, len(grad), *memory, arrays.num_rows, arrays.widths, arrays.columns, arrays.is_mean,
            arrays.features_from, arrays.features, *_batch(tables[0], ids, bounds, given), grad.data_ptr(),
            _SCALARS[grad.dtype], *rule,
        )  # fmt: skip

    run_on_threads(work, threads)


def update_hogwild(
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
    """`update` for callers that train on several batches at once, one per thread: no sum over equal ids, no locks.

    The gradient of each id is applied to its row immediately, in the order of the batch. Where two threads update the same
    row, one of the changes may be lost.
    """
    arrays, ids, grad = _layout_arrays(layout), ids.contiguous(), grad.contiguous()
    given = weights if weights is None else weights.to(grad.dtype).contiguous()
    update_each_id(
        len(grad), *_memory(optimizer.kind, tables, states), arrays.widths, arrays.table_of, arrays.columns, arrays.is_mean,
        *_batch(tables[0], ids, offsets.contiguous().numpy(), given), grad.data_ptr(), _SCALARS[grad.dtype],
        *_rule(optimizer, lr, step, grad.dtype),
    )  # fmt: skip


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
    """A layout as arrays."""

    num_rows: NDArray[np.int64]
    """[T]."""
    widths: NDArray[np.int64]
    """[T]."""
    table_of: NDArray[np.int64]
    """[F]."""
    columns: NDArray[np.int64]
    """[F + 1]."""
    is_mean: NDArray[np.bool_]
    """[F]."""
    features_from: NDArray[np.int64]
    """[T + 1]: table t is read by features[features_from[t] : features_from[t + 1]]."""
    features: NDArray[np.int64]
    """[F]."""


@lru_cache(maxsize=64)
def _layout_arrays(layout: Layout) -> _LayoutArrays:
    assert all(table.num_rows <= 2**32 for table in layout.tables), "a table has at most 2**32 rows"
    return _LayoutArrays(
        num_rows=np.array([table.num_rows for table in layout.tables], np.int64),
        widths=np.array([table.width for table in layout.tables], np.int64),
        table_of=np.array(layout.table_of, np.int64),
        columns=np.array(layout.columns, np.int64),
        is_mean=np.array(layout.is_mean, np.bool_),
        features_from=np.cumsum([0] + [len(table.features) for table in layout.tables], dtype=np.int64),
        features=np.array([feature for table in layout.tables for feature in table.features], np.int64),
    )


def _out_of_range(index: int, layout: Layout, ids: NDArray[Any], offsets: NDArray[np.int64], num_samples: int) -> DataError:
    bag = int(np.searchsorted(offsets, index, side="right") - 1)
    table = layout.tables[layout.table_of[bag // num_samples]]
    return DataError(
        f"id {int(ids[index])} of example {bag % num_samples} is outside table `{table.name}`, whose rows are 0 to "
        f"{table.num_rows - 1}: hash ids to rows first"
    )


def _num_parts(num_ids: int) -> int:
    """How many threads are worth waking for so many ids."""
    return max(1, min(torch.get_num_threads(), num_ids // 512))
