"""`RowOrder`: which rows of a log are in which batch. It needs the sizes of a log only, and reads none of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rowstead.data.batch import share_bounds
from rowstead.spec.errors import DataError

T = TypeVar("T")
Cursor = dict[str, int]
"""Position of a reader after a batch: small, JSON-able, opaque to all but the source that made it."""
Rows = NDArray[np.int64]
RowsBetween = Callable[[int, int], Rows]
"""The good rows of a log between two row numbers, in order."""


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one row group, counted over those that belong to the split."""

    file: int
    group: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def slice(self, start: int, stop: int) -> Span:
        """Rows `start` to `stop` of this span, clipped to its bounds."""
        return Span(self.file, self.group, self.start + max(start, 0), self.start + min(stop, self.num_rows))


def cut(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    """The spans of rows `start` to `stop`, counted over all `spans`."""
    parts, at = [], 0
    for span in spans:
        if at < stop and at + span.num_rows > start:
            parts.append(span.slice(start - at, stop - at))
        at += span.num_rows
    return parts


class RowOrder(ABC):
    """The rows of each batch of an epoch, a pure function of seed, batch size, epoch, rank and world size."""

    num_rows: int
    """Rows of the split, bad ones included."""

    @abstractmethod
    def batches(
        self,
        batch_size: int,
        rows_between: RowsBetween,
        *,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        cursor: Cursor | None = None,
    ) -> Generator[tuple[Rows, Cursor], None, None]:
        """The rows of each batch, from `cursor` on, with the cursor after it. `rows_between` is called once for each part of the log."""


class FileOrder(RowOrder):
    """Rows in the order of the log, the same in every epoch; ranks have contiguous shares."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def batches(
        self,
        batch_size: int,
        rows_between: RowsBetween,
        *,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        cursor: Cursor | None = None,
    ) -> Generator[tuple[Rows, Cursor], None, None]:
        first, last = share_bounds(self.num_rows, rank, world_size)
        for start in range(first + (cursor["row"] if cursor else 0), last, batch_size):
            stop = min(start + batch_size, last)
            yield rows_between(start, stop), {"row": stop - first}


class WindowOrder(RowOrder):
    """Row groups, in file order or permuted by (seed, epoch), cut into windows of rows, each shuffled on its own.

    Each rank owns one contiguous share of an epoch's rows. Batches are cut from consecutive windows.
    """

    def __init__(self, spans: Sequence[Span], *, window_rows: int, seed: int, shuffle: bool) -> None:
        self.spans, self.window_rows = spans, window_rows
        self.num_rows = sum(span.num_rows for span in spans)
        self._seed, self._shuffle = seed % 2**64, shuffle

    def share(self, epoch: int, rank: int, world_size: int) -> list[Span]:
        """The spans of one rank in one epoch, in reading order."""
        return [self.spans[i].slice(start, stop) for i, start, stop in self._share(epoch, rank, world_size)]

    def _share(self, epoch: int, rank: int, world_size: int) -> list[tuple[int, int, int]]:
        """As `share`: the index of each span, and which of its rows."""
        spans = [Span(0, index, 0, span.num_rows) for index, span in enumerate(self.spans)]
        if self._shuffle:
            spans = [spans[i] for i in np.random.default_rng((self._seed, epoch)).permutation(len(spans))]
        return [(part.group, part.start, part.stop) for part in cut(spans, *share_bounds(self.num_rows, rank, world_size))]

    def start(self, cursor: Cursor | None, share_rows: int) -> tuple[int, int]:
        """The window to begin with, and how many of its good rows come before."""
        if cursor and cursor["of"] != share_rows:
            raise DataError(
                f"cannot resume: this reader's share of the log had {cursor['of']} rows and now has {share_rows}. "
                "Restore the original files, or start a new run"
            )
        return (cursor["window"], cursor["row"]) if cursor else (0, 0)

    def cut_batches(
        self,
        batch_size: int,
        windows: Iterator[tuple[T, Rows]],
        *,
        seeds: tuple[int, int],
        share_rows: int,
        number: int,
        at: int,
    ) -> Generator[tuple[list[tuple[T, Rows]], Cursor], None, None]:
        """Shuffle the good rows of `windows`, from window `number` on, by (epoch, rank), and cut batches, from row `at` on.

        Each window comes with where its rows are, and each part of a batch with the same.
        """
        num_windows = -(-share_rows // self.window_rows)
        parts: list[tuple[T, Rows]] = []
        num_taken = 0
        for window in range(number, num_windows):
            where, order = next(windows)
            if self._shuffle:
                np.random.default_rng((self._seed, *seeds, window)).shuffle(order)
            while at < len(order):
                taken = order[at : at + batch_size - num_taken]
                at += len(taken)
                num_taken += len(taken)
                parts.append((where, taken))
                if num_taken == batch_size:
                    here = (window, at) if at < len(order) else (window + 1, 0)
                    yield parts, {"window": here[0], "row": here[1], "of": share_rows}
                    parts, num_taken = [], 0
            at = 0
            del where, order  # or this window would stay in memory while the next is gathered
        if parts:
            yield parts, {"window": num_windows, "row": 0, "of": share_rows}

    def batches(
        self,
        batch_size: int,
        rows_between: RowsBetween,
        *,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        cursor: Cursor | None = None,
    ) -> Generator[tuple[Rows, Cursor], None, None]:
        firsts = list(accumulate((span.num_rows for span in self.spans), initial=0))
        share = [(firsts[i] + start, firsts[i] + stop) for i, start, stop in self._share(epoch, rank, world_size)]
        share_rows = sum(stop - start for start, stop in share)
        number, at = self.start(cursor, share_rows)
        windows = self._windows(share, number, rows_between)
        cuts = self.cut_batches(batch_size, windows, seeds=(epoch, rank), share_rows=share_rows, number=number, at=at)
        with closing(cuts):
            for parts, after in cuts:
                yield (parts[0][1] if len(parts) == 1 else np.concatenate([rows for _, rows in parts])), after

    def _windows(self, share: Sequence[tuple[int, int]], number: int, rows_between: RowsBetween) -> Iterator[tuple[None, Rows]]:
        """The good rows of each window of consecutive ranges of rows, from window `number` on."""
        skipped, missing = number * self.window_rows, self.window_rows
        found: list[Rows] = []
        for start, stop in share:
            start, skipped = start + min(skipped, stop - start), max(0, skipped - (stop - start))
            while start < stop:
                end = min(start + missing, stop)
                found.append(rows_between(start, end))
                missing, start = missing - (end - start), end
                if not missing:
                    yield None, np.concatenate(found)
                    found, missing = [], self.window_rows
        if found:
            yield None, np.concatenate(found)
