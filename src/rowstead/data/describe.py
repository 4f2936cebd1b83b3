"""Statistics of a log, in one pass over blocks of raw rows and in bounded memory.

Ids are counted before truncation and hashing. `rowstead.spec.statistics` says which figures are exact and which are estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowstead.data.block import RawBlock
from rowstead.data.column_values import id_type, is_list, is_quantity, is_text, is_time
from rowstead.data.count_ids import Budget, IdCounter, top_shares
from rowstead.data.hashing import hash_to_rows, mix_ids
from rowstead.data.order_test import LABEL, OrderSample, block_columns
from rowstead.data.transforms import accumulate_moments
from rowstead.spec.errors import DataError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, Hash, SparseFeatureSpec
from rowstead.spec.statistics import QUANTILES, DenseStatistics, LogStatistics, SparseStatistics

DEFAULT_MEMORY_BYTES = 1 << 30
"""For counting ids: enough for 20 million ids of one feature exactly."""
NOT_FEATURES = ("label", "timestamp", "rating", "true_p")
"""Names of columns that `infer_features` leaves out: outcomes and times."""
SAMPLE_ROWS = 20_000
MAX_TRACKED_LENGTH = 65_535
NUM_SKEW_POINTS = 40
_LEAST_SAMPLED = 100
"""Minimum number of sampled ids for a point of the skew curve."""


def describe(
    blocks: Iterable[RawBlock],
    features: FeaturesSpec,
    *,
    num_rows: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int], None] | None = None,
) -> LogStatistics:
    """Compute statistics of the rows in `blocks`, whose columns are those of `features` in order.

    Collisions are counted at the hash size of each feature, or at `num_rows` for all. `progress` is called with the number of rows
    read so far.
    """
    dense_specs, sparse_specs = features.expanded_dense(), features.expanded_sparse()
    shared = {table.name: table.num_rows for table in features.tables}
    budget = Budget(memory_bytes, len(sparse_specs))
    sparse = [_SparseCounts(budget) for _ in sparse_specs]
    dense = _DenseCounts(len(dense_specs))
    order = OrderSample([LABEL, *(f"`{spec.name}`" for spec in sparse_specs)])
    num_read, label_sum, num_labels, num_missing = 0, 0.0, 0, 0
    for block in blocks:
        for one, ids, offsets in zip(sparse, block.ids, block.offsets, strict=True):
            one.add(ids, offsets)
        dense.add(block.dense, num_read)
        order.add(block_columns(block))
        if block.labels is not None:
            present = ~np.isnan(block.labels)
            label_sum += float(block.labels.sum(where=present, dtype=np.float64))
            num_labels += int(present.sum())
            num_missing += int((~present).sum())
        num_read += block.num_rows
        if progress:
            progress(num_read)
    if num_read == 0:
        raise DataError("the log has no rows to describe")
    return LogStatistics(
        num_rows=num_read,
        label_mean=label_sum / num_labels if num_labels else None,
        num_labels_missing=num_missing,
        num_rows_sampled=dense.num_sampled,
        dense=tuple(dense.result(f, spec.name, num_read) for f, spec in enumerate(dense_specs)),
        sparse=tuple(
            one.result(spec.name, num_read, num_rows or spec.num_rows or shared[str(spec.table)], spec.hash)
            for one, spec in zip(sparse, sparse_specs, strict=True)
        ),
        clustered=tuple(order.find_clustered()),
    )


def infer_features(
    schema: pa.Schema, *, label: str = "label", num_rows: int = 1_000_000
) -> tuple[FeaturesSpec, dict[str, str]]:
    """Guess the features of a log without a recipe, from types alone; and why each other column is left out.

    Floating-point columns, dates and timestamps are dense, and so are lists of a fixed size of numbers. Integers, text, booleans, and
    lists of these are sparse, with a hash size of `num_rows`.
    """
    dense: list[DenseFeatureSpec] = []
    sparse: list[SparseFeatureSpec] = []
    left_out: dict[str, str] = {}
    for field in schema:
        kind = field.type
        value, name = id_type(kind), field.name
        is_number = pa.types.is_floating(value) or pa.types.is_decimal(value)
        if name == label:
            left_out[name] = "the label"
        elif name in NOT_FEATURES:
            left_out[name] = "by its name an outcome or a time, not a feature"
        elif not name:
            left_out[name] = "no name"
        elif "{i}" in name:
            left_out[name] = "`{i}` in a name stands for a number in recipes; rename it"
        elif is_list(kind) and is_number:
            if pa.types.is_fixed_size_list(kind):
                dense.append(DenseFeatureSpec(name=name, column=name, length=kind.list_size))
            else:
                left_out[name] = f"type {kind}: describe it with a recipe that says its `length`"
        elif not is_list(kind) and (is_number or is_time(kind)):
            dense.append(DenseFeatureSpec(name=name, column=name))
        elif is_quantity(value) or is_text(value):
            sparse.append(SparseFeatureSpec(name=name, column=name, num_rows=num_rows))
        else:
            left_out[name] = f"type {kind} is not supported"
    if not dense and not sparse:
        found = ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"
        raise DataError(f"no column can be a feature (a number, text, or list of ids); the columns are {found}")
    return FeaturesSpec(dense=tuple(dense), sparse=tuple(sparse)), left_out


class _SparseCounts:
    """Counts for one sparse feature."""

    def __init__(self, budget: Budget) -> None:
        self._counter = IdCounter(budget)
        self._lengths = np.zeros(1, np.int64)
        self._longest = 0

    def add(self, ids: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        self._counter.add(ids)
        lengths = np.diff(offsets)
        if lengths.size:
            self._longest = max(self._longest, int(lengths.max()))
            found = np.bincount(np.minimum(lengths, MAX_TRACKED_LENGTH), minlength=self._lengths.size)
            found[: self._lengths.size] += self._lengths
            self._lengths = found

    def result(self, name: str, num_examples: int, num_rows: int, hash: Hash) -> SparseStatistics:
        counter = self._counter
        p50, p90, p99 = (self._length_at(share) for share in (0.5, 0.9, 0.99))
        bins = length_bins(self._longest)
        ids, counts = counter.items()
        tops = _skew_tops(counts.size, exact=counter.level == 0)
        top_1 = top_10 = None
        skew: tuple[float, ...] = ()
        if counts.size:
            top_1, top_10, *rest = top_shares(counts, np.array([0.01, 0.1, *tops]), 1 << counter.level, counter.num_accesses)
            skew = tuple(rest)
        return SparseStatistics(
            name=name,
            num_accesses=counter.num_accesses,
            num_distinct=counter.num_distinct,
            distinct_error=counter.distinct_error,
            empty_share=float(self._lengths[0]) / num_examples,
            length_mean=counter.num_accesses / num_examples,
            length_p50=p50,
            length_p90=p90,
            length_p99=p99,
            length_max=self._longest,
            length_bins=bins,
            length_shares=_binned(self._lengths, bins),
            top_1_percent_share=top_1,
            top_10_percent_share=top_10,
            skew_top=tops,
            skew_accesses=skew,
            num_rows=num_rows,
            expected_collisions=expected_collisions(counter.num_distinct, num_rows),
            actual_collisions=_actual_collisions(ids, num_rows, hash) if counter.level == 0 else None,
        )

    def _length_at(self, share: float) -> int:
        """The quantile of the lengths at `share`."""
        below = np.cumsum(self._lengths)
        return int(np.searchsorted(below, np.ceil(share * below[-1] - 1e-9)))


def length_bins(longest: int) -> tuple[int, ...]:
    """Lower bounds of bins of lengths up to `longest`: width 1 below 16, then four bins per octave."""
    ends = list(range(min(longest, 15) + 1))
    octave = 16
    while octave <= longest:
        ends += [end for end in range(octave, 2 * octave, octave // 4) if end <= longest]
        octave *= 2
    return tuple(ends)


def _binned(lengths: NDArray[np.int64], bins: tuple[int, ...]) -> tuple[float, ...]:
    starts = np.minimum(np.array(bins, np.int64), lengths.size - 1)
    before = np.concatenate([[0], np.cumsum(lengths)])
    ends = np.append(before[starts[1:]], before[-1])
    return tuple(((ends - before[starts]) / max(int(before[-1]), 1)).tolist())


def _skew_tops(num_kept: int, *, exact: bool) -> tuple[float, ...]:
    """Points of the skew curve: evenly spaced on a log scale, from one id (or enough sampled ones) to all."""
    if num_kept == 0:
        return ()
    least = min(1 if exact else _LEAST_SAMPLED, num_kept)
    counts = np.unique(np.rint(np.geomspace(least, num_kept, NUM_SKEW_POINTS)).astype(np.int64))
    return tuple((counts / num_kept).tolist())


def expected_collisions(num_distinct: int, num_rows: int) -> float | None:
    """Expected share of distinct ids that share a row with another id, if ids are uniform over rows."""
    if num_distinct == 0:
        return None
    if num_rows == 1:
        return float(num_distinct > 1)
    return float(-np.expm1((num_distinct - 1) * np.log1p(-1 / num_rows)))


def _actual_collisions(ids: NDArray[np.int64], num_rows: int, hash: Hash) -> float | None:
    if ids.size == 0:
        return None
    try:
        rows = np.sort(hash_to_rows(ids, num_rows, hash))
    except DataError:  # `hash: none` with ids outside the table: training on the log reports it
        return None
    same = rows[1:] == rows[:-1]
    unique = ~(np.append(same, False) | np.append(False, same))
    return float(1 - unique.mean())


class _DenseCounts:
    """Moments, extremes and a row sample of the dense features, [Fd] each."""

    def __init__(self, num_features: int) -> None:
        self._count, self._missing, self._infinite = (np.zeros(num_features, np.int64) for _ in range(3))
        self._mean, self._squares = (np.zeros(num_features, np.float64) for _ in range(2))
        self._min = np.full(num_features, np.inf, np.float32)
        self._max = np.full(num_features, -np.inf, np.float32)
        self._sample = np.empty((0, num_features), np.float32)
        self._codes = np.empty(0, np.uint64)
        self._limit = np.uint64(2**64 - 1)

    @property
    def num_sampled(self) -> int:
        return int(self._codes.size)

    def add(self, dense: NDArray[np.float32], first_row: int) -> None:
        """Add rows [R, Fd], starting at row `first_row` of the log."""
        finite = np.isfinite(dense)
        self._missing += np.isnan(dense).sum(axis=0)
        self._infinite += np.isinf(dense).sum(axis=0)
        self._min = np.minimum(self._min, dense.min(axis=0, where=finite, initial=np.inf))
        self._max = np.maximum(self._max, dense.max(axis=0, where=finite, initial=-np.inf))
        accumulate_moments(dense, self._count, self._mean, self._squares)
        codes = mix_ids(np.arange(first_row, first_row + len(dense)))
        chosen = codes <= self._limit
        self._sample = np.concatenate([self._sample, dense[chosen]])
        self._codes = np.concatenate([self._codes, codes[chosen]])
        while self._codes.size > SAMPLE_ROWS:
            self._limit >>= np.uint64(1)
            stay = self._codes <= self._limit
            self._sample, self._codes = self._sample[stay], self._codes[stay]

    def result(self, f: int, name: str, num_examples: int) -> DenseStatistics:
        count = int(self._count[f])
        sample = self._sample[:, f]
        sample = sample[np.isfinite(sample)]
        return DenseStatistics(
            name=name,
            missing_share=int(self._missing[f]) / num_examples,
            infinite_share=int(self._infinite[f]) / num_examples,
            mean=float(self._mean[f]) if count else None,
            std=float(np.sqrt(self._squares[f] / count)) if count else None,
            min=float(self._min[f]) if count else None,
            max=float(self._max[f]) if count else None,
            quantiles=tuple(np.quantile(sample, QUANTILES, method="inverted_cdf").astype(float).tolist())
            if sample.size
            else (),
        )
