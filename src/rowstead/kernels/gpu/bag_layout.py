"""From example-major ids to feature-major ones on a GPU: the twin of `kernels/cpu/bag_layout.py`.

Letters: B examples, F features, nnz ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SAMPLES, FEATURES = 32, 32
"""Examples and features that a program places at a time."""
CELLS = 2048
"""Bags times ids of each that a program moves at a time."""
WIDTHS = (1, 8, 32)
"""Ids of a bag that are moved at a time: about as many as a bag has on average."""


def to_feature_major(ids: Tensor, lengths: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Ids [nnz], in the type of `ids`, and offsets int64 [F*B + 1] of a batch; the arguments are those of the CPU's function."""
    num_samples, num_features = lengths.shape
    num_bags, out = num_samples * num_features, torch.empty_like(ids)
    offsets = torch.zeros(num_bags + 1, dtype=torch.int64, device=ids.device)
    if not num_bags:
        return out, offsets
    begins = torch.empty(num_bags, dtype=torch.int64, device=ids.device)
    _place_bags[(triton.cdiv(num_samples, SAMPLES),)](
        lengths, starts, begins, offsets, num_samples, num_features, SAMPLES=SAMPLES, FEATURES=FEATURES, num_warps=4
    )
    offsets.cumsum_(0)
    width = next((width for width in WIDTHS if 2 * ids.numel() <= 3 * width * num_bags), WIDTHS[-1])
    bags = CELLS // width
    _move_ids[(triton.cdiv(num_bags, bags),)](ids, begins, offsets, out, num_bags, BAGS=bags, WIDTH=width, num_warps=8)
    return out, offsets


@triton.jit
def _place_bags(lengths, starts, begins, offsets, num_samples, num_features, SAMPLES: tl.constexpr, FEATURES: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Fill begins [F*B], where each bag's ids are, and offsets [1 :] with the bags' lengths; both feature-major."""
    b = tl.program_id(0) * SAMPLES + tl.arange(0, SAMPLES)
    is_sample = b < num_samples
    b = b.to(tl.int64)
    at = tl.load(starts + b, mask=is_sample, other=0)
    for first in range(0, num_features, FEATURES):
        f = first + tl.arange(0, FEATURES)
        inside = is_sample[:, None] & (f < num_features)[None, :]
        count = tl.load(lengths + b[:, None] * num_features + f[None, :], mask=inside, other=0).to(tl.int64)
        begin = at[:, None] + tl.cumsum(count, 1) - count
        bag = f[None, :].to(tl.int64) * num_samples + b[:, None]
        tl.store(begins + bag, begin, mask=inside)
        tl.store(offsets + bag + 1, count, mask=inside)
        at += tl.sum(count, 1)


@triton.jit
def _move_ids(ids, begins, offsets, out, num_bags, BAGS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy the ids of some bags from where they begin in `ids` to their offsets in `out`."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    is_bag = bag < num_bags
    target = tl.load(offsets + bag, mask=is_bag, other=0)
    count = tl.load(offsets + bag + 1, mask=is_bag, other=0) - target
    source = tl.load(begins + bag, mask=is_bag, other=0)
    for first in range(0, tl.max(count, 0), WIDTH):
        i = first + tl.arange(0, WIDTH)
        inside = i[None, :] < count[:, None]
        id_ = tl.load(ids + source[:, None] + i[None, :], mask=inside, other=0, eviction_policy="evict_first")
        tl.store(out + target[:, None] + i[None, :], id_, mask=inside)
