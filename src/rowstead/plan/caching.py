"""How many rows of a batch a cache lacks, by the law of the ids and by what the cache does when it is full.

A cache keeps rows that many batches used, those of long ago counted less, and rows of the batches under way. Late in a run each row is in it by a
chance that follows from how often batches use it: the same threshold of uses holds for all rows, and is such that as many are in it
as there are places. Tables of one width share places.

A GPU brings batches in by sets, for each of which its host makes one plan: several small batches, or one where places are too few for more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rowstead.plan.setup import Setup
from rowstead.plan.traffic import Popularity, distinct_ids, id_bins
from rowstead.plan.work import TableWork

Array = NDArray[np.float64]

BATCHES_COUNTED = 96
"""Batches of which uses count, on average: after every 64 all counts are halved, so that they are those of 64 to 128."""
SETS_KEPT = 3
"""The last sets of batches before one, whose rows are all still there when it looks for its own; a set is one batch on a CPU."""
MOST_USES = 255
"""Uses that are counted at most."""
MOST_BATCHES = 1e9
NUM_HALVINGS = 40

SET_IDS, MAX_SET = 1 << 24, 8
"""On a GPU a set is of as many batches as have about so many ids, and of at most so many."""
GROWTH = 1.25
"""Room over what is needed that a cache takes when its places run out."""

READ_BYTES, GAP_BYTES = 16 << 10, 4096
"""The most that one read of a file fetches, and the most between two records that come by one read."""
SECTOR_BYTES = 512
"""Of which reads are multiples."""


@dataclass(frozen=True, kw_only=True)
class CacheModel:
    """Tables of one width behind a cache, which share its places and, on disk, a file."""

    tables: tuple[TableWork, ...]
    num_places: int
    batch_size: int
    set_size: int = 1
    """Batches that are brought in at once."""
    sets_kept: int = SETS_KEPT

    @property
    def row_bytes(self) -> int:
        """Of a row with its optimizer's state."""
        return self.tables[0].row_bytes + self.tables[0].state_bytes

    @functools.cached_property
    def missing_rows(self) -> float:
        """Rows that a batch needs and the cache lacks; where several ids share a row, as many fewer as the batch has rows fewer than ids.

        What several batches of a set need is brought in once, and counts as one use.
        """
        num_samples, counted = self.batch_size * self.set_size, BATCHES_COUNTED / self.set_size
        draws = [Draws(law, num_samples * ids) for table in self.tables for ids, law in table.reads]
        num_ids = sum(distinct_ids(one.law, one.num_draws) for one in draws)
        shared = min(1.0, self.rows_of(self.set_size) / num_ids) if num_ids else 0.0
        return missing_rows(draws, self.num_places, counted=counted, kept=self.sets_kept) * shared / self.set_size

    def rows_of(self, num_batches: int) -> float:
        """Different rows that so many batches need."""
        return sum(table.distinct_rows(num_batches * self.batch_size) for table in self.tables)

    def num_reads(self, num_rows: float) -> float:
        """Reads of a file that bring so many rows, by how far apart they are in it."""
        if num_rows <= 0:
            return 0.0
        record_bytes = -(-(self.row_bytes + 8) // 8) * 8
        apart = sum(table.num_rows for table in self.tables) * record_bytes / num_rows
        near = GAP_BYTES + SECTOR_BYTES
        alone = math.exp(-near / apart)  # chance that the next row is too far away
        if alone > 1 - 1e-9:
            return num_rows
        step = max(1.0, apart - near * alone / (1 - alone))  # bytes to the next, where it is not
        most = 1 + READ_BYTES / step
        return num_rows * alone / -math.expm1(most * math.log1p(-alone)) if alone > 1e-9 else num_rows / most


def sets_of(groups: Sequence[CacheModel], num_ids: float) -> tuple[int, int]:
    """Batches of so many ids that a GPU brings in at once, and such sets whose rows are still there when it looks for another's.

    What three sets need has room among its places, or where three batches would have it if all their ids differed. Where two have
    room among the places, it brings in one set while one is trained on, and else two.
    """
    size = min(MAX_SET, int(SET_IDS // max(1.0, num_ids)))
    for group in groups:
        if rows := SETS_KEPT * group.rows_of(1):
            room = max(group.num_places, GROWTH * SETS_KEPT * group.batch_size * sum(t.ids_per_sample for t in group.tables))
            size = min(size, int(room / rows))
    size = max(1, size)
    has_room = all(2 * size * group.rows_of(1) <= group.num_places for group in groups)
    return size, SETS_KEPT - 1 if has_room else SETS_KEPT


def groups_of(tables: Sequence[TableWork], setup: Setup, *, in_sets: bool = False) -> list[CacheModel]:
    """The tables of a set-up that are behind caches; `in_sets` as a GPU brings rows in."""
    shares = {one.table: one.kept_share for one in setup.behind}
    by_width: dict[int, list[TableWork]] = {}
    for table in tables:
        if table.name in shares:
            by_width.setdefault(table.width, []).append(table)
    groups = [
        CacheModel(
            tables=tuple(some),
            num_places=sum(max(1, math.ceil(shares[table.name] * table.num_rows)) for table in some),
            batch_size=setup.batch_size,
        )
        for _, some in sorted(by_width.items())
    ]
    if not in_sets:
        return groups
    size, kept = sets_of(groups, setup.batch_size * sum(table.ids_per_sample for table in tables))
    return [replace(group, set_size=size, sets_kept=kept) for group in groups]


@dataclass(frozen=True)
class Draws:
    """What a batch reads by one law: ids of so many features that are alike."""

    law: Popularity
    num_draws: float
    """Of one feature."""
    num_alike: int = 1


def missing_rows(
    draws: Sequence[Draws], num_places: float, *, counted: float = BATCHES_COUNTED, kept: int = SETS_KEPT
) -> float:
    """How many different rows of a batch are not in a cache of so many places, late in a run.

    Uses in so many batches are `counted`, and the rows of so many before it are `kept`.
    """
    return _missing(tuple(sorted(_merged(draws), key=repr)), num_places, counted, kept)


def _merged(draws: Sequence[Draws]) -> list[Draws]:
    """Those that are alike together: most tables of a model are."""
    counts: dict[tuple[Popularity, float], int] = {}
    for one in draws:
        key = one.law, one.num_draws
        counts[key] = counts.get(key, 0) + one.num_alike
    return [Draws(law, num_draws, count) for (law, num_draws), count in counts.items()]


@functools.lru_cache(maxsize=1024)
def _missing(draws: tuple[Draws, ...], num_places: float, counted: float, sets_kept: int) -> float:
    counts, used = _rows(draws)
    if not len(counts):
        return 0.0
    left = np.log1p(-used)
    lapsed = np.exp(sets_kept * left)  # not in one of the last batches

    def kept(chance: Array) -> float:
        return float((counts * (1 - (1 - chance) * lapsed)).sum())

    def missing(chance: Array) -> float:
        return float((counts * used * (1 - chance) * lapsed).sum())

    none = np.zeros_like(used)
    if kept(none) >= num_places:  # what is under way needs all places and more, and gets room to spare
        num_places = GROWTH * kept(none)
    if num_places >= counts.sum():
        return 0.0
    if kept(-np.expm1(counted * left)) <= num_places:  # all that were counted, and of the others those used last
        chance = _solved(
            lambda batches: -np.expm1(math.exp(batches) * left),
            (math.log(counted), math.log(MOST_BATCHES)),
            kept,
            num_places,
        )
        return missing(chance)
    more, equal = _above(used * counted, lambda chance: kept(chance) <= num_places)
    return missing(_solved(lambda share: more + share * equal, (0.0, 1.0), kept, num_places))


def _rows(draws: Sequence[Draws]) -> tuple[Array, Array]:
    """Rows in bins of like popularity: how many there are in each, and the chance that a batch uses one of them."""
    counts, used = [np.zeros(0)], [np.zeros(0)]
    for one in draws:
        of_bin, chances = id_bins(one.law)
        counts.append(of_bin * one.num_alike)
        used.append(-np.expm1(one.num_draws * np.log1p(-np.minimum(chances, 1 - 1e-12))))
    return np.concatenate(counts), np.minimum(np.concatenate(used), 1 - 1e-12)


def _above(uses: Array, is_enough: Callable[[Array], bool]) -> tuple[Array, Array]:
    """Chances of more uses than a threshold, and of just so many, by their means; the threshold is the least that is enough."""
    equal = np.exp(-uses)
    more = 1 - equal
    for threshold in range(1, MOST_USES + 1):
        equal = equal * uses / threshold
        more = np.clip(more - equal, 0.0, 1.0)
        if is_enough(more):
            break
    return more, equal


def _solved(
    chances: Callable[[float], Array], between: tuple[float, float], kept: Callable[[Array], float], num_places: float
) -> Array:
    """The chances with which as many rows are kept as there are places; more are kept as their argument rises."""
    low, high = between
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if kept(chances(middle)) < num_places:
            low = middle
        else:
            high = middle
    return chances(low)
