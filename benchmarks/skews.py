"""Ids as logs have them: few rows take most accesses, and which ones they are follows no order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.embedding import Shape
from rowstead.data.batch import Sparse

HOT_ROWS, HOT_ACCESSES = 0.01, 0.9
"""Criteo-like: such a share of the rows takes such a share of the accesses."""


def share_of_hottest(num_rows: int, exponent: float, *, rows: float = HOT_ROWS) -> float:
    """The share of accesses that go to the hottest share `rows` of the rows, if the k-th hottest gets `k ** -exponent`."""
    weights = torch.arange(1, num_rows + 1, dtype=torch.float64) ** -exponent
    return float(weights[: max(1, int(num_rows * rows))].sum() / weights.sum())


@lru_cache(maxsize=8)
def criteo_like_exponent(num_rows: int) -> float:
    """Zipf's exponent at which the hottest rows take their share, by bisection."""
    low, high = 0.0, 4.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if share_of_hottest(num_rows, middle) < HOT_ACCESSES else (low, middle)
    return high


@lru_cache(maxsize=4)
def _ranks(num_rows: int, device: str) -> tuple[Tensor, Tensor]:
    """The accesses of the hottest rows up to each, [N], and the row of every rank, [N]."""
    weights = torch.arange(1, num_rows + 1, dtype=torch.float64) ** -criteo_like_exponent(num_rows)
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    return (weights.cumsum(0) / weights.sum()).to(device), rows.to(device)


@dataclass(frozen=True)
class CriteoLike(Shape):
    """A shape whose ids are Zipf-distributed; each table has hot rows of its own."""

    def draw(self, device: str) -> Sparse:
        num_ids = self.batch_size * self.num_ids
        drawn = torch.rand(self.num_tables, num_ids, device=device, dtype=torch.float64)
        return self._sparse(torch.searchsorted(_ranks(self.num_rows, device)[0], drawn), self.batch_size)

    def of_ranks(self, first: int, last: int, device: str) -> Sparse:
        """A batch of one id a bag that names the rows of ranks `first` to `last` of every table, the hottest of which is 0."""
        ranks = torch.arange(first, last, device=device).expand(self.num_tables, -1)
        return self._sparse(ranks, last - first)

    def _sparse(self, ranks: Tensor, batch_size: int) -> Sparse:
        """ranks [T, ids of a table]."""
        rows = _ranks(self.num_rows, str(ranks.device))[1]
        shifts = torch.arange(self.num_tables, device=ranks.device).unsqueeze(1) * (self.num_rows // self.num_tables)
        ids = rows[ranks.clamp(max=self.num_rows - 1)].add_(shifts).remainder_(self.num_rows).flatten()
        num_bags = self.num_tables * batch_size
        offsets = torch.arange(num_bags + 1, device=ranks.device) * (ids.numel() // num_bags)
        return Sparse(ids=ids, offsets=offsets, num_features=self.num_tables)
