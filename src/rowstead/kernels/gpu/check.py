"""Checks a batch on a CUDA GPU, by one launch and one synchronization; `kernels/check.py` says what is wrong if it fails.

Letters: B examples, F features, nnz ids.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowstead.kernels.gpu.launch import quick_launch
from rowstead.kernels.layout import Layout


def fits(layout: Layout, ids: Tensor, offsets: Tensor) -> bool:
    """Whether offsets [F*B + 1] rise from 0 to nnz and each id lies in its table, by one launch and one synchronization."""
    num_ids, num_bags = ids.numel(), offsets.numel() - 1
    if not num_bags:
        return num_ids == 0 and int(offsets[0]) == 0
    is_wrong = torch.zeros(1, dtype=torch.int32, device=ids.device)
    wide = min(32, triton.next_power_of_2(max(1, num_ids // num_bags)))
    tall = 512 // wide
    check_bags[(triton.cdiv(num_bags, tall),)](
        ids, offsets, _num_rows(layout, ids.device), is_wrong, num_ids, num_bags // layout.num_features, num_bags, BAGS=tall, L=wide, num_warps=4
    )  # fmt: skip
    return not is_wrong.item()


@lru_cache(maxsize=64)
def _num_rows(layout: Layout, device: torch.device) -> Tensor:
    """For each feature the rows of its table."""
    return torch.tensor([layout.tables[table].num_rows for table in layout.table_of], dtype=torch.int64, device=device)


@quick_launch
@triton.jit
def check_bags(  # type: ignore[no-untyped-def]
    ids, offsets, limits, is_wrong, num_ids, num_samples, num_bags, BAGS: tl.constexpr, L: tl.constexpr
):
    """Set `is_wrong` unless offsets rise from 0 to `num_ids` and each id is a row of its table; no other id is read."""
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)[:, None]
    live = bag < num_bags
    begin = tl.load(offsets + bag, mask=live, other=0)
    end = tl.load(offsets + bag + 1, mask=live, other=0)
    is_whole = ((bag > 0) | (begin == 0)) & ((bag < num_bags - 1) | (end == num_ids))
    rises = (begin >= 0) & (begin <= end) & (end <= num_ids)
    wrong = live & ~(is_whole & rises)
    limit = tl.load(limits + bag // num_samples, mask=live, other=0)
    longest = tl.max(tl.max(tl.where(wrong, 0, end - begin), axis=1), axis=0)
    for start in range(0, longest, L):
        index = begin + start + tl.arange(0, L)[None, :]
        on = live & ~wrong & (index < end)
        row = tl.load(ids + index, mask=on, other=0).to(tl.int64)
        outside = on & ((row < 0) | (row >= limit))
        wrong = wrong | (tl.max(outside.to(tl.int32), axis=1, keep_dims=True) != 0)
    tl.store(is_wrong + bag * 0, 1, mask=wrong)
