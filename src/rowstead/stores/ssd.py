"""Rows in a file on SSD: the slow and large end of a cached store.

Reads go where the rows are, hundreds at once. Writes never do: a written row goes to the end of a segment in memory, and full
segments go to disk in one piece, so that rows that leave the cache cost the disk next to nothing beside those that enter it. A map
in memory says where each row's newest record is. When the file is full, the segments with the fewest newest records are read, and
those are written again with others like them.
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
from rowstead.stores.groups import CacheGroup
from rowstead.stores.scratch import BLOCK, ScratchFile, aligned, whole_blocks

Columns = Sequence[tuple[torch.dtype, int]]
"""What a record holds: type and width of the row's numbers and of each of its optimizer states."""

DEPTH = 512
"""Reads in flight."""
READ_BYTES = 16 << 10
"""The most that one read fetches of records near each other, if a record is not longer."""
GAP_BYTES = 4096
"""Between records that one read fetches at most."""
THREADS = 32
"""That read where the system has no queue."""
SEGMENT_BYTES = 1 << 20
"""Of a large file; smaller ones have at least `LEAST_SEGMENTS` shorter segments."""
LEAST_SEGMENTS = 64
WRITERS, CLEANED = 4, 8
"""Segments that are written at once at most, and those that are cleaned at once."""

_FREE, _IN_MEMORY, _ON_DISK = range(3)


@dataclass
class IoCounts:
    """What a file of rows has done so far."""

    rows_read: int = 0
    """From the disk; not those that were never written, or were still in memory."""
    reads: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    """Those of cleaning included."""
    bytes_cleaned: int = 0
    """Read to clean segments."""


@dataclass
class _Head:
    """A segment that is being filled."""

    segment: int
    memory: NDArray[np.uint8]
    filled: int = 0


class FileRows:
    """The records of `num_rows` rows of equal width, in one file that is the scratch space of one run.

    columns: type and width of the row's numbers, then of each optimizer state. `initial(rows)` makes the numbers [n, width] of rows
    that were never written, whose states are zero; so a new file is ready at once. The file is `spare` times as long as its rows:
    the shorter it is, the more often rows are written again to make room.
    The file is removed by `close`, or when the process ends in good order; with `keep` it stays, and `create=False` opens it
    again. `direct`, `reserve`: see ScratchFile. One thread at a time gets in; rows in one call are distinct.
    Memory besides the file: 4 bytes a row (8 from 2**31 slots on), and at most some 25 MB.
    """

    def __init__(
        self,
        path: str | Path,
        num_rows: int,
        columns: Columns,
        *,
        initial: Callable[[Tensor], Tensor] | None = None,
        create: bool = True,
        keep: bool = False,
        direct: bool = True,
        reserve: bool = False,
        spare: float = 1.5,
    ) -> None:
        assert num_rows > 0
        assert spare >= 1.1, "cleaning needs room"
        self.num_rows, self.columns, self.counts = num_rows, tuple(columns), IoCounts()
        self._initial = initial
        self._widths = np.array([dtype.itemsize * width for dtype, width in columns], np.int64)
        self.record_bytes = -(-(8 + int(self._widths.sum())) // 8) * 8
        least = whole_blocks(self.record_bytes)
        self._segment_bytes = max(least, min(SEGMENT_BYTES, whole_blocks(num_rows * self.record_bytes // LEAST_SEGMENTS)))
        self._per_segment = self._segment_bytes // self.record_bytes
        self._num_segments = int(num_rows * spare) // self._per_segment + 2 + 2 * WRITERS + 2 * CLEANED
        num_slots = self._num_segments * self._per_segment
        facts = {
            "format": 1,
            "rows": num_rows,
            "columns": [[str(dtype).removeprefix("torch."), width] for dtype, width in columns],
            "segment_bytes": self._segment_bytes,
            "segments": self._num_segments,
        }
        num_bytes = self._num_segments * self._segment_bytes
        self.file = ScratchFile(path, num_bytes, facts, create=create, keep=keep, direct=direct, reserve=reserve)
        self._where: NDArray[Any] = np.full(num_rows, -1, np.int32 if num_slots < 2**31 else np.int64)
        self._live = np.zeros(self._num_segments, np.int64)
        self._status = np.zeros(self._num_segments, np.uint8)
        self._in_memory = np.zeros(self._num_segments, np.int64)
        if not create:
            self._where[:] = np.frombuffer(self.file.extra, self._where.dtype)
            segments, counts = np.unique(self._where[self._where >= 0] // self._per_segment, return_counts=True)
            self._live[segments] = counts
            self._status[segments] = _ON_DISK
        self._free = deque(np.flatnonzero(self._status == _FREE).tolist())
        self._spare_memory: list[NDArray[np.uint8]] = []
        self._written: deque[tuple[Future[None], _Head]] = deque()
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="rows-to-disk")
        self._queue = self._new_queue()
        self._read_bytes = max(READ_BYTES, whole_blocks(self.record_bytes) + BLOCK)
        readers = DEPTH if self._queue else THREADS
        self._read_memory = aligned(readers * self._read_bytes)
        self._readers = None if self._queue else ThreadPoolExecutor(THREADS, thread_name_prefix="rows-from-disk")
        self._clean_memory: list[NDArray[np.uint8]] = []
        self._fresh, self._kept = self._new_head(), self._new_head()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def direct(self) -> bool:
        """Whether the system keeps no copies of the file in its own memory."""
        return self.file.direct

    def _new_queue(self) -> disk.ReadQueue | None:
        """None where the system has none, or where its reads would be done one by one because they are not direct."""
        if not self.file.direct:
            return None
        try:
            return disk.ReadQueue(DEPTH)
        except OSError:
            return None

    def read(self, rows: Tensor, into: Sequence[Tensor], places: Tensor | None = None) -> None:
        """Fill `into`, contiguous CPU tensors [n, width] in the order of the columns, with the records of `rows` int64 [n].

        With `places` int64 [n], tensors may be longer, and records go there.
        """
        numbers, columns = rows.contiguous().numpy(), self._addresses(into)
        targets = _numbered(rows, places, into)
        on_disk, nowhere = np.empty_like(numbers), np.empty_like(numbers)
        with self._lock:
            self._settle()
            memory = self._in_memory, self._per_segment, self.record_bytes
            found = disk.locate(numbers, targets, self._where, *memory, columns, self._widths, on_disk, nowhere)
            num_on_disk, num_nowhere = found
            assert num_on_disk >= 0, "a row is outside"
            if num_on_disk:
                self._read_records(numbers, on_disk[:num_on_disk], targets, columns)
        if num_nowhere:
            self._make(numbers, nowhere[:num_nowhere], targets, into)

    def _read_records(
        self, rows: NDArray[np.int64], places: NDArray[np.int64], targets: NDArray[np.int64], columns: NDArray[np.int64]
    ) -> None:
        starts = self._starts_of(rows, places)
        order = np.argsort(starts)
        starts, places = starts[order], places[order]
        reads, firsts = disk.cut_reads(starts, self.record_bytes, self.file.sector, GAP_BYTES, self._read_bytes)
        self.counts.rows_read += len(places)
        self.counts.reads += len(reads)
        self.counts.bytes_read += int(reads[:, 1].sum())
        work = (reads, firsts, starts, places, rows, targets, columns, self._widths)
        memory = address_of(self._read_memory)
        if self._queue:
            outcome = disk.read_queued(self._queue, self.file.fd, memory, self._read_bytes, *work)
        else:
            assert self._readers is not None
            counter, threads = np.zeros(1, np.int64), min(THREADS, -(-len(reads) // 8))
            parts = [
                self._readers.submit(disk.read_in_turn, counter, self.file.fd, memory + thread * self._read_bytes, *work)
                for thread in range(threads)
            ]
            outcome = max((part.result() for part in parts), key=abs)
        if outcome == disk.ANOTHER_ROW:
            raise self.file.changed()
        if outcome == disk.SHORT:
            raise self.file.cut_off()
        if outcome != disk.OK:
            raise self.file.failed(OSError(outcome, os.strerror(outcome)), "reading")

    def _starts_of(self, rows: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        sizes = self._per_segment, self.record_bytes, self._segment_bytes
        starts: NDArray[np.int64] = disk.record_starts(rows, places, self._where, *sizes, BLOCK)
        return starts

    def starts_on_disk(self, rows: Tensor) -> NDArray[np.int64]:
        """At which bytes of the file the newest records of `rows` begin, those left out that are not on disk now."""
        numbers = rows.numpy()
        with self._lock:
            slots = self._where[numbers]
            on_disk = (slots >= 0) & (self._status[slots // self._per_segment] == _ON_DISK)
            return self._starts_of(numbers, np.flatnonzero(on_disk))

    def _make(
        self, rows: NDArray[np.int64], places: NDArray[np.int64], targets: NDArray[np.int64], into: Sequence[Tensor]
    ) -> None:
        """Rows that were never written."""
        assert self._initial is not None, "rows were never written, and nobody said how to make them"
        made, there = self._initial(torch.from_numpy(rows[places])), torch.from_numpy(targets[places])
        into[0].index_copy_(0, there, made.to(into[0].dtype))
        for state in into[1:]:
            state.index_fill_(0, there, 0)

    def write(self, rows: Tensor, values: Sequence[Tensor], places: Tensor | None = None) -> None:
        """Take over the records of distinct `rows` int64 [n] from `values`, CPU tensors [n, width] in the order of the columns.

        With `places` int64 [n], tensors may be longer, and records are there.
        """
        numbers, held = rows.contiguous().numpy(), [value.contiguous() for value in values]
        columns, sources = self._addresses(held), _numbered(rows, places, held)
        assert not len(numbers) or (numbers.min() >= 0 and numbers.max() < self.num_rows), "a row is outside"
        done = 0
        with self._lock:
            self._settle()
            while done < len(numbers):
                head = self._fresh = self._with_room(self._fresh)
                count = min(len(numbers) - done, self._per_segment - head.filled)
                target, slot = self._next_slot(head)
                size, where, live = self.record_bytes, self._where, self._live
                disk.append(
                    numbers, sources, done, count, columns, self._widths, target, size, slot, self._per_segment, where, live
                )
                head.filled += count
                done += count

    def read_range(self, start: int, stop: int) -> list[Tensor]:
        """The records of rows `start` to `stop`, a tensor a column; the more at once, the fewer reads for each."""
        into = [torch.empty(stop - start, width, dtype=dtype) for dtype, width in self.columns]
        self.read(torch.arange(start, stop), into)
        return into

    def write_range(self, start: int, values: Sequence[Tensor]) -> None:
        """Take over the records of the rows from `start` on, a tensor a column."""
        self.write(torch.arange(start, start + len(values[0])), values)

    def close(self) -> None:
        """Give everything back; the file is removed unless it is to be kept."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            newest = None
            try:
                if self.file.keep:
                    for head in (self._fresh, self._kept):
                        if head.filled:
                            self._send(head)
                    self._settle(leave=0)
                    newest = self._where.tobytes()
            finally:
                self._writers.shutdown()
                if self._readers:
                    self._readers.shutdown()
                if self._queue:
                    self._queue.close()
                self.file.close(newest)

    def _addresses(self, columns: Sequence[Tensor]) -> NDArray[np.int64]:
        assert not self._closed, "this file of rows was closed"
        for column, (dtype, width) in zip(columns, self.columns, strict=True):
            assert (column.shape[1], column.dtype) == (width, dtype), (column.shape, column.dtype)
            assert column.is_contiguous()
            assert column.device.type == "cpu"
        return np.array([column.data_ptr() for column in columns], np.int64)

    # Segments

    def _new_head(self) -> _Head:
        segment = self._free.popleft()
        memory = self._spare_memory.pop() if self._spare_memory else aligned(self._segment_bytes)
        self._status[segment] = _IN_MEMORY
        self._in_memory[segment] = address_of(memory)
        return _Head(segment, memory)

    def _next_slot(self, head: _Head) -> tuple[int, int]:
        """Address and number of a head's first empty slot."""
        return address_of(head.memory) + head.filled * self.record_bytes, head.segment * self._per_segment + head.filled

    def _with_room(self, head: _Head) -> _Head:
        """The same segment, or a new one if it is full; makes room in the file where there is little left."""
        if head.filled < self._per_segment:
            return head
        self._send(head)
        while len(self._free) <= CLEANED + 1:
            self._clean()
        return self._new_head()

    def _send(self, head: _Head) -> None:
        """Have a segment written, while its records can still be read from memory."""
        self._settle(leave=WRITERS - 1)
        self.counts.bytes_written += self._segment_bytes
        place = BLOCK + head.segment * self._segment_bytes
        self._written.append((self._writers.submit(self.file.write, head.memory, place), head))

    def _settle(self, leave: int | None = None) -> None:
        """Take back the memory of segments that are on disk by now, and wait until at most `leave` are not."""
        while self._written and (self._written[0][0].done() or (leave is not None and len(self._written) > leave)):
            written, head = self._written[0]
            written.result()  # an error stays first in line, so that every later call meets it too
            self._written.popleft()
            self._status[head.segment] = _ON_DISK
            self._in_memory[head.segment] = 0
            self._spare_memory.append(head.memory)

    def _clean(self) -> None:
        """Make segments free: those without newest records, or else those with the fewest, whose records are written again."""
        self._settle(leave=0 if len(self._written) and not (self._status == _ON_DISK).any() else None)
        candidates = np.flatnonzero(self._status == _ON_DISK)
        dead = candidates[self._live[candidates] == 0]
        if len(dead):
            self._release(dead)
            return
        order = np.argpartition(self._live[candidates], CLEANED - 1)[:CLEANED]
        chosen = np.sort(candidates[order])
        assert self._live[chosen].sum() < len(chosen) * self._per_segment, "a file with no room to spare"
        while len(self._clean_memory) < len(chosen):
            self._clean_memory.append(aligned(self._segment_bytes))
        tasks = [
            self._writers.submit(self.file.read, memory, BLOCK + int(segment) * self._segment_bytes)
            for memory, segment in zip(self._clean_memory, chosen, strict=False)
        ]
        for task, memory, segment in zip(tasks, self._clean_memory, chosen, strict=False):
            task.result()
            self.counts.bytes_cleaned += self._segment_bytes
            self._keep_newest(address_of(memory), int(segment))
        self._release(chosen)

    def _keep_newest(self, source: int, segment: int) -> None:
        looked_at = 0
        while looked_at < self._per_segment:
            if self._kept.filled == self._per_segment:
                self._send(self._kept)
                self._kept = self._new_head()
            head, first = self._kept, segment * self._per_segment
            target, slot = self._next_slot(head)
            room, where, live = self._per_segment - head.filled, self._where, self._live
            looked_at, copied = disk.keep_live(
                source, looked_at, first, target, room, slot, self.record_bytes, self._per_segment, where, live
            )
            head.filled += copied

    def _release(self, segments: NDArray[Any]) -> None:
        assert not self._live[segments].any()
        self._status[segments] = _FREE
        self._free.extend(segments.tolist())


def _numbered(rows: Tensor, places: Tensor | None, columns: Sequence[Tensor]) -> NDArray[np.int64]:
    """Where in the columns the records of rows are."""
    numbers: NDArray[np.int64] = np.arange(len(rows)) if places is None else places.contiguous().numpy()
    assert len(numbers) == len(rows)
    assert not len(rows) or (numbers.min() >= 0 and numbers.max() < min(map(len, columns))), "a place is outside"
    return numbers


def initial_in(group: CacheGroup, *, seed: int) -> Callable[[Tensor], Tensor]:
    """What makes the initial rows of a group by their numbers in it."""
    firsts = torch.tensor([first for _, first in group.tables])
    dtype = group.columns[0][0]

    def initial(rows: Tensor) -> Tensor:
        order = torch.argsort(rows)
        rising = rows[order]
        borders = torch.searchsorted(rising, firsts).tolist()
        made = torch.empty(len(rows), group.width, dtype=dtype)
        for (table, first), start, stop in zip(group.tables, borders, [*borders[1:], len(rows)], strict=True):
            if start < stop:
                made[order[start:stop]] = initial_rows_at(table, rising[start:stop] - first, seed=seed, dtype=dtype)
        return made

    return initial
