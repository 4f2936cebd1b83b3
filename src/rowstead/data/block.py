"""`RawBlock`: rows of a log before transforms and hashing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class RawBlock:
    """R rows of a log: the selected columns, features in the order of the spec."""

    dense: NDArray[np.float32]
    """[R, Fd], C-contiguous; NaN where a value is missing."""
    ids: tuple[NDArray[np.int64], ...]
    """Per sparse feature, the raw 64-bit ids of all rows, concatenated: integers as they are, text hashed by XXH64."""
    offsets: tuple[NDArray[np.int64], ...]
    """Per sparse feature, [R + 1], the first 0: row r owns ids[offsets[r] : offsets[r+1]]."""
    labels: NDArray[np.float32] | None = None
    """[R], or with several labels [R, T], NaN where one is missing."""
    weights: NDArray[np.float32] | None = None
    """Example weights [R]."""
    true_p: NDArray[np.float32] | None = None
    """True probabilities of the labels, [R] or [R, T]."""
    groups: NDArray[np.int64] | None = None
    """Values of the log's `group_columns`, such as user and country, as raw 64-bit ids [R, G]."""

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.dense.shape[0])

    def slice(self, start: int, stop: int) -> RawBlock:
        """Rows `start` to `stop`, without copying ids or dense values."""
        if start == 0 and stop == self.num_rows:
            return self

        def part(values: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
            return None if values is None else values[start:stop]

        return RawBlock(
            dense=self.dense[start:stop],
            ids=tuple(ids[o[start] : o[stop]] for ids, o in zip(self.ids, self.offsets, strict=True)),
            offsets=tuple(o[start : stop + 1] - o[start] for o in self.offsets),
            labels=part(self.labels),
            weights=part(self.weights),
            true_p=part(self.true_p),
            groups=None if self.groups is None else self.groups[start:stop],
        )

    def take(self, rows: NDArray[np.int64]) -> RawBlock:
        """A copy of these rows [n], in rising order."""

        def part(values: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
            return None if values is None else values[rows]

        wanted = np.zeros(self.num_rows, np.bool_)
        wanted[rows] = True
        lengths = tuple(np.diff(offsets) for offsets in self.offsets)
        return RawBlock(
            dense=self.dense[rows],
            ids=tuple(ids[np.repeat(wanted, each)] for ids, each in zip(self.ids, lengths, strict=True)),
            offsets=tuple(np.concatenate([[0], np.cumsum(each[rows])]) for each in lengths),
            labels=part(self.labels),
            weights=part(self.weights),
            true_p=part(self.true_p),
            groups=None if self.groups is None else self.groups[rows],
        )


@dataclass(frozen=True)
class LogPiece:
    """Decoded rows, in file order, and which of them are good."""

    block: RawBlock
    good: NDArray[np.bool_] | None
    """[R]; None if all are."""
