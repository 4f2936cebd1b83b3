"""A network over features of which some are histories: encoders make one vector of each history, and the network sees vectors only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse
from rowstead.kernels.layout import Layout
from rowstead.nn.encoders import HistoryEncoder, build_encoder
from rowstead.nn.network import Network
from rowstead.spec.features import FeaturesSpec
from rowstead.stores.histories import HistoryLayout


class HistoryNetwork(Network):
    """Any network, below it the encoders of histories; its pooled rows have the encoders' vectors among them."""

    def __init__(self, network: Network, features: FeaturesSpec, layout: Layout) -> None:
        nn.Module.__init__(self)
        self.network = network
        self.inputs, self.compiles = network.inputs, network.compiles
        specs = features.expanded_sparse()
        self.histories = [index for index, spec in enumerate(specs) if spec.is_history]
        """Indices of their features."""
        names = [spec.name for spec in specs]
        self.targets: list[int | None] = []
        """For each history the index of the feature that its encoder compares it with."""
        self.max_ids: list[int] = []
        encoders: list[HistoryEncoder] = []
        for index in self.histories:
            spec, width = specs[index], layout.tables[layout.table_of[index]].width
            assert spec.encoder is not None
            assert spec.max_ids is not None
            self.targets.append(None if spec.encoder.target is None else names.index(spec.encoder.target))
            self.max_ids.append(spec.max_ids)
            encoders.append(build_encoder(spec.encoder, width=width, max_ids=spec.max_ids))
        self.encoders = nn.ModuleList(encoders)
        self._layout = HistoryLayout(layout)

    def pool(self, flat: Tensor, sparse: Sparse) -> Tensor:
        """Pooled rows [B, sum of widths] of what a `HistoryStore` found for a batch."""
        rows = self._layout.unpack(flat, sparse)
        vectors = list(rows)
        for feature, target, encoder in zip(self.histories, self.targets, self.encoders, strict=True):
            against = None if target is None else rows[target]
            vectors[feature] = encoder(rows[feature], self._layout.offsets(feature, sparse), against)
        return torch.cat(vectors, dim=1)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        logits: Tensor = self.network(dense, pooled)
        return logits

    def project(self, dense: Tensor) -> Tensor | None:
        return self.network.project(dense)

    def join(self, projected: Any, pooled: Tensor) -> Tensor:
        return self.network.join(projected, pooled)

    def seed_step(self, number: int, rank: int = 0) -> None:
        self.network.seed_step(number, rank)
