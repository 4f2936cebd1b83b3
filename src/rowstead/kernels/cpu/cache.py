"""Kernels of a cache in system memory: mark the rows that a batch needs, choose rows to evict, map ids to rows and slots.

Letters: N rows, P slots, F features, nnz ids.
"""

from __future__ import annotations

import numba
import numpy as np

from rowstead.kernels.cpu.memory import prefetch
from rowstead.spec.caching import MAX_USES

AHEAD = 16
"""How many ids ahead their slots are prefetched into the processor's cache."""
WINDOW = 8
"""Eviction candidates of which the coldest is evicted."""
WANTED = -2
"""In `slot_of`: the row has no slot and needs one."""

_EVICTED = np.int32(2147483647)
"""In `used`: the slot was chosen already."""


@numba.njit(nogil=True, cache=True)
def mark_rows(rows, slot_of, used, uses, number, missing):  # type: ignore[no-untyped-def]
    """Mark the rows that batch `number` needs; returns how many of them have no slot.

    rows int64 [nnz], may repeat; slot_of int32 [N], -1 for none, becomes WANTED for rows without a slot, which go to
    `missing` int64 [nnz], each once; used int32 [P] of the others becomes `number`, and uses uint8 [N] of all rises by one. A
    negative number changes neither.
    """
    count = 0
    start = slot_of.ctypes.data
    for at in range(rows.size):
        if at + AHEAD < rows.size:
            prefetch(start + 4 * rows[at + AHEAD])
        row = rows[at]
        slot = slot_of[row]
        is_new = False
        if slot >= 0:
            if number >= 0 and used[slot] != number:
                used[slot] = number
                is_new = True
        elif slot != WANTED:
            slot_of[row] = WANTED
            missing[count] = row
            count += 1
            is_new = number >= 0
        if is_new and uses[row] < MAX_USES:
            uses[row] += 1
    return count


@numba.njit(nogil=True, cache=True)
def evict_rows(hand, oldest, row_in, used, uses, slots):  # type: ignore[no-untyped-def]
    """Fill `slots` int64 [any] with slots whose rows batches from `oldest` on do not use; returns how many, and the new hand.

    A clock hand goes round the slots and evicts the coldest of every few candidates: the least frequently used row, and of equals
    the least recently used. Where many rows must go, all below some use count do.
    row_in int64 [P], -1 for none; used int32 [P]; uses uint8 [N].
    """
    num_slots, count, seen = row_in.size, 0, 0
    while count < slots.size and slots.size * WINDOW <= num_slots and seen < num_slots:
        best, found = -1, 0
        while found < WINDOW and seen < num_slots:
            slot = hand
            hand = hand + 1 if hand + 1 < num_slots else 0
            seen += 1
            if row_in[slot] >= 0 and used[slot] < oldest:
                found += 1
                if best < 0 or _is_colder(slot, best, row_in, used, uses):
                    best = slot
        if best >= 0:
            slots[count] = best
            used[best] = _EVICTED
            count += 1
    if count < slots.size:
        count, hand = _evict_coldest(hand, oldest, row_in, used, uses, slots, count)
    for at in range(count):
        used[slots[at]] = -1
    return count, hand


@numba.njit(nogil=True, cache=True)
def _evict_coldest(hand, oldest, row_in, used, uses, slots, count):  # type: ignore[no-untyped-def]
    """Fill `slots` from `count` on: all rows below some use count, and the first of those with that count."""
    num_slots = row_in.size
    rows_of = np.zeros(MAX_USES + 1, np.int64)
    for slot in range(num_slots):
        if row_in[slot] >= 0 and used[slot] < oldest:
            rows_of[uses[row_in[slot]]] += 1
    limit, below = 0, 0
    while limit < MAX_USES and below + rows_of[limit] < slots.size - count:
        below += rows_of[limit]
        limit += 1
    at_limit = slots.size - count - below
    for _ in range(num_slots):
        slot = hand
        hand = hand + 1 if hand + 1 < num_slots else 0
        if count == slots.size:
            break
        if row_in[slot] >= 0 and used[slot] < oldest and uses[row_in[slot]] <= limit:
            if uses[row_in[slot]] == limit:
                if at_limit == 0:
                    continue
                at_limit -= 1
            slots[count] = slot
            used[slot] = _EVICTED
            count += 1
    return count, hand


@numba.njit(nogil=True, cache=True, inline="always")
def _is_colder(slot, other, row_in, used, uses):  # type: ignore[no-untyped-def]
    one, two = uses[row_in[slot]], uses[row_in[other]]
    return one < two or (one == two and used[slot] < used[other])


@numba.njit(nogil=True, cache=True)
def map_ids_to_rows(ids, offsets, num_samples, first_rows, rows):  # type: ignore[no-untyped-def]
    """Fill `rows` int64 [nnz] with `ids` [nnz] plus first_rows int64 [F] of their feature, or -1 where that is negative."""
    for feature in range(first_rows.size):
        first = first_rows[feature]
        for at in range(offsets[feature * num_samples], offsets[(feature + 1) * num_samples]):
            rows[at] = ids[at] + first if first >= 0 else -1


@numba.njit(nogil=True, cache=True)
def map_rows_to_slots(rows, start, stop, slot_of, slots):  # type: ignore[no-untyped-def]
    """Fill `slots` [nnz] with the slots of those `rows` int64 [nnz] that are from `start` to `stop`; others stay."""
    address = slot_of.ctypes.data
    for at in range(rows.size):
        if at + AHEAD < rows.size:
            prefetch(address + 4 * (rows[at + AHEAD] - start))
        if start <= rows[at] < stop:
            slots[at] = slot_of[rows[at] - start]


@numba.njit(nogil=True, cache=True)
def select_rows(rows, start, stop, found):  # type: ignore[no-untyped-def]
    """Fill `found` int64 [nnz] with those `rows` that are from `start` to `stop`, minus `start`; returns how many."""
    count = 0
    for at in range(rows.size):
        if start <= rows[at] < stop:
            found[count] = rows[at] - start
            count += 1
    return count
