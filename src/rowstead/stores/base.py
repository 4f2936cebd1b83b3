"""`EmbeddingStore`: one small protocol for every place where rows can live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.spec.features import Table


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """One tensor of a store's state, or the piece of it that this process keeps, some rows at a time.

    Rows in `read` and `write` are counted from the piece's own first row. A table may be larger than the memory: whoever saves
    or loads it asks for as many rows as fit.
    """

    name: str
    """`<table>.rows`, or the optimizer's `<table>.<name>`."""
    shape: tuple[int, int]
    """Of the whole tensor: rows and columns."""
    dtype: torch.dtype
    num_rows: int
    """Of this piece."""
    num_columns: int
    read: Callable[[int, int], Tensor]
    """Rows `start` to `stop` of this piece, [stop - start, num_columns]; on any device, not to be written to."""
    write: Callable[[int, Tensor], None]
    """Take over rows [n, num_columns] from row `start` of this piece on."""
    first_row: int = 0
    """Of this piece, in the whole."""
    first_column: int = 0
    is_copy: bool = False
    """Whether another process saves the same piece; this one only loads it."""
    take: Callable[[Tensor], Tensor] | None = None
    """Rows of this piece by their numbers, int64 [n] on the CPU and rising: [n, num_columns]. Without it, `read` is asked for
    all rows between."""


@runtime_checkable
class SavedState(Protocol):
    """Tensors that somebody saved, read some rows and columns at a time."""

    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        ...

    def rows(self, name: str, start: int, stop: int, first_column: int = 0, last_column: int | None = None) -> Tensor:
        """Rows `start` to `stop`, columns `first_column` to `last_column`, of a tensor; reads no more than those rows."""
        ...


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

    @property
    def batches_ahead(self) -> int:
        """How many batches before they come it is of use to announce them."""
        ...

    def prefetch(self, sparse: Sparse) -> None:
        """A hint that this batch is coming, after those announced before; a store may ignore it.

        Batches that were announced come in that order, with the same tensors, and look-ups between them are for evaluation only
        (`eval()` of the module that holds the store).
        """
        ...

    def drop_prefetched(self) -> None:
        """Batches that were announced are not coming after all."""
        ...

    def rows(self, table: str, ids: Tensor) -> Tensor:
        """Rows of one table, [len(ids), width]."""
        ...

    def parts(self) -> list[StatePart]:
        """All that a checkpoint must hold, tensor by tensor, of what this process keeps; good until the store changes places.

        Between steps alone: no part may be read or written while `lookup` or `update` runs.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint must hold: `<table>.rows` and the optimizer's `<table>.<name>`, one tensor each."""
        ...

    def load_state(self, state: Mapping[str, Tensor], *, rows_only: bool = False) -> None:
        """Take over what `state` of any store gave for the same tables; of the rows alone, if the optimizer is to start anew.

        A mapping that is a `SavedState` is read some rows at a time.
        """
        ...
