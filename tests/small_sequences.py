"""Tables and plain torch modules against which Embeddings are tested; batches are those of `small_bags`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse
from rowstead.nn.bag_tables import EmbeddingTable
from rowstead.nn.embeddings import Embeddings
from tests.small_bags import FEATURES

SEQUENCE_TABLES = (
    EmbeddingTable(name="users", num_embeddings=40, embedding_dim=8, feature_names=("user", "friend")),
    EmbeddingTable(name="tags", num_embeddings=15, embedding_dim=4, feature_names=("tag",)),
    EmbeddingTable(name="again", num_embeddings=40, embedding_dim=12, feature_names=("user",)),
)
KEYS = ["user@users", "friend", "tag", "user@again"]


class PlainSequences(nn.Module):
    """The same tables, one nn.Embedding each."""

    def __init__(self, embeddings: Embeddings, *, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                table.name: nn.Embedding(table.num_embeddings, table.embedding_dim, sparse=sparse)
                for table in embeddings.embedding_configs()
            }
        )
        for name, weight in embeddings.state_dict().items():
            self.tables[name.split(".")[1]].weight.data.copy_(weight)

    def forward(self, sparse: Sparse, features: Sequence[str] = FEATURES) -> dict[str, tuple[list[int], Tensor]]:
        """For each feature the ids of each example, and their rows."""
        count, found = sparse.num_samples, {}
        for key, (table, feature) in zip(KEYS, TABLE_AND_FEATURE, strict=True):
            bounds = sparse.offsets.tolist()
            bags = [
                sparse.ids[bounds[bag] : bounds[bag + 1]].long()
                for bag in range(features.index(feature) * count, (features.index(feature) + 1) * count)
            ]
            ids = torch.cat([sparse.ids[:0].long(), *bags])
            found[key] = ([len(bag) for bag in bags], self.tables[table](ids))
        return found


TABLE_AND_FEATURE = [(table.name, feature) for table in SEQUENCE_TABLES for feature in table.feature_names]


def rows_loss(rows: dict[str, Any], seed: int = 0) -> Tensor:
    """A loss with another gradient for each row at each index; `rows` are JaggedRows or what PlainSequences return."""
    random, total = torch.Generator().manual_seed(seed), torch.zeros(())
    for key in KEYS:
        values = rows[key][1] if isinstance(rows[key], tuple) else rows[key].values()
        target = torch.randn(values.shape, generator=random)
        total = total + (values.cpu().sin() - target).square().sum()
    return total


def assert_same_tables(embeddings: Embeddings, plain: PlainSequences, tolerance: float = 1e-5) -> None:
    for name, weight in embeddings.state_dict().items():
        other = plain.tables[name.split(".")[1]].weight.data
        torch.testing.assert_close(weight.cpu(), other, rtol=tolerance, atol=tolerance)
