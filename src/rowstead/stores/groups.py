"""Tables of one width as one group that shares places, and how a batch's ids are named in it.

A row of a group is numbered through the group's tables, one after the other.

Letters: B examples, F features, nnz ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.kernels.cpu.cache import name_rows, rows_between, slots_of_rows
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_optimizer import compute_dtype
from rowstead.spec.features import Table
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, SparseOptimizerSpec


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Cached tables of one width."""

    tables: tuple[tuple[Table, int], ...]
    """Each with the number of its first row in the group."""
    num_rows: int
    num_places: int
    width: int
    columns: tuple[tuple[torch.dtype, int], ...]
    """What a record holds: type and number of columns of the row, and of each state of its optimizer."""
    state_names: tuple[str, ...]
    """Of those states."""


def grouped(
    tables: Sequence[Table], places: Mapping[str, int], *, dtype: torch.dtype, optimizer: SparseOptimizerSpec | None
) -> list[CacheGroup]:
    """The tables that `places` names, by width; each gets at least one place."""
    widths = sorted({table.width for table in tables if table.name in places})
    groups = []
    for width in widths:
        members, num_rows, num_places = [], 0, 0
        for table in tables:
            if table.width == width and table.name in places:
                members.append((table, num_rows))
                num_rows += table.num_rows
                num_places += min(table.num_rows, max(1, places[table.name]))
        states = ROW_OPTIMIZERS[optimizer.kind].state_columns(width) if optimizer else {}
        groups.append(
            CacheGroup(
                tables=tuple(members),
                num_rows=num_rows,
                num_places=num_places,
                width=width,
                columns=((dtype, width), *((compute_dtype(dtype), columns) for columns in states.values())),
                state_names=tuple(states),
            )
        )
    return groups


def slots_layout(layout: Layout, groups: Sequence[CacheGroup], num_places: Sequence[int]) -> tuple[Layout, int]:
    """The layout of what is in fast memory: tables that are there whole, then one table for each group's places.

    Also the number of whole tables.
    """
    group_of = {table.name: place for place, group in enumerate(groups) for table, _ in group.tables}
    whole = [table for table in layout.tables if table.name not in group_of]
    new_place = {table.name: place for place, table in enumerate(whole)}
    table_of = [
        len(whole) + group_of[name] if (name := layout.tables[table].name) in group_of else new_place[name]
        for table in layout.table_of
    ]
    shared = [
        Table(
            name=f"places of width {group.width}",
            num_rows=count,
            width=group.width,
            features=tuple(f for f, table in enumerate(table_of) if table == len(whole) + place),
        )
        for place, (group, count) in enumerate(zip(groups, num_places, strict=True))
    ]
    fast = Layout(tables=(*whole, *shared), table_of=tuple(table_of), columns=layout.columns, is_mean=layout.is_mean)
    return fast, len(whole)


class RowNames:
    """Names the ids of batches by rows of groups, all groups numbered through, and by places.

    Ids of tables that belong to no group stay what they are.
    """

    def __init__(self, layout: Layout, groups: Sequence[CacheGroup], device: torch.device) -> None:
        firsts, self._starts = {}, [0]
        for group in groups:
            for table, first in group.tables:
                firsts[table.name] = self._starts[-1] + first
            self._starts.append(self._starts[-1] + group.num_rows)
        names = [layout.tables[table].name for table in layout.table_of]
        self._firsts = np.array([firsts.get(name, -1) for name in names], np.int64)
        self._firsts_there = torch.from_numpy(self._firsts).to(device)
        self._all_behind = all(name in firsts for name in names)
        self.first_rows = [
            torch.from_numpy(np.where((self._firsts >= start) & (self._firsts < stop), self._firsts - start, -1)).to(device)
            for start, stop in pairwise(self._starts)
        ]
        """For each group the first row of every feature by the group's own numbers, int64 [F]; -1 where it is of another."""

    @property
    def starts(self) -> list[int]:
        """For each group how many rows those before it have."""
        return self._starts[:-1]

    def blank(self, ids: Tensor) -> Tensor:
        """Where the places of `ids` [nnz] go, or what -1 - row of one is: the ids themselves if some belong to no group."""
        if not self._all_behind or len(self._starts) > 2:
            return ids.to(torch.int64, copy=True)
        return torch.empty_like(ids, dtype=torch.int32 if self._starts[-1] < 2**31 else torch.int64)

    def rows(self, sparse: Sparse) -> Tensor:
        """For each id its row, int64 [nnz]; -1 where its table belongs to no group."""
        if not sparse.ids.is_cuda:
            named = np.empty(sparse.ids.numel(), np.int64)
            if named.size:
                offsets = sparse.offsets.contiguous().numpy()
                name_rows(sparse.ids.contiguous().numpy(), offsets, sparse.num_samples, self._firsts, named)
            return torch.from_numpy(named)
        from rowstead.kernels.gpu.cache import name_rows as name_rows_there

        return name_rows_there(sparse.ids, sparse.offsets, self._firsts_there)

    def by_group(self, rows: Tensor) -> Iterator[Tensor]:
        """The rows of each group, by its own numbers."""
        for first, last in zip(self._starts[:-1], self._starts[1:], strict=True):
            if self._all_behind and len(self._starts) == 2:
                yield rows
            elif not rows.is_cuda:
                found = np.empty(rows.numel(), np.int64)
                yield torch.from_numpy(found[: rows_between(rows.numpy(), first, last, found)])
            else:
                yield rows[(rows >= first) & (rows < last)] - first

    def places(self, sparse: Sparse, rows: Tensor, place_of: Sequence[Tensor]) -> Tensor:
        """For each id the place of its row, or the id itself where its table belongs to no group; int32 if places allow."""
        if not rows.is_cuda:
            ids = sparse.ids.numpy().astype(np.int64)
            for first, last, places in zip(self._starts[:-1], self._starts[1:], place_of, strict=True):
                slots_of_rows(rows.numpy(), first, last, places.numpy(), ids)
            return torch.from_numpy(ids)
        if self._all_behind and len(place_of) == 1:
            return place_of[0][rows]
        named = sparse.ids.long()
        for first, last, places in zip(self._starts[:-1], self._starts[1:], place_of, strict=True):
            here = (rows >= first) & (rows < last)
            named = torch.where(here, places[(rows - first).clamp(0, last - first - 1)], named)
        return named
