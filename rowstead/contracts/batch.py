"""`Batch`: one mini-batch as every room sees it.

Letters: B examples, F sparse features, Fd dense features, nnz ids in the whole batch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """The ids of a batch, feature-major: the layout of TorchRec's KeyedJaggedTensor. Empty bags are legal."""

    ids: Tensor
    """Rows of the tables, int64 or int32 [nnz]."""
    offsets: Tensor
    """int64 [F*B + 1]: feature f of example b owns ids[offsets[f*B+b] : offsets[f*B+b+1]]."""
    num_features: int
    """F."""
    weights: Tensor | None = None
    """Per-id weights [nnz], where the log has them."""

    @property
    def num_samples(self) -> int:
        """B."""
        return (self.offsets.numel() - 1) // self.num_features if self.num_features else 0

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Sparse:
        return _moved(self, device, non_blocking)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Examples ready for a model: transforms applied, ids hashed to rows."""

    dense: Tensor
    """float32 [B, Fd]."""
    sparse: Sparse
    """The ids of all sparse features."""
    labels: Tensor | None = None
    """float32 [B], from 0 to 1; absent when predicting."""
    weights: Tensor | None = None
    """Example weights, float32 [B]."""
    true_p: Tensor | None = None
    """True click probabilities, float32 [B]; only a synthetic log knows them."""

    @property
    def num_samples(self) -> int:
        """B."""
        return int(self.dense.shape[0])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        return _moved(self, device, non_blocking)


Movable = TypeVar("Movable", Sparse, Batch)


def _moved(value: Movable, device: torch.device | str, non_blocking: bool) -> Movable:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if isinstance(part, (Tensor, Sparse)):
            changes[field.name] = part.to(device, non_blocking=non_blocking)
    return dataclasses.replace(value, **changes)
