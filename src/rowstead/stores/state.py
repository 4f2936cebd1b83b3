"""The state of a store as parts, as whole tensors, and as loaded from a checkpoint a few rows at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rowstead.spec.errors import CheckpointError
from rowstead.spec.features import Table

PIECE_BYTES = 16 << 20
"""Bytes of a tensor that are in memory at a time while it is saved or loaded."""


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """One tensor of a store's state, or the piece of it that this process holds, read and written a few rows at a time.

    `read` and `write` count rows from the first row of the piece. A table may be larger than memory: request as many rows as fit.
    """

    name: str
    """`<table>.rows`, or the optimizer's `<table>.<name>`."""
    shape: tuple[int, int]
    """Rows and columns of the whole tensor."""
    dtype: torch.dtype
    num_rows: int
    """Rows of this piece."""
    num_columns: int
    read: Callable[[int, int], Tensor]
    """Rows `start` to `stop` of this piece, [stop - start, num_columns]; on any device, read-only."""
    write: Callable[[int, Tensor], None]
    """Replace rows from `start` on by the given [n, num_columns]."""
    take: Callable[[Tensor], Tensor]
    """Rows of this piece by index, int64 [n] on the CPU, ascending: [n, num_columns]."""
    first_row: int = 0
    """Offset of this piece in the whole tensor."""
    first_column: int = 0
    is_copy: bool = False
    """Whether another process saves the same piece; this one only loads it."""


@runtime_checkable
class SavedState(Protocol):
    """Saved tensors, read a range of rows and columns at a time."""

    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    def rows(self, name: str, start: int, stop: int, first_column: int = 0, last_column: int | None = None) -> Tensor:
        """Rows `start` to `stop`, columns `first_column` to `last_column`, of a tensor; reads only those rows."""


def part_of(name: str, tensor: Tensor, *, is_copy: bool = False) -> StatePart:
    """A part that is a whole tensor in memory, [rows, columns]."""

    @torch.no_grad()
    def write(start: int, values: Tensor) -> None:
        tensor[start : start + len(values)].copy_(values)

    return StatePart(
        name=name,
        shape=(tensor.shape[0], tensor.shape[1]),
        dtype=tensor.dtype,
        num_rows=tensor.shape[0],
        num_columns=tensor.shape[1],
        read=lambda start, stop: tensor.detach()[start:stop],
        write=write,
        take=lambda rows: tensor.detach()[rows.to(tensor.device)],
        is_copy=is_copy,
    )


def whole_state(parts: Sequence[StatePart]) -> dict[str, Tensor]:
    """The whole tensors that `parts` make up, by name. A tensor of one part is not copied if its store can avoid it."""
    tensors: dict[str, Tensor] = {}
    filled: Counter[str] = Counter()
    at_once = rows_at_once(parts)
    for part in parts:
        filled[part.name] += part.num_rows * part.num_columns
        if (part.num_rows, part.num_columns) == part.shape:
            tensors[part.name] = part.read(0, part.num_rows)
            continue
        whole = tensors.setdefault(part.name, torch.empty(part.shape, dtype=part.dtype))
        columns = slice(part.first_column, part.first_column + part.num_columns)
        for start, stop in row_ranges(part, at_once[part.name]):
            whole[part.first_row + start : part.first_row + stop, columns] = part.read(start, stop)
    for name, count in filled.items():
        assert count == tensors[name].numel(), f"this process holds {count} of the {tensors[name].numel()} elements of `{name}`"
    return tensors


def load_parts(parts: Sequence[StatePart], state: Mapping[str, Tensor] | SavedState, *, rows_only: bool = False) -> None:
    """Write saved tensors into `parts`, only the piece that each part is; with `rows_only` without optimizer state.

    Everything is checked before anything is written.
    """
    saved = state if isinstance(state, SavedState) else _InMemory(state)
    wanted = [part for part in parts if not rows_only or part.name.endswith(".rows")]
    for part in wanted:
        if part.name not in saved:
            raise CheckpointError(f"the checkpoint has no `{part.name}`: it was saved with another model or optimizer")
        if (shape := saved.shape(part.name)) != part.shape:
            raise CheckpointError(f"`{part.name}` is {shape} in the checkpoint and {part.shape} in this model")
    at_once = rows_at_once(parts)
    for part in wanted:
        columns = part.first_column, part.first_column + part.num_columns
        for start, stop in row_ranges(part, at_once[part.name]):
            part.write(start, saved.rows(part.name, part.first_row + start, part.first_row + stop, *columns).to(part.dtype))


def in_order_of(tables: Sequence[Table], parts: Iterable[StatePart]) -> list[StatePart]:
    """The parts sorted by their tables."""
    order = {table.name: index for index, table in enumerate(tables)}
    return sorted(parts, key=lambda part: order[part.name.rpartition(".")[0]])


def rows_at_once(parts: Sequence[StatePart]) -> dict[str, int]:
    """For each part, how many rows to process at a time.

    Counts rows and optimizer state of a table together: a store that keeps them side by side reads both.
    """
    row_bytes: dict[str, int] = {}
    for part in parts:
        table = part.name.rpartition(".")[0]
        row_bytes[table] = row_bytes.get(table, 0) + part.num_columns * part.dtype.itemsize
    return {part.name: max(1, PIECE_BYTES // max(1, row_bytes[part.name.rpartition(".")[0]])) for part in parts}


def row_ranges(part: StatePart, rows_each: int) -> Iterator[tuple[int, int]]:
    """Row ranges of a part with at most `rows_each` rows."""
    for start in range(0, part.num_rows, rows_each):
        yield start, min(start + rows_each, part.num_rows)


class _InMemory(dict[str, Tensor]):
    """Tensors in memory as a SavedState."""

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def rows(self, name: str, start: int, stop: int, first_column: int = 0, last_column: int | None = None) -> Tensor:
        return self[name][start:stop, first_column:last_column]
