"""Bitmaps of the rows that training has touched, set from the ids of each batch."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.distributed.process_group import ProcessGroup
from rowstead.spec.features import Table

BLOCK_BYTES = 4096
"""Bytes of a bitmap per precomputed count of the rows before."""
MERGE_BYTES = 1 << 20
"""Bytes of a bitmap that processes merge at a time."""
_COUNTS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1).astype(np.uint8)


class RowBitmap:
    """A set of rows of one table: bit `row % 8` of byte `row // 8` is set if the row is in it."""

    def __init__(self, num_rows: int, bits: NDArray[np.uint8]) -> None:
        assert bits.size == num_bytes(num_rows)
        self._num_rows, self.bits = num_rows, bits
        starts = np.arange(0, bits.size, BLOCK_BYTES)
        counts = [int(_COUNTS[bits[start : start + BLOCK_BYTES]].sum()) for start in starts]
        self._before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)

    @property
    def count(self) -> int:
        """Number of rows in the set."""
        return int(self._before[-1])

    @property
    def has_rows_beyond(self) -> bool:
        """Whether a bit of the last byte is set that stands for no row of the table."""
        return self._num_rows % 8 > 0 and bool(self.bits[-1] >> (self._num_rows % 8))

    def position(self, row: int) -> int:
        """Number of rows before `row` in the set."""
        block = row // (8 * BLOCK_BYTES)
        return int(self._before[block]) + len(self.between(block * 8 * BLOCK_BYTES, row))

    def between(self, start: int, stop: int) -> Tensor:
        """The rows from `start` to `stop` in the set, int64 in rising order."""
        first = start // 8
        some = self.bits[first : -(-stop // 8)]
        filled = np.flatnonzero(some)  # fast for a large table with few rows in the set
        which, bit = np.nonzero(np.unpackbits(some[filled, None], axis=1, bitorder="little"))
        rows = 8 * (filled[which] + first) + bit
        return torch.from_numpy(rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)])

    def at(self, first: int, last: int) -> Tensor:
        """The rows at positions `first` to `last` of the set."""
        if first >= last:
            return torch.empty(0, dtype=torch.int64)
        low = int(np.searchsorted(self._before, first, side="right")) - 1
        high = int(np.searchsorted(self._before, last, side="left"))
        rows = self.between(low * 8 * BLOCK_BYTES, min(high * 8 * BLOCK_BYTES, self._num_rows))
        return rows[first - int(self._before[low]) : last - int(self._before[low])]


class TouchedRows:
    """The rows of all tables that batches contained since `clear`. One thread at a time marks them."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tuple(tables)
        sizes = [num_bytes(table.num_rows) for table in tables]
        self._starts = {table.name: int(start) for table, start in zip(tables, np.cumsum([0, *sizes[:-1]]), strict=False)}
        self._bits = np.zeros(sum(sizes), dtype=np.uint8)
        num_features = 1 + max((feature for table in tables for feature in table.features), default=-1)
        self._feature_starts = np.zeros(num_features, dtype=np.int64)
        self._feature_rows = np.zeros(num_features, dtype=np.int64)
        for table in tables:
            self._feature_starts[list(table.features)] = self._starts[table.name]
            self._feature_rows[list(table.features)] = table.num_rows

    def mark(self, sparse: Sparse) -> None:
        """Add every row of a batch in CPU memory."""
        if not self.tables:
            return
        ids, offsets = sparse.ids.numpy(), sparse.offsets.numpy()
        _mark(ids, offsets, sparse.num_samples, self._feature_starts, self._feature_rows, self._bits)

    def clear(self) -> None:
        """Remove all rows."""
        self._bits[:] = 0

    def bits(self, table: Table) -> NDArray[np.uint8]:
        """The bitmap of one table, to read or write."""
        start = self._starts[table.name]
        return self._bits[start : start + num_bytes(table.num_rows)]

    def rows_of(self, table: Table) -> RowBitmap:
        """A copy of the rows of one table."""
        return RowBitmap(table.num_rows, self.bits(table).copy())

    def merge(self, process_group: ProcessGroup) -> None:
        """Add the rows that other processes have marked."""
        for start in range(0, self._bits.size if process_group.world_size > 1 else 0, MERGE_BYTES):
            some = self._bits[start : start + MERGE_BYTES]
            unpacked = torch.from_numpy(np.unpackbits(some))
            process_group.all_reduce(unpacked, op="max")
            some[:] = np.packbits(unpacked.numpy())


def num_bytes(num_rows: int) -> int:
    """Bytes of the bitmap of a table."""
    return -(-num_rows // 8)


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _mark(ids, offsets, num_samples, starts, num_rows, bits):  # type: ignore[no-untyped-def]
    """Set the bits of ids [nnz], feature-major; starts [F] and num_rows [F] are those of the features' tables.

    Ids out of range are skipped; they are refused elsewhere.
    """
    for feature in range(len(starts)):
        start, limit = np.uint64(starts[feature]), np.uint64(num_rows[feature])
        for index in range(offsets[feature * num_samples], offsets[(feature + 1) * num_samples]):
            row = np.uint64(ids[index])
            if row < limit:
                byte, bit = start + (row >> np.uint64(3)), np.uint8(1) << np.uint8(row & np.uint64(7))
                if not bits[byte] & bit:  # most are set already, and reading is faster than writing
                    bits[byte] |= bit
