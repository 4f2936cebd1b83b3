"""Notices a log whose rows are not in random order, such as one sorted by user, from a sample in bounded memory.

The test. A sample of n rows, evenly spaced, is cut into K = 16 chunks of m rows in the order of the log. Of the P pairs of rows with the same
value of a column, A are in the same chunk. In random order each pair is with probability q = (m - 1) / (n - 1), so E[A] = q P. Its variance
is at most 2 q (1 - q) P: pairs that share a row are negatively correlated, and two disjoint pairs have the covariance
2 q (n - m) / ((n - 1) (n - 2) (n - 3)), about 2 q (1 - q) / n², of which there are at most P² <= P n² / 2. By Cantelli's inequality,

    Pr[A >= q P + d P] <= 1 / (1 + d² P / (2 q (1 - q)))

whatever the distribution of values. A column is reported only if this bound is below `FALSE_ALARM_RATE` over the number of columns, so that a log
in random order is reported with at most that probability, and only if the order matters: A is at least `LEAST_CLUSTERING` of the way from
q P to the most that any order reaches, which is when equal values stand together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rowstead.data.batch import Batch, StagedBatch
from rowstead.data.block import RawBlock
from rowstead.spec.statistics import ClusteredColumn

NUM_CHUNKS = 16
FALSE_ALARM_RATE = 1e-3
LEAST_CLUSTERING = 0.25
MAX_ROWS = 65_536
"""Rows of a sample, 8 bytes each per column."""
MAX_COLUMNS = 128
"""Columns that are looked at: the label and the first features."""
LABEL = "the label"
_LEAST_ROWS = 64 * NUM_CHUNKS
_MISSING = -(2**63)


class OrderSample:
    """An evenly spaced sample of the rows of a log, in their order."""

    def __init__(self, names: Sequence[str], max_rows: int = MAX_ROWS) -> None:
        """`names` are those of the columns, whose values are added in this order."""
        self._names, self._max_rows = tuple(names)[:MAX_COLUMNS], max_rows
        self._parts: list[NDArray[np.int64]] = []
        self._num_kept, self._every, self._num_seen = 0, 1, 0

    def add(self, columns: Sequence[NDArray[np.int64]]) -> None:
        """Add rows [R] of each column."""
        num_rows = len(columns[0]) if columns else 0
        wanted = np.arange(-self._num_seen % self._every, num_rows, self._every)
        self._num_seen += num_rows
        if len(wanted):
            self._parts.append(np.stack([column[wanted] for column in columns[: len(self._names)]], axis=1))
            self._num_kept += len(wanted)
        if self._num_kept > self._max_rows:  # every second of them, and of those that follow
            kept = np.concatenate(self._parts)[::2]
            self._parts, self._num_kept, self._every = [kept], len(kept), 2 * self._every

    def find_clustered(self) -> list[ClusteredColumn]:
        """The columns whose values are not in random order, the most clustered first."""
        if self._num_kept < _LEAST_ROWS or not self._names:
            return []
        rows = np.concatenate(self._parts)
        found = [_test(name, rows[:, index], len(self._names)) for index, name in enumerate(self._names)]
        return sorted((one for one in found if one is not None), key=lambda one: -one.clustering)


def _test(name: str, values: NDArray[np.int64], num_tests: int) -> ClusteredColumn | None:
    values = values[values != _MISSING]
    m = len(values) // NUM_CHUNKS
    n = m * NUM_CHUNKS
    if n < _LEAST_ROWS:
        return None
    _, index, counts = np.unique(values[:n], return_inverse=True, return_counts=True)
    in_chunk = np.unique(index * NUM_CHUNKS + np.arange(n) // m, return_counts=True)[1].astype(np.float64)
    pairs = float((counts * (counts - 1.0)).sum()) / 2
    together = float((in_chunk * (in_chunk - 1)).sum()) / 2
    most = float((counts * (np.minimum(counts, m) - 1.0)).sum()) / 2
    q = (m - 1) / (n - 1)
    excess = together - q * pairs
    if pairs == 0 or excess <= 0 or most <= q * pairs:
        return None
    d = excess / pairs
    bound = 1 / (1 + d * d * pairs / (2 * q * (1 - q)))
    clustering = min(1.0, excess / (most - q * pairs))
    if bound > FALSE_ALARM_RATE / num_tests or clustering < LEAST_CLUSTERING:
        return None
    return ClusteredColumn(name=name, clustering=clustering, likelier=together / (q * pairs))


def block_columns(block: RawBlock) -> list[NDArray[np.int64]]:
    """The label, and of each sparse feature the first id of every row [R]."""
    label = np.full(block.num_rows, _MISSING) if block.labels is None else _label_codes(block.labels)
    return [label, *(_first_ids(ids, offsets[:-1], offsets[1:]) for ids, offsets in zip(block.ids, block.offsets, strict=True))]


def batch_columns(batch: StagedBatch, num_rows: int) -> list[NDArray[np.int64]]:
    """The same of the first rows of a batch, whose ids are rows of tables; without a label where only the device will have it."""
    num_rows = min(num_rows, batch.num_samples)
    sparse = batch.first_sparse(num_rows)
    labels = batch.labels if isinstance(batch, Batch) else None
    ids, offsets = sparse.ids.numpy(), sparse.offsets.numpy()
    starts = np.arange(min(sparse.num_features, MAX_COLUMNS)) * num_rows
    label = np.full(num_rows, _MISSING) if labels is None else _label_codes(labels[:num_rows].numpy())
    return [label, *(_first_ids(ids, offsets[s : s + num_rows], offsets[s + 1 : s + 1 + num_rows]) for s in starts)]


def _label_codes(labels: NDArray[np.float32]) -> NDArray[np.int64]:
    """Of labels [R] or [R, T], the first one."""
    labels = labels if labels.ndim == 1 else labels[:, 0]
    codes = np.clip(np.round(labels.astype(np.float64) * 100.0), -(2.0**62), 2.0**62)
    return np.where(np.isnan(labels), _MISSING, np.nan_to_num(codes)).astype(np.int64)


def _first_ids(ids: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    found = np.full(len(starts), _MISSING)
    has_id = ends > starts
    found[has_id] = ids[starts[has_id]]
    return found


def order_warning(found: Sequence[ClusteredColumn], remedy: str) -> str:
    """One sentence about columns that are clustered, and what to do."""
    worst = found[0]
    others = f" (and {len(found) - 1} more columns)" if len(found) > 1 else ""
    return (
        f"the rows are not in random order: those with the same value of {worst.name} are {worst.likelier:.1f} times as often in the same "
        f"sixteenth of the log as by chance{others}, which costs quality in training: {remedy}"
    )
