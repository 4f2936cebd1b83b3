"""Rows behind a cache: the whole tables, in memory that is larger and slower than where rows are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rowstead.kernels.cpu.memory import prefer_large_pages
from rowstead.kernels.initial import initial_rows
from rowstead.spec.features import Table
from rowstead.stores.device import numbered
from rowstead.stores.groups import CacheGroup
from rowstead.stores.pinned import seen_by_both
from rowstead.stores.state import StatePart

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
    """Rows in system memory.

    Optimizer states of one number a row stay in the memory of the `device` that trains: over its bus each would take as long as
    half a row.
    """

    def __init__(self, group: CacheGroup, *, seed: int, device: torch.device | str = "cpu") -> None:
        """Filled with initial rows, which `device` makes."""
        device = numbered(device)
        self._parts: list[Tensor] = []
        self._seen: list[Tensor] = []
        for place, (kind, width) in enumerate(group.columns):
            shape = group.num_rows, width
            if device.type == "cpu":
                part = seen = prefer_large_pages(torch.empty(shape, dtype=kind))
            elif place and width == 1:
                part = seen = torch.empty(shape, dtype=kind, device=device)
            else:
                part, seen = seen_by_both(device, shape, kind)
            self._parts.append(part)
            self._seen.append(seen)
        rows, *states = self._parts
        for state in states:
            state.zero_()
        for table, first in group.tables:
            for start in range(0, table.num_rows, PIECE_ROWS):
                stop = min(start + PIECE_ROWS, table.num_rows)
                piece = initial_rows(table, seed=seed, dtype=rows.dtype, device=device, start=start, stop=stop)
                rows[first + start : first + stop] = piece

    def read(self, rows: Tensor, into: Sequence[Tensor], places: Tensor | None = None) -> None:
        for part, values in zip(self._parts, into, strict=True):
            if part.is_cuda:
                values[slice(None) if places is None else places] = part[rows.to(part.device)].cpu()
            elif places is None:
                torch.index_select(part, 0, rows, out=values)
            else:
                values.index_copy_(0, places, part.index_select(0, rows))

    def write(self, rows: Tensor, values: Sequence[Tensor], places: Tensor | None = None) -> None:
        for part, some in zip(self._parts, values, strict=True):
            given = some if places is None else some.index_select(0, places)
            part.index_copy_(0, rows.to(part.device), given.to(part.device))
            if part.is_cuda:
                torch.cuda.synchronize(part.device)  # as all of it would be in system memory

    @property
    def seen(self) -> list[tuple[Tensor, bool]]:
        """The same memory as tensors of the device that trains, and whether a GPU reads and writes them over the bus."""
        return [(seen, not part.is_cuda) for seen, part in zip(self._seen, self._parts, strict=True)]

    def close(self) -> None:
        self._parts = self._seen = [part.new_empty(0, part.shape[1]) for part in self._parts]


def parts_behind(
    table: Table, first: int, group: CacheGroup, backing: Backing, *, before_write: Callable[[], None]
) -> Iterator[StatePart]:
    """The parts of a table whose records begin at row `first` of its group: their columns. `before_write` is called before any changes."""

    def values(rows: Tensor) -> list[Tensor]:
        into = [torch.empty(rows.numel(), width, dtype=dtype) for dtype, width in group.columns]
        backing.read(rows + first, into)
        return into

    for column, name in enumerate(["rows", *group.state_names]):
        dtype, width = group.columns[column]

        def read(start: int, stop: int, column: int = column) -> Tensor:
            return values(torch.arange(start, stop))[column]

        def take(rows: Tensor, column: int = column) -> Tensor:
            return values(rows.cpu())[column]

        def write(start: int, given: Tensor, column: int = column) -> None:
            before_write()
            rows = torch.arange(start, start + len(given))
            now = values(rows)
            now[column].copy_(given)
            backing.write(rows + first, now)

        yield StatePart(
            name=f"{table.name}.{name}",
            shape=(table.num_rows, width),
            dtype=dtype,
            num_rows=table.num_rows,
            num_columns=width,
            read=read,
            write=write,
            take=take,
        )
