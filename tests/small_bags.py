"""Tables, batches and plain torch modules against which EmbeddingBags are tested."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse
from rowstead.nn.bag_tables import BagTable
from rowstead.nn.embedding_bags import EmbeddingBags

TABLES = (
    BagTable(name="users", num_embeddings=40, embedding_dim=8, feature_names=("user", "friend")),
    BagTable(name="tags", num_embeddings=15, embedding_dim=4, feature_names=("tag",), pooling="mean"),
    BagTable(name="again", num_embeddings=40, embedding_dim=12, feature_names=("user",)),
)
FEATURES = ("user", "friend", "tag")
ROWS = {"user": 40, "friend": 40, "tag": 15}
NUM_SAMPLES = 6


def batch(
    random: torch.Generator, *, weighted: bool = False, dtype: torch.dtype = torch.int64, features: tuple[str, ...] = FEATURES
) -> Sparse:
    """Random bags, many of them empty, and ids that repeat."""
    lengths = torch.randint(0, 5, (len(features), NUM_SAMPLES), generator=random)
    lengths[:, 0] = 0
    ids = [
        torch.randint(0, ROWS[name], (int(own.sum()),), generator=random) for name, own in zip(features, lengths, strict=True)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
    weights = torch.rand(int(offsets[-1]), generator=random) if weighted else None
    return Sparse(ids=torch.cat(ids).to(dtype), offsets=offsets, num_features=len(features), weights=weights)


class Plain(nn.Module):
    """The same tables, one nn.EmbeddingBag each."""

    def __init__(self, bags: EmbeddingBags, *, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag(
                    table.num_embeddings, table.embedding_dim, mode=table.pooling, include_last_offset=True, sparse=sparse
                )
                for table in TABLES
            }
        )
        for name, weight in bags.state_dict().items():
            self.tables[name.split(".")[1]].weight.data.copy_(weight)

    def forward(self, sparse: Sparse, features: tuple[str, ...] = FEATURES) -> Tensor:
        pooled = []
        for table in TABLES:
            for feature in table.feature_names:
                place = features.index(feature)
                own = sparse.offsets[place * NUM_SAMPLES : (place + 1) * NUM_SAMPLES + 1]
                part = slice(int(own[0]), int(own[-1]))
                weights = None if sparse.weights is None else sparse.weights[part]
                if weights is not None and table.pooling == "mean":
                    raise AssertionError("nn.EmbeddingBag has no weighted mean")
                pooled.append(self.tables[table.name](sparse.ids[part].long(), own - own[0], weights))
        return torch.cat(pooled, dim=1)


def loss_of(pooled: Tensor, target: Tensor) -> Tensor:
    return (pooled.sin() - target).square().sum()


def assert_same_rows(bags: EmbeddingBags, plain: Plain, tolerance: float = 1e-5) -> None:
    for name, weight in bags.state_dict().items():
        torch.testing.assert_close(weight.cpu(), plain.tables[name.split(".")[1]].weight.data, rtol=tolerance, atol=tolerance)


class Keyed:
    """A batch with the methods of TorchRec's KeyedJaggedTensor that we use."""

    def __init__(self, keys: list[str], sparse: Sparse) -> None:
        self._keys, self._sparse = keys, sparse

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._sparse.ids

    def offsets(self) -> Tensor:
        return self._sparse.offsets

    def lengths(self) -> Tensor:
        return self._sparse.offsets.diff()

    def weights_or_none(self) -> Tensor | None:
        return self._sparse.weights


def two_tables(**more: Any) -> EmbeddingBags:
    tables = [BagTable(name=name, num_embeddings=10, embedding_dim=4) for name in ("a", "b")]
    return EmbeddingBags(tables, **more)


def one_example(weights: Tensor | None = None) -> Sparse:
    return Sparse(ids=torch.tensor([1, 2]), offsets=torch.tensor([0, 1, 2]), num_features=2, weights=weights)
