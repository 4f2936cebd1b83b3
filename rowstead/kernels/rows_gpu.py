"""Rows that a GPU gathers from, and scatters to, memory on the other side of its bus: many under way at once.

Letters: N rows, n rows that move, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_A_PROGRAM = 1024


def gather_rows(source: Tensor, rows: Tensor, into: Tensor) -> None:
    """into[i] = source[rows[i]]: source [N, D], rows int32 or int64 [n], into [n or more, D]."""
    _move(source, rows, into, is_gather=True)


def scatter_rows(target: Tensor, rows: Tensor, values: Tensor) -> None:
    """target[rows[i]] = values[i], for distinct rows: target [N, D], rows int32 or int64 [n], values [n or more, D]."""
    _move(target, rows, values, is_gather=False)


def _move(whole: Tensor, rows: Tensor, some: Tensor, *, is_gather: bool) -> None:
    count, width = rows.numel(), whole.shape[1]
    if not count:
        return
    if whole.element_size() == 2:
        whole, some = whole.view(torch.int16), some.view(torch.int16)
    block = triton.next_power_of_2(width)
    at_a_time = max(1, ELEMENTS_A_PROGRAM // block)
    _move_rows[(triton.cdiv(count, at_a_time),)](
        whole, rows, some, count, width, GATHER=is_gather, EXACT=block == width, D=block, R=at_a_time, num_warps=4
    )


@triton.jit
def _move_rows(  # type: ignore[no-untyped-def]
    whole, rows, some, count, width, GATHER: tl.constexpr, EXACT: tl.constexpr, D: tl.constexpr, R: tl.constexpr
):
    """R rows."""
    column = tl.arange(0, D)
    if EXACT:
        width = D
    place = tl.program_id(0) * R + tl.arange(0, R)
    is_row = place < count
    row = tl.load(rows + place, mask=is_row, other=0).to(tl.int64)
    inside = whole + row[:, None] * width + column[None, :]
    outside = some + place.to(tl.int64)[:, None] * width + column[None, :]
    mask = is_row[:, None] & (column < width)[None, :]
    if GATHER:
        tl.store(outside, tl.load(inside, mask=mask), mask=mask)
    else:
        tl.store(inside, tl.load(outside, mask=mask), mask=mask)
