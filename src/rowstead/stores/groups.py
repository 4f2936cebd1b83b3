"""Cached tables of one width form a group that shares slots; `IdMapper` maps the ids of batches to its rows and slots.

The rows of a group are numbered through its tables, one table after the other.

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
from rowstead.kernels.cpu.cache import map_ids_to_rows, map_rows_to_slots, select_rows
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_state import compute_dtype
from rowstead.spec.features import Table
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, SparseOptimizerSpec


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Cached tables of one width."""

    tables: tuple[tuple[Table, int], ...]
    """Each with the number of its first row in the group."""
    num_rows: int
    num_slots: int
    width: int
    columns: tuple[tuple[torch.dtype, int], ...]
    """Type and number of columns of a row, then of each of its optimizer states."""
    state_names: tuple[str, ...]


def group_tables(
    tables: Sequence[Table], num_slots: Mapping[str, int], *, dtype: torch.dtype, optimizer: SparseOptimizerSpec | None
) -> list[CacheGroup]:
    """The tables in `num_slots`, grouped by width; each gets at least one slot."""
    widths = sorted({table.width for table in tables if table.name in num_slots})
    groups = []
    for width in widths:
        members, group_rows, group_slots = [], 0, 0
        for table in tables:
            if table.width == width and table.name in num_slots:
                members.append((table, group_rows))
                group_rows += table.num_rows
                group_slots += min(table.num_rows, max(1, num_slots[table.name]))
        states = ROW_OPTIMIZERS[optimizer.kind].state_columns(width) if optimizer else {}
        groups.append(
            CacheGroup(
                tables=tuple(members),
                num_rows=group_rows,
                num_slots=group_slots,
                width=width,
                columns=((dtype, width), *((compute_dtype(dtype), columns) for columns in states.values())),
                state_names=tuple(states),
            )
        )
    return groups


def slots_layout(layout: Layout, groups: Sequence[CacheGroup], num_slots: Sequence[int]) -> tuple[Layout, int]:
    """The layout of fast memory: the tables that are not cached, then one table per group for its slots.

    Also the number of tables that are not cached.
    """
    group_of = {table.name: index for index, group in enumerate(groups) for table, _ in group.tables}
    whole = [table for table in layout.tables if table.name not in group_of]
    index_of = {table.name: index for index, table in enumerate(whole)}
    table_of = [
        len(whole) + group_of[name] if (name := layout.tables[table].name) in group_of else index_of[name]
        for table in layout.table_of
    ]
    shared = [
        Table(
            name=f"slots of width {group.width}",
            num_rows=count,
            width=group.width,
            features=tuple(f for f, table in enumerate(table_of) if table == len(whole) + index),
        )
        for index, (group, count) in enumerate(zip(groups, num_slots, strict=True))
    ]
    fast = Layout(tables=(*whole, *shared), table_of=tuple(table_of), columns=layout.columns, is_mean=layout.is_mean)
    return fast, len(whole)


class IdMapper:
    """Maps ids of batches to rows, numbered through all groups, and rows to slots.

    Ids of tables that are not cached stay as they are.
    """

    def __init__(self, layout: Layout, groups: Sequence[CacheGroup], device: torch.device) -> None:
        firsts, self._starts = {}, [0]
        for group in groups:
            for table, first in group.tables:
                firsts[table.name] = self._starts[-1] + first
            self._starts.append(self._starts[-1] + group.num_rows)
        self.starts = self._starts[:-1]
        """For each group the number of rows in the groups before it."""
        names = [layout.tables[table].name for table in layout.table_of]
        self._firsts = np.array([firsts.get(name, -1) for name in names], np.int64)
        self._firsts_on_device = torch.from_numpy(self._firsts).to(device)
        self._all_cached = all(name in firsts for name in names)
        self.first_rows = [
            torch.from_numpy(np.where((self._firsts >= start) & (self._firsts < stop), self._firsts - start, -1)).to(device)
            for start, stop in pairwise(self._starts)
        ]
        """For each group the first row of every feature within the group, int64 [F]; -1 for features of other groups."""

    def empty_slots(self, ids: Tensor) -> Tensor:
        """A tensor for the slots of `ids` [nnz], or -1 - row until there is one; holds the ids of tables that are not cached."""
        if not self._all_cached or len(self._starts) > 2:
            return ids.to(torch.int64, copy=True)
        return torch.empty_like(ids, dtype=torch.int32 if self._starts[-1] < 2**31 else torch.int64)

    def rows(self, sparse: Sparse) -> Tensor:
        """The row of each id, int64 [nnz]; -1 if its table is not cached."""
        if not sparse.ids.is_cuda:
            rows = np.empty(sparse.ids.numel(), np.int64)
            if rows.size:
                offsets = sparse.offsets.contiguous().numpy()
                map_ids_to_rows(sparse.ids.contiguous().numpy(), offsets, sparse.num_samples, self._firsts, rows)
            return torch.from_numpy(rows)
        return map_ids_with_torch(sparse, self._firsts_on_device)

    def split_by_group(self, rows: Tensor) -> Iterator[Tensor]:
        """The rows of each group, numbered within the group."""
        for first, last in pairwise(self._starts):
            if self._all_cached and len(self._starts) == 2:
                yield rows
            elif not rows.is_cuda:
                found = np.empty(rows.numel(), np.int64)
                yield torch.from_numpy(found[: select_rows(rows.numpy(), first, last, found)])
            else:
                yield rows[(rows >= first) & (rows < last)] - first

    def slots(self, sparse: Sparse, rows: Tensor, slot_of: Sequence[Tensor]) -> Tensor:
        """The slot of each id, given its row, or the id itself if its table is not cached; int32 if slots fit."""
        if not rows.is_cuda:
            ids = sparse.ids.numpy().astype(np.int64)
            for (first, last), slots in zip(pairwise(self._starts), slot_of, strict=True):
                map_rows_to_slots(rows.numpy(), first, last, slots.numpy(), ids)
            return torch.from_numpy(ids)
        if self._all_cached and len(slot_of) == 1:
            return slot_of[0][rows]
        mapped = sparse.ids.long()
        for (first, last), slots in zip(pairwise(self._starts), slot_of, strict=True):
            is_here = (rows >= first) & (rows < last)
            mapped = torch.where(is_here, slots[(rows - first).clamp(0, last - first - 1)], mapped)
        return mapped


def map_ids_with_torch(sparse: Sparse, first_rows: Tensor) -> Tensor:
    """The row of each id, int64 [nnz]: the first row of its feature, first_rows int64 [F], plus the id; -1 where that is -1."""
    if not sparse.ids.numel():
        return sparse.ids.long()
    counts = sparse.offsets[:: sparse.num_samples].diff()
    firsts = torch.repeat_interleave(first_rows, counts, output_size=sparse.ids.numel())
    return torch.where(firsts < 0, firsts, firsts + sparse.ids)
