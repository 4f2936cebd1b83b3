"""`EmbeddingStore`: one small protocol for every place where rows can live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from rowstead.contracts.batch import Sparse
from rowstead.spec.features import Table


class EmbeddingStore(Protocol):
    """Tables of embedding rows with pooled look-up and an optimizer fused with the backward pass.

    One thread at a time calls `lookup` and `update`. An update is exact: the gradients of one row are summed over repeated
    ids and over the features that share its table before the optimizer sees them.
    """

    tables: tuple[Table, ...]

    def lookup(self, sparse: Sparse) -> Tensor:
        """Pooled rows [B, sum of the features' widths], features in the order of the batch."""
        ...

    def update(self, sparse: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        """Apply the optimizer to every row that `sparse` names.

        grad [B, sum of widths] is the gradient of what `lookup(sparse)` returned; `step` counts from 1.
        """
        ...

    def prefetch(self, sparse: Sparse) -> None:
        """A hint that this batch is coming; a store may ignore it."""
        ...

    def rows(self, table: str, ids: Tensor) -> Tensor:
        """Rows of one table, [len(ids), width]."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint must hold: `<table>.rows` and the optimizer's `<table>.<name>`, one tensor each."""
        ...

    def load_state(self, state: Mapping[str, Tensor], *, rows_only: bool = False) -> None:
        """Take over what `state` of any store gave for the same tables; of the rows alone, if the optimizer is to start anew."""
        ...
