"""The deep learning recommendation model: embedding tables under a network, by default bottom MLP, interaction, top MLP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rowstead.data.batch import Batch, Sparse
from rowstead.data.row_encoder import RowEncoder
from rowstead.kernels.layout import layout_of
from rowstead.nn import layers
from rowstead.nn.heads import TaskLosses, head_of, losses_of
from rowstead.nn.histories import HistoryNetwork
from rowstead.nn.nearest import Metric, nearest
from rowstead.nn.network import Network, NetworkInputs, build_network
from rowstead.spec.errors import DataError, RowsteadError, did_you_mean
from rowstead.spec.features import FeaturesSpec, Table
from rowstead.spec.heads import HeadKind
from rowstead.spec.interactions import INTERACTIONS, InteractionInputs
from rowstead.spec.model import ModelSpec
from rowstead.spec.network_options import DLRMSpec
from rowstead.stores.base import EmbeddingStore

PREDICT_BATCH = 16_384
"""Raw rows are predicted this many at a time, to bound the memory."""
ROWS_AT_ONCE = 1 << 20
"""Of a table are copied at a time."""


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
            (*spec.top, spec.num_outputs),
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


def build_model_network(spec: ModelSpec, features: FeaturesSpec, tables: Sequence[Table]) -> Network:
    """The network of a model with the encoders of its histories, with fresh parameters."""
    network = build_network(spec, features, tables)
    return HistoryNetwork(network, features, layout_of(features, tuple(tables))) if features.has_histories else network


class DLRM(nn.Module):
    """A whole model: an EmbeddingStore under a Network. `forward` takes a Batch and returns logits [B], or [B, T] of T tasks."""

    def __init__(
        self,
        spec: ModelSpec,
        features: FeaturesSpec,
        store: EmbeddingStore,
        *,
        head: HeadKind = "bce",
        negative_keep_rate: float = 1.0,
        encoder: RowEncoder | None = None,
    ) -> None:
        super().__init__()
        self.store = store
        self.net = build_model_network(spec, features, store.tables)
        self.head = losses_of(spec) if spec.tasks else head_of(head)
        self.tasks = spec.tasks
        """The labels that it predicts; empty for the log's one label."""
        self.is_chain = isinstance(self.head, TaskLosses) and self.head.is_chain
        """Whether the second label can only be where the first one is."""
        self.log_keep_rate = math.log(negative_keep_rate)
        self._encoder = encoder

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B] or [B, T] as of the training log, whose negatives may be downsampled."""
        if self.store.tables and batch.sparse.num_samples != batch.num_samples:
            raise DataError(f"{batch.num_samples} examples have dense values and {batch.sparse.num_samples} have ids")
        pooled = batch.dense.new_zeros(batch.num_samples, 0)
        if self.store.tables:
            pooled = self.pool(self.store.lookup(batch.sparse), batch.sparse)
        logits: Tensor = self.net(batch.dense, pooled)
        return logits

    def pool(self, rows: Tensor, sparse: Sparse) -> Tensor:
        """Pooled rows [B, sum of widths] of what the store found for a batch, with histories encoded."""
        return self.net.pool(rows, sparse) if isinstance(self.net, HistoryNetwork) else rows

    @overload
    def predict(self, rows: Batch) -> Tensor: ...

    @overload
    def predict(self, rows: Any) -> NDArray[np.float32]: ...

    @torch.no_grad()
    def predict(self, rows: Any) -> Any:
        """Click probabilities [B], corrected for downsampled negatives.

        Of raw rows (a DataFrame, an Arrow table, a dict of columns: see `encode`) as a float32 array, of a Batch as a tensor.
        Of a model with tasks the prediction of each of them, [B, T].
        """
        if not isinstance(rows, Batch):
            device = next(self.net.parameters()).device
            batches = self._raw_encoder.batches(rows, PREDICT_BATCH)
            empty = np.empty((0, len(self.tasks)) if self.tasks else 0, np.float32)
            return np.concatenate([empty, *(self.predict(batch.to(device)).cpu().numpy() for batch in batches)])
        return self.head.predict(self(rows) + self.log_keep_rate)

    def encode(self, columns: Any) -> Batch:
        """Encode raw rows with the transforms and the hashing of training: a pandas DataFrame, an Arrow table, or names to lists or arrays."""
        return self._raw_encoder.encode(columns)

    def row_of(self, feature: str, ids: Any) -> NDArray[np.int64]:
        """The rows [n] of a sparse feature's table that ids [n] are hashed to; -1 where an id is missing."""
        return self._raw_encoder.row_of(feature, ids)

    @torch.no_grad()
    def embeddings(self, name: str, ids: Any = None) -> NDArray[np.float32]:
        """Embedding rows as an array [n, width]: those of `ids` of a sparse feature, or all rows of its table; zeros where an id is missing.

        `name` is a feature's or a table's. The array is float32 and C-contiguous, as FAISS takes it.
        """
        table = self._table_of(name)
        rows = np.arange(table.num_rows) if ids is None else self.row_of(name, ids)
        found = np.zeros((len(rows), table.width), np.float32)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[start : start + ROWS_AT_ONCE]
            values = self.store.rows(table.name, torch.from_numpy(np.maximum(part, 0)).to(self.store.device or "cpu"))
            found[start : start + len(part)] = values.float().cpu().numpy()
        found[rows < 0] = 0
        return found

    def nearest(
        self, feature: str, ids: Any, k: int = 10, *, among: Any = None, metric: Metric = "cosine"
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The `k` nearest of the ids `among` to each of `ids`, by exact search: scores [n, k], best first, and indices [n, k] into `among`.

        Without `among` the indices are rows of the feature's table. `metric` is `cosine` or `dot`.
        """
        return nearest(self.embeddings(feature, ids), self.embeddings(feature, among), k, metric=metric)

    @property
    def _raw_encoder(self) -> RowEncoder:
        if self._encoder is None:
            raise RowsteadError("only a model from `rowstead.load` knows how training encoded raw columns")
        return self._encoder

    def _table_of(self, name: str) -> Table:
        names = self._raw_encoder.feature_names
        for table in self.store.tables:
            if table.name == name or (name in names and names.index(name) in table.features):
                return table
        known = dict.fromkeys([*names, *(table.name for table in self.store.tables)])
        raise RowsteadError(f"no sparse feature or table `{name}`: {did_you_mean(name, known)}")
