"""The rows of one sparse server: looked up, updated, and copied for snapshots meanwhile.

A snapshot is consistent: it holds the rows as they were when it began. After that, a row is copied before its first change, and
the remaining rows are copied in small portions; no request waits longer than one portion takes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.fleet.lookup_request import LookupRequest, RequestParser, check_reply_bytes
from rowstead.kernels.cpu import embedding as cpu
from rowstead.kernels.cpu.embedding import gather_rows, update_rows
from rowstead.kernels.layout import Layout
from rowstead.kernels.row_state import compute_dtype
from rowstead.spec.errors import DataError
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.device import DeviceStore

PORTION_BYTES = 1 << 20
"""Bytes of rows and optimizer state copied at a time."""
SCANNED_ROWS = 1 << 18
"""Rows scanned at a time for the next portion."""
QUEUED_BYTES = 64 << 20
"""Bytes of copies waiting to be written; above it updates block until some are written."""


@dataclass(frozen=True, eq=False)
class RowCopy:
    """Rows of one table as they were when a snapshot began."""

    table: int
    rows: NDArray[np.int64]
    """Row numbers [n] within the shard."""
    values: list[Tensor]
    """The rows and their optimizer state, [n, columns] each, in the order of `TableShard.parts`."""

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + sum(value.nbytes for value in self.values)


class TableShard:
    """The parts of the tables that one server holds. One thread changes rows, another takes snapshots."""

    def __init__(
        self,
        layout: Layout,
        optimizer: SparseOptimizerSpec | None,
        *,
        seed: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        # The client has the whole gradient, and clips it.
        self.optimizer = None if optimizer is None else dataclasses.replace(optimizer, clip=None)
        self.layout, self.dtype, self.seed = layout, dtype, seed
        self.store = DeviceStore(layout, self.optimizer, seed=seed, kernel="cpu", dtype=dtype)
        self.parser = RequestParser(layout, compute_dtype(dtype))
        self.table_index = {table.name: index for index, table in enumerate(layout.tables)}
        self._rows = [rows.detach() for rows in self.store.weights]
        self._states = self.store.row_states
        sizes = [table.num_rows for table in layout.tables]
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)
        self.touched = np.zeros(self._starts[-1], np.uint8)
        """Per row: whether it has changed since the last full snapshot, or since the start."""
        self._pending = np.zeros(self._starts[-1], np.uint8)
        """Rows that the current snapshot still has to copy."""
        self.num_changes = 0
        """Updates and writes of rows so far."""
        self._is_copying = False
        self._queue: deque[RowCopy] = deque()
        self._queued_bytes = 0
        self._condition = threading.Condition()
        self.changing = threading.Lock()
        """Held while rows and the counts of updates change, and while a snapshot begins."""

    # Lookups and updates

    def lookup(self, request: LookupRequest) -> list[Tensor]:
        """Return pooled vectors [B, width] and flat distinct rows, each only if requested."""
        results = []
        pooled = request.pooled
        if pooled.table_indices and request.num_samples:
            tables = [self._rows[index] for index in pooled.table_indices]
            results.append(
                cpu.lookup(tables, pooled.layout, request.sparse.ids, request.sparse.offsets, request.sparse.weights)
            )
        if request.row_bounds[-1]:
            results.append(gather_rows(self._rows, request.distinct, request.row_bounds))
        return results

    def check_gradients(self, request: LookupRequest, gradients: list[Tensor]) -> None:
        """Raise a DataError unless the gradients have the shapes of what `lookup` returns."""
        shapes: list[tuple[int, ...]] = []
        if request.pooled.table_indices and request.num_samples:
            shapes.append((request.num_samples, request.pooled.layout.total_width))
        if request.row_bounds[-1]:
            widths = [table.width for table in self.layout.tables]
            shapes.append((int((np.diff(request.row_bounds) * widths).sum()),))
        dtype = compute_dtype(self.dtype)
        if [tuple(each.shape) for each in gradients] != shapes or any(each.dtype != dtype for each in gradients):
            found = [(tuple(each.shape), str(each.dtype)) for each in gradients]
            raise DataError(f"the gradients are {found}, expected {shapes} of {dtype}")

    def update(self, request: LookupRequest, gradients: list[Tensor], *, lr: float, step: int) -> None:
        """Apply the optimizer to every row of a request; within `changing`, with checked gradients."""
        assert self.optimizer is not None, "this server was created for lookups only"
        self.num_changes += 1
        borders, tables = request.segments
        self._copy_before_write(request.ids, borders, tables)
        _mark(request.ids, borders, tables, self._starts, self.touched)
        left, pooled = list(gradients), request.pooled
        if pooled.table_indices and request.num_samples:
            cpu.update(
                [self._rows[index] for index in pooled.table_indices],
                [self._states[index] for index in pooled.table_indices],
                pooled.layout,
                request.sparse.ids,
                request.sparse.offsets,
                request.sparse.weights,
                left.pop(0),
                optimizer=self.optimizer,
                lr=lr,
                step=step,
            )
        if request.row_bounds[-1]:
            update_rows(
                self._rows,
                self._states,
                request.distinct,
                request.row_bounds,
                left.pop(0),
                optimizer=self.optimizer,
                lr=lr,
                step=step,
            )

    # Rows by number

    def parts(self, table: int) -> dict[str, Tensor]:
        """`rows` of a table and their optimizer state, [rows, columns] each."""
        return {"rows": self._rows[table], **self._states[table]}

    def read(self, table: str, part: str, start: int, stop: int) -> Tensor:
        """Copy rows `start` to `stop` of one part of a table."""
        rows = self._part(table, part, start, stop)[start:stop]
        check_reply_bytes(rows.nbytes)
        return rows.clone()

    def gather(self, table: str, part: str, rows: Tensor) -> Tensor:
        if rows.numel():
            self._part(table, part, int(rows.min()), int(rows.max()) + 1)
        found = self._part(table, part, 0, 0)
        check_reply_bytes(rows.numel() * found.shape[1] * found.itemsize)
        return found[rows.long()]

    def write(self, table: str, part: str, start: int, values: Tensor) -> None:
        """Overwrite rows from `start` on with values [n, columns]; within `changing`."""
        tensor = self._part(table, part, start, start + len(values))
        if values.shape[1:] != tensor.shape[1:] or values.dtype != tensor.dtype:
            raise DataError(f"`{table}.{part}` has {tensor.shape[1]} columns of {tensor.dtype}; these values do not fit")
        self.num_changes += 1
        rows = np.arange(start, start + len(values))
        borders, tables = np.array([0, len(rows)], np.int64), np.array([self.table_index[table]], np.int64)
        self._copy_before_write(rows, borders, tables)
        _mark(rows, borders, tables, self._starts, self.touched)
        tensor[start : start + len(values)] = values

    def _part(self, table: str, part: str, start: int, stop: int) -> Tensor:
        if table not in self.table_index or part not in (parts := self.parts(self.table_index[table])):
            raise DataError(f"this server does not hold `{table}.{part}`")
        tensor = parts[part]
        if not 0 <= start <= stop <= len(tensor):
            raise DataError(f"this server holds {len(tensor)} rows of `{table}`; {start} to {stop} is out of range")
        return tensor

    # Changes and snapshots

    def begin_snapshot(self, *, is_full: bool, on_begin: Callable[[], None]) -> int:
        """Start a snapshot of all rows, or of those touched, as they are now; `on_begin` is called at this moment.

        Returns its number of rows. A full snapshot also clears `touched`.
        """
        with self.changing, self._condition:
            assert not self._is_copying, "a snapshot is already in progress"
            on_begin()
            self._pending[:] = 1 if is_full else self.touched
            if is_full:
                self.touched[:] = 0
            self._is_copying = True
            return int(np.count_nonzero(self._pending))

    def copy_rows(self) -> Iterator[RowCopy]:
        """Yield the rows of the current snapshot, each once, in any order."""
        for table, whole in enumerate(self.layout.tables):
            at, most = 0, max(1, PORTION_BYTES // max(1, self._row_bytes(table)))
            found = np.empty(most, np.int64)
            pending = self._pending[self._starts[table] : self._starts[table + 1]]
            while at < whole.num_rows:
                with self._condition:
                    count, at = _next_rows(pending, at, min(at + SCANNED_ROWS, whole.num_rows), found)
                    copy = self._copy(table, found[:count].copy()) if count else None
                if copy is not None:
                    yield copy
                yield from self._drain_queue()
        with self._condition:
            self._is_copying = False
        yield from self._drain_queue()

    def end_snapshot(self, *, is_full: bool, is_written: bool) -> None:
        """Stop copying. A full snapshot that was not written leaves every row touched."""
        with self._condition:
            self._is_copying = False
            self._queue.clear()
            self._queued_bytes = 0
            if is_full and not is_written:
                self.touched[:] = 1
            self._condition.notify_all()

    def restore_rows(self, copy: RowCopy, *, is_touched: bool) -> None:
        """Load rows from a snapshot, before serving."""
        rows = torch.from_numpy(copy.rows)
        for tensor, value in zip(self.parts(copy.table).values(), copy.values, strict=True):
            tensor[rows] = value
        if is_touched:
            self.touched[self._starts[copy.table] + copy.rows] = 1

    @property
    def num_bytes(self) -> int:
        return sum(self._row_bytes(table) * whole.num_rows for table, whole in enumerate(self.layout.tables))

    @property
    def touched_bytes(self) -> int:
        total = 0
        for table in range(len(self.layout.tables)):
            own = self.touched[self._starts[table] : self._starts[table + 1]]
            total += self._row_bytes(table) * int(np.count_nonzero(own))
        return total

    def _copy_before_write(self, ids: NDArray[np.int64], borders: NDArray[np.int64], tables: NDArray[np.int64]) -> None:
        """Copy those of the given rows that the snapshot still needs."""
        if not self._is_copying:
            return
        with self._condition:
            while self._is_copying and self._queued_bytes > QUEUED_BYTES:
                self._condition.wait()
            if not self._is_copying:
                return
            found = np.empty(len(ids), np.int64)
            counts = np.empty(len(tables), np.int64)
            _claim(ids, borders, tables, self._starts, self._pending, found, counts)
            first = 0
            for table, count in zip(tables.tolist(), counts.tolist(), strict=True):
                if count:
                    copy = self._copy(table, found[first : first + count].copy())
                    self._queue.append(copy)
                    self._queued_bytes += copy.num_bytes
                first += count

    def _copy(self, table: int, rows: NDArray[np.int64]) -> RowCopy:
        numbers = torch.from_numpy(rows)
        return RowCopy(table, rows, [tensor[numbers] for tensor in self.parts(table).values()])

    def _drain_queue(self) -> Iterator[RowCopy]:
        while True:
            with self._condition:
                if not self._queue:
                    return
                copy = self._queue.popleft()
            yield copy
            with self._condition:
                self._queued_bytes = max(0, self._queued_bytes - copy.num_bytes)
                self._condition.notify_all()

    def _row_bytes(self, table: int) -> int:
        return sum(tensor.shape[1] * tensor.dtype.itemsize for tensor in self.parts(table).values())


_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")


@_jit
def _mark(ids, borders, tables, starts, flags):  # type: ignore[no-untyped-def]
    """Set the flags of ids [n], which are rows of tables[s] from borders[s] to borders[s + 1]."""
    for segment in range(len(tables)):
        start = starts[tables[segment]]
        for index in range(borders[segment], borders[segment + 1]):
            row = start + np.int64(ids[index])
            if flags[row] == 0:  # most are set already, and reading is cheaper than writing
                flags[row] = 1


@_jit
def _claim(ids, borders, tables, starts, flags, found, counts):  # type: ignore[no-untyped-def]
    """Clear the flags that are set for ids, and list these rows; counts [segments] is their number per segment."""
    total = 0
    for segment in range(len(tables)):
        start, before = starts[tables[segment]], total
        for index in range(borders[segment], borders[segment + 1]):
            row = np.int64(ids[index])
            if flags[start + row] != 0:
                flags[start + row] = 0
                found[total] = row
                total += 1
        counts[segment] = total - before


@_jit
def _next_rows(flags, first, last, found):  # type: ignore[no-untyped-def]
    """Clear flags from `first` on and list their rows until `found` is full; returns their number and where to continue."""
    count = 0
    for row in range(first, last):
        if flags[row] != 0:
            if count == len(found):
                return count, row
            flags[row] = 0
            found[count] = row
            count += 1
    return count, last
