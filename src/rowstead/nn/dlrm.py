"""The deep learning recommendation model: embedding tables under a network, by default bottom MLP, interaction, top MLP."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rowstead.data.batch import Batch
from rowstead.nn import layers
from rowstead.nn.heads import head_of
from rowstead.nn.network import Network, NetworkInputs, build_network
from rowstead.spec.errors import DataError, RowsteadError
from rowstead.spec.features import FeaturesSpec
from rowstead.spec.heads import HeadKind
from rowstead.spec.interactions import INTERACTIONS, InteractionInputs
from rowstead.spec.model import ModelSpec
from rowstead.spec.network_options import DLRMSpec
from rowstead.stores.base import EmbeddingStore


class DLRMNetwork(Network):
    """The built-in network: a bottom MLP projects dense features, which interact with the pooled rows under a top MLP."""

    def __init__(self, inputs: NetworkInputs, options: DLRMSpec) -> None:
        super().__init__(inputs, options)
        spec, num_dense = inputs.model, inputs.num_dense
        self.bottom = None
        if num_dense:
            self.bottom = layers.MLP(
                num_dense,
                (*spec.bottom, spec.dense_width),
                last_relu=True,
                norm=spec.bottom_norm,
                dropout=spec.bottom_dropout,
            )
        dense_width = spec.dense_width if num_dense else 0
        widths = InteractionInputs(width=spec.width, dense_width=dense_width, pooled_width=inputs.pooled_width)
        entry = INTERACTIONS[spec.interaction.kind]
        self.interaction: nn.Module = getattr(layers, entry.layer)(widths, spec.interaction)
        self.top = layers.MLP(
            entry.out_width(widths, spec.interaction),
            (*spec.top, 1),
            last_relu=False,
            norm=spec.top_norm,
            dropout=spec.top_dropout,
        )
        self._draws = bool(spec.bottom_dropout or spec.top_dropout)

    def project(self, dense: Tensor) -> Tensor | None:
        """The dense vectors [B, dense width]; None for a model without dense features."""
        return self.bottom(dense) if self.bottom is not None else None

    def join(self, projected: Tensor | None, pooled: Tensor) -> Tensor:
        """Logits [B] of the dense vectors and the pooled rows."""
        logits: Tensor = self.top(self.interaction(projected, pooled))
        return logits.squeeze(1)

    def seed_step(self, number: int, rank: int = 0) -> None:
        """As `Network.seed_step` with dropout; else nothing is drawn."""
        if self._draws:
            super().seed_step(number, rank)


class DLRM(nn.Module):
    """A whole model: an EmbeddingStore under a Network. `forward` takes a Batch and returns logits [B]."""

    def __init__(
        self,
        spec: ModelSpec,
        features: FeaturesSpec,
        store: EmbeddingStore,
        *,
        head: HeadKind = "bce",
        negative_keep_rate: float = 1.0,
        encode: Callable[[Mapping[str, Any]], Batch] | None = None,
    ) -> None:
        super().__init__()
        self.store = store
        self.net = build_network(spec, features, store.tables)
        self.head = head_of(head)
        self.log_keep_rate = math.log(negative_keep_rate)
        self._encode = encode

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B] as of the training log, whose negatives may be downsampled."""
        if self.store.tables and batch.sparse.num_samples != batch.num_samples:
            raise DataError(f"{batch.num_samples} examples have dense values and {batch.sparse.num_samples} have ids")
        pooled = self.store.lookup(batch.sparse) if self.store.tables else batch.dense.new_zeros(batch.num_samples, 0)
        logits: Tensor = self.net(batch.dense, pooled)
        return logits

    @overload
    def predict(self, rows: Batch) -> Tensor: ...

    @overload
    def predict(self, rows: Any) -> NDArray[np.float32]: ...

    @torch.no_grad()
    def predict(self, rows: Any) -> Any:
        """Click probabilities [B], corrected for downsampled negatives: of a Batch as a tensor, of raw columns (see `encode`) as an array."""
        if not isinstance(rows, Batch):
            return self.predict(self.encode(rows).to(next(self.net.parameters()).device)).cpu().numpy()
        return self.head.predict(self(rows) + self.log_keep_rate)

    def encode(self, columns: Any) -> Batch:
        """Encode raw rows with the transforms and the hashing of training: a pandas DataFrame, an Arrow table, or names to lists or arrays."""
        if self._encode is None:
            raise RowsteadError("only a model from `rowstead.load` can encode raw columns")
        return self._encode(columns)
