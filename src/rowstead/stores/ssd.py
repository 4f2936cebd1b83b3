"""Rows in a file on SSD: the backing of a cached store, as a log-structured file.

Reads are random, hundreds at once. Writes are appended: a written row goes to the end of a segment in memory, and full segments go to
disk in one piece, so that evicted rows cost the disk little beside fetched ones. A map in memory holds the slot of each row's newest
record. When the file is full, it cleans the segments with the fewest newest records: these are read and appended again.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.kernels.cpu import disk
from rowstead.kernels.cpu.memory import address_of
from rowstead.kernels.initial import initial_rows_at
from rowstead.spec.caching import FILE_SPARE, GAP_BYTES, READ_BYTES
from rowstead.stores.groups import CacheGroup
from rowstead.stores.scratch import BLOCK, ScratchFile, allocate_aligned, round_up_to_block

Columns = Sequence[tuple[torch.dtype, int]]
"""Type and width of the row in a record, then of each of its optimizer states."""

DEPTH = 512
"""Reads in flight."""
THREADS = 32
"""Threads that read where there is no asynchronous I/O."""
SEGMENT_BYTES = 1 << 20
"""Segment size of a large file; smaller files have at least `MIN_SEGMENTS` shorter segments."""
MIN_SEGMENTS = 64
WRITERS, CLEANED = 4, 8
"""Segments that are written at once at most, and segments that are cleaned together."""

_FREE, _IN_MEMORY, _ON_DISK = range(3)


@dataclass
class IoCounts:
    """I/O of a row file so far."""

    rows_read: int = 0
    """From disk, without rows that were never written or were still in memory."""
    reads: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    """Including cleaning."""
    bytes_cleaned: int = 0
    """Bytes read to clean segments."""


@dataclass
class _OpenSegment:
    """A segment in memory that is being filled."""

    segment: int
    memory: NDArray[np.uint8]
    filled: int = 0


class FileRows:
    """The records of `num_rows` rows of equal width, in one scratch file of one run.

    columns: type and width of the row, then of each optimizer state. `initial(rows)` makes the values [n, width] of rows that were
    never written, whose states are zero, so a new file is ready at once. The file is `spare` times as long as its records: the shorter
    it is, the more often it is cleaned. `close` removes it, as does a regular exit of the process. `direct`: see ScratchFile.
    A lock admits one thread at a time; rows in one call are distinct.
    Memory besides the file: 4 bytes per row (8 from 2**31 slots on), and at most about 25 MB.
    """

    def __init__(
        self,
        path: str | Path,
        num_rows: int,
        columns: Columns,
        *,
        initial: Callable[[Tensor], Tensor] | None = None,
        direct: bool = True,
        spare: float = FILE_SPARE,
    ) -> None:
        assert num_rows > 0
        assert spare >= 1.1, "cleaning needs free segments"
        self.num_rows, self.columns, self.counts = num_rows, tuple(columns), IoCounts()
        self._initial = initial
        self._widths = np.array([dtype.itemsize * width for dtype, width in columns], np.int64)
        self.record_bytes = -(-(8 + int(self._widths.sum())) // 8) * 8
        least = round_up_to_block(self.record_bytes)
        self._segment_bytes = max(least, min(SEGMENT_BYTES, round_up_to_block(num_rows * self.record_bytes // MIN_SEGMENTS)))
        self._per_segment = self._segment_bytes // self.record_bytes
        self._num_segments = int(num_rows * spare) // self._per_segment + 2 + 2 * WRITERS + 2 * CLEANED
        num_slots = self._num_segments * self._per_segment
        self.file = ScratchFile(path, self._num_segments * self._segment_bytes, direct=direct)
        self._slot_of: NDArray[Any] = np.full(num_rows, -1, np.int32 if num_slots < 2**31 else np.int64)
        self._live = np.zeros(self._num_segments, np.int64)
        self._status = np.zeros(self._num_segments, np.uint8)
        self._in_memory = np.zeros(self._num_segments, np.int64)
        self._free = deque(range(self._num_segments))
        self._spare_memory: list[NDArray[np.uint8]] = []
        self._written: deque[tuple[Future[None], _OpenSegment]] = deque()
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="rows-to-disk")
        self._queue = self._new_queue()
        self._read_bytes = max(READ_BYTES, round_up_to_block(self.record_bytes) + BLOCK)
        readers = DEPTH if self._queue else THREADS
        self._read_memory = allocate_aligned(readers * self._read_bytes)
        self._readers = None if self._queue else ThreadPoolExecutor(THREADS, thread_name_prefix="rows-from-disk")
        self._clean_memory: list[NDArray[np.uint8]] = []
        self._fresh, self._kept = self._new_segment(), self._new_segment()
        self._lock = threading.Lock()
        self._closed = False

    def _new_queue(self) -> disk.ReadQueue | None:
        """None where the system has no asynchronous I/O, or would do reads one after the other because they are not direct."""
        if not self.file.direct:
            return None
        try:
            return disk.ReadQueue(DEPTH)
        except OSError:
            return None

    def read(self, rows: Tensor, into: Sequence[Tensor], slots: Tensor | None = None) -> None:
        numbers, columns = rows.contiguous().numpy(), self._addresses(into)
        targets = _indices(rows, slots, into)
        on_disk, unwritten = np.empty_like(numbers), np.empty_like(numbers)
        with self._lock:
            self._collect_written()
            memory = self._in_memory, self._per_segment, self.record_bytes
            found = disk.locate(numbers, targets, self._slot_of, *memory, columns, self._widths, on_disk, unwritten)
            num_on_disk, num_unwritten = found
            assert num_on_disk >= 0, "a row is out of range"
            if num_on_disk:
                self._read_records(numbers, on_disk[:num_on_disk], targets, columns)
        if num_unwritten:
            self._make(numbers, unwritten[:num_unwritten], targets, into)

    def _read_records(
        self, rows: NDArray[np.int64], chosen: NDArray[np.int64], targets: NDArray[np.int64], columns: NDArray[np.int64]
    ) -> None:
        starts = self._starts_of(rows, chosen)
        order = np.argsort(starts)
        starts, chosen = starts[order], chosen[order]
        reads, firsts = disk.cut_reads(starts, self.record_bytes, self.file.sector, GAP_BYTES, self._read_bytes)
        self.counts.rows_read += len(chosen)
        self.counts.reads += len(reads)
        self.counts.bytes_read += int(reads[:, 1].sum())
        work = (reads, firsts, starts, chosen, rows, targets, columns, self._widths)
        memory = address_of(self._read_memory)
        if self._queue:
            outcome = disk.read_queued(self._queue, self.file.fd, memory, self._read_bytes, *work)
        else:
            assert self._readers is not None
            counter, threads = np.zeros(1, np.int64), min(THREADS, -(-len(reads) // 8))
            parts = [
                self._readers.submit(disk.read_by_pread, counter, self.file.fd, memory + thread * self._read_bytes, *work)
                for thread in range(threads)
            ]
            outcome = max((part.result() for part in parts), key=abs)
        if outcome == disk.WRONG_ROW:
            raise self.file.changed()
        if outcome == disk.SHORT:
            raise self.file.truncated()
        if outcome != disk.OK:
            raise self.file.failed(OSError(outcome, os.strerror(outcome)), "reading")

    def _starts_of(self, rows: NDArray[np.int64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        sizes = self._per_segment, self.record_bytes, self._segment_bytes
        starts: NDArray[np.int64] = disk.record_starts(rows, chosen, self._slot_of, *sizes, BLOCK)
        return starts

    def starts_on_disk(self, rows: Tensor) -> NDArray[np.int64]:
        """File offsets of the newest records of those `rows` that are on disk."""
        numbers = rows.numpy()
        with self._lock:
            slots = self._slot_of[numbers]
            on_disk = (slots >= 0) & (self._status[slots // self._per_segment] == _ON_DISK)
            return self._starts_of(numbers, np.flatnonzero(on_disk))

    def _make(
        self, rows: NDArray[np.int64], chosen: NDArray[np.int64], targets: NDArray[np.int64], into: Sequence[Tensor]
    ) -> None:
        """Make rows that were never written."""
        assert self._initial is not None, "rows were never written, and there is no `initial` to make them"
        made, there = self._initial(torch.from_numpy(rows[chosen])), torch.from_numpy(targets[chosen])
        into[0].index_copy_(0, there, made.to(into[0].dtype))
        for state in into[1:]:
            state.index_fill_(0, there, 0)

    def write(self, rows: Tensor, values: Sequence[Tensor], slots: Tensor | None = None) -> None:
        numbers, held = rows.contiguous().numpy(), [value.contiguous() for value in values]
        columns, sources = self._addresses(held), _indices(rows, slots, held)
        assert not len(numbers) or (numbers.min() >= 0 and numbers.max() < self.num_rows), "a row is out of range"
        done = 0
        with self._lock:
            self._collect_written()
            while done < len(numbers):
                head = self._fresh = self._ensure_space(self._fresh)
                count = min(len(numbers) - done, self._per_segment - head.filled)
                target, slot = self._next_slot(head)
                size, slot_of, live = self.record_bytes, self._slot_of, self._live
                disk.append(
                    numbers, sources, done, count, columns, self._widths, target, size, slot, self._per_segment, slot_of, live
                )
                head.filled += count
                done += count

    def close(self) -> None:
        """Release threads and memory, and remove the file."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._writers.shutdown()
            if self._readers:
                self._readers.shutdown()
            if self._queue:
                self._queue.close()
            self.file.close()

    def _addresses(self, columns: Sequence[Tensor]) -> NDArray[np.int64]:
        assert not self._closed, "this row file was closed"
        for column, (dtype, width) in zip(columns, self.columns, strict=True):
            assert (column.shape[1], column.dtype) == (width, dtype), (column.shape, column.dtype)
            assert column.is_contiguous()
            assert column.device.type == "cpu"
        return np.array([column.data_ptr() for column in columns], np.int64)

    # Segments

    def _new_segment(self) -> _OpenSegment:
        segment = self._free.popleft()
        memory = self._spare_memory.pop() if self._spare_memory else allocate_aligned(self._segment_bytes)
        self._status[segment] = _IN_MEMORY
        self._in_memory[segment] = address_of(memory)
        return _OpenSegment(segment, memory)

    def _next_slot(self, head: _OpenSegment) -> tuple[int, int]:
        """Address and number of a segment's first empty slot."""
        return address_of(head.memory) + head.filled * self.record_bytes, head.segment * self._per_segment + head.filled

    def _ensure_space(self, head: _OpenSegment) -> _OpenSegment:
        """The same segment, or a new one if it is full; cleans the file if few segments are free."""
        if head.filled < self._per_segment:
            return head
        self._send(head)
        while len(self._free) <= CLEANED + 1:
            self._clean()
        return self._new_segment()

    def _send(self, head: _OpenSegment) -> None:
        """Start to write a segment; its records are read from memory until it is on disk."""
        self._collect_written(leave=WRITERS - 1)
        self.counts.bytes_written += self._segment_bytes
        offset = BLOCK + head.segment * self._segment_bytes
        self._written.append((self._writers.submit(self.file.write, head.memory, offset), head))

    def _collect_written(self, leave: int | None = None) -> None:
        """Reuse the memory of segments that are on disk by now; with `leave`, wait until at most that many are not."""
        while self._written and (self._written[0][0].done() or (leave is not None and len(self._written) > leave)):
            written, head = self._written[0]
            written.result()  # an error stays first in the queue, so that every later call raises it
            self._written.popleft()
            self._status[head.segment] = _ON_DISK
            self._in_memory[head.segment] = 0
            self._spare_memory.append(head.memory)

    def _clean(self) -> None:
        """Free segments: those without newest records, else those with the fewest, whose records are appended again."""
        self._collect_written(leave=0 if len(self._written) and not (self._status == _ON_DISK).any() else None)
        candidates = np.flatnonzero(self._status == _ON_DISK)
        dead = candidates[self._live[candidates] == 0]
        if len(dead):
            self._release(dead)
            return
        order = np.argpartition(self._live[candidates], CLEANED - 1)[:CLEANED]
        chosen = np.sort(candidates[order])
        assert self._live[chosen].sum() < len(chosen) * self._per_segment, "a file without spare slots"
        while len(self._clean_memory) < len(chosen):
            self._clean_memory.append(allocate_aligned(self._segment_bytes))
        tasks = [
            self._writers.submit(self.file.read, memory, BLOCK + int(segment) * self._segment_bytes)
            for memory, segment in zip(self._clean_memory, chosen, strict=False)
        ]
        for task, memory, segment in zip(tasks, self._clean_memory, chosen, strict=False):
            task.result()
            self.counts.bytes_cleaned += self._segment_bytes
            self._append_newest(address_of(memory), int(segment))
        self._release(chosen)

    def _append_newest(self, source: int, segment: int) -> None:
        scanned = 0
        while scanned < self._per_segment:
            if self._kept.filled == self._per_segment:
                self._send(self._kept)
                self._kept = self._new_segment()
            head, first = self._kept, segment * self._per_segment
            target, slot = self._next_slot(head)
            capacity, slot_of, live = self._per_segment - head.filled, self._slot_of, self._live
            scanned, copied = disk.keep_live(
                source, scanned, first, target, capacity, slot, self.record_bytes, self._per_segment, slot_of, live
            )
            head.filled += copied

    def _release(self, segments: NDArray[Any]) -> None:
        assert not self._live[segments].any()
        self._status[segments] = _FREE
        self._free.extend(segments.tolist())


def _indices(rows: Tensor, slots: Tensor | None, columns: Sequence[Tensor]) -> NDArray[np.int64]:
    """Indices in the columns of the records of rows."""
    numbers: NDArray[np.int64] = np.arange(len(rows)) if slots is None else slots.contiguous().numpy()
    assert len(numbers) == len(rows)
    assert not len(rows) or (numbers.min() >= 0 and numbers.max() < min(map(len, columns))), "a slot is out of range"
    return numbers


def initial_rows_of(group: CacheGroup, *, seed: int) -> Callable[[Tensor], Tensor]:
    """A function that makes the initial rows of a group by their numbers in it."""
    firsts = torch.tensor([first for _, first in group.tables])
    dtype = group.columns[0][0]

    def initial(rows: Tensor) -> Tensor:
        order = torch.argsort(rows)
        ascending = rows[order]
        borders = torch.searchsorted(ascending, firsts).tolist()
        made = torch.empty(len(rows), group.width, dtype=dtype)
        for (table, first), start, stop in zip(group.tables, borders, [*borders[1:], len(rows)], strict=True):
            if start < stop:
                made[order[start:stop]] = initial_rows_at(table, ascending[start:stop] - first, seed=seed, dtype=dtype)
        return made

    return initial
