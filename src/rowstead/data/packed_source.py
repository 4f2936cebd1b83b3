"""`PackedSource`: the batches of another source, bit for bit, gathered from packed files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.data.batch import Batch, share_bounds
from rowstead.data.encode import empty_pinned
from rowstead.data.file_log import FileLog
from rowstead.data.file_source import TRAINING_CORES
from rowstead.data.packed_files import PackedReader
from rowstead.data.packed_gather import GatheredBatch, gather, gather_totals
from rowstead.data.prefetch import map_ahead
from rowstead.data.row_order import Cursor
from rowstead.data.source import Batches, Source, StagedBatches
from rowstead.kernels.layout import Layout
from rowstead.records.cost import Cost
from rowstead.records.usage import usable_cores
from rowstead.spec.errors import DataError

BYTES_AHEAD = 4 << 30
"""Batches that are made ahead have about this many bytes at most, or are two."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PackedSplit:
    """One split of a packed log."""

    reader: PackedReader
    bad_rows: NDArray[np.int64]
    """The rows of the log that were bad and are not in the files, in order."""


class PackedSource(Source):
    """The batches of `source`, whose rows are read from packed files.

    Threads gather rows from memory-mapped files without the GIL. Memory: batches made ahead, one per thread and `BYTES_AHEAD` at most. One
    thread at a time may iterate; several iterators may be open.
    """

    def __init__(self, source: Source, split: PackedSplit) -> None:
        order, num_rows = source.row_order, split.reader.num_rows + len(split.bad_rows)
        assert order is not None, "only whole splits are packed"
        if num_rows != order.num_rows:
            raise DataError(f"the log has {order.num_rows:,} rows, and its packed files {num_rows:,}: pack it again")
        self._source, self._order, self._split = source, order, split
        self.num_samples = source.num_samples
        self._rank, self._world = 0, 1
        self._pins = False
        self._functions: tuple[Callable[[Batch], Batch], ...] = ()
        self._checked_for: Layout | None = None
        self._num_skipped, self._making = 0, Cost()

    @property
    def num_skipped(self) -> int | None:
        return None if self._source.num_skipped is None else self._num_skipped

    @property
    def background_cpu_s_per_sample(self) -> float:
        return self._making.s_per_item or 0.0

    @property
    def file_log(self) -> FileLog | None:
        return self._source.file_log

    def _copy(self) -> PackedSource:
        """The same source with counters of its own."""
        source = copy.copy(self)
        source._num_skipped, source._making = 0, Cost()
        return source

    def map(self, function: Callable[[Batch], Batch]) -> PackedSource:
        """As `Source.map`, with `function` called by the threads that make batches."""
        source = self._copy()
        source._functions = (*self._functions, function)
        return source

    def check_ids(self, layout: Layout) -> Source:
        """As `Source.check_ids`: ids are checked as they are gathered."""
        last_rows = tuple(layout.tables[table].num_rows - 1 for table in layout.table_of)
        if self._functions or last_rows != self._split.reader.columns.last_rows:
            return super().check_ids(layout)
        source = self._copy()
        source._checked_for = layout
        return source

    def local_share(self, rank: int, world_size: int) -> Source:
        """As `Source.local_share`; of the other processes' rows only labels and weights are read."""
        if self._functions or self._world > 1:  # these expect the whole batch
            return super().local_share(rank, world_size)
        source = self._copy()
        source._rank, source._world = rank, world_size
        return source

    def pin_memory(self) -> PackedSource:
        """As `Source.pin_memory`, with rows gathered right into pinned memory."""
        source = self._copy()
        source._pins = True
        return source

    def batches(
        self, batch_size: int, *, epoch: int = 0, rank: int = 0, world_size: int = 1, cursor: Cursor | None = None
    ) -> Batches:
        return self._read(self._batch, batch_size, epoch, rank, world_size, cursor)

    def staged_batches(
        self, batch_size: int, *, epoch: int = 0, rank: int = 0, world_size: int = 1, cursor: Cursor | None = None
    ) -> StagedBatches:
        if self._functions:  # these expect a `Batch`
            return self.batches(batch_size, epoch=epoch, rank=rank, world_size=world_size, cursor=cursor)
        make = partial(self._gather, empty_pinned_bytes if self._pins else empty_bytes)
        return self._read(make, batch_size, epoch, rank, world_size, cursor)

    def _read(
        self,
        make: Callable[[NDArray[np.int64]], T],
        batch_size: int,
        epoch: int,
        rank: int,
        world_size: int,
        cursor: Cursor | None,
    ) -> Generator[tuple[T, Cursor], None, None]:
        assert batch_size >= 1
        assert 0 <= rank < world_size
        order = self._order.batches(batch_size, self._good_rows, epoch=epoch, rank=rank, world_size=world_size, cursor=cursor)
        cores = usable_cores()
        batch_bytes = batch_size * self._split.reader.row_bytes
        num_ahead = max(2, min(cores - TRAINING_CORES if self._pins else cores // 2, int(BYTES_AHEAD // max(1, batch_bytes))))
        return map_ahead(
            lambda item: (make(item[0]), item[1]),
            order,
            threads=num_ahead,
            size=lambda item: batch_size,
            cost=self._making,
        )

    def _good_rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """The rows of the files that were the good rows of the log from `start` to `stop`."""
        before, until = (int(count) for count in np.searchsorted(self._split.bad_rows, (start, stop)))
        self._num_skipped += until - before
        return np.arange(start - before, stop - until)

    def _gather(self, allocate: Callable[[int], Tensor], rows: NDArray[np.int64]) -> GatheredBatch:
        reader = self._split.reader
        totals = None if self._world == 1 else gather_totals(reader, rows)
        own = rows[slice(*share_bounds(len(rows), self._rank, self._world))]
        return gather(reader, own, allocate, global_totals=totals, checked_for=self._checked_for)

    def _batch(self, rows: NDArray[np.int64]) -> Batch:
        batch = self._gather(empty_bytes, rows).to("cpu")
        for function in self._functions:
            batch = function(batch)
        return batch.pin_memory() if self._pins else batch


def empty_bytes(count: int) -> Tensor:
    return torch.from_numpy(np.empty(count, np.uint8))


def empty_pinned_bytes(count: int) -> Tensor:
    return empty_pinned((count,), torch.uint8)
