"""`CacheSlots` in system memory, by compiled loops and NumPy: torch's own indexing wakes threads for a few thousand numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rowstead.kernels.cpu.cache import mark_rows, send_away
from rowstead.stores.cache_slots import HALF_LIFE, CacheSlots, Moves


class CpuCacheSlots(CacheSlots):
    """The same places, kept by the CPU; which rows make room may differ, as a hand goes round instead of a sort."""

    def __init__(self, num_rows: int, num_places: int) -> None:
        super().__init__(num_rows, num_places, torch.device("cpu"))
        self._hand = 0
        """Where the search for rows that make room goes on."""
        self._free_places = np.arange(num_places, dtype=np.int64)

    def plan(self, rows: Tensor, number: int, *, oldest: int) -> Moves:
        missing = self.missing(rows, number).numpy()
        place_of, row_in, used = self.place_of.numpy(), self._row_in.numpy(), self._used.numpy()
        places = np.empty(max(0, self._num_taken + len(missing) - self.num_kept), np.int64)
        num_out, self._hand = send_away(self._hand, oldest, row_in, used, self._uses.numpy(), places)
        out_places = places[:num_out]
        out_places = out_places[np.argsort(row_in[out_places])]
        out_rows = row_in[out_places]
        place_of[out_rows] = -1
        row_in[out_places] = -1
        self._free_places = np.concatenate([out_places, self._free_places])
        in_places = self.lend(len(missing)).numpy()
        row_in, used = self._row_in.numpy(), self._used.numpy()  # there may be more now
        row_in[in_places] = missing
        used[in_places] = number
        place_of[missing] = in_places
        self._take(len(missing) - num_out)
        return Moves(*(torch.from_numpy(part) for part in (missing, in_places, out_rows, out_places)))

    def missing(self, rows: Tensor, number: int | None = None) -> Tensor:
        if number is not None and number - self._halved >= HALF_LIFE:
            self._uses >>= 1
            self._halved = number
        found = np.empty(rows.numel(), np.int64)
        arrays = rows.numpy(), self.place_of.numpy(), self._used.numpy(), self._uses.numpy()
        count = mark_rows(*arrays, -1 if number is None else number, found)
        return torch.from_numpy(np.sort(found[:count]))

    def lend(self, count: int, *, is_aside: bool = False) -> Tensor:
        short = count - len(self._free_places)
        if short > 0:
            before = self.capacity
            self._grow(self._room(short, is_aside=is_aside))
            self._free_places = np.concatenate([self._free_places, np.arange(before, self.capacity)])
        lent, self._free_places = self._free_places[:count], self._free_places[count:]
        return torch.from_numpy(lent)

    def give_back(self, places: Tensor) -> None:
        self._free_places = np.concatenate([places.numpy(), self._free_places])

    def clear(self) -> None:
        super().clear()
        self._free_places = np.arange(self.capacity, dtype=np.int64)
