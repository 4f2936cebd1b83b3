"""Initial embedding rows that depend on nothing but seed, table, row and column: the same under every placement."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rowstead.kernels.memory import prefer_large_pages
from rowstead.kernels.mix import uniform
from rowstead.kernels.optimizer import compute_dtype
from rowstead.spec.features import Table

CPU_PIECE, GPU_PIECE = 1 << 16, 1 << 22
"""Numbers that are made at a time: what the caches of a CPU hold, and what keeps a GPU busy."""


def initial_rows(
    table: Table, *, seed: int, dtype: torch.dtype, device: torch.device, start: int = 0, stop: int | None = None
) -> Tensor:
    """Rows `start` to `stop` [n, D] of a new table, even between -1/sqrt(N) and 1/sqrt(N), where N counts the whole table's rows.

    Rows of 16 bits are the FP32 ones, rounded. A piece of a table has the numbers that the whole has there.
    """
    stop = table.num_rows if stop is None else stop
    rows = prefer_large_pages(torch.empty((stop - start) * table.width, dtype=dtype, device=device)).view(-1, table.width)
    rows_each = max(1, (CPU_PIECE if device.type == "cpu" else GPU_PIECE) // table.width)
    for first in range(start, stop, rows_each):
        last = min(first + rows_each, stop)
        numbers = torch.arange(first, last, dtype=torch.int64, device=device)
        rows[first - start : last - start] = _drawn(table, numbers, seed).to(compute_dtype(dtype))
    return rows


def initial_rows_at(table: Table, numbers: Tensor, *, seed: int, dtype: torch.dtype) -> Tensor:
    """The rows [n, D] that `initial_rows` has at `numbers` int64 [n], on their device, bit for bit."""
    rows = torch.empty(len(numbers), table.width, dtype=dtype, device=numbers.device)
    rows_each = max(1, (CPU_PIECE if numbers.device.type == "cpu" else GPU_PIECE) // table.width)
    for first in range(0, len(numbers), rows_each):
        some = slice(first, first + rows_each)
        rows[some] = _drawn(table, numbers[some], seed).to(compute_dtype(dtype))
    return rows


def _drawn(table: Table, numbers: Tensor, seed: int) -> Tensor:
    """FP64 rows [n, D] of a new table at `numbers` [n]."""
    digest = hashlib.sha256(f"{seed}/{table.name}".encode()).digest()
    salt = int.from_bytes(digest[:8], "little", signed=True)
    num_rows, width = table.whole_shape
    columns = torch.arange(table.first_column, table.first_column + table.width, dtype=torch.int64, device=numbers.device)
    counters = (numbers.unsqueeze(1) + table.first_row) * width + columns
    return (2 * uniform(counters, salt) - 1) * num_rows**-0.5
