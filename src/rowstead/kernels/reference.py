"""Pooled look-up and exact fused update in plain torch: slow and obvious; every fast kernel is tested against it.

Letters: B examples, F features, T tables, N rows, D width, nnz ids in the batch, U distinct ids of one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rowstead.kernels.layout import Layout
from rowstead.kernels.rounding import ROUNDED, noise, round_to
from rowstead.kernels.row_state import RowState
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, SparseOptimizerSpec, adam_correction


def lookup(tables: Sequence[Tensor], layout: Layout, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Pooled rows of all features, concatenated: [B, sum of widths].

    tables: T tensors [N, D]; ids int32 or int64 [nnz]; offsets int64 [F*B + 1]; weights [nnz] or None. 16-bit rows are summed, and
    returned, in float32.
    """
    pooled = []
    for bags in _bags(layout, ids, offsets, weights):
        by_mean = layout.is_mean[bags.feature]
        scale = bags.weights / bags.lengths_per_id() if by_mean and bags.weights is not None else bags.weights
        names, rows = bags.ids, tables[layout.table_of[bags.feature]]
        if rows.dtype in ROUNDED:
            names, rows = torch.arange(len(names), device=names.device), rows[names].float()
        if scale is not None:
            scale = scale.to(rows.dtype)
        mode = "mean" if by_mean and scale is None else "sum"
        pooled.append(
            functional.embedding_bag(names, rows, bags.offsets, mode=mode, per_sample_weights=scale, include_last_offset=True)
        )
    return torch.cat(pooled, dim=1)


def update(
    tables: Sequence[Tensor],
    states: Sequence[RowState],
    layout: Layout,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    grad: Tensor,
    *,
    optimizer: SparseOptimizerSpec,
    lr: float,
    step: int,
) -> None:
    """One exact optimizer step on every row in `ids`, in place.

    grad [B, sum of widths] is the gradient of what `lookup` returned. Gradients of one row are summed over repeated ids
    and over features that share the table before the optimizer is applied.
    """
    if optimizer.clip is not None:
        grad = clip_pooled(grad, layout, optimizer.clip)
    bags = _bags(layout, ids, offsets, weights)
    for index, table in enumerate(layout.tables):
        named = torch.cat([bags[feature].ids for feature in table.features])
        if named.numel() == 0:
            continue
        gradients = torch.cat([bags[feature].row_gradients(layout, grad) for feature in table.features])
        distinct, inverse, counts = torch.unique(named, return_inverse=True, return_counts=True)
        # A segmented sum has one order on every device; index_add on a GPU has none.
        summed = torch.segment_reduce(gradients[inverse.argsort(stable=True)], "sum", lengths=counts)
        rows = tables[index]
        before = rows[distinct].to(summed.dtype)
        change = _RULES[optimizer.kind](states[index], distinct, summed + optimizer.l2 * before, optimizer, lr, step)
        change = change + lr * optimizer.weight_decay * before
        if rows.dtype in ROUNDED:  # stochastically
            chance = noise(index, distinct, rows.shape[1], step)
            rows[distinct] = round_to(rows[distinct].float() - change, chance, rows.dtype)
        else:
            rows[distinct] -= change


def table_gradients(
    tables: Sequence[Tensor], layout: Layout, ids: Tensor, offsets: Tensor, weights: Tensor | None, grad: Tensor
) -> list[Tensor]:
    """The gradient of each table [N, D], where `grad` [B, sum of widths] is that of what `lookup` returned."""
    gradients = [torch.zeros_like(rows, dtype=grad.dtype) for rows in tables]
    for bags in _bags(layout, ids, offsets, weights):
        gradients[layout.table_of[bags.feature]].index_add_(0, bags.ids, bags.row_gradients(layout, grad))
    return [gradient.to(rows.dtype) for gradient, rows in zip(gradients, tables, strict=True)]


def weight_gradients(tables: Sequence[Tensor], layout: Layout, ids: Tensor, offsets: Tensor, grad: Tensor) -> Tensor:
    """The gradient of each id's weight [nnz], where `grad` [B, sum of widths] is that of what `lookup` returned."""
    bags = _bags(layout, ids, offsets, None)
    return torch.cat(
        [(tables[layout.table_of[own.feature]][own.ids] * own.row_gradients(layout, grad)).sum(dim=1) for own in bags]
    )


# Rules: the state of rows `distinct` [U] is updated in place with summed gradients [U, D]; what is subtracted from the rows is returned.


def _sgd(state: RowState, distinct: Tensor, grad: Tensor, optimizer: SparseOptimizerSpec, lr: float, step: int) -> Tensor:
    return lr * grad


def _adagrad(state: RowState, distinct: Tensor, grad: Tensor, optimizer: SparseOptimizerSpec, lr: float, step: int) -> Tensor:
    square = grad.square()
    if optimizer.kind == "rowwise_adagrad":
        square = square.mean(dim=1, keepdim=True)
    total = state["sum"][distinct] + square
    state["sum"][distinct] = total
    return lr * grad / (total.sqrt() + optimizer.eps)


def _adam(state: RowState, distinct: Tensor, grad: Tensor, optimizer: SparseOptimizerSpec, lr: float, step: int) -> Tensor:
    moment1 = torch.lerp(state["moment1"][distinct], grad, 1 - optimizer.beta1)
    square = grad.square()
    if optimizer.kind == "rowwise_adam":
        square = square.mean(dim=1, keepdim=True)
    moment2 = torch.lerp(state["moment2"][distinct], square, 1 - optimizer.beta2)
    state["moment1"][distinct] = moment1
    state["moment2"][distinct] = moment2
    return lr * adam_correction(optimizer, step) * moment1 / (moment2.sqrt() + optimizer.eps)


def _momentum(state: RowState, distinct: Tensor, grad: Tensor, optimizer: SparseOptimizerSpec, lr: float, step: int) -> Tensor:
    """SGD with momentum as in torch.optim.SGD, but lazy: a row that a batch does not read keeps its value and its velocity."""
    velocity = optimizer.momentum * state["velocity"][distinct] + grad
    state["velocity"][distinct] = velocity
    return lr * velocity


_RULES = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _adagrad,
    "adam": _adam,
    "rowwise_adam": _adam,
    "momentum": _momentum,
}
assert set(_RULES) == set(ROW_OPTIMIZERS), "every row optimizer has a rule"


def clip_pooled(grad: Tensor, layout: Layout, largest: float) -> Tensor:
    """`grad` [B, sum of widths] with the gradient of each pooled vector scaled down to norm `largest`."""
    parts = []
    for feature in range(layout.num_features):
        part = grad[:, layout.columns[feature] : layout.columns[feature + 1]]
        norm = part.norm(dim=1, keepdim=True)
        parts.append(part * (largest / norm.clamp(min=largest)))
    return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class _Bags:
    """One feature's share of a batch."""

    feature: int
    ids: Tensor
    """[n]."""
    offsets: Tensor
    """[B + 1], from 0."""
    weights: Tensor | None
    """[n]."""

    def lengths_per_id(self) -> Tensor:
        """For each id the number of ids in its bag, [n]."""
        lengths = self.offsets.diff()
        return torch.repeat_interleave(lengths, lengths)

    def row_gradients(self, layout: Layout, grad: Tensor) -> Tensor:
        """The gradient that each id sends to its row, [n, D]."""
        pooled = grad[:, layout.columns[self.feature] : layout.columns[self.feature + 1]]
        gradients = torch.repeat_interleave(pooled, self.offsets.diff(), dim=0)
        if layout.is_mean[self.feature]:
            gradients = gradients / self.lengths_per_id().unsqueeze(1)
        if self.weights is not None:
            gradients = gradients * self.weights.unsqueeze(1)
        return gradients


def _bags(layout: Layout, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> list[_Bags]:
    """The batch cut into features."""
    num_samples = (offsets.numel() - 1) // layout.num_features
    bounds = offsets[::num_samples].tolist() if num_samples else [0] * (layout.num_features + 1)
    cut = []
    for feature in range(layout.num_features):
        start, stop = bounds[feature], bounds[feature + 1]
        own = offsets[feature * num_samples : (feature + 1) * num_samples + 1] - start
        cut.append(_Bags(feature, ids[start:stop].long(), own, None if weights is None else weights[start:stop]))
    return cut
