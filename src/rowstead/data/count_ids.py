"""Counts of ids in bounded memory: exact while they fit, then for a known share of the ids.

The counter is an open-addressing hash table from id to count. When it is full and may not grow, it keeps only the ids whose hash
is in the lower half of its range (adaptive sampling, Wegman 1984). The remaining ids are a uniform sample of the distinct ids, each
with its exact count, so the number of ids and the distribution of counts can be extrapolated.
"""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np
from numpy.typing import NDArray

from rowstead.kernels.mix import mix64

BYTES_PER_SLOT = 16
FIRST_SLOTS = 1024
MAX_LOAD = 0.6
_SALT = 0x5851F42D4C957F2D
"""Makes the slots independent of the rows that ids are hashed to."""


class Budget:
    """Memory shared by several counters: one half is divided evenly, the other half goes to the counters that need it first."""

    def __init__(self, num_bytes: int, num_counters: int) -> None:
        self._guaranteed_slots = num_bytes // 2 // BYTES_PER_SLOT // max(num_counters, 1)
        self._free_slots = num_bytes // 2 // BYTES_PER_SLOT

    def reserve(self, slots: int, more_slots: int) -> bool:
        """Reserve growth of a counter from `slots` to `more_slots`; false if the budget is exhausted."""
        extra = max(more_slots - self._guaranteed_slots, 0) - max(slots - self._guaranteed_slots, 0)
        if extra > self._free_slots:
            return False
        self._free_slots -= extra
        return True


class IdCounter:
    """Counts of the ids of one feature."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._keys = np.zeros(FIRST_SLOTS, np.int64)
        self._counts = np.zeros(FIRST_SLOTS, np.int64)
        self._num_used = 0
        self.level = 0
        """One id in 2**level is kept."""
        self.num_accesses = 0

    def add(self, ids: NDArray[np.int64]) -> None:
        """Count the ids [n]."""
        self.num_accesses += ids.size
        ids = np.ascontiguousarray(ids)
        done = 0
        while True:
            capacity = int(self._keys.size * MAX_LOAD)
            done, self._num_used = _count(ids, done, self._keys, self._counts, self._num_used, capacity, self.level)
            if done == ids.size:
                return
            self._grow_or_sample()

    def items(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids that are kept (all of them at level 0) and their counts."""
        used = self._counts > 0
        return self._keys[used], self._counts[used]

    @property
    def num_distinct(self) -> int:
        """Distinct ids, an estimate when the level is above 0."""
        return self._num_used << self.level

    @property
    def distinct_error(self) -> float:
        """Relative standard error of the number of distinct ids."""
        return 0.0 if self.level == 0 else float(1 / np.sqrt(max(self._num_used, 1)))

    def _grow_or_sample(self) -> None:
        size = self._keys.size
        if self._budget.reserve(size, 2 * size):
            size *= 2
        else:
            self.level += 1
        old_keys, old_counts = self._keys, self._counts
        self._keys, self._counts = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._num_used = _move(old_keys, old_counts, self._keys, self._counts, self.level)


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _count(ids, start, keys, counts, used, capacity, level):  # type: ignore[no-untyped-def]
    """Count ids[start:] until all are counted or `capacity` ids are kept; returns the next index and the number of kept ids."""
    mask = np.uint64(keys.size - 1)
    limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(level)
    for i in range(start, ids.size):
        key = ids[i]
        code = mix64(key ^ np.int64(_SALT))
        if code > limit:
            continue
        slot = code & mask
        while counts[slot] and keys[slot] != key:
            slot = (slot + np.uint64(1)) & mask
        if counts[slot] == 0:
            if used >= capacity:
                return i, used
            keys[slot] = key
            used += 1
        counts[slot] += 1
    return ids.size, used


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _move(old_keys, old_counts, keys, counts, level):  # type: ignore[no-untyped-def]
    """Copy the entries that remain at `level` to an empty table; returns how many."""
    mask = np.uint64(keys.size - 1)
    limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(level)
    used = 0
    for i in range(old_keys.size):
        if old_counts[i]:
            code = mix64(old_keys[i] ^ np.int64(_SALT))
            if code <= limit:
                slot = code & mask
                while counts[slot]:
                    slot = (slot + np.uint64(1)) & mask
                keys[slot] = old_keys[i]
                counts[slot] = old_counts[i]
                used += 1
    return used


def top_shares(counts: NDArray[np.int64], tops: NDArray[np.float64], scale: int, num_accesses: int) -> Iterator[float]:
    """Share of all accesses that goes to the `tops` shares of most accessed ids (at least one id each).

    counts [kept] are those of one id in `scale`. Computed as one minus the share of the other ids: none of them is frequent, so a
    sample estimates their share well, while a single frequent id may or may not be in the sample.
    """
    falling = np.sort(counts)[::-1]
    remaining = np.concatenate([np.cumsum(falling[::-1])[::-1], [0]]) * scale
    for top in tops.tolist():
        num_top = max(int(np.ceil(top * falling.size - 1e-9)), 1)
        yield float(np.clip(1 - remaining[num_top] / num_accesses, 0.0, 1.0))
