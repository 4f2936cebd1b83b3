"""`FileSource`: batches from files, shuffled by seed, split among ranks, resumable at any batch.

`WindowOrder` says which rows are in which batch. Threads decode up to one window ahead and make batches; the result is the same for any
number of threads.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from rowstead.data.batch import Batch, share_bounds
from rowstead.data.block import LogPiece, RawBlock
from rowstead.data.columns import IdKinds
from rowstead.data.encode import Encoder, RawRows, compute_totals, empty_pinned, empty_tensor
from rowstead.data.file_log import FileLog, choose_num_busy, open_file_log
from rowstead.data.footers import Fingerprint
from rowstead.data.prefetch import map_ahead
from rowstead.data.row_order import Cursor, RowOrder, Span, WindowOrder, cut
from rowstead.data.source import Batches, LogSplit, Source
from rowstead.records.cost import Cost
from rowstead.records.usage import usable_cores
from rowstead.spec.data import FileLogSpec, SplitName
from rowstead.spec.features import FeaturesSpec
from rowstead.spec.heads import TaskSpec

UNSHUFFLED_WINDOW = 8_192
"""Rows of a window without shuffling; visible only when resuming."""
TRAINING_CORES = 2
"""With a GPU, one thread launches steps and one hands over batches; if they waited for a core, everything would."""
PART_ROWS = 512
"""Threads split the work of one batch in parts of at least this many examples; less is not worth the overhead."""

Part = tuple[RawRows, NDArray[np.int64]]
"""Rows of a batch: where they are, and their indices [R]."""


class FileSplit(LogSplit):
    """One split of a log in files with the columns that `features` select."""

    def __init__(
        self,
        spec: FileLogSpec,
        features: FeaturesSpec,
        split: SplitName,
        id_kinds: IdKinds | None = None,
        tasks: Sequence[TaskSpec] = (),
    ) -> None:
        self._features, self._split = features, split
        self._log = open_file_log(spec, features, split=split, id_kinds=id_kinds, tasks=tasks)
        self.id_kinds = {**(id_kinds or {}), **self._log.id_kinds}

    def raw_blocks(self, max_rows: int | None = None) -> Iterator[RawBlock]:
        return self._log.raw_blocks(max_rows)

    def dense_blocks(self, max_rows: int) -> Iterator[RawBlock]:
        dense_only = dataclasses.replace(self._features, sparse=(), tables=())
        return open_file_log(self._log.spec, dense_only, split=self._split, with_labels=False).raw_blocks(max_rows)

    def pieces(self) -> Iterator[Callable[[], LogPiece]]:
        with closing(self._log.pieces(self._log.spans, rows_ahead=0)) as pieces:
            for piece in pieces:
                yield partial(_same, piece)

    @property
    def fingerprints(self) -> Mapping[str, Fingerprint]:
        return self._log.fingerprints

    def source(self, encoder: Encoder, *, seed: int) -> FileSource:
        return FileSource(self._log, encoder, seed=seed, shuffle=self._split == "train")


class FileSource(Source):
    """Batches of one split of a `FileLog`.

    Memory: up to three windows (being read, being gathered, decoded ahead), the row groups that threads are decoding
    (`rowgroup.DECODED_BYTES`) or that a window still refers to, and batches made ahead, one per thread and at most one window of
    rows. Buffers are reused. One thread at a time may iterate; several iterators may be open.
    """

    def __init__(self, log: FileLog, encoder: Encoder, *, seed: int = 0, shuffle: bool = True) -> None:
        """Without `shuffle`, or with `shuffle_rows: 0`, rows are in file order."""
        self.log, self.encoder = log, encoder
        self.num_samples = log.num_samples
        self._num_skipped = 0
        self._making, self._helping = Cost(), Cost()
        """Cost per sample of the threads that make batches, and of those that help them."""
        self._rank, self._world = 0, 1
        self._pins = False
        self._functions: tuple[Callable[[Batch], Batch], ...] = ()
        shuffle = shuffle and log.spec.shuffle_rows > 0
        self._window_rows = log.spec.shuffle_rows if shuffle else UNSHUFFLED_WINDOW
        self._order = WindowOrder(log.spans, window_rows=self._window_rows, seed=seed, shuffle=shuffle)

    def map(self, function: Callable[[Batch], Batch]) -> FileSource:
        """As `Source.map`, with `function` called by the threads that make batches."""
        source = self._copy()
        source._functions = (*self._functions, function)
        return source

    def local_share(self, rank: int, world_size: int) -> Source:
        """As `Source.local_share`; rows of the other processes are decoded but not encoded."""
        if self._functions or self._world > 1:  # these expect the whole batch
            return super().local_share(rank, world_size)
        source = self._copy()
        source._rank, source._world = rank, world_size
        return source

    def pin_memory(self) -> FileSource:
        """As `Source.pin_memory`, with batches encoded right into pinned memory.

        Leaves `TRAINING_CORES` of the cores to the threads that train and hand over batches.
        """
        if not self._pins:
            free = max(1, usable_cores() - TRAINING_CORES)
            self.log.cpu_slots = threading.Semaphore(choose_num_busy(self.log.spec.decode_threads, free))
        source = self._copy()
        source._pins = True
        return source

    def _copy(self) -> FileSource:
        """The same source with counters of its own."""
        source = copy.copy(self)
        source._num_skipped, source._making, source._helping = 0, Cost(), Cost()
        return source

    def batches(
        self, batch_size: int, *, epoch: int = 0, rank: int = 0, world_size: int = 1, cursor: Cursor | None = None
    ) -> Batches:
        """As `Source.batches`. Resuming decodes at most the cursor's window again, and the rows before it in its row group."""
        assert batch_size >= 1
        assert 0 <= rank < world_size
        share = self._order.share(epoch, rank, world_size)
        number, at = self._order.start(cursor, sum(span.num_rows for span in share))
        # If batches are as large as windows, few are in progress, and threads share the work of each.
        num_ahead = min(self.log.threads, max(1, self._window_rows // batch_size))
        num_parts = max(1, min(-(-self.log.threads // num_ahead), batch_size // PART_ROWS))
        with ThreadPoolExecutor(self.log.threads, thread_name_prefix="part") as pool:  # threads start on demand
            made = map_ahead(
                lambda item: (self._encode(item[0], pool, num_parts), item[1]),
                self._cuts(batch_size, share, (epoch, rank), number, at),
                threads=num_ahead,
                size=lambda item: item[0].num_samples,
                cost=self._making,
            )
            with closing(made):
                yield from made

    def _cuts(
        self, batch_size: int, share: Sequence[Span], seeds: tuple[int, int], number: int, at: int
    ) -> Generator[tuple[list[Part], Cursor], None, None]:
        """The rows of each batch, from row `at` of window `number` on, with the cursor after it."""
        share_rows = sum(span.num_rows for span in share)
        rest = cut(share, number * self._window_rows, share_rows)
        with closing(self.log.pieces(rest, rows_ahead=self._window_rows)) as pieces:
            windows = self._windows(pieces)
            yield from self._order.cut_batches(batch_size, windows, seeds=seeds, share_rows=share_rows, number=number, at=at)

    @property
    def num_skipped(self) -> int:
        return self._num_skipped

    @property
    def row_order(self) -> RowOrder:
        return self._order

    @property
    def file_log(self) -> FileLog:
        return self.log

    @property
    def background_cpu_s_per_sample(self) -> float:
        return sum(cost.s_per_item or 0.0 for cost in (self.log.decoding, self._making, self._helping))

    def _windows(self, pieces: Iterator[LogPiece]) -> Iterator[tuple[RawRows, NDArray[np.int64]]]:
        """Windows of `shuffle_rows` rows, the last may be shorter: their blocks, and the indices of their good rows."""
        blocks: list[RawBlock] = []
        indices: list[NDArray[np.int64]] = []
        base = missing = 0
        for piece in pieces:
            start, num_rows = 0, piece.block.num_rows
            while start < num_rows:
                if not blocks:
                    base, missing = 0, self._window_rows
                stop = min(start + missing, num_rows)
                good = np.arange(start, stop) if piece.good is None else start + np.flatnonzero(piece.good[start:stop])
                self._num_skipped += stop - start - len(good)
                blocks.append(piece.block)
                indices.append(base + good)
                base, missing, start = base + num_rows, missing - (stop - start), stop
                if not missing:
                    window = RawRows(blocks), np.concatenate(indices)
                    blocks, indices = [], []
                    yield window
                    del window
        if blocks:
            yield RawRows(blocks), np.concatenate(indices)

    def _encode(self, parts: Sequence[Part], pool: ThreadPoolExecutor, num_parts: int) -> Batch:
        rows, order = parts[0]
        if len(parts) > 1:
            starts = accumulate((len(rows) for rows, _ in parts), initial=0)
            order = np.concatenate([start + order for start, (_, order) in zip(starts, parts, strict=False)])
            rows = RawRows.concatenate([rows for rows, _ in parts])
        start, stop = share_bounds(len(order), self._rank, self._world)
        helpers_s: list[float] = []

        def run_parts(count: int, work: Callable[[int], int]) -> list[int]:
            others = [pool.submit(_timed, partial(run_part, work), part, helpers_s) for part in range(1, count)]
            try:
                return [run_part(work, 0), *(other.result() for other in others)]
            finally:
                wait(others)

        def run_part(work: Callable[[int], int], part: int) -> int:
            with self.log.cpu_slots:
                return work(part)

        allocate = empty_pinned if self._pins else empty_tensor
        batch = self.encoder.encode(rows, order[start:stop], allocate=allocate, run_parts=run_parts, num_parts=num_parts)
        if helpers_s:
            self._helping.add(sum(helpers_s), batch.num_samples)
        if self._world > 1:
            batch = dataclasses.replace(batch, global_totals=compute_totals(rows, order))
        with self.log.cpu_slots:
            for function in self._functions:
                batch = function(batch)
        return batch


def _same(piece: LogPiece) -> LogPiece:
    return piece


def _timed(work: Callable[[int], int], part: int, spent_s: list[float]) -> int:
    """Call `work(part)` and append this thread's CPU time to the list."""
    start_s = time.thread_time()
    try:
        return work(part)
    finally:
        spent_s.append(time.thread_time() - start_s)
