"""Initial embedding rows that depend on nothing but seed, table, row and column: the same under every placement."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rowstead.kernels.cpu.memory import prefer_large_pages
from rowstead.kernels.mix import uniform
from rowstead.kernels.row_optimizer import compute_dtype
from rowstead.spec.features import Table

PIECE = 1 << 22
"""Numbers that are made at a time."""


def initial_rows(
    table: Table, *, seed: int, dtype: torch.dtype, device: torch.device, start: int = 0, stop: int | None = None
) -> Tensor:
    """Rows `start` to `stop` [n, D] of a new table, even between -1/sqrt(N) and 1/sqrt(N), where N counts the whole table's rows.

    Rows of 16 bits are the FP32 ones, rounded. A piece of a table has the numbers that the whole has there.
    """
    stop = table.num_rows if stop is None else stop
    rows = prefer_large_pages(torch.empty((stop - start) * table.width, dtype=dtype, device=device)).view(-1, table.width)
    rows_each = max(1, PIECE // table.width)
    for first in range(start, stop, rows_each):
        last = min(first + rows_each, stop)
        _draw(rows[first - start : last - start], table, torch.arange(first, last, dtype=torch.int64, device=device), seed)
    return rows


def initial_rows_at(table: Table, numbers: Tensor, *, seed: int, dtype: torch.dtype) -> Tensor:
    """The rows [n, D] that `initial_rows` has at `numbers` int64 [n], on their device, bit for bit."""
    rows = torch.empty(len(numbers), table.width, dtype=dtype, device=numbers.device)
    rows_each = max(1, PIECE // table.width)
    for some, here in zip(rows.split(rows_each), numbers.split(rows_each), strict=True):
        _draw(some, table, here, seed)
    return rows


def _draw(rows: Tensor, table: Table, numbers: Tensor, seed: int) -> None:
    """Fill contiguous `rows` [n, D] of a new table, at `numbers` [n]."""
    drawn = drawn_by_torch
    if rows.device.type == "cpu":  # Numba is slow to import, and nothing for other devices
        from rowstead.kernels.cpu.initial import drawn_by_numba as drawn
    rows.copy_(drawn(table, numbers, salt_of(table, seed), compute_dtype(rows.dtype)))


def salt_of(table: Table, seed: int) -> int:
    """A number of 64 bits that tells the tables of a seed apart."""
    digest = hashlib.sha256(f"{seed}/{table.name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def drawn_by_torch(table: Table, numbers: Tensor, salt: int, dtype: torch.dtype) -> Tensor:
    """The rows [n, D] of a new table at `numbers` [n], made in FP64, on any device."""
    num_rows, width = table.whole_shape
    columns = torch.arange(table.first_column, table.first_column + table.width, dtype=torch.int64, device=numbers.device)
    counters = (numbers.unsqueeze(1) + table.first_row) * width + columns
    return ((2 * uniform(counters, salt) - 1) * num_rows**-0.5).to(dtype)
