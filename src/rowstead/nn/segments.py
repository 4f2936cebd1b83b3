"""Operations on the rows of bags of any length, without padding: rows [nnz, D] and offsets [B + 1].

Bag b owns rows[offsets[b] : offsets[b+1]]. Sums are over one bag after the other, in order, forward and backward: the same input gives
the same bits, on a GPU too.

Letters: B bags, nnz rows of all bags, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def bag_of_rows(offsets: Tensor, num_rows: int) -> Tensor:
    """The bag of each row, int64 [nnz]."""
    lengths = offsets.diff()
    return torch.repeat_interleave(lengths, output_size=num_rows)


def expand(x: Tensor, offsets: Tensor, bags: Tensor) -> Tensor:
    """x [B, D] for each row of its bag, [nnz, D]; `bags` [nnz] is that of each row."""
    return _Expand.apply(x, offsets, bags)


def weighted_sum(rows: Tensor, weights: Tensor, offsets: Tensor, bags: Tensor) -> Tensor:
    """The sum of each bag's rows [nnz, D], each times its weight [nnz]: [B, D]; zeros for an empty bag."""
    return _WeightedSum.apply(rows, weights, offsets, bags)


def softmax(scores: Tensor, offsets: Tensor, bags: Tensor) -> Tensor:
    """The softmax of the scores [nnz] within each bag."""
    num_bags = offsets.numel() - 1
    top = scores.detach().new_full((num_bags,), -torch.inf).scatter_reduce(0, bags, scores.detach(), "amax")
    powers = torch.exp(scores - top[bags]).unsqueeze(1)
    totals = weighted_sum(powers, torch.ones_like(scores), offsets, bags)
    return (powers / expand(totals, offsets, bags)).squeeze(1)


def spread(rows: Tensor, source: Tensor, slots: Tensor) -> Tensor:
    """rows[source], of which row i is taken at slots[i]; what is elsewhere has no influence on the result that is differentiated."""
    return _Spread.apply(rows, source, slots)


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """Undo x = y[order]: returns y."""
    return _Spread.apply(x, torch.empty_like(order).index_put_((order,), torch.arange(len(order), device=order.device)), order)


def _sum(rows: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum of each bag's rows, times their weights: [B, D]."""
    order = torch.arange(rows.shape[0], device=rows.device)
    return functional.embedding_bag(order, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, bags: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return x[bags]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (offsets,) = ctx.saved_tensors
        return _sum(grad.contiguous(), offsets), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, offsets: Tensor, bags: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, bags)
        return _sum(rows.contiguous(), offsets, weights.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weights, bags = ctx.saved_tensors
        of_rows = grad[bags]
        for_weights = (rows * of_rows).sum(dim=1) if ctx.needs_input_grad[1] else None
        for_rows = of_rows.mul_(weights.unsqueeze(1)) if ctx.needs_input_grad[0] else None
        return for_rows, for_weights, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return rows[source]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return grad[slots], None, None
