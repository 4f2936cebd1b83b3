"""Initial embedding rows that depend on nothing but seed, table, row and column: the same under every placement."""

from __future__ import annotations

import hashlib

import numba
import numpy as np
import torch
from torch import Tensor

from rowstead.kernels.cpu.memory import advise_huge_pages
from rowstead.kernels.cpu.thread_team import parallel_for
from rowstead.kernels.mix import mix64, uniform
from rowstead.kernels.row_state import compute_dtype
from rowstead.spec.features import Table

PIECE = 1 << 22
"""Elements drawn at a time."""


def initial_rows(table: Table, *, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The rows [n, D] of a new table, uniform between -1/sqrt(N) and 1/sqrt(N), where N is the number of rows of the whole table.

    Rows of 16 bits are the FP32 ones, rounded. A piece of a table has the same elements as the whole table.
    """
    empty = torch.empty(table.num_rows * table.width, dtype=dtype, device=device)
    rows = advise_huge_pages(empty).view(-1, table.width)
    fill_initial_rows(rows, table, seed=seed, device=device)
    return rows


def fill_initial_rows(rows: Tensor, table: Table, *, seed: int, device: torch.device) -> None:
    """Fill memory [n, D], wherever it is, with the initial rows of a table, some at a time; `device` draws them."""
    rows_each = max(1, PIECE // table.width)
    for first in range(0, table.num_rows, rows_each):
        some = rows[first : first + rows_each]
        some.copy_(_draw(table, torch.arange(first, first + len(some), dtype=torch.int64, device=device), seed, rows.dtype))


def initial_rows_at(table: Table, numbers: Tensor, *, seed: int, dtype: torch.dtype) -> Tensor:
    """The rows [n, D] that `initial_rows` has at `numbers` int64 [n], on their device, bit for bit."""
    return torch.cat([_draw(table, some, seed, dtype) for some in numbers.split(max(1, PIECE // table.width))])


def _draw(table: Table, numbers: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    draw = draw_with_numba if numbers.device.type == "cpu" else draw_with_torch
    return draw(table, numbers, salt_of(table, seed), compute_dtype(dtype)).to(dtype)


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
    rows = torch.empty(len(numbers), table.width, dtype=dtype, device=numbers.device)
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
