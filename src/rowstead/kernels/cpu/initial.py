"""Initial rows on the CPU, in Numba: the bits of `initial.drawn_by_torch`, without its passes over memory."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from rowstead.kernels.cpu.mix import mix64
from rowstead.kernels.cpu.thread_team import over_parts
from rowstead.spec.features import Table


def drawn_by_numba(table: Table, numbers: Tensor, salt: int, dtype: torch.dtype) -> Tensor:
    """The rows [n, D] of a new table at `numbers` [n]."""
    num_rows, width = table.whole_shape
    rows = torch.empty(len(numbers), table.width, dtype=dtype)
    out, firsts = rows.numpy(), ((numbers + table.first_row) * width + table.first_column).numpy()
    word, bound = np.int64(salt).view(np.uint64), num_rows**-0.5
    over_parts(lambda a, b: _fill(out[a:b], firsts[a:b], word, bound), len(out), num_bytes=rows.nbytes)
    return rows


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _fill(rows, firsts, salt, bound):  # type: ignore[no-untyped-def]
    """Rows [n, D] whose first numbers have the places `firsts` [n] in their table."""
    for row in range(len(rows)):
        first = np.uint64(firsts[row])
        for column in range(rows.shape[1]):
            mixed = mix64(mix64(first + np.uint64(column)) ^ salt)
            rows[row, column] = (2.0 * (np.float64(mixed >> np.uint64(11)) * 2.0**-53) - 1.0) * bound
