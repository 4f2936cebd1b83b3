"""How many rows of a batch miss the cache, from the id distribution and the cache's eviction policy.

A cache keeps the rows that most batches used (least frequently used with decay) and the rows of batches in flight. In steady state a row
is cached with a probability that follows from how often batches use it: all rows have the same threshold of uses, at which the expected
number of cached rows equals the number of slots. Tables of one width share slots.

A GPU fetches batches in sets, with one plan of the host per set: several small batches, or one where slots are too few for more.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rowstead.plan.setup import Setup
from rowstead.plan.traffic import Popularity, distinct_ids, id_bins
from rowstead.plan.work import TableWork
from rowstead.spec.caching import (
    FILE_SPARE,
    GAP_BYTES,
    GROWTH,
    HALVING_BATCHES,
    MAX_SET,
    MAX_USES,
    READ_BYTES,
    SET_IDS,
    SETS_IN_FLIGHT,
)

Array = NDArray[np.float64]

BATCHES_COUNTED = 3 * HALVING_BATCHES // 2
"""Batches whose uses count, on average: counts are halved every 64 batches, so they cover 64 to 128."""
SETS_KEPT = SETS_IN_FLIGHT
"""Preceding sets of batches whose rows are all still cached when a set looks for its own; on a CPU a set is one batch."""
MOST_BATCHES = 1e9
NUM_HALVINGS = 40

SECTOR_BYTES = 512
"""Read sizes are multiples of this."""


@dataclass(frozen=True, kw_only=True)
class CacheModel:
    """Cached tables of one width, which share slots and, on disk, a file."""

    tables: tuple[TableWork, ...]
    num_slots: int
    batch_size: int
    set_size: int = 1
    """Batches that are fetched together."""
    sets_kept: int = SETS_KEPT

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its optimizer state."""
        return self.tables[0].row_bytes + self.tables[0].state_bytes

    @functools.cached_property
    def missing_rows(self) -> float:
        """Cache misses per batch; where several ids share a row, reduced by the ratio of distinct rows to distinct ids.

        A row that several batches of a set need is fetched once and counts as one use.
        """
        num_samples, counted = self.batch_size * self.set_size, BATCHES_COUNTED / self.set_size
        draws = [Draws(popularity, num_samples * ids) for table in self.tables for ids, popularity in table.reads]
        num_ids = sum(distinct_ids(one.popularity, one.num_draws) for one in draws)
        shared = min(1.0, self.distinct_rows(self.set_size) / num_ids) if num_ids else 0.0
        return missing_rows(draws, self.num_slots, counted=counted, kept=self.sets_kept) * shared / self.set_size

    def distinct_rows(self, num_batches: int) -> float:
        """Distinct rows of so many batches."""
        return sum(table.distinct_rows(num_batches * self.batch_size) for table in self.tables)

    @property
    def bus_bytes(self) -> int:
        """Bytes of a row that cross the link to an accelerator, which keeps state of one number per row."""
        table = self.tables[0]
        return table.row_bytes + (table.state_bytes if table.state_bytes >= 4 * table.width else 0)

    @property
    def record_bytes(self) -> int:
        """Bytes of a row's record in a file: its row number, the row and its state, in whole words."""
        return -(-(self.row_bytes + 8) // 8) * 8

    def num_reads(self, num_rows: float) -> float:
        """File reads that fetch so many rows."""
        return self.file_io(num_rows).num_reads

    def file_io(self, num_rows: float) -> FileIo:
        """Reads and writes of a file that fetch so many rows and write as many back, given the mean distance of rows in the file."""
        if num_rows <= 0:
            return FileIo(0.0, 0.0, 0.0, 0.0)
        apart = sum(table.num_rows for table in self.tables) * self.record_bytes / num_rows
        near = GAP_BYTES + SECTOR_BYTES
        isolated = math.exp(-near / apart)  # probability that the next row is too far away
        num_reads, step = num_rows, 0.0
        if isolated <= 1 - 1e-9:
            step = max(1.0, apart - near * isolated / (1 - isolated))  # bytes to the next row otherwise
            most = 1 + READ_BYTES / step
            few = num_rows / most
            num_reads = num_rows * isolated / -math.expm1(most * math.log1p(-isolated)) if isolated > 1e-9 else few
        whole_sectors = SECTOR_BYTES - 8  # that a read begins and ends with, beyond its records
        read_bytes = (num_rows - num_reads) * step + num_reads * (self.record_bytes + whole_sectors)
        written = num_rows * self.record_bytes / (1 - live_share(FILE_SPARE))
        return FileIo(num_reads, read_bytes, written, written)


class FileIo(NamedTuple):
    """What a step reads from and writes to a file of rows."""

    num_reads: float
    read_bytes: float
    cleaned_bytes: float
    """Read to clean segments."""
    written_bytes: float
    """Written back rows, and live records of cleaned segments."""


@functools.cache
def live_share(spare: float) -> float:
    """Share of the records of a segment that are still live when it is cleaned, in a file `spare` times as long as its records.

    The oldest segment is cleaned, and rows are rewritten at random: P. Desnoyers, Analytic modeling of SSD write performance, 2012.
    """
    share = 0.0
    for _ in range(200):
        share = math.exp(-spare * (1 - share))
    return share


def choose_set_size(groups: Sequence[CacheModel], num_ids: float) -> tuple[int, int]:
    """Batches of `num_ids` ids that a GPU fetches together, and preceding sets whose rows are still cached at the next.

    Three sets must fit in the slots, or in the capacity that three batches of all-distinct ids would get. Where two fit in the slots,
    one set is fetched while another is trained on, otherwise two.
    """
    size = min(MAX_SET, int(SET_IDS // max(1.0, num_ids)))
    for group in groups:
        if rows := SETS_KEPT * group.distinct_rows(1):
            capacity = max(group.num_slots, GROWTH * SETS_KEPT * group.batch_size * sum(t.ids_per_sample for t in group.tables))
            size = min(size, int(capacity / rows))
    size = max(1, size)
    two_fit = all(2 * size * group.distinct_rows(1) <= group.num_slots for group in groups)
    return size, SETS_KEPT - 1 if two_fit else SETS_KEPT


def build_cache_models(
    tables: Sequence[TableWork], setup: Setup, *, in_sets: bool = False, num_sharing: int = 1
) -> list[CacheModel]:
    """The cached tables of a set-up, grouped by width; `in_sets` as a GPU fetches rows.

    Processes that share the tables have caches of their own, each for its part of the rows that all batches together read; the models
    are of all of them together.
    """
    shares = {one.table: one.cache_fraction for one in setup.behind}
    by_width: dict[int, list[TableWork]] = {}
    for table in tables:
        if table.name in shares:
            by_width.setdefault(table.width, []).append(table)
    groups = [
        CacheModel(
            tables=tuple(some),
            num_slots=sum(max(1, math.ceil(shares[table.name] * table.num_rows)) for table in some),
            batch_size=num_sharing * setup.batch_size,
        )
        for _, some in sorted(by_width.items())
    ]
    if not in_sets:
        return groups
    size, kept = choose_set_size(groups, setup.batch_size * sum(table.ids_per_sample for table in tables))
    return [replace(group, set_size=size, sets_kept=kept) for group in groups]


class Caches(NamedTuple):
    """The caches of a trainer's tables, of all processes of a step together."""

    over_bus: list[CacheModel]
    """In an accelerator's memory, before system memory."""
    over_file: list[CacheModel]
    """In system memory, before a file."""


def build_caches(tables: Sequence[TableWork], setup: Setup, *, has_devices: bool, num_sharing: int) -> Caches:
    """The caches of a set-up; without accelerators rows are behind them in files."""
    in_files = {one.table for one in setup.behind if one.where == "ssd" or not has_devices}
    over_bus = [table for table in tables if table.name not in in_files]
    over_file = [table for table in tables if table.name in in_files]
    return Caches(
        build_cache_models(over_bus, setup, in_sets=has_devices, num_sharing=num_sharing),
        build_cache_models(over_file, setup, num_sharing=num_sharing),
    )


class Draws(NamedTuple):
    """Ids that a batch draws from one distribution, for one feature."""

    popularity: Popularity
    num_draws: float


def missing_rows(draws: Sequence[Draws], num_slots: float, *, counted: float = BATCHES_COUNTED, kept: int = SETS_KEPT) -> float:
    """Expected distinct rows of a batch that miss a cache of `num_slots`, in steady state.

    Uses in `counted` batches count, and the rows of the `kept` preceding batches are in the cache.
    """
    alike = tuple(sorted(Counter(draws).items(), key=repr))  # most tables of a model are alike
    return _missing(alike, num_slots, counted, kept)


@functools.lru_cache(maxsize=1024)
def _missing(draws: tuple[tuple[Draws, int], ...], num_slots: float, counted: float, sets_kept: int) -> float:
    counts, used = _rows(draws)
    if not len(counts):
        return 0.0
    left = np.log1p(-used)
    lapsed = np.exp(sets_kept * left)  # probability of no use in the last sets

    def kept(chance: Array) -> float:
        return float((counts * (1 - (1 - chance) * lapsed)).sum())

    def missing(chance: Array) -> float:
        return float((counts * used * (1 - chance) * lapsed).sum())

    none = np.zeros_like(used)
    if kept(none) >= num_slots:  # batches in flight need more than all slots: the cache grows
        num_slots = GROWTH * kept(none)
    if num_slots >= counts.sum():
        return 0.0
    if kept(-np.expm1(counted * left)) <= num_slots:  # every counted row fits, and of the others the most recently used
        between = math.log(counted), math.log(MOST_BATCHES)
        return missing(_solve(lambda batches: -np.expm1(math.exp(batches) * left), between, kept, num_slots))
    more, equal = _above(used * counted, lambda chance: kept(chance) <= num_slots)
    return missing(_solve(lambda share: more + share * equal, (0.0, 1.0), kept, num_slots))


def _rows(draws: Sequence[tuple[Draws, int]]) -> tuple[Array, Array]:
    """Rows in bins of similar popularity: the number in each, and the probability that a batch uses one of them."""
    counts, used = [np.zeros(0)], [np.zeros(0)]
    for one, num_alike in draws:
        of_bin, chances = id_bins(one.popularity)
        counts.append(of_bin * num_alike)
        used.append(-np.expm1(one.num_draws * np.log1p(-np.minimum(chances, 1 - 1e-12))))
    return np.concatenate(counts), np.minimum(np.concatenate(used), 1 - 1e-12)


def _above(uses: Array, is_enough: Callable[[Array], bool]) -> tuple[Array, Array]:
    """Poisson probabilities of more uses than a threshold, and of exactly as many, at the smallest sufficient threshold."""
    equal = np.exp(-uses)
    more = 1 - equal
    for threshold in range(1, MAX_USES + 1):
        equal = equal * uses / threshold
        more = np.clip(more - equal, 0.0, 1.0)
        if is_enough(more):
            break
    return more, equal


def _solve(
    chances: Callable[[float], Array], between: tuple[float, float], kept: Callable[[Array], float], num_slots: float
) -> Array:
    """Bisect for the probabilities at which the expected number of cached rows equals the slots; it rises with the argument."""
    low, high = between
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if kept(chances(middle)) < num_slots:
            low = middle
        else:
            high = middle
    return chances(low)
