"""Which rows are in fast memory, and where: the bookkeeping of a cache whose coming batches are known.

On a GPU it is plain tensor arithmetic there, but for the marking of rows (`kernels/cache_gpu.py`); on a CPU both marking and
choosing are compiled (`kernels/cache_cpu.py`), and the plain form is what they are tested against.

Letters: N rows, n rows that a batch misses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rowstead.kernels import cache_cpu
from rowstead.kernels.cache_cpu import MOST_USES, WANTED
from rowstead.kernels.choose import has_triton

HALF_LIFE = 64
"""Batches after which the uses of a row count half."""
SPARE_SHARE = 16
"""Of the rows that may go, on a CPU one in so many is put in line at a time: to sort them is dear there."""
SAMPLE = 1 << 13
"""Rows by whose heat it is guessed how cold the coldest of all are."""
DENSE_SHARE = 8
"""With more ids than one for so many rows it is quicker to go through all rows than from id to id."""
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


class Places:
    """The places of one group of tables.

    At most `num_places` rows stay; while batches under way need more, there are more. `capacity` is how many places have
    been handed out memory for: whoever keeps the rows makes room when it has risen.
    """

    def __init__(self, num_rows: int, num_places: int, device: torch.device, *, compiled: bool = True) -> None:
        self.num_places = num_places
        self.capacity = num_places
        self.place_of = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        """For each row its place, or -1."""
        self._row_in = torch.full((num_places,), -1, dtype=torch.int64, device=device)
        self._used = torch.full((num_places + 1,), -1, dtype=torch.int32, device=device)
        """For each place the last batch that needed its row; one more at the end for rows that have no place."""
        self._uses = torch.zeros(num_rows, dtype=torch.uint8, device=device)
        """For each row, also one that has no place, by how many batches it was used, those of long ago counted less."""
        self._halved = 0
        """The batch at which they were halved last."""
        self._num_taken = 0
        self._free = torch.arange(num_places, dtype=torch.int64, device=device)
        self._line = self._free[:0]
        """Places whose rows may go, the coldest first."""
        self._line_used = self._used[:0]
        self._is_compiled = compiled and device.type == "cpu"
        self._hand = 0
        """Where the search for rows that make room goes on, in compiled code."""

    def plan(self, rows: Tensor, number: int, *, oldest: int) -> Moves:
        """Give every row that batch `number` names, int64 [any], a place; rows that batches from `oldest` on use stay."""
        missing = self.missing(rows, number)
        out_places = self._may_go(self._num_taken + missing.numel() - self.num_places, oldest)
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
        self._num_taken += missing.numel() - out_rows.numel()
        return Moves(missing, in_places, out_rows, out_places)

    def missing(self, rows: Tensor, number: int | None = None) -> Tensor:
        """Which of `rows` have no place, each once, rising; batch `number`, if given, uses the others."""
        if number is not None and number - self._halved >= HALF_LIFE:
            self._uses >>= 1
            self._halved = number
        if self._is_compiled:
            return self._missing_compiled(rows, -1 if number is None else number)
        if rows.numel() * DENSE_SHARE < self.place_of.numel():
            place = self.place_of[rows]
            missing = torch.unique(rows[place < 0])
            if number is not None:
                self._used[place.long()] = number  # of a row without a place: the last, which is nobody's
                self._count(rows)
            return missing
        _mark(rows, self.place_of, self._used, -1 if number is None else number)
        missing = (self.place_of == WANTED).nonzero().flatten()
        if number is not None:
            self._count(missing)
            self._count(self._row_in[(self._used[:-1] == number).nonzero().flatten()])
        return missing

    def _missing_compiled(self, rows: Tensor, number: int) -> Tensor:
        found = np.empty(rows.numel(), np.int64)
        arrays = rows.numpy(), self.place_of.numpy(), self._used.numpy(), self._uses.numpy()
        count = cache_cpu.mark_rows(*arrays, number, found)
        return torch.from_numpy(np.sort(found[:count]))

    def _count(self, rows: Tensor) -> None:
        """One more batch uses these rows, some of them perhaps several times, which counts once."""
        uses = self._uses[rows]
        self._uses[rows] = uses + (uses < MOST_USES)

    def lend(self, count: int) -> Tensor:
        """So many free places, int64 [count]; those of rows that were sent away last come first."""
        short = count - self._free.numel()
        if short > 0:
            self._grow(int((self.capacity + short) * GROWTH))
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, places: Tensor) -> None:
        """Places that were lent, and never belonged to a row, are free again."""
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
        self._line, self._line_used = self._free[:0], self._used[:0]

    def _may_go(self, count: int, oldest: int) -> Tensor:
        """Up to `count` places, of the coldest rows that batches from `oldest` on do not use."""
        if self._is_compiled:
            places = np.empty(max(0, count), np.int64)
            arrays = self._row_in.numpy(), self._used.numpy(), self._uses.numpy()
            num_found, self._hand = cache_cpu.send_away(self._hand, oldest, *arrays, places)
            return torch.from_numpy(places[:num_found])
        found = [self._free[:0]]
        is_new = False
        while count > 0:
            if not self._line.numel():
                if is_new:
                    break
                self._renew_line(count, oldest)
                is_new = True
                continue
            first, used = self._line[:count], self._line_used[:count]
            self._line, self._line_used = self._line[count:], self._line_used[count:]
            found.append(first if is_new else first[self._used[first] == used])
            count -= found[-1].numel()
        return found[-1] if len(found) < 3 else torch.cat(found)

    def _renew_line(self, count: int, oldest: int) -> None:
        used = self._used[:-1]
        candidates = ((used < oldest) & (self._row_in >= 0)).nonzero().flatten()
        if candidates.numel() > count:
            wanted = count if used.is_cuda else max(count, candidates.numel() // SPARE_SHARE)
            recent = 1 / (oldest - used[candidates])
            candidates = candidates[_coldest(self._uses[self._row_in[candidates]] + recent, wanted)]
        self._line, self._line_used = candidates, used[candidates]

    def _grow(self, capacity: int) -> None:
        device, more = self.place_of.device, capacity - self.capacity
        self._row_in = torch.cat([self._row_in, torch.full((more,), -1, dtype=torch.int64, device=device)])
        self._used = torch.cat([self._used, torch.full((more,), -1, dtype=torch.int32, device=device)])
        self._free = torch.cat([self._free, torch.arange(self.capacity, capacity, device=device)])
        self.capacity = capacity


def _mark(rows: Tensor, place_of: Tensor, used: Tensor, number: int) -> None:
    """As `mark_rows` on a GPU says, which does it without writing the same again and again."""
    if rows.is_cuda and has_triton():
        from rowstead.kernels.cache_gpu import mark_rows

        mark_rows(rows, place_of, used, number)
        return
    place = place_of[rows]
    if number >= 0:
        used[place.long()] = number
    place_of[rows] = torch.where(place < 0, WANTED, place)


def _coldest(heat: Tensor, count: int) -> Tensor:
    """`count` of the coldest, fewer than there are; of many not exactly those, since a sample says how cold they are."""
    if heat.numel() > 4 * SAMPLE:
        sample = heat[:: heat.numel() // SAMPLE].sort().values
        share = count / heat.numel()
        border = int(sample.numel() * share + 3 * (sample.numel() * share * (1 - share)) ** 0.5 + 1)
        if border < sample.numel():
            cold = (heat <= sample[border]).nonzero().flatten()
            if cold.numel() >= count:
                return cold[:count]
    return heat.sort().indices[:count]
