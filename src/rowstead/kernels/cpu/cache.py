"""What a cache in system memory does for each batch: marks the rows that the batch needs, and picks rows that make room.

Letters: N rows, P places, nnz ids.
"""

from __future__ import annotations

import numba
import numpy as np

from rowstead.kernels.cpu.memory import prefetch

AHEAD = 16
"""Ids whose places are asked for before they are needed."""
WINDOW = 8
"""Rows of which the coldest goes."""
WANTED = -2
"""In place of a row's place: it has none, and is to get one."""
MOST_USES = 255

_GOES = np.int32(2147483647)
"""As the batch that used a place last: it was picked, and is not to be found again."""


@numba.njit(nogil=True, cache=True)
def mark_rows(rows, place_of, used, uses, number, missing):  # type: ignore[no-untyped-def]
    """Say which rows batch `number` needs; returns how many of them have no place.

    rows int64 [nnz], some of them several times; place_of int32 [N], -1 for none, becomes WANTED for those that are missing,
    which go to `missing` int64 [nnz], each once; used int32 [P] of the others becomes `number`, and uses uint8 [N] of all rises
    by one. A negative number changes neither.
    """
    count = 0
    start = place_of.ctypes.data
    for at in range(rows.size):
        if at + AHEAD < rows.size:
            prefetch(start + 4 * rows[at + AHEAD])
        row = rows[at]
        place = place_of[row]
        is_new = False
        if place >= 0:
            if number >= 0 and used[place] != number:
                used[place] = number
                is_new = True
        elif place != WANTED:
            place_of[row] = WANTED
            missing[count] = row
            count += 1
            is_new = number >= 0
        if is_new and uses[row] < MOST_USES:
            uses[row] += 1
    return count


@numba.njit(nogil=True, cache=True)
def send_away(hand, oldest, row_in, used, uses, places):  # type: ignore[no-untyped-def]
    """Fill `places` int64 [any] with places whose rows batches from `oldest` on do not use; returns how many, and the new hand.

    A hand goes round the places, and of each few that may go the coldest does: the row that fewest batches used, of late above
    all, and of those the one used longest ago. Where many have to go, all that were used less than some number do.
    row_in int64 [P], -1 for none; used int32 [P]; uses uint8 [N].
    """
    num_places, count, seen = row_in.size, 0, 0
    while count < places.size and places.size * WINDOW <= num_places and seen < num_places:
        best, found = -1, 0
        while found < WINDOW and seen < num_places:
            place = hand
            hand = hand + 1 if hand + 1 < num_places else 0
            seen += 1
            if row_in[place] >= 0 and used[place] < oldest:
                found += 1
                if best < 0 or _is_colder(place, best, row_in, used, uses):
                    best = place
        if best >= 0:
            places[count] = best
            used[best] = _GOES
            count += 1
    if count < places.size:
        count, hand = _send_coldest(hand, oldest, row_in, used, uses, places, count)
    for at in range(count):
        used[places[at]] = -1
    return count, hand


@numba.njit(nogil=True, cache=True)
def _send_coldest(hand, oldest, row_in, used, uses, places, count):  # type: ignore[no-untyped-def]
    """The rest of `places`, from `count` on: all rows below some number of uses, and of those with that number the first."""
    num_places = row_in.size
    rows_of = np.zeros(MOST_USES + 1, np.int64)
    for place in range(num_places):
        if row_in[place] >= 0 and used[place] < oldest:
            rows_of[uses[row_in[place]]] += 1
    limit, below = 0, 0
    while limit < MOST_USES and below + rows_of[limit] < places.size - count:
        below += rows_of[limit]
        limit += 1
    at_limit = places.size - count - below
    for _ in range(num_places):
        place = hand
        hand = hand + 1 if hand + 1 < num_places else 0
        if count == places.size:
            break
        if row_in[place] >= 0 and used[place] < oldest and uses[row_in[place]] <= limit:
            if uses[row_in[place]] == limit:
                if at_limit == 0:
                    continue
                at_limit -= 1
            places[count] = place
            used[place] = _GOES
            count += 1
    return count, hand


@numba.njit(nogil=True, cache=True, inline="always")
def _is_colder(place, other, row_in, used, uses):  # type: ignore[no-untyped-def]
    one, two = uses[row_in[place]], uses[row_in[other]]
    return one < two or (one == two and used[place] < used[other])


@numba.njit(nogil=True, cache=True)
def name_rows(ids, offsets, num_samples, first_rows, rows):  # type: ignore[no-untyped-def]
    """Fill `rows` int64 [nnz] with `ids` [nnz] counted on from first_rows int64 [F] of their feature, -1 where that is negative."""
    for feature in range(first_rows.size):
        first = first_rows[feature]
        for at in range(offsets[feature * num_samples], offsets[(feature + 1) * num_samples]):
            rows[at] = ids[at] + first if first >= 0 else -1


@numba.njit(nogil=True, cache=True)
def slots_of_rows(rows, start, stop, place_of, places):  # type: ignore[no-untyped-def]
    """Fill `places` [nnz] with the places of those `rows` int64 [nnz] that are from `start` to `stop`; others stay."""
    address = place_of.ctypes.data
    for at in range(rows.size):
        if at + AHEAD < rows.size:
            prefetch(address + 4 * (rows[at + AHEAD] - start))
        if start <= rows[at] < stop:
            places[at] = place_of[rows[at] - start]


@numba.njit(nogil=True, cache=True)
def rows_between(rows, start, stop, found):  # type: ignore[no-untyped-def]
    """Fill `found` int64 [nnz] with those `rows` that are from `start` to `stop`, counted from `start`; returns how many."""
    count = 0
    for at in range(rows.size):
        if start <= rows[at] < stop:
            found[count] = rows[at] - start
            count += 1
    return count
