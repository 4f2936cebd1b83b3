"""Which rows are in fast memory, and where: the bookkeeping of a cache whose coming batches are known.

All of it is plain tensor arithmetic, which says what is promised. Stores use `places_cpu.py`, which does the same in compiled
loops, and on a GPU `places_gpu.py`, which does it in launches of its own; tests hold both against this.

Letters: N rows, n rows that a batch misses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rowstead.kernels.cpu.cache import MOST_USES

HALF_LIFE = 64
"""Batches after which the uses of a row count half."""
GROWTH = 1.25
"""Room beyond what is needed when places run out, so that they seldom do."""


@dataclass(frozen=True)
class Moves:
    """What has to cross the bus for one batch."""

    in_rows: Tensor
    """int64 [n], rising."""
    in_places: Tensor
    """int64 [n]."""
    out_rows: Tensor
    """int64, rising; none of them is in `in_rows`."""
    out_places: Tensor
    """int64; as far as both lists go, the same as `in_places`."""


class CacheSlots:
    """The places of one group of tables.

    As many rows stay as there are places; where batches under way needed more at once, there are more since, and as many stay.
    `capacity` is how many places have been handed out memory for: whoever keeps the rows makes room when it has risen.
    """

    def __init__(self, num_rows: int, num_places: int, device: torch.device) -> None:
        self.num_places = num_places
        self.num_kept = num_places
        """Rows that stay at most, unless those of batches under way are more."""
        self.capacity = num_places
        self.place_of = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        """For each row its place, or -1."""
        self._row_in = torch.full((num_places,), -1, dtype=torch.int64, device=device)
        self._used = torch.full((num_places,), -1, dtype=torch.int32, device=device)
        """For each place the last batch that needed its row."""
        self._uses = torch.zeros(num_rows, dtype=torch.uint8, device=device)
        """For each row, also one that has no place, by how many batches it was used, those of long ago counted less."""
        self._halved = 0
        """The batch at which they were halved last."""
        self._num_taken = 0
        self._free = torch.arange(num_places, dtype=torch.int64, device=device)

    def plan(self, rows: Tensor, number: int, *, oldest: int) -> Moves:
        """Give every row that batch `number` names, int64 [any], a place; rows that batches from `oldest` on use stay."""
        missing = self.missing(rows, number)
        out_places = self._may_go(self._num_taken + missing.numel() - self.num_kept, oldest)
        out_rows, order = torch.sort(self._row_in[out_places])
        out_places = out_places[order]
        self.place_of[out_rows] = -1
        self._row_in[out_places] = -1
        self._used[out_places] = -1
        self._free = torch.cat([out_places, self._free])
        in_places = self.lend(missing.numel())
        self._row_in[in_places] = missing
        self._used[in_places] = number
        self.place_of[missing] = in_places.int()
        self._take(missing.numel() - out_rows.numel())
        return Moves(missing, in_places, out_rows, out_places)

    def _take(self, more: int) -> None:
        """So many more rows have places than before."""
        self._num_taken += more
        if self._num_taken > self.num_kept:
            self.num_kept = min(self.capacity, int(GROWTH * self._num_taken))

    def missing(self, rows: Tensor, number: int | None = None) -> Tensor:
        """Which of `rows` have no place, each once, rising; batch `number`, if given, uses the others."""
        if number is not None and number - self._halved >= HALF_LIFE:
            self._uses >>= 1
            self._halved = number
        place = self.place_of[rows]
        if number is not None:
            self._used[place[place >= 0].long()] = number
            self._count(rows)
        return torch.unique(rows[place < 0])

    def _count(self, rows: Tensor) -> None:
        """One more batch uses these rows, some of them perhaps several times, which counts once."""
        uses = self._uses[rows]
        self._uses[rows] = uses + (uses < MOST_USES)

    def lend(self, count: int, *, is_aside: bool = False) -> Tensor:
        """So many free places, int64 [count]; those of rows that were sent away last come first.

        `is_aside` if they are given back soon: then there is less room to spare.
        """
        short = count - self._free.numel()
        if short > 0:
            self._grow(self._room(short, is_aside=is_aside))
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _room(self, short: int, *, is_aside: bool) -> int:
        """CacheSlots that there are once so many more were needed."""
        return self.capacity + int(GROWTH * short) if is_aside else int((self.capacity + short) * GROWTH)

    def give_back(self, places: Tensor) -> None:
        """CacheSlots that were lent, and never belonged to a row, are free again."""
        self._free = torch.cat([places, self._free])

    def taken(self) -> tuple[Tensor, Tensor]:
        """The rows that have places, and these."""
        places = (self._row_in >= 0).nonzero().flatten()
        return self._row_in[places], places

    def clear(self) -> None:
        """No row has a place any more."""
        self.place_of.fill_(-1)
        self._row_in.fill_(-1)
        self._used.fill_(-1)
        self._uses.fill_(0)
        self._num_taken = 0
        self._free = torch.arange(self.capacity, dtype=torch.int64, device=self.place_of.device)

    def _may_go(self, count: int, oldest: int) -> Tensor:
        """Up to `count` places, of the coldest rows that batches from `oldest` on do not use."""
        if count <= 0:
            return self._free[:0]
        candidates = ((self._used < oldest) & (self._row_in >= 0)).nonzero().flatten()
        recent = 1 / (oldest - self._used[candidates])
        heat = self._uses[self._row_in[candidates]] + recent
        return candidates[heat.sort(stable=True).indices[:count]]

    def _grow(self, capacity: int) -> None:
        device, more = self.place_of.device, capacity - self.capacity
        self._row_in = torch.cat([self._row_in, torch.full((more,), -1, dtype=torch.int64, device=device)])
        self._used = torch.cat([self._used, torch.full((more,), -1, dtype=torch.int32, device=device)])
        self._free = torch.cat([self._free, torch.arange(self.capacity, capacity, device=device)])
        self.capacity = capacity
