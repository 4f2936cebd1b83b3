"""The deep learning recommendation model: bottom MLP, tables, interaction, top MLP."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rowstead.data.batch import Batch
from rowstead.nn.layers import MLP, Concat, Cross, Dot
from rowstead.spec.errors import DataError, RowsteadError
from rowstead.spec.features import FeaturesSpec
from rowstead.spec.model import ModelSpec
from rowstead.stores.base import EmbeddingStore


class DenseNet(nn.Module):
    """Everything of a DLRM but its tables: dense features [B, Fd] and pooled rows [B, sum of widths] to log-odds [B]."""

    def __init__(self, spec: ModelSpec, *, num_dense: int, pooled_width: int) -> None:
        super().__init__()
        self.bottom = MLP(num_dense, (*spec.bottom, spec.width), last_relu=True) if num_dense else None
        dense_width = spec.width if num_dense else 0
        self.interaction = _interaction(spec, dense_width, pooled_width)
        self.top = MLP(self.interaction.out_width, (*spec.top, 1), last_relu=False)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.joined(self.projected(dense), pooled)

    def projected(self, dense: Tensor) -> Tensor | None:
        """The part that needs no rows yet: the dense vector [B, width], or none of a model without dense features."""
        return self.bottom(dense) if self.bottom is not None else None

    def joined(self, projected: Tensor | None, pooled: Tensor) -> Tensor:
        """The rest, once the rows are there."""
        log_odds: Tensor = self.top(self.interaction(projected, pooled))
        return log_odds.squeeze(1)


def _interaction(spec: ModelSpec, dense_width: int, pooled_width: int) -> Concat | Dot | Cross:
    kind = spec.interaction.kind
    if kind == "dot":
        return Dot(dense_width, pooled_width, spec.width)
    if kind == "cross":
        layers, rank = spec.interaction.cross_layers, spec.interaction.cross_rank
        return Cross(dense_width, pooled_width, layers=layers, rank=rank)
    return Concat(dense_width, pooled_width)


class DLRM(nn.Module):
    """A whole model: an EmbeddingStore under a DenseNet. `forward` takes a Batch and returns log-odds [B]."""

    def __init__(
        self,
        spec: ModelSpec,
        features: FeaturesSpec,
        store: EmbeddingStore,
        *,
        negative_keep_rate: float = 1.0,
        encode: Callable[[Mapping[str, Any]], Batch] | None = None,
    ) -> None:
        super().__init__()
        self.store = store
        pooled_width = sum(table.width * len(table.features) for table in store.tables)
        self.net = DenseNet(spec, num_dense=len(features.expanded_dense()), pooled_width=pooled_width)
        self.log_keep_rate = math.log(negative_keep_rate)
        self._encode = encode

    def forward(self, batch: Batch) -> Tensor:
        """Log-odds [B] in the world of the training log."""
        if self.store.tables and batch.sparse.num_samples != batch.num_samples:
            raise DataError(f"{batch.num_samples} examples have dense values and {batch.sparse.num_samples} have ids")
        pooled = self.store.lookup(batch.sparse) if self.store.tables else batch.dense.new_zeros(batch.num_samples, 0)
        log_odds: Tensor = self.net(batch.dense, pooled)
        return log_odds

    @torch.no_grad()
    def predict(self, batch: Batch) -> Tensor:
        """Click probabilities [B], corrected for negatives that the training log left out."""
        return torch.sigmoid(self(batch) + self.log_keep_rate)

    def encode(self, columns: Mapping[str, Any]) -> Batch:
        """Raw columns (names to lists or arrays, as in the log) as a Batch: transforms and hashing of training."""
        if self._encode is None:
            raise RowsteadError("only a model that `rowstead.load` gave can encode raw columns")
        return self._encode(columns)
