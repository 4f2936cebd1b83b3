"""The inputs of the networks: one vector per field, and first-order weights.

A field is a feature of the model. The vector of a sparse field is its pooled row; that of a dense one with value x is x v, with a trained v.
First-order weights are the last column of rows and of such v, so that they need no tables of their own.

Letters: B examples, Fd dense features, F sparse features, M = Fd + F fields, D width of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rowstead.nn.network import NetworkInputs

INITIAL_STD = 0.01


class Fields(nn.Module):
    """The vectors of all fields, dense ones first: [B, M, D]. All tables have the width D."""

    def __init__(self, inputs: NetworkInputs) -> None:
        super().__init__()
        self.shape = len(inputs.sparse), inputs.model.width
        self.dense_vectors = nn.Parameter(torch.empty(inputs.num_dense, inputs.model.width)) if inputs.num_dense else None
        if self.dense_vectors is not None:
            nn.init.normal_(self.dense_vectors, std=INITIAL_STD)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Dense features [B, Fd] and pooled rows [B, F D] to [B, M, D]."""
        rows = pooled.unflatten(1, self.shape)
        return rows if self.dense_vectors is None else torch.cat([dense.unsqueeze(2) * self.dense_vectors, rows], dim=1)


def split_first_order(pooled: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Pooled rows [B, sum of widths] as vectors [B, sum of widths - F] and as first-order weights [B, F], their last columns."""
    rows = pooled.split(list(widths), dim=1)
    return torch.cat([row[:, :-1] for row in rows], dim=1), torch.cat([row[:, -1:] for row in rows], dim=1)
