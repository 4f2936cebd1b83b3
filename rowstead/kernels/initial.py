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


def initial_rows(table: Table, *, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows [N, D] of a new table, even between -1/sqrt(N) and 1/sqrt(N); those of 16 bits are the FP32 ones, rounded."""
    digest = hashlib.sha256(f"{seed}/{table.name}".encode()).digest()
    salt = int.from_bytes(digest[:8], "little", signed=True)
    bound = table.num_rows**-0.5
    numbers = prefer_large_pages(torch.empty(table.num_elements, dtype=dtype, device=device))
    piece = CPU_PIECE if device.type == "cpu" else GPU_PIECE
    for start in range(0, table.num_elements, piece):
        stop = min(start + piece, table.num_elements)
        counters = torch.arange(start, stop, dtype=torch.int64, device=device)
        numbers[start:stop] = ((2 * uniform(counters, salt) - 1) * bound).to(compute_dtype(dtype))
    return numbers.view(table.num_rows, table.width)
