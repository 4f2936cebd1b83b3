"""`CacheSlots` in the memory of a GPU, by launches over ids, places and maps of rows; the host waits once for each plan.

Letters: N rows, P places, n rows that a batch misses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rowstead.kernels.gpu import bitmaps as maps
from rowstead.kernels.gpu import cache_slots as there
from rowstead.stores.cache_slots import HALF_LIFE, CacheSlots, Moves

MOST_TAGS = 255
"""Plans that a byte tells apart."""


class GpuCacheSlots(CacheSlots):
    """The same places, kept by a GPU; which rows make room may differ, since heat is told apart in levels."""

    def __init__(self, num_rows: int, num_places: int, device: torch.device) -> None:
        super().__init__(num_rows, num_places, device)
        self._heat = torch.zeros(num_places, dtype=torch.uint8, device=device)
        """For each place what `_uses` was for its row and now is here, so that neighbours are read together."""
        self._seen = torch.zeros(num_places, dtype=torch.uint8, device=device)
        """For each place the tag of the last plan whose batches use its row."""
        self._tag = 0
        words = maps.num_words(num_rows)
        self._wanted = torch.zeros(words, dtype=torch.int32, device=device)
        """A map of the rows that are to get places; empty between plans."""
        self._going = torch.zeros(words, dtype=torch.int32, device=device)
        """A map of the rows that are sent away; empty between plans."""
        blocks = maps.word_blocks(words)
        self._wanted_counts, self._going_counts = torch.zeros(2, blocks, dtype=torch.int32, device=device)
        self._bins = torch.zeros(there.MOST_PLACE_BLOCKS, there.BINS, dtype=torch.int32, device=device)
        self._sums = torch.zeros(there.BINS + 3, dtype=torch.int32, device=device)
        """CacheSlots by bin; missing rows, places that may go, and rows that go."""

    def begin(self, number: int) -> None:
        """A plan up to batch `number` begins; its batches are marked next."""
        if number - self._halved >= HALF_LIFE:
            self._uses >>= 1
            self._heat >>= 1
            self._halved = number
        if self._tag == MOST_TAGS:
            self._seen.zero_()
            self._tag = 0
        self._tag += 1

    def mark(self, ids: Tensor, offsets: Tensor, first_rows: Tensor, start: int, into: Tensor) -> None:
        """Mark the rows of batches as `mark_ids` takes them, and name their ids in `into` as far as they have places.

        first_rows int64 [F], the first row of each feature, or -1 for those of other groups; others are `start` rows before these.
        """
        there.mark_ids(
            ids, offsets, first_rows, self.place_of, self._wanted, seen=self._seen, tag=self._tag, into=into, start=start
        )

    def plan_marked(self, number: int, *, oldest: int) -> Moves:
        """Give every row that was marked a place; rows that batches from `oldest` on use stay."""
        bins, wanted, may_go, going = self._sums.zero_().split([there.BINS, 1, 1, 1])
        maps.count_bits(self._wanted, self._wanted_counts, wanted)
        there.tally(self._used, self._heat, self._seen, self._bins, bins, may_go, tag=self._tag, number=number, oldest=oldest)
        num_in, num_may_go = self._sums[there.BINS : there.BINS + 2].tolist()
        num_out = min(max(0, self._num_taken + num_in - self.num_kept), num_may_go)
        assert num_out <= num_in, "as many rows have places as may stay"
        device = self.place_of.device
        in_rows, out_rows, out_places = (
            torch.empty(count, dtype=torch.int64, device=device) for count in (num_in, num_out, num_out)
        )
        if num_out:
            there.choose(self._used, self._heat, self._row_in, self._bins, bins, self._going, count=num_out, oldest=oldest)
            maps.count_bits(self._going, self._going_counts, going)
            there.send_away(
                self._going, self._going_counts, self.place_of, self._heat, self._uses, out_rows, out_places,
            )  # fmt: skip
        if num_in == num_out:  # as always once all places are taken
            in_places = out_places
        else:
            self._free = torch.cat([out_places, self._free])
            in_places = self.lend(num_in)
        if num_in:
            there.settle(
                self._wanted, self._wanted_counts, in_places, self.place_of, self._row_in, self._used, self._heat, self._uses,
                in_rows, number=number,
            )  # fmt: skip
        self._take(num_in - num_out)
        return Moves(in_rows, in_places, out_rows, out_places)

    def name_left(self, into: Tensor, start: int) -> None:
        """Name the ids in `into` that `mark` left, once their rows have places."""
        there.name_left(into, self.place_of, start)

    def plan(self, rows: Tensor, number: int, *, oldest: int) -> Moves:
        self.begin(number)
        there.mark_ids(rows, *_as_one_bag(rows), self.place_of, self._wanted, seen=self._seen, tag=self._tag)
        return self.plan_marked(number, oldest=oldest)

    def missing(self, rows: Tensor, number: int | None = None) -> Tensor:
        assert number is None, "uses are counted by plans alone"
        there.mark_ids(rows, *_as_one_bag(rows), self.place_of, self._wanted)
        total = self._sums[:1].zero_()
        maps.count_bits(self._wanted, self._wanted_counts, total)
        found = torch.empty(int(total), dtype=torch.int64, device=rows.device)
        if found.numel():
            maps.list_rows(self._wanted, self._wanted_counts, found)
        return found

    def clear(self) -> None:
        super().clear()
        for part in (self._heat, self._seen):
            part.zero_()

    def _grow(self, capacity: int) -> None:
        more = capacity - self.capacity
        super()._grow(capacity)
        none = torch.zeros(more, dtype=torch.uint8, device=self.place_of.device)
        self._heat, self._seen = torch.cat([self._heat, none]), torch.cat([self._seen, none])


def _as_one_bag(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets of rows that one feature names, and its first row."""
    return torch.tensor([0, rows.numel()], device=rows.device), torch.zeros(1, dtype=torch.int64, device=rows.device)
