"""Which rows of a log's training files belong to which split, by a hash or by time: one bit per row.

The column that decides is read once when a split is opened. Splits in file order need none of this: see `FileLog`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowstead.data.column_values import is_text, to_bags
from rowstead.data.hashing import mix_ids
from rowstead.spec.data import FileLogSpec, SplitSpec
from rowstead.spec.errors import DataError

HELD_OUT = ("eval", "test")
ReadColumn = Callable[[int, int, str], pa.Array]
"""Reads a column of one row group of one file."""
SAMPLED_ROWS = 1_000_000
"""Times from which bounds are computed, where the recipe gives none; all of them in a log of at most so many rows."""
_SALT = np.int64(0x5EED_0F_5B117)
"""Makes the split independent of the rows of tables that the same ids get."""


@dataclass(frozen=True)
class GroupRows:
    """The rows of a split in one row group."""

    bits: NDArray[np.uint8]
    num_rows: int
    """Of the split."""

    @classmethod
    def of(cls, mask: NDArray[np.bool_]) -> GroupRows:
        return cls(np.packbits(mask), int(mask.sum()))

    def locate(self, start: int, stop: int) -> NDArray[np.int64]:
        """Indices in the row group of the split's rows `start` to `stop`."""
        return np.flatnonzero(np.unpackbits(self.bits))[start:stop]


def choose_rows(
    spec: FileLogSpec, split: str, group_rows: Sequence[Sequence[int]], read: ReadColumn, *, threads: int
) -> list[list[GroupRows]]:
    """The rows of `split` in each row group of each training file."""
    groups = [(file, group) for file, counts in enumerate(group_rows) for group in range(len(counts))]
    starts = np.concatenate([[0], np.cumsum([count for counts in group_rows for count in counts])]).tolist()
    rule = spec.split
    with ThreadPoolExecutor(threads) as pool:
        if rule.by == "time":
            times = partial(_read_times, rule, read)
            bounds = _time_bounds(spec, pool.map(lambda at: times(*at), groups), starts[-1])
            positions: Iterator[NDArray[np.float64]] = pool.map(lambda at: times(*at), groups)
        else:
            bounds = hash_bounds(spec)
            sizes = [count for counts in group_rows for count in counts]
            positions = pool.map(partial(_hash_rows, rule, read), groups, starts, sizes)
        found = [GroupRows.of(_is_in(split, position, bounds)) for position in positions]
    parts, at = [], 0
    for counts in group_rows:
        parts.append(found[at : at + len(counts)])
        at += len(counts)
    return parts


def hash_bounds(spec: FileLogSpec) -> dict[str, tuple[float, float]]:
    """From where to where in [0, 1) each held-out split reaches; the rest is for training."""
    test, evaluation = spec.held_out("test"), spec.held_out("eval")
    return {"test": (1 - test, 1.0), "eval": (1 - test - evaluation, 1 - test)}


def _is_in(split: str, position: NDArray[np.float64], bounds: dict[str, tuple[float, float]]) -> NDArray[np.bool_]:
    inside = {name: (start <= position) & (position < stop) for name, (start, stop) in bounds.items()}
    return inside[split] if split in HELD_OUT else ~(inside["eval"] | inside["test"])


# Hashes


def _hash_rows(rule: SplitSpec, read: ReadColumn, at: tuple[int, int], start: int, num_rows: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each row of a row group: of its index in the log, or of its value in a column."""
    keys = np.arange(start, start + num_rows) if rule.column is None else _keys(read(*at, rule.column), rule.column)
    hashes = mix_ids(mix_ids(keys).view(np.int64) ^ _SALT)
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _keys(column: pa.Array, name: str) -> NDArray[np.int64]:
    """The 64-bit id of each value; 0 where it is missing."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_integer(kind) or is_text(kind)):
        raise DataError(f"split.column: `{name}` has type {column.type}; split by a column of integers or text")
    ids, offsets = to_bags(column, name)
    keys = np.zeros(len(column), np.int64)
    keys[np.diff(offsets) > 0] = ids
    return keys


# Times


def _read_times(rule: SplitSpec, read: ReadColumn, file: int, group: int) -> NDArray[np.float64]:
    """The time of each row of a row group as a number, of seconds where the column has dates or times; missing is -inf."""
    assert rule.column is not None
    column = read(file, group, rule.column)
    kind, per_second = column.type, 1
    if is_text(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        try:
            column, per_second = column.cast(pa.timestamp("us")).cast(pa.int64()), 1_000_000
        except pa.ArrowException as error:
            raise DataError(f"split.column: `{rule.column}` has text that is not a time: {error}") from None
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DataError(f"split.column: `{rule.column}` has type {kind}; split by a column of numbers or times")
    times = np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)) / per_second
    return np.where(np.isnan(times), -np.inf, times)


def _time_bounds(spec: FileLogSpec, groups: Iterator[NDArray[np.float64]], num_rows: int) -> dict[str, tuple[float, float]]:
    rule, shares = spec.split, {name: spec.held_out(name) for name in HELD_OUT}
    needs_sample = (shares["eval"] and rule.eval_from is None) or (shares["test"] and rule.test_from is None)
    every = -(-num_rows // SAMPLED_ROWS)
    sample = np.concatenate([times[::every] for times in groups]) if needs_sample else np.empty(0)

    def bound(given: float | str | None, share: float) -> float:
        if given is not None:
            return parse_time(given)
        if not share:
            return np.inf
        index = min(round(len(sample) * (1 - share)), len(sample) - 1)
        return float(np.partition(sample, index)[index])

    test = bound(rule.test_from, shares["test"])
    evaluation = test if spec.eval else bound(rule.eval_from, shares["eval"] + shares["test"])
    if evaluation > test:
        raise DataError(f"split: the evaluation split begins after the test split, at {evaluation:.15g} and {test:.15g}")
    return {"test": (test, np.inf), "eval": (evaluation, test)}


def parse_time(given: float | str) -> float:
    """A bound of a recipe as a number: itself, or the seconds since 1970 of a date or time, in UTC unless it says otherwise."""
    if not isinstance(given, str):
        return float(given)
    moment = datetime.fromisoformat(given)
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
