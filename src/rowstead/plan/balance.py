"""The balancer: which device, process or server keeps which tables, or which rows of them, so that none has much more to do.

The planner, synchronous sharding and the sparse servers all use it, so what is predicted is what runs. A table stays whole, or its
rows are split over several devices: where it does not fit one, or where that shortens the highest load. Letters: P pieces,
N devices, K kinds of cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowstead.spec.errors import RowsteadError

Array = NDArray[np.float64]
Devices = NDArray[np.int64]

NUM_EXACT = 10
"""Pieces up to which every assignment is tried, except those that cannot beat a known one."""
MOVES_PER_TABLE = 4
"""Improvement steps per table, after which the search ends."""
NUM_LIGHTEST = 16
"""The least loaded devices, with which the highest load tries to swap pieces."""
LARGEST_SHARES = (1.0, 0.25)
"""Shares of a device's memory beyond which a table is split, tried in this order: whole tables are cheaper, pieces fill devices better."""
EVEN = 1.05
"""Imbalance at which no further split is tried."""
MANY_ROWS = 1 << 16
"""Rows of a table from which on its parts count as equally large: rows are whole."""
SPLIT_OVERHEAD = 0.1
"""Extra cost of a split table over a whole one: each example's vector is summed from several devices."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table as the balancer sees it."""

    name: str
    costs: tuple[float, ...]
    """What a device spends on it in a step, one number per kind of cost; a device's load is the largest of its sums."""
    num_bytes: float = 0.0
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

    slices: tuple[TableSlice, ...]
    loads: tuple[float, ...]
    """Load of each device."""
    held_bytes: tuple[float, ...]
    """Bytes that each device holds."""

    @property
    def max_load(self) -> float:
        """The load of the busiest device, for which all others wait."""
        return max(self.loads)

    @property
    def imbalance(self) -> float:
        """The highest load over the mean load."""
        mean = sum(self.loads) / len(self.loads)
        return self.max_load / mean if mean else 1.0

    def rows_of(self, table: str, num_rows: int) -> list[tuple[int, int, int]]:
        """The devices that keep a table, each with its first and last row; in the order of rows, which is that of devices."""
        shares: dict[int, float] = {}
        for piece in sorted((piece for piece in self.slices if piece.table == table), key=lambda piece: piece.device):
            shares[piece.device] = shares.get(piece.device, 0.0) + piece.share
        ranges, start, total = [], 0, 0.0
        for device, share in shares.items():
            total += share
            stop = num_rows if math.isclose(total, 1.0) else min(num_rows, math.floor(total * num_rows + 1e-6))
            if stop > start:
                ranges.append((device, start, stop))
            start = stop
        return ranges


def balance(
    items: Sequence[Item],
    num_devices: int,
    capacity_bytes: float = math.inf,
    *,
    split: bool = True,
    split_overhead: float = SPLIT_OVERHEAD,
    tolerance: float | None = None,
) -> Assignment:
    """Assign tables to devices of equal memory so that the highest load is low.

    Tables that are too large for a device, or that alone would be the highest load, are split by rows first (unless `split` is
    false). Each piece then goes to the least loaded device that has capacity for it, the costliest first; then pieces move and
    swap as long as that helps. With a `tolerance`, tables of the highest load are split over all devices until its load is at
    most that share above an even one.
    """
    best: Assignment | None = None
    tried: list[int] = []
    for largest_share in LARGEST_SHARES if split else (1.0,):
        num_parts = _num_parts(items, num_devices, largest_share * capacity_bytes) if split else [1] * len(items)
        if num_parts == tried:
            break
        tried = num_parts
        found = _assign(_pieces(items, num_parts, split_overhead), num_devices, capacity_bytes)
        if found is not None and (best is None or found.max_load < best.max_load):
            best = found
        if best is not None and best.imbalance < EVEN:
            break
    if best is None:
        raise RowsteadError(_does_not_fit(items, num_devices, capacity_bytes))
    if tolerance is None:
        return best
    even = max(sum(costs) for costs in zip(*(item.costs for item in items), strict=True)) / num_devices
    is_cut, latest = [False] * len(items), best
    while best.max_load > (1 + tolerance) * even:
        busiest = latest.loads.index(latest.max_load)
        here = {piece.table for piece in latest.slices if piece.device == busiest}
        can_cut = [
            index
            for index, item in enumerate(items)
            if not is_cut[index] and min(item.num_rows, num_devices) > 1 and max(item.costs) > 0
        ]
        if not can_cut:
            break
        costliest = max(can_cut, key=lambda index: (items[index].name in here, max(items[index].costs)))
        is_cut[costliest] = True
        tried[costliest] = min(num_devices, items[costliest].num_rows)
        found = _assign(_pieces(items, tried, split_overhead), num_devices, capacity_bytes)
        if found is None:
            break
        latest = found
        if latest.max_load < best.max_load:
            best = latest
    return best


@dataclass(frozen=True)
class _Piece:
    name: str
    costs: tuple[float, ...]
    num_bytes: float
    share: float


def _num_parts(items: Sequence[Item], num_devices: int, largest_bytes: float) -> list[int]:
    """In how many parts tables are needed: to fit, and not to be longer than an even share of all work."""
    totals = [sum(costs) for costs in zip(*(item.costs for item in items), strict=True)]
    counts = []
    for item in items:
        needed = math.ceil(item.num_bytes / largest_bytes) if largest_bytes > 0 else 1
        shares = [cost * num_devices / total for cost, total in zip(item.costs, totals, strict=True) if total > 0]
        useful = math.ceil(max(shares, default=1.0))
        counts.append(max(1, min(max(needed, useful), num_devices, item.num_rows)))
    return counts


def _pieces(items: Sequence[Item], num_parts: Sequence[int], split_overhead: float) -> list[_Piece]:
    """Tables in even parts."""
    pieces: list[_Piece] = []
    for item, count in zip(items, num_parts, strict=True):
        share = 1.0 / count
        largest = share if item.num_rows >= MANY_ROWS else math.ceil(item.num_rows / count) / item.num_rows
        factor = share if count == 1 else largest * (1.0 + split_overhead)
        costs = tuple(cost * factor for cost in item.costs)
        pieces += [_Piece(item.name, costs, item.num_bytes * share, share)] * count
    return pieces


def _assign(pieces: Sequence[_Piece], num_devices: int, capacity_bytes: float) -> Assignment | None:
    """A good assignment of pieces; None where none is found that fits."""
    costs = np.array([piece.costs for piece in pieces])
    sizes = np.array([piece.num_bytes for piece in pieces])
    if len(pieces) <= NUM_EXACT:
        chosen = _exact(costs, sizes, num_devices, capacity_bytes)
    else:
        chosen = _least_loaded(costs, sizes, num_devices, capacity_bytes, order=np.argsort(-_weights(costs), kind="stable"))
        if chosen is None:  # memory is tight: the largest first wastes least of it
            chosen = _least_loaded(costs, sizes, num_devices, capacity_bytes, order=np.argsort(-sizes, kind="stable"))
        if chosen is not None:
            chosen = _improved(costs, sizes, chosen, num_devices, capacity_bytes)
    if chosen is None:
        return None
    loads, held = _sums(costs, chosen, num_devices).max(axis=1), _sums(sizes[:, None], chosen, num_devices)[:, 0]
    return Assignment(
        slices=tuple(
            TableSlice(table=piece.name, device=int(device), share=piece.share)
            for piece, device in zip(pieces, chosen, strict=True)
        ),
        loads=tuple(loads.tolist()),
        held_bytes=tuple(held.tolist()),
    )


def _weights(costs: Array) -> Array:
    """What orders pieces: the largest of a piece's costs, each relative to the total of its kind. [P, K] to [P]."""
    totals = costs.sum(axis=0)
    weights: Array = (costs / np.where(totals > 0, totals, 1.0)).max(axis=1)
    return weights


def _least_loaded(costs: Array, sizes: Array, num_devices: int, capacity_bytes: float, *, order: Devices) -> Devices | None:
    """Each piece, in `order`, on the device with the least load after it among those with capacity; None where one fits nowhere."""
    chosen = np.zeros(len(sizes), np.int64)
    loads, held = np.zeros((num_devices, costs.shape[1])), np.zeros(num_devices)
    for piece in order:
        after = (loads + costs[piece]).max(axis=1)
        after[capacity_bytes - held < sizes[piece]] = np.inf
        least = after.min()
        if least == np.inf:
            return None
        ties = np.flatnonzero(after == least)
        device = ties[held[ties].argmin()]
        chosen[piece] = device
        loads[device] += costs[piece]
        held[device] += sizes[piece]
    return chosen


def _exact(costs: Array, sizes: Array, num_devices: int, capacity_bytes: float) -> Devices | None:
    """The best assignment of a few pieces, by trying all; None where none fits."""
    order = [int(piece) for piece in np.argsort(-_weights(costs), kind="stable")]
    kinds = range(costs.shape[1])
    loads = [[0.0] * len(kinds) for _ in range(num_devices)]
    capacity = [capacity_bytes] * num_devices
    now, best = [0] * len(order), [0] * len(order)
    shortest = math.inf
    least = max(_lower_bound(costs[:, kind], num_devices) for kind in kinds) * (1 + 1e-12)

    def descend(depth: int) -> None:
        nonlocal shortest, best
        if shortest <= least:
            return
        if depth == len(order):
            shortest, best = max(map(max, loads)), now.copy()
            return
        piece = order[depth]
        own = costs[piece].tolist()
        tried: set[tuple[float, ...]] = set()
        for device in sorted(range(num_devices), key=lambda device: max(loads[device])):  # a good start leaves less to try
            before, free = loads[device], capacity[device]
            after = [load + cost for load, cost in zip(before, own, strict=True)]
            if (*before, free) in tried or max(after) >= shortest or free < sizes[piece]:
                continue
            tried.add((*before, free))  # another device with the same load would give the same
            now[piece] = device
            loads[device], capacity[device] = after, free - float(sizes[piece])
            descend(depth + 1)
            loads[device], capacity[device] = before, free

    descend(0)
    return np.array(best, np.int64) if shortest < math.inf else None


def _lower_bound(costs: Array, num_devices: int) -> float:
    """The least possible highest load: an even share, the costliest piece, or two pieces where there are more than devices."""
    falling = np.sort(costs)[::-1]
    pair = falling[num_devices - 1 : num_devices + 1].sum() if len(falling) > num_devices else 0.0
    return float(max(costs.sum() / num_devices, costs.max(initial=0.0), pair))


def _improved(costs: Array, sizes: Array, chosen: Devices, num_devices: int, capacity_bytes: float) -> Devices:
    """Move pieces off the highest load, or swap them with pieces of others, as long as it gets shorter."""
    chosen = chosen.copy()
    loads, held = _sums(costs, chosen, num_devices), _sums(sizes[:, None], chosen, num_devices)[:, 0]
    members: list[list[int]] = [[] for _ in range(num_devices)]
    for piece, device in enumerate(chosen):
        members[device].append(piece)
    for _ in range(MOVES_PER_TABLE * len(sizes)):
        busiest = int(loads.max(axis=1).argmax())
        found = _best_change(busiest, costs, sizes, loads, held, members, capacity_bytes)
        if found is None:
            break
        piece, device, other = found
        for moved, source, target in ((piece, busiest, device), (other, device, busiest)):
            if moved is not None:
                members[source].remove(moved)
                members[target].append(moved)
                chosen[moved] = target
                loads[source] -= costs[moved]
                loads[target] += costs[moved]
                held[source] -= sizes[moved]
                held[target] += sizes[moved]
    return chosen


def _best_change(
    busiest: int, costs: Array, sizes: Array, loads: Array, held: Array, members: list[list[int]], capacity_bytes: float
) -> tuple[int, int, int | None] | None:
    """The move or swap out of the highest load after which the higher of the two loads is lowest."""
    mine = np.array(members[busiest], np.int64)
    count = min(NUM_LIGHTEST, len(loads) - 1)
    if count == 0 or len(mine) == 0:
        return None
    queues = loads.max(axis=1)
    best, best_longer = None, queues[busiest] * (1 - 1e-9)
    for device in np.argpartition(queues, count)[: count + 1]:
        if device == busiest:
            continue
        theirs = np.array([*members[device], -1], np.int64)  # -1: nothing comes back
        their_costs = np.where((theirs >= 0)[:, None], costs[theirs], 0.0)
        their_bytes = np.where(theirs >= 0, sizes[theirs], 0.0)
        moved = costs[mine][:, None, :] - their_costs[None, :, :]
        moved_bytes = sizes[mine][:, None] - their_bytes[None, :]
        longer = np.maximum((loads[busiest] - moved).max(axis=2), (loads[device] + moved).max(axis=2))
        fits = (held[device] + moved_bytes <= capacity_bytes) & (held[busiest] - moved_bytes <= capacity_bytes)
        longer = np.where(fits, longer, np.inf)
        index = int(longer.argmin())
        if longer.flat[index] < best_longer:
            best_longer = float(longer.flat[index])
            piece, other = np.unravel_index(index, longer.shape)
            back = int(theirs[other])
            best = int(mine[piece]), int(device), back if back >= 0 else None
    return best


def _sums(values: Array, chosen: Devices, num_devices: int) -> Array:
    """Sums [N, K] of values [P, K] by device."""
    return np.stack([np.bincount(chosen, weights=column, minlength=num_devices) for column in values.T], axis=1)


def _does_not_fit(items: Sequence[Item], num_devices: int, capacity_bytes: float) -> str:
    total, largest = sum(item.num_bytes for item in items), max(item.num_bytes for item in items)
    return (
        f"no placement fits: {len(items)} tables need {total / 1e9:.3g} GB, the largest {largest / 1e9:.3g} GB, and {num_devices} "
        f"devices have {capacity_bytes / 1e9:.3g} GB each: use more devices, or keep some tables in system memory"
    )
