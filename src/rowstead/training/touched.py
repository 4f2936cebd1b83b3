"""Which rows of the tables training has touched: one bit a row, set from the ids of each batch."""

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
"""Of a bitmap, between two places where the number of rows before is known."""
AGREE_BYTES = 1 << 20
"""Of a bitmap, that processes put together at a time."""
_COUNTS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1).astype(np.uint8)


class RowBits:
    """A set of rows of one table, as it is now: bit `row % 8` of byte `row // 8` says whether a row is in it."""

    def __init__(self, num_rows: int, bits: NDArray[np.uint8]) -> None:
        assert bits.size == num_bytes(num_rows)
        self._num_rows, self.bits = num_rows, bits
        starts = np.arange(0, bits.size, BLOCK_BYTES)
        counts = [int(_COUNTS[bits[start : start + BLOCK_BYTES]].sum()) for start in starts]
        self._before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)

    @property
    def count(self) -> int:
        """How many rows are in it."""
        return int(self._before[-1])

    def position(self, row: int) -> int:
        """How many rows before `row` are in it."""
        block = row // (8 * BLOCK_BYTES)
        return int(self._before[block]) + len(self.between(block * 8 * BLOCK_BYTES, row))

    def between(self, start: int, stop: int) -> Tensor:
        """The rows from `start` to `stop` that are in it, int64 and rising."""
        first = start // 8
        some = self.bits[first : -(-stop // 8)]
        filled = np.flatnonzero(some)  # so that a large set with few rows in it costs little
        which, bit = np.nonzero(np.unpackbits(some[filled, None], axis=1, bitorder="little"))
        rows = 8 * (filled[which] + first) + bit
        return torch.from_numpy(rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)])

    def at(self, first: int, last: int) -> Tensor:
        """The rows at positions `first` to `last`, if those in it are counted from 0."""
        if first >= last:
            return torch.empty(0, dtype=torch.int64)
        low = int(np.searchsorted(self._before, first, side="right")) - 1
        high = int(np.searchsorted(self._before, last, side="left"))
        rows = self.between(low * 8 * BLOCK_BYTES, min(high * 8 * BLOCK_BYTES, self._num_rows))
        return rows[first - int(self._before[low]) : last - int(self._before[low])]


class Touched:
    """The rows of all tables that batches have named since `clear`. One thread at a time marks them."""

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
        """Add every row that a batch in the CPU's memory names."""
        if not self.tables:
            return
        ids, offsets = sparse.ids.numpy(), sparse.offsets.numpy()
        _mark(ids, offsets, sparse.num_samples, self._feature_starts, self._feature_rows, self._bits)

    def clear(self) -> None:
        """Forget all."""
        self._bits[:] = 0

    def bits(self, table: Table) -> NDArray[np.uint8]:
        """The bitmap of one table, to be read or written."""
        start = self._starts[table.name]
        return self._bits[start : start + num_bytes(table.num_rows)]

    def rows_of(self, table: Table) -> RowBits:
        """The rows of one table, until the next `mark`."""
        return RowBits(table.num_rows, self.bits(table))

    def agree(self, process_group: ProcessGroup) -> None:
        """Add the rows that the other processes have marked."""
        for start in range(0, self._bits.size if process_group.world_size > 1 else 0, AGREE_BYTES):
            some = self._bits[start : start + AGREE_BYTES]
            unpacked = torch.from_numpy(np.unpackbits(some))
            process_group.all_reduce(unpacked, op="max")
            some[:] = np.packbits(unpacked.numpy())


def num_bytes(num_rows: int) -> int:
    """Of the bitmap of a table."""
    return -(-num_rows // 8)


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _mark(ids, offsets, num_samples, starts, num_rows, bits):  # type: ignore[no-untyped-def]
    """Set the bits of ids [nnz], feature-major; starts [F] and num_rows [F] are those of the features' tables.

    An id out of range is passed over: refusing it is for others.
    """
    for feature in range(len(starts)):
        start, limit = np.uint64(starts[feature]), np.uint64(num_rows[feature])
        for place in range(offsets[feature * num_samples], offsets[(feature + 1) * num_samples]):
            row = np.uint64(ids[place])
            if row < limit:
                byte, bit = start + (row >> np.uint64(3)), np.uint8(1) << np.uint8(row & np.uint64(7))
                if not bits[byte] & bit:  # most are set already, and reading alone is faster
                    bits[byte] |= bit
