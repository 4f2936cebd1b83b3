"""Initial embedding rows that depend on nothing but seed, table, row and column: the same under every placement."""

from __future__ import annotations

import hashlib

import numba
import numpy as np
import torch
from torch import Tensor

from rowstead.kernels.cpu.memory import advise_huge_pages
from rowstead.kernels.cpu.mix import mix64
from rowstead.kernels.cpu.thread_team import parallel_for
from rowstead.kernels.mix import uniform
from rowstead.kernels.row_state import compute_dtype
from rowstead.spec.features import Table

PIECE = 1 << 22
"""Elements drawn at a time."""


def initial_rows(
    table: Table, *, seed: int, dtype: torch.dtype, device: torch.device, start: int = 0, stop: int | None = None
) -> Tensor:
    """Rows `start` to `stop` [n, D] of a new table, uniform between -1/sqrt(N) and 1/sqrt(N), where N is the number of rows of the whole table.

    Rows of 16 bits are the FP32 ones, rounded. A piece of a table has the same elements as the whole table.
    """
    stop = table.num_rows if stop is None else stop
    rows = advise_huge_pages(torch.empty((stop - start) * table.width, dtype=dtype, device=device)).view(-1, table.width)
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
    draw = draw_with_numba if rows.device.type == "cpu" else draw_with_torch
    rows.copy_(draw(table, numbers, salt_of(table, seed), compute_dtype(rows.dtype)))


def salt_of(table: Table, seed: int) -> int:
    """A 64-bit number that differs between the tables of a seed."""
    digest = hashlib.sha256(f"{seed}/{table.name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def draw_with_torch(table: Table, numbers: Tensor, salt: int, dtype: torch.dtype) -> Tensor:
    """The rows [n, D] of a new table at `numbers` [n], drawn in FP64, on any device."""
    num_rows, width = table.whole_shape
    columns = torch.arange(table.first_column, table.first_column + table.width, dtype=torch.int64, device=numbers.device)
    counters = (numbers.unsqueeze(1) + table.first_row) * width + columns
    return ((2 * uniform(counters, salt) - 1) * num_rows**-0.5).to(dtype)


def draw_with_numba(table: Table, numbers: Tensor, salt: int, dtype: torch.dtype) -> Tensor:
    """The bits of `draw_with_torch` on the CPU, without its passes over memory."""
    num_rows, width = table.whole_shape
    rows = torch.empty(len(numbers), table.width, dtype=dtype)
    out, firsts = rows.numpy(), ((numbers + table.first_row) * width + table.first_column).numpy()
    word, bound = np.int64(salt).view(np.uint64), num_rows**-0.5
    parallel_for(lambda a, b: _fill(out[a:b], firsts[a:b], word, bound), len(out), num_bytes=rows.nbytes)
    return rows


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _fill(rows, firsts, salt, bound):  # type: ignore[no-untyped-def]
    """Rows [n, D] whose first elements have the indices `firsts` [n] in their table."""
    for row in range(len(rows)):
        first = np.uint64(firsts[row])
        for column in range(rows.shape[1]):
            mixed = mix64(mix64(first + np.uint64(column)) ^ salt)
            rows[row, column] = (2.0 * (np.float64(mixed >> np.uint64(11)) * 2.0**-53) - 1.0) * bound
