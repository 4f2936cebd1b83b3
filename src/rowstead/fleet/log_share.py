"""One reader's share of a log as packed batches: from a position on, or given ones again. No threads here."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from rowstead.data.batch import Batch, share_bounds
from rowstead.data.row_order import Cursor
from rowstead.data.source import Source
from rowstead.fleet.batch_assignments import AssignedBatch
from rowstead.fleet.packing import PackedBatch, pack
from rowstead.spec.errors import DataError

_MAX_SKIPPED_BATCHES = 64
"""Up to this many unwanted batches are read over; beyond that, reading starts again at the next wanted one."""


@dataclass(frozen=True, kw_only=True)
class NewBatch:
    """A batch, and where the next one begins."""

    packed: PackedBatch
    cursor: Cursor
    num_skipped: int
    """Bad rows in its epoch so far, seen by this process."""


@dataclass(frozen=True, kw_only=True)
class EpochEnd:
    num_rows: int
    """Rows of this reader's share, bad ones included."""


class LogShare:
    """The share of reader `number` of `num_readers`; together they read each epoch of the log once. Not thread-safe."""

    def __init__(
        self,
        source: Source,
        *,
        number: int = 0,
        num_readers: int = 1,
        batch_size: int,
        epochs: int = 1,
        max_batches: int | None = None,
        narrow_ids: bool | None = None,
    ) -> None:
        """At most `max_batches` over all epochs; `narrow_ids` sends ids as int32, None does so where they fit."""
        assert 0 <= number < num_readers
        self._source, self._number, self._num_readers = source, number, num_readers
        self._batch_size, self._epochs, self._max_batches = batch_size, epochs, max_batches
        self._narrow_ids = narrow_ids
        self._skipped_rereading = 0

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal for batch numbers to mean the same."""
        return {
            "reader": self._number,
            "of": self._num_readers,
            "num_samples": self._source.num_samples,
            "batch_size": self._batch_size,
            "epochs": self._epochs,
            "max_batches": self._max_batches,
        }

    @property
    def may_skip(self) -> bool:
        """Whether the log may have rows that are skipped."""
        return self._source.num_skipped is not None

    def read_from(
        self, number: int = 0, first_epoch: int = 0, cursor: Cursor | None = None
    ) -> Generator[NewBatch | EpochEnd, None, None]:
        """Yield the batches from the one that begins at a cursor to the end of the last epoch, in the order of the log."""
        first, last = share_bounds(self._source.num_samples, self._number, self._num_readers)
        for epoch in range(first_epoch, self._epochs):
            skipped_before = self._num_skipped()
            with contextlib.closing(self._batches(epoch, cursor)) as batches:
                while self._max_batches is None or number < self._max_batches:
                    item = next(batches, None)
                    if item is None:
                        break
                    number += 1
                    skipped = self._num_skipped() - skipped_before
                    self._skipped_rereading = 0
                    yield NewBatch(packed=pack(item[0], narrow=self._narrow_ids), cursor=item[1], num_skipped=skipped)
                    skipped_before += self._skipped_rereading
                else:
                    return
            yield EpochEnd(num_rows=last - first)
            cursor = None

    def reread(self, wanted: Mapping[int, AssignedBatch]) -> Generator[tuple[int, PackedBatch], None, None]:
        """Yield batches by number, in ascending order."""
        next_number = epoch = -1
        batches = self._batches(0, None)  # not started yet
        skipped_before = self._num_skipped()
        try:
            for number, entry in wanted.items():
                if entry.epoch != epoch or number - next_number > _MAX_SKIPPED_BATCHES:
                    batches.close()
                    batches = self._batches(entry.epoch, entry.cursor)
                    next_number, epoch = number, entry.epoch
                batch = None
                while next_number <= number:
                    batch, _ = next(batches, (None, None))
                    next_number += 1
                if batch is None or batch.num_samples != entry.num_samples:
                    raise DataError(f"the log has changed: batch {number} of reader {self._number} has another size")
                yield number, pack(batch, narrow=self._narrow_ids)
        finally:
            batches.close()
            self._skipped_rereading += self._num_skipped() - skipped_before

    def _batches(self, epoch: int, cursor: Cursor | None) -> Generator[tuple[Batch, Cursor], None, None]:
        rank, world_size = self._number, self._num_readers
        batches = self._source.batches(self._batch_size, epoch=epoch, rank=rank, world_size=world_size, cursor=cursor)
        with contextlib.closing(batches):
            yield from batches

    def _num_skipped(self) -> int:
        return self._source.num_skipped or 0
