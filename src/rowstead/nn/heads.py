"""Task heads: the loss of logits against labels, and the prediction that a logit stands for. All tensors are [B]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rowstead.spec.heads import HeadKind


@dataclass(frozen=True, kw_only=True)
class Head:
    """The arithmetic of one entry of `spec.heads.HEADS`."""

    example_loss: Callable[[Tensor, Tensor], Tensor]
    """Logits and labels to the loss of each example."""
    predict: Callable[[Tensor], Tensor]
    """Logits to predictions, in the range of the labels."""

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None, total_weight: float | None = None) -> Tensor:
        """Mean loss over a batch, weighted by example.

        With `total_weight` these examples are a share of a batch of that total weight, and this is their share of its mean.
        """
        each = self.example_loss(logits, labels)
        if total_weight is not None:
            weighted = each if weights is None else each * weights
            return weighted.sum() / max(total_weight, torch.finfo(each.dtype).tiny)
        if weights is None:
            return each.mean()
        return (each * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def _squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    return (torch.sigmoid(logits) - labels).square()


_HEADS: dict[HeadKind, Head] = {
    "bce": Head(example_loss=_cross_entropy, predict=torch.sigmoid),
    "mse": Head(example_loss=_squared_error, predict=torch.sigmoid),
}


def head_of(kind: HeadKind) -> Head:
    """The head that is trained with this loss."""
    return _HEADS[kind]
