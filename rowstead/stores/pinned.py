"""Rows in page-locked system memory that a GPU reads and writes over the bus by itself.

Each row that a batch names crosses once each way: the GPU gathers the distinct rows into its own memory, pools them there,
trains them there, and writes them back. Nothing of a table stays on the GPU between steps, but for an optimizer state of
one number a row, which is too small to be worth a trip.

Gathering ahead, beside the training of the batch before, was tried and is no faster: while a GPU's cores read and write over
the bus, whatever else they do with memory takes several times as long.

On a CPU the same runs over plain memory, so it can be tested without a GPU.

Letters: B examples, F features, N rows, D width, nnz ids, n distinct rows of a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rowstead.contracts.batch import Sparse
from rowstead.contracts.store import StatePart
from rowstead.kernels.check import check_gradient
from rowstead.kernels.choose import Kernels, has_triton, kernels_for
from rowstead.kernels.initial import initial_rows
from rowstead.kernels.layout import Layout
from rowstead.kernels.memory import prefer_large_pages
from rowstead.kernels.optimizer import RowState
from rowstead.spec.features import Table
from rowstead.spec.run import Kernel
from rowstead.spec.train import SparseOptimizerSpec
from rowstead.stores.checked import checked
from rowstead.stores.device import numbered
from rowstead.stores.groups import Group, grouped, places_layout
from rowstead.stores.locked import seen_from
from rowstead.stores.state import load_parts, part_of, whole_state

LEAST_CAPACITY = 1 << 10
"""Rows for which a batch has room at least; layouts are made for powers of two, so that there are few of them."""


@dataclass
class _Staged:
    """The distinct rows of a batch on the device."""

    ids: Tensor
    """Of the batch, as they were given; by them it is known again."""
    sparse: Sparse
    """The batch with ids that are places among the staged rows."""
    layout: Layout
    rows: list[Tensor]
    """For each group its rows that the batch names [n], rising."""
    values: list[list[Tensor]]
    """For each group those rows and their optimizer's states."""


class PinnedStore(nn.Module):
    """An EmbeddingStore whose rows are in page-locked memory, for batches on `device`."""

    def __init__(
        self,
        layout: Layout,
        optimizer: SparseOptimizerSpec | None,
        *,
        device: torch.device | str,
        seed: int = 1,
        kernel: Kernel = "auto",
        dtype: torch.dtype = torch.float32,
        check: bool = True,
    ) -> None:
        super().__init__()
        self.layout, self.tables, self.optimizer = layout, layout.tables, optimizer
        self._device, self._check, self._kernel_choice = numbered(device), check, kernel
        everything = {table.name: table.num_rows for table in layout.tables}
        self._groups = grouped(layout.tables, everything, dtype=dtype, optimizer=optimizer)
        self._starts = [0]
        for group in self._groups:
            self._starts.append(self._starts[-1] + group.num_rows)
        first = {
            table.name: start + own
            for start, group in zip(self._starts, self._groups, strict=False)
            for table, own in group.tables
        }
        kind = torch.int32 if self._starts[-1] < 2**31 else torch.int64
        firsts = [first[layout.tables[table].name] for table in layout.table_of]
        self._first_rows = torch.tensor(firsts, dtype=kind, device=self._device)
        self._own = [_new_values(group, seed, self._device) for group in self._groups]
        """For each group all rows [N, D] and states."""
        self._seen = [
            [seen_from(self._device, values) if values.device.type == "cpu" else values for values in own] for own in self._own
        ]
        """The same memory as the device sees it."""
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._staged: _Staged | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> PinnedStore:
        """Rows stay where they are when the model around them is moved."""
        return self

    @property
    def kernel(self) -> str:
        """Name of the kernels that run."""
        return kernels_for(self._kernel_choice, self._device)[0] if self.tables else "none"

    # An EmbeddingStore

    @torch.no_grad()
    def lookup(self, sparse: Sparse) -> Tensor:
        staged = self._stage(self.checked(sparse))
        self._staged = staged if self.training else None
        rows, here = [values[0] for values in staged.values], staged.sparse
        return self._kernels().lookup(rows, staged.layout, here.ids, here.offsets, here.weights)

    @torch.no_grad()
    def update(self, sparse: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        assert self.optimizer is not None, "this store was made for look-ups only"
        sparse = self.checked(sparse)
        if self._check:
            check_gradient(self.layout, sparse.offsets, grad)
        staged, self._staged = self._staged, None
        if staged is None or staged.ids is not sparse.ids:
            staged = self._stage(sparse)
        self._kernels().update(
            [values[0] for values in staged.values],
            [_states(group, values) for group, values in zip(self._groups, staged.values, strict=True)],
            staged.layout,
            staged.sparse.ids,
            staged.sparse.offsets,
            staged.sparse.weights,
            grad,
            optimizer=self.optimizer,
            lr=lr,
            step=step,
        )
        for seen, rows, values in zip(self._seen, staged.rows, staged.values, strict=True):
            for whole, some in zip(seen, values, strict=True):
                self._scatter(whole, rows, some)

    batches_ahead = 0

    def prefetch(self, sparse: Sparse) -> None:
        """Nothing to do."""

    def drop_prefetched(self) -> None:
        """Nothing to do."""

    def rows(self, table: str, ids: Tensor) -> Tensor:
        part = next(part for part in self.parts() if part.name == f"{table}.rows")
        assert part.take is not None
        return part.take(ids.cpu()).to(ids.device)

    def parts(self) -> list[StatePart]:
        self._settle()
        parts = {}
        for group, own in zip(self._groups, self._own, strict=True):
            for table, first in group.tables:
                named = zip(["rows", *group.state_names], own, strict=True)
                parts[table.name] = [
                    part_of(f"{table.name}.{name}", values[first : first + table.num_rows]) for name, values in named
                ]
        return [part for table in self.tables for part in parts[table.name]]

    def state(self) -> dict[str, Tensor]:
        return whole_state(self.parts())

    def load_state(self, state: Mapping[str, Tensor], *, rows_only: bool = False) -> None:
        load_parts(self.parts(), state, rows_only=rows_only)

    def checked(self, sparse: Sparse) -> Sparse:
        """The same batch, known to fit if this store checks batches."""
        return checked(sparse, self.layout, self._device) if self._check and self.tables else sparse

    def close(self) -> None:
        """Give the memory back; of no use afterwards."""
        self._settle()
        self._seen, self._own = [], []

    def _settle(self) -> None:
        """Until all rows are back; what is staged is not to be trusted afterwards."""
        self._staged = None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _kernels(self) -> Kernels:
        return kernels_for(self._kernel_choice, self._device)[1]

    def _stage(self, sparse: Sparse) -> _Staged:
        """Gather the distinct rows of a batch; on a GPU this waits for their number."""
        names = self._row_names(sparse)
        distinct, places = torch.unique(names, return_inverse=True)
        borders = [0, distinct.numel()]
        if len(self._groups) > 1:
            starts = torch.tensor(self._starts, dtype=names.dtype, device=names.device)
            at = torch.searchsorted(distinct, starts)
            places = places - at[torch.searchsorted(starts, names, right=True) - 1]
            borders = at.tolist()
        rows = [
            distinct[first:last] - start if start else distinct[first:last]
            for first, last, start in zip(borders[:-1], borders[1:], self._starts[:-1], strict=True)
        ]
        capacities = tuple(_capacity(len(some)) for some in rows)
        if capacities not in self._layouts:
            self._layouts[capacities] = places_layout(self.layout, self._groups, capacities)[0]
        values = [[self._gathered(whole, some) for whole in seen] for seen, some in zip(self._seen, rows, strict=True)]
        here = dataclasses.replace(sparse, ids=places, checked_for=None)
        return _Staged(sparse.ids, here, self._layouts[capacities], rows, values)

    def _row_names(self, sparse: Sparse) -> Tensor:
        """For each id its row, all tables of all groups numbered through [nnz]; in 32 bits where that is enough."""
        kind = self._first_rows.dtype
        if not sparse.num_samples:
            return sparse.ids.to(kind)
        ends = sparse.offsets[sparse.num_samples :: sparse.num_samples].to(kind)
        places = torch.arange(sparse.ids.numel(), dtype=kind, device=ends.device)
        return sparse.ids.to(kind) + self._first_rows[torch.bucketize(places, ends, right=True, out_int32=True)]

    def _gathered(self, whole: Tensor, rows: Tensor) -> Tensor:
        into = whole.new_empty(max(1, len(rows)), whole.shape[1])
        if self._device.type == "cuda" and has_triton():
            from rowstead.kernels import rows_gpu

            rows_gpu.gather_rows(whole, rows, into)
        else:
            torch.index_select(whole, 0, rows, out=into[: len(rows)])
        return into

    def _scatter(self, whole: Tensor, rows: Tensor, values: Tensor) -> None:
        if self._device.type == "cuda" and has_triton():
            from rowstead.kernels import rows_gpu

            rows_gpu.scatter_rows(whole, rows, values)
        else:
            whole.index_copy_(0, rows.long(), values[: len(rows)])


def _capacity(count: int) -> int:
    return max(LEAST_CAPACITY, 1 << max(0, count - 1).bit_length())


def _states(group: Group, values: Sequence[Tensor]) -> RowState:
    return dict(zip(group.state_names, values[1:], strict=True))


def _new_values(group: Group, seed: int, device: torch.device) -> list[Tensor]:
    """Initial rows of a group's tables and zeroed states: in system memory, but for states of one number a row."""
    (dtype, width), *states = group.columns
    rows = prefer_large_pages(torch.empty(group.num_rows, width, dtype=dtype))
    for table, first in group.tables:
        _fill(rows[first : first + table.num_rows], table, seed)
    values = [rows]
    for kind, columns in states:
        if columns == 1:
            values.append(torch.zeros(group.num_rows, 1, dtype=kind, device=device))
        else:
            values.append(prefer_large_pages(torch.empty(group.num_rows, columns, dtype=kind)).zero_())
    return values


def _fill(rows: Tensor, table: Table, seed: int, at_a_time: int = 1 << 18) -> None:
    for start in range(0, table.num_rows, at_a_time):
        stop = min(start + at_a_time, table.num_rows)
        rows[start:stop] = initial_rows(table, seed=seed, dtype=rows.dtype, device=rows.device, start=start, stop=stop)
