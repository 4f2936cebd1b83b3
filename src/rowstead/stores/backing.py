"""What is behind a cache: whole tables in memory that is larger and slower than where rows are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rowstead.kernels.cpu.memory import advise_huge_pages
from rowstead.kernels.initial import initial_rows
from rowstead.spec.features import Table
from rowstead.stores.cache_slots import Moves
from rowstead.stores.device import resolve_device
from rowstead.stores.groups import CacheGroup
from rowstead.stores.pinned import allocate_mapped
from rowstead.stores.state import StatePart

PIECE_ROWS = 1 << 17
"""Rows that are initialised at a time."""


class Backing(Protocol):
    """The records of one group of tables: a row and its optimizer states. One thread at a time reads and writes."""

    def read(self, rows: Tensor, into: Sequence[Tensor], slots: Tensor | None = None) -> None:
        """Read the records of `rows` int64 [n] into tensors in system memory, [n, columns] each.

        With `slots` int64 [n] the tensors are longer, and the records go to these indices.
        """
        ...

    def write(self, rows: Tensor, values: Sequence[Tensor], slots: Tensor | None = None) -> None:
        """Write the records of distinct `rows`; with `slots` int64 [n] the tensors are longer, and the records are at these indices."""
        ...

    def close(self) -> None:
        """Release memory and files; the backing cannot be used afterwards."""
        ...


def move_rows(parts: Sequence[Tensor], moves: Moves, backing: Backing) -> None:
    """Write back `moves.out_slots` of rows and states [P, ...] in system memory, then fill `moves.in_slots` from the backing."""
    backing.write(moves.out_rows, parts, moves.out_slots)
    backing.read(moves.in_rows, parts, moves.in_slots)


def move_rows_over_bus(parts: Sequence[Tensor], moves: Moves, backing: Backing) -> None:
    """`move_rows` for slots in GPU memory: queued on the current stream, without waiting."""
    from rowstead.kernels.gpu.cache import swap_rows

    assert isinstance(backing, RamRows), "a GPU reads rows in system memory only"
    for part, (behind, over_bus) in zip(parts, backing.on_device, strict=True):
        swap_rows(part, behind, moves.in_rows, moves.in_slots, moves.out_rows, moves.out_slots, over_bus=over_bus)


class RamRows:
    """Rows in system memory.

    Optimizer states with one number per row stay in the memory of `device`: over the bus each would take half as long as a row.
    """

    def __init__(self, group: CacheGroup, *, seed: int, device: torch.device | str = "cpu") -> None:
        """Filled with initial rows, which `device` draws."""
        device = resolve_device(device)
        self._parts: list[Tensor] = []
        self._on_device: list[Tensor] = []
        for index, (kind, width) in enumerate(group.columns):
            shape = group.num_rows, width
            if device.type == "cpu":
                part = seen = advise_huge_pages(torch.empty(shape, dtype=kind))
            elif index and width == 1:
                part = seen = torch.empty(shape, dtype=kind, device=device)
            else:
                part, seen = allocate_mapped(device, shape, kind)
            self._parts.append(part)
            self._on_device.append(seen)
        rows, *states = self._parts
        for state in states:
            state.zero_()
        for table, first in group.tables:
            for start in range(0, table.num_rows, PIECE_ROWS):
                stop = min(start + PIECE_ROWS, table.num_rows)
                piece = initial_rows(table, seed=seed, dtype=rows.dtype, device=device, start=start, stop=stop)
                rows[first + start : first + stop] = piece

    def read(self, rows: Tensor, into: Sequence[Tensor], slots: Tensor | None = None) -> None:
        for part, values in zip(self._parts, into, strict=True):
            if part.is_cuda:
                values[slice(None) if slots is None else slots] = part[rows.to(part.device)].cpu()
            elif slots is None:
                torch.index_select(part, 0, rows, out=values)
            else:
                values.index_copy_(0, slots, part.index_select(0, rows))

    def write(self, rows: Tensor, values: Sequence[Tensor], slots: Tensor | None = None) -> None:
        for part, some in zip(self._parts, values, strict=True):
            given = some if slots is None else some.index_select(0, slots)
            part.index_copy_(0, rows.to(part.device), given.to(part.device))
            if part.is_cuda:
                torch.cuda.synchronize(part.device)  # writes to system memory are done on return, too

    @property
    def on_device(self) -> list[tuple[Tensor, bool]]:
        """The same memory as tensors of `device`, and whether a GPU accesses it over the bus."""
        return [(seen, not part.is_cuda) for seen, part in zip(self._on_device, self._parts, strict=True)]

    def close(self) -> None:
        self._parts = self._on_device = [part.new_empty(0, part.shape[1]) for part in self._parts]


def parts_behind(
    table: Table, first: int, group: CacheGroup, backing: Backing, *, before_write: Callable[[], None]
) -> Iterator[StatePart]:
    """The state parts of a table whose records start at row `first` of its group. `before_write` is called before each write."""

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
