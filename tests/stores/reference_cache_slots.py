"""The reference of the slots of a cache, in plain tensor operations: slow and obvious."""

from __future__ import annotations

import torch
from torch import Tensor

from rowstead.spec.caching import MAX_USES
from rowstead.stores.cache_slots import CacheSlots, Moves


class ReferenceCacheSlots(CacheSlots):
    def __init__(self, num_rows: int, num_slots: int) -> None:
        super().__init__(num_rows, num_slots, torch.device("cpu"))

    def plan(self, rows: Tensor, number: int, *, oldest: int) -> Moves:
        self._halve_if_due(number)
        missing, slots = self.missing(rows), self.slot_of[rows]
        self._used[slots[slots >= 0].long()] = number
        uses = self._uses[rows]
        self._uses[rows] = uses + (uses < MAX_USES)  # a row that occurs several times counts once
        out_slots = self._choose_evicted(self._num_taken + missing.numel() - self.num_kept, oldest)
        out_rows, order = torch.sort(self._row_in[out_slots])
        out_slots = out_slots[order]
        self.slot_of[out_rows] = -1
        self._row_in[out_slots] = -1
        self._used[out_slots] = -1
        self.give_back(out_slots)
        in_slots = self.borrow(missing.numel())
        self._row_in[in_slots] = missing
        self._used[in_slots] = number
        self.slot_of[missing] = in_slots.int()
        self._count_taken(missing.numel() - out_rows.numel())
        return Moves(missing, in_slots, out_rows, out_slots)

    def missing(self, rows: Tensor) -> Tensor:
        return torch.unique(rows[self.slot_of[rows] < 0])

    def _choose_evicted(self, count: int, oldest: int) -> Tensor:
        """Up to `count` slots of the coldest rows that batches from `oldest` on do not use."""
        if count <= 0:
            return self._free[:0]
        candidates = ((self._used < oldest) & (self._row_in >= 0)).nonzero().flatten()
        recency = 1 / (oldest - self._used[candidates])
        heat = self._uses[self._row_in[candidates]] + recency
        return candidates[heat.sort(stable=True).indices[:count]]
