"""Placement of tables on devices, balanced by predicted time: which device takes which table, or which part of one.

A table is placed whole, or its rows are split over several devices, where it does not fit one or where that shortens the longest
queue. Letters: T tables, N devices.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rowstead.spec.errors import RowsteadError

Array = NDArray[np.float64]

NUM_EXACT = 10
"""Pieces up to which every assignment is tried, less those that cannot be better than one that is known."""
MOVES_PER_TABLE = 4
"""Steps of improvement that are tried for each table, after which the search ends."""
LARGEST_SHARES = (1.0, 0.25)
"""Shares of a device's memory beyond which a table is split, tried in turn: whole tables are cheaper, pieces fill devices better."""
EVEN = 1.05
"""Imbalance at which no other share is tried."""
SPLIT_OVERHEAD = 0.1
"""Share by which the parts of a split table cost more than the whole: each example's vector is summed from several devices."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table as the search sees it."""

    name: str
    seconds: float
    """Time that a device spends on it in a step."""
    num_bytes: float
    """Memory that it takes."""
    num_rows: int = 2**62
    """Rows, over which it may be split."""


@dataclass(frozen=True, kw_only=True)
class TableSlice:
    """A table, or some of its rows, on one device."""

    table: str
    device: int
    share: float
    """Share of the table's rows."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Where every table is."""

    parts: tuple[TableSlice, ...]
    loads_s: tuple[float, ...]
    """Predicted time of each device for its tables."""
    held_bytes: tuple[float, ...]
    """What each device holds."""

    @property
    def longest_s(self) -> float:
        """What all wait for."""
        return max(self.loads_s)

    @property
    def imbalance(self) -> float:
        """The longest load over the mean one."""
        mean = sum(self.loads_s) / len(self.loads_s)
        return self.longest_s / mean if mean else 1.0


def place(
    items: Sequence[Item], num_devices: int, capacity_bytes: float, *, sharding: Literal["whole", "rows"] = "rows"
) -> Assignment:
    """The assignment of tables to devices of equal memory in which the longest queue is short.

    Tables that are too large for a device, or that alone would be the longest queue, are split by rows first. Then each piece goes
    to the device with least to do that has room, the longest first; then pieces move and change places as long as that helps.
    """
    best: Assignment | None = None
    tried: list[_Piece] = []
    for largest_share in LARGEST_SHARES if sharding == "rows" else (1.0,):
        pieces = _pieces(items, num_devices, capacity_bytes, largest_share, sharding)
        if pieces == tried:
            break
        tried = pieces
        found = _placed(pieces, num_devices, capacity_bytes)
        if found is not None and (best is None or found.longest_s < best.longest_s):
            best = found
        if best is not None and best.imbalance < EVEN:
            break
    if best is None:
        raise RowsteadError(_no_room(items, num_devices, capacity_bytes))
    return best


def _placed(pieces: Sequence[_Piece], num_devices: int, capacity_bytes: float) -> Assignment | None:
    """A short assignment of pieces, or None where none is found."""
    seconds = np.array([piece.seconds for piece in pieces])
    sizes = np.array([piece.num_bytes for piece in pieces])
    if len(pieces) <= NUM_EXACT:
        chosen = _exact(seconds, sizes, num_devices, capacity_bytes)
    else:
        chosen = _least_loaded(seconds, sizes, num_devices, capacity_bytes, by=seconds)
        if chosen is None:  # the memory is tight: the largest first wastes least of it
            chosen = _least_loaded(seconds, sizes, num_devices, capacity_bytes, by=sizes)
        if chosen is not None:
            chosen = _improved(seconds, sizes, chosen, num_devices, capacity_bytes)
    if chosen is None:
        return None
    parts = tuple(
        TableSlice(table=piece.name, device=int(device), share=piece.share)
        for piece, device in zip(pieces, chosen, strict=True)
    )
    loads, held = _sums(seconds, chosen, num_devices), _sums(sizes, chosen, num_devices)
    return Assignment(parts=parts, loads_s=tuple(loads.tolist()), held_bytes=tuple(held.tolist()))


def by_bytes(items: Sequence[Item], num_devices: int, capacity_bytes: float) -> Assignment:
    """The assignment that only balances memory, whole tables, the largest first: what `place` is compared with."""
    sizes, seconds = np.array([item.num_bytes for item in items]), np.array([item.seconds for item in items])
    chosen = _least_loaded(sizes, sizes, num_devices, capacity_bytes, by=sizes)
    if chosen is None:
        raise RowsteadError(_no_room(items, num_devices, capacity_bytes))
    return Assignment(
        parts=tuple(TableSlice(table=item.name, device=int(d), share=1.0) for item, d in zip(items, chosen, strict=True)),
        loads_s=tuple(_sums(seconds, chosen, num_devices).tolist()),
        held_bytes=tuple(_sums(sizes, chosen, num_devices).tolist()),
    )


@dataclass(frozen=True)
class _Piece:
    name: str
    seconds: float
    num_bytes: float
    share: float


def _pieces(
    items: Sequence[Item], num_devices: int, capacity_bytes: float, largest_share: float, sharding: str
) -> list[_Piece]:
    """Tables in as many parts as they need: to fit, and not to be longer than an even share of all work."""
    even_s = sum(item.seconds for item in items) / num_devices
    pieces = []
    for item in items:
        needed = int(np.ceil(item.num_bytes / (largest_share * capacity_bytes))) if capacity_bytes > 0 else 1
        if sharding == "rows":
            useful = int(np.ceil(item.seconds / even_s)) if even_s > 0 else 1
            num_parts = min(max(needed, useful), num_devices, item.num_rows)
        else:
            num_parts = 1
        cost = 1.0 if num_parts == 1 else 1.0 + SPLIT_OVERHEAD
        share = 1.0 / num_parts
        pieces += [_Piece(item.name, item.seconds * share * cost, item.num_bytes * share, share)] * num_parts
    return pieces


def _least_loaded(
    seconds: Array, sizes: Array, num_devices: int, capacity_bytes: float, *, by: Array
) -> NDArray[np.int64] | None:
    """Each piece on the device that has least to do among those with room, the largest `by` first; None where one has no room."""
    chosen = np.zeros(len(seconds), np.int64)
    room = np.full(num_devices, capacity_bytes)
    queue = [(0.0, 0.0, device) for device in range(num_devices)]
    for piece in np.argsort(-by, kind="stable"):
        full = []
        while queue and room[queue[0][2]] < sizes[piece]:
            full.append(heapq.heappop(queue))
        if not queue:
            return None
        load, held, device = heapq.heappop(queue)
        chosen[piece] = device
        room[device] -= sizes[piece]
        heapq.heappush(queue, (load + seconds[piece], held + sizes[piece], device))
        for one in full:
            heapq.heappush(queue, one)
    return chosen


def _exact(seconds: Array, sizes: Array, num_devices: int, capacity_bytes: float) -> NDArray[np.int64] | None:
    """The best assignment of a few pieces, by trying all; None where none fits."""
    order = [int(piece) for piece in np.argsort(-seconds, kind="stable")]
    loads, room = [0.0] * num_devices, [capacity_bytes] * num_devices
    now, best = [0] * len(order), [0] * len(order)
    shortest = np.inf
    least = _least_longest(seconds, num_devices) * (1 + 1e-12)

    def go_on(depth: int) -> None:
        nonlocal shortest, best
        if shortest <= least:
            return
        if depth == len(order):
            shortest, best = max(loads), now.copy()
            return
        piece = order[depth]
        tried: set[tuple[float, float]] = set()
        for device in sorted(range(num_devices), key=loads.__getitem__):  # what is good soon leaves less to try
            like = loads[device], room[device]
            longer = loads[device] + float(seconds[piece])
            if like in tried or longer >= shortest or room[device] < sizes[piece]:
                continue
            tried.add(like)  # another device that is filled alike would give the same
            now[piece] = device
            loads[device], room[device] = longer, like[1] - float(sizes[piece])
            go_on(depth + 1)
            loads[device], room[device] = like

    go_on(0)
    return np.array(best, np.int64) if shortest < np.inf else None


def _least_longest(seconds: Array, num_devices: int) -> float:
    """What the longest queue takes at least: an even share, the longest piece, or two pieces where there are more than devices."""
    falling = np.sort(seconds)[::-1]
    together = falling[num_devices - 1 : num_devices + 1].sum() if len(falling) > num_devices else 0.0
    return float(max(seconds.sum() / num_devices, seconds.max(initial=0.0), together))


def _improved(
    seconds: Array, sizes: Array, chosen: NDArray[np.int64], num_devices: int, capacity_bytes: float
) -> NDArray[np.int64]:
    """Pieces of the longest queue move to others, or change places with pieces there, as long as it gets shorter."""
    chosen = chosen.copy()
    loads, held = _sums(seconds, chosen, num_devices), _sums(sizes, chosen, num_devices)
    members: list[list[int]] = [[] for _ in range(num_devices)]
    for piece, device in enumerate(chosen):
        members[device].append(piece)
    for _ in range(MOVES_PER_TABLE * len(seconds)):
        longest = int(loads.argmax())
        found = _best_change(longest, seconds, sizes, loads, held, members, capacity_bytes)
        if found is None:
            break
        piece, device, other = found
        for moved, source, target in ((piece, longest, device), (other, device, longest)):
            if moved is not None:
                members[source].remove(moved)
                members[target].append(moved)
                chosen[moved] = target
                loads[source] -= seconds[moved]
                loads[target] += seconds[moved]
                held[source] -= sizes[moved]
                held[target] += sizes[moved]
    return chosen


NUM_LIGHTEST = 16
"""Devices, those with least to do, with which the longest queue tries to change places."""


def _best_change(
    longest: int, seconds: Array, sizes: Array, loads: Array, held: Array, members: list[list[int]], capacity_bytes: float
) -> tuple[int, int, int | None] | None:
    """The move or exchange out of the longest queue after which the longer of the two queues is shortest."""
    mine = np.array(members[longest], np.int64)
    count = min(NUM_LIGHTEST, len(loads) - 1)
    if count == 0 or len(mine) == 0:
        return None
    lightest = np.argpartition(loads, count)[: count + 1]
    best, best_longer = None, loads[longest] * (1 - 1e-9)
    for device in lightest:
        if device == longest:
            continue
        theirs = np.array([*members[device], -1], np.int64)  # -1: nothing comes back
        their_s = np.where(theirs >= 0, seconds[theirs], 0.0)
        their_bytes = np.where(theirs >= 0, sizes[theirs], 0.0)
        moved_s = seconds[mine][:, None] - their_s[None, :]
        moved_bytes = sizes[mine][:, None] - their_bytes[None, :]
        longer = np.maximum(loads[longest] - moved_s, loads[device] + moved_s)
        fits = (held[device] + moved_bytes <= capacity_bytes) & (held[longest] - moved_bytes <= capacity_bytes)
        longer = np.where(fits, longer, np.inf)
        place_of_least = int(longer.argmin())
        if longer.flat[place_of_least] < best_longer:
            best_longer = float(longer.flat[place_of_least])
            piece, other = np.unravel_index(place_of_least, longer.shape)
            back = int(theirs[other])
            best = int(mine[piece]), int(device), back if back >= 0 else None
    return best


def _sums(values: Array, chosen: NDArray[np.int64], num_devices: int) -> Array:
    return np.bincount(chosen, weights=values, minlength=num_devices).astype(np.float64)


def _no_room(items: Sequence[Item], num_devices: int, capacity_bytes: float) -> str:
    total, largest = sum(item.num_bytes for item in items), max(item.num_bytes for item in items)
    return (
        f"no placement fits: {len(items)} tables need {total / 1e9:.3g} GB, the largest {largest / 1e9:.3g} GB, and {num_devices} "
        f"devices have {capacity_bytes / 1e9:.3g} GB each: use more devices, or keep some tables in system memory"
    )
