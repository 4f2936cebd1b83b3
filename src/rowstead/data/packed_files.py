"""Packed files: rows of a log as a model reads them, in Arrow IPC files that are mapped into memory.

Each example is contiguous in each column, so that a shuffled batch is one copy for each example and column. Columns: `dense`
float32 [Fd], `lengths` uint8 or int32 [F], `ids` list of uint32 or int64 (those of all features, one feature after the other), and the scalars
that the log has; for evaluation also `groups`. A file with longer bags than a uint8 counts follows in a file of its own.

Letters: R rows, F sparse and Fd dense features, K record batches, S scalars, nnz ids.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from rowstead.data.files import open_regular
from rowstead.data.footers import first_line
from rowstead.data.write import disk_errors
from rowstead.kernels.cpu.memory import address_of
from rowstead.spec.errors import DataError

RECORD_BATCH_BYTES = 16 << 20
"""Rows are buffered up to about this size and then written: large enough that finding a row's record batch is cheap."""
DAMAGED = "Pack the log again"


@dataclass(frozen=True, kw_only=True)
class PackedColumns:
    """The columns of packed files."""

    num_dense: int
    last_rows: tuple[int, ...]
    """The last row of each sparse feature's table, [F]."""
    scalars: tuple[str, ...]
    """Which of `labels`, `weights` and `true_p` there are; of several labels `labels.0`, `labels.1` …"""
    num_groups: int = 0
    """Columns that group rows; only for evaluation."""
    label_ranges: tuple[tuple[float, float], ...] = ()
    """Smallest and largest label of each task, which may also be missing; empty for one label."""

    @property
    def num_features(self) -> int:
        return len(self.last_rows)

    def by_field(self, values: Any) -> dict[str, Any]:
        """The scalars [S, B] of some examples by their field of a `Batch`: each [B], or [B, T] where examples have several."""
        found = {}
        fields = [name.partition(".")[0] for name in self.scalars]
        for field in dict.fromkeys(fields):
            first, count = fields.index(field), fields.count(field)
            found[field] = values[first] if self.scalars[first] == field else values[first : first + count].T
        return found

    @property
    def ids_dtype(self) -> torch.dtype:
        """int32 where every row fits."""
        return torch.int32 if max(self.last_rows, default=0) < 2**31 else torch.int64

    def schema(self, *, has_long_bags: bool) -> pa.Schema:
        """The columns of one file; the ids are not negative, so int32 are written as uint32."""
        kinds: list[tuple[str, pa.DataType]] = [(name, pa.float32()) for name in self.scalars]
        if self.num_dense:
            kinds.append(("dense", pa.list_(_not_null(pa.float32()), self.num_dense)))
        if self.num_features:
            ids = pa.uint32() if self.ids_dtype == torch.int32 else pa.int64()
            lengths = pa.int32() if has_long_bags else pa.uint8()
            kinds += [("lengths", pa.list_(_not_null(lengths), self.num_features)), ("ids", pa.list_(_not_null(ids)))]
        if self.num_groups:
            kinds.append(("groups", pa.list_(_not_null(pa.int64()), self.num_groups)))
        return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds])


def _not_null(kind: pa.DataType) -> pa.Field:
    return pa.field("item", kind, nullable=False)


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Some rows, example-major."""

    dense: NDArray[np.float32]
    """[R, Fd]."""
    lengths: NDArray[np.int32]
    """[R, F]."""
    ids: NDArray[Any]
    """[nnz]."""
    scalars: tuple[NDArray[np.float32], ...]
    """[R] each."""
    groups: NDArray[np.int64] | None = None
    """[R, G]."""

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.dense, self.lengths, self.ids, *self.scalars))

    @classmethod
    def concatenate(cls, parts: Sequence[PackedRows]) -> PackedRows:
        if len(parts) == 1:
            return parts[0]
        return cls(
            dense=np.concatenate([part.dense for part in parts]),
            lengths=np.concatenate([part.lengths for part in parts]),
            ids=np.concatenate([part.ids for part in parts]),
            scalars=tuple(np.concatenate(values) for values in zip(*(part.scalars for part in parts), strict=True)),
            groups=None if parts[0].groups is None else np.concatenate([part.groups for part in parts]),
        )


class PackedWriter:
    """Appends rows to `NAME-00000.arrow`, `NAME-00001.arrow` … in a folder; a file may have more bytes than memory."""

    def __init__(self, folder: Path, name: str, columns: PackedColumns) -> None:
        self._folder, self._name, self._columns = folder, name, columns
        self._pending: list[PackedRows] = []
        self._pending_bytes = self.num_rows = 0
        self._has_long_bags = False
        self._file: Any = None
        self._writer: pa.ipc.RecordBatchFileWriter | None = None
        self.files: list[str] = []

    def write(self, rows: PackedRows) -> None:
        """Append rows; they may be buffered."""
        self._pending.append(rows)
        self._pending_bytes += rows.num_bytes
        self.num_rows += len(rows.lengths)
        if self._pending_bytes >= RECORD_BATCH_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is buffered, and wait until it is on the disk."""
        if self._pending or self._writer is None:
            self._flush()
        self._close_file()

    def discard(self) -> None:
        """Close the file as it is."""
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        with disk_errors(self._folder):
            rows = PackedRows.concatenate(self._pending) if self._pending else None
            has_long_bags = rows is not None and bool(rows.lengths.size) and int(rows.lengths.max()) > 255
            if self._writer is None or (has_long_bags and not self._has_long_bags):
                self._open_file(has_long_bags=has_long_bags)
            if rows is not None and len(rows.lengths):
                assert self._writer is not None
                self._writer.write_batch(self._record_batch(rows))
            self._pending, self._pending_bytes = [], 0

    def _open_file(self, *, has_long_bags: bool) -> None:
        self._close_file()
        self._has_long_bags = has_long_bags
        self.files.append(f"{self._name}-{len(self.files):05}.arrow")
        self._file = open(self._folder / self.files[-1], "xb")  # noqa: SIM115
        self._writer = pa.ipc.new_file(self._file, self._columns.schema(has_long_bags=has_long_bags))

    def _close_file(self) -> None:
        if self._writer is None:
            return
        with disk_errors(self._folder):
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._writer = None

    def _record_batch(self, rows: PackedRows) -> pa.RecordBatch:
        schema = self._columns.schema(has_long_bags=self._has_long_bags)
        values: dict[str, pa.Array] = dict(zip(self._columns.scalars, map(pa.array, rows.scalars), strict=True))
        if self._columns.num_dense:
            values["dense"] = pa.FixedSizeListArray.from_arrays(
                pa.array(rows.dense.reshape(-1)), type=schema.field("dense").type
            )
        if self._columns.num_features:
            lengths = rows.lengths.astype(np.int32 if self._has_long_bags else np.uint8, copy=False)
            ends = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(rows.lengths.sum(1, dtype=np.int64), out=ends[1:])
            assert ends[-1] < 2**31, "pieces are far smaller"
            ids = rows.ids.view(np.uint32) if rows.ids.dtype == np.int32 else rows.ids
            kinds = schema.field("lengths").type, schema.field("ids").type
            values["lengths"] = pa.FixedSizeListArray.from_arrays(pa.array(lengths.reshape(-1)), type=kinds[0])
            values["ids"] = pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), pa.array(ids), type=kinds[1])
        if rows.groups is not None:
            kind = schema.field("groups").type
            values["groups"] = pa.FixedSizeListArray.from_arrays(pa.array(rows.groups.reshape(-1)), type=kind)
        return pa.record_batch([values[name] for name in schema.names], schema=schema)


class PackedReader:
    """Packed files of one split, mapped into memory.

    What tells where something is has been checked: buffers lie inside their file and are large enough. Offsets and ids are
    checked when they are read.
    """

    def __init__(self, folder: Path, files: Sequence[str], columns: PackedColumns) -> None:
        self.columns = columns
        self._maps: list[mmap.mmap] = []
        self._names: list[str] = []
        sizes, addresses, num_values, is_long = [], [], [], []
        for file in files:
            path = folder / file
            try:
                for num_rows, where, count, long in self._read_file(path):
                    sizes.append(num_rows)
                    addresses.append(where)
                    num_values.append(count)
                    is_long.append(long)
                    self._names.append(str(path))
            except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
                raise DataError(f"`{path}` cannot be read: {first_line(error)}. {DAMAGED}") from None
        num_columns = 4 + len(columns.scalars) + (columns.num_groups > 0)
        self.starts = np.zeros(len(sizes) + 1, np.int64)
        """[K + 1]: record batch k has the rows from starts[k] to starts[k+1]."""
        np.cumsum(sizes, out=self.starts[1:])
        self.addresses = np.array(addresses, np.int64).reshape(len(sizes), num_columns)
        """[K, 4 + S] or one more: addresses of each record batch's dense values, lengths, offsets of ids, ids, scalars, and groups."""
        self.num_values = np.array(num_values, np.int64)
        """[K]: how many ids each record batch has."""
        self.is_long = np.array(is_long, np.bool_)
        """[K]: whether lengths are int32 rather than uint8."""

    @property
    def num_rows(self) -> int:
        return int(self.starts[-1])

    @property
    def row_bytes(self) -> float:
        """Mean size of a row."""
        columns = self.columns
        ids = columns.ids_dtype.itemsize * float(self.num_values.sum()) / max(1, self.num_rows)
        return ids + 4 * (columns.num_dense + len(columns.scalars)) + columns.num_features

    def name_row(self, row: int) -> str:
        """A row for error messages: its file, and where in it."""
        k = int(np.searchsorted(self.starts, row, side="right")) - 1
        first = self._names.index(self._names[k])
        return f"`{self._names[k]}`, row {row - int(self.starts[first]):,} (from 0)"

    def _read_file(self, path: Path) -> list[tuple[int, list[int], int, bool]]:
        """For each record batch its number of rows, its addresses, its number of ids, and whether its lengths are int32."""
        with open_regular(str(path)) as opened:
            mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        self._maps.append(mapped)
        first = address_of(np.frombuffer(mapped, np.uint8))
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapped)))
        schemas = {long: self.columns.schema(has_long_bags=long) for long in (False, True)}
        found = [long for long, schema in schemas.items() if reader.schema.equals(schema)]
        if not found:
            raise ValueError(
                f"its columns are {', '.join(reader.schema.names)} of other types or numbers than its pack.json says"
            )
        batches = []
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            if batch.num_rows:
                batches.append(self._find(batch, found[0], lambda at, size: first <= at and at + size <= first + len(mapped)))
        return batches

    def _find(
        self, batch: pa.RecordBatch, is_long: bool, is_inside: Callable[[int, int], bool]
    ) -> tuple[int, list[int], int, bool]:
        num_rows, columns = batch.num_rows, self.columns
        id_bytes = columns.ids_dtype.itemsize
        num_values = 0

        def address(name: str, buffer: int, num_bytes: int) -> int:
            """Where a buffer is, once it is known to be large enough and in the file as it is: not compressed, and not moved."""
            column = batch.column(name)
            found = column.buffers()[buffer]
            if found is None:  # pyarrow has none where there are no values
                found = pa.py_buffer(b"")
            if column.offset or len(column) != num_rows or found.size < num_bytes:
                raise ValueError(f"column `{name}` has less than {num_bytes:,} bytes for {num_rows:,} rows")
            if num_bytes and not is_inside(found.address, found.size):
                raise ValueError(f"column `{name}` is compressed or damaged")
            return int(found.address) if num_bytes else 0

        where = [address("dense", -1, 4 * num_rows * columns.num_dense)] if columns.num_dense else [0]
        if columns.num_features:
            values = batch.column("ids").buffers()[-1]
            num_values = (0 if values is None else values.size) // id_bytes
            where += [
                address("lengths", -1, (4 if is_long else 1) * num_rows * columns.num_features),
                address("ids", 1, 4 * (num_rows + 1)),
                address("ids", -1, id_bytes * num_values),
            ]
        else:
            where += [0, 0, 0]
        where += [address(name, -1, 4 * num_rows) for name in columns.scalars]
        if columns.num_groups:
            where.append(address("groups", -1, 8 * num_rows * columns.num_groups))
        return num_rows, where, num_values, is_long
