"""Rows behind a cache: the whole tables, in memory that is larger and slower than where rows are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rowstead.kernels.initial import initial_rows
from rowstead.kernels.memory import prefer_large_pages
from rowstead.stores.groups import Group
from rowstead.stores.locked import seen_from

PIECE_ROWS = 1 << 17
"""Rows that are filled in at a time."""


class Backing(Protocol):
    """The records of some tables of one width, numbered through; one thread at a time reads and writes."""

    def read(self, rows: Tensor, into: Sequence[Tensor], places: Tensor | None = None) -> None:
        """Fill `into`, in system memory, with what the records of `rows` int64 [n] hold: [n, columns] for each part.

        With `places` int64 [n], tensors are longer, and records go there.
        """
        ...

    def write(self, rows: Tensor, values: Sequence[Tensor], places: Tensor | None = None) -> None:
        """Take over the records of distinct `rows`; with `places` int64 [n], tensors are longer, and records are there."""
        ...

    def close(self) -> None:
        """Give back what it holds; nothing may be asked of it afterwards."""
        ...


class RamRows:
    """Rows in system memory."""

    def __init__(self, group: Group, *, seed: int, device: torch.device | str = "cpu") -> None:
        """Filled with initial rows, which `device` makes."""
        self._parts = [prefer_large_pages(torch.empty(group.num_rows, width, dtype=kind)) for kind, width in group.columns]
        self._seen: list[Tensor] | None = None
        rows, *states = self._parts
        for state in states:
            state.zero_()
        for table, first in group.tables:
            for start in range(0, table.num_rows, PIECE_ROWS):
                stop = min(start + PIECE_ROWS, table.num_rows)
                piece = initial_rows(table, seed=seed, dtype=rows.dtype, device=torch.device(device), start=start, stop=stop)
                rows[first + start : first + stop] = piece

    def read(self, rows: Tensor, into: Sequence[Tensor], places: Tensor | None = None) -> None:
        for part, values in zip(self._parts, into, strict=True):
            if places is None:
                torch.index_select(part, 0, rows, out=values)
            else:
                values.index_copy_(0, places, part.index_select(0, rows))

    def write(self, rows: Tensor, values: Sequence[Tensor], places: Tensor | None = None) -> None:
        for part, some in zip(self._parts, values, strict=True):
            part.index_copy_(0, rows, some if places is None else some.index_select(0, places))

    def seen_from(self, device: torch.device) -> list[Tensor]:
        """The same memory as tensors of a GPU, which reads and writes it over the bus."""
        if self._seen is None:
            self._seen = [seen_from(device, part) for part in self._parts]
        return self._seen

    def close(self) -> None:
        self._seen = None
        self._parts = [part.new_empty(0, part.shape[1]) for part in self._parts]
