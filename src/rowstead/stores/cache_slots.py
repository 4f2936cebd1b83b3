"""Which rows are in the slots of a cache: bookkeeping for a cache that knows the next batches.

`CpuCacheSlots` is for slots in system memory, `GpuCacheSlots` of `cache_slots_gpu.py` for slots on a GPU; tests compare both with a
reference in plain tensor operations.

Letters: N rows, P slots, n rows that a batch misses, nnz ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.kernels.cpu.cache import evict_rows, mark_rows
from rowstead.spec.caching import GROWTH, HALVING_BATCHES
from rowstead.stores.groups import IdMapper


@dataclass(frozen=True)
class Moves:
    """Rows to move for one set of batches: `out` are written back, `in` are fetched."""

    in_rows: Tensor
    """int64 [n], ascending."""
    in_slots: Tensor
    """int64 [n]."""
    out_rows: Tensor
    """int64, ascending; disjoint from `in_rows`."""
    out_slots: Tensor
    """int64; equals `in_slots` as far as both lists go."""


class CacheSlots(ABC):
    """The slots of one group of tables.

    The cache keeps at most as many rows as it has slots. When the batches in flight need more at once, it grows, and stays larger.
    `capacity` counts the slots that need memory: the owner of the rows allocates more when it has risen.

    Rows are evicted by use count, least frequently used first. Counts are per batch and halve every `HALVING_BATCHES`; of equal counts
    the least recently used row goes first.
    """

    def __init__(self, num_rows: int, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.num_kept = num_slots
        """Rows that stay at most, unless the batches in flight need more."""
        self.capacity = num_slots
        self.slot_of = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        """The slot of each row, or -1."""
        self._row_in = torch.full((num_slots,), -1, dtype=torch.int64, device=device)
        self._used = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        """The last batch that needed each slot's row."""
        self._uses = torch.zeros(num_rows, dtype=torch.uint8, device=device)
        """Use count of each row, in a slot or not."""
        self._halved = 0
        """The batch at which the counts were last halved."""
        self._num_taken = 0
        self._free = torch.arange(num_slots, dtype=torch.int64, device=device)

    @abstractmethod
    def plan(self, rows: Tensor, number: int, *, oldest: int) -> Moves:
        """Assign a slot to every row of batch `number`, int64 [any]; rows that batches from `oldest` on use stay."""

    @abstractmethod
    def missing(self, rows: Tensor) -> Tensor:
        """Distinct `rows` without a slot, ascending."""

    def _count_taken(self, more: int) -> None:
        """Count `more` rows that got slots."""
        self._num_taken += more
        if self._num_taken > self.num_kept:
            self.num_kept = min(self.capacity, int(GROWTH * self._num_taken))

    def _halve_if_due(self, number: int) -> None:
        if number - self._halved >= HALVING_BATCHES:
            self._halve_uses()
            self._halved = number

    def _halve_uses(self) -> None:
        self._uses >>= 1

    def borrow(self, count: int, *, temporarily: bool = False) -> Tensor:
        """Take free slots, int64 [count], the most recently freed first; grows if there are too few.

        `temporarily` if they are given back soon: then less spare capacity is added.
        """
        short = count - self._free.numel()
        if short > 0:
            self._grow(self.capacity + int(GROWTH * short) if temporarily else int((self.capacity + short) * GROWTH))
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, slots: Tensor) -> None:
        """Return borrowed slots that were not assigned to a row."""
        self._free = self._concatenate(slots, self._free)

    def taken(self) -> tuple[Tensor, Tensor]:
        """The rows that have slots, and their slots."""
        slots = (self._row_in >= 0).nonzero().flatten()
        return self._row_in[slots], slots

    def clear(self) -> None:
        """Empty all slots and reset the counts."""
        self.slot_of.fill_(-1)
        self._row_in.fill_(-1)
        self._used.fill_(-1)
        self._uses.fill_(0)
        self._num_taken = 0
        self._free = torch.arange(self.capacity, dtype=torch.int64, device=self.slot_of.device)

    def _grow(self, capacity: int) -> None:
        device, more = self.slot_of.device, capacity - self.capacity
        self._row_in = torch.cat([self._row_in, torch.full((more,), -1, dtype=torch.int64, device=device)])
        self._used = torch.cat([self._used, torch.full((more,), -1, dtype=torch.int32, device=device)])
        self._free = self._concatenate(self._free, torch.arange(self.capacity, capacity, device=device))
        self.capacity = capacity

    def _concatenate(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([first, second])


class CpuCacheSlots(CacheSlots):
    """Slots in system memory, by compiled loops and NumPy: torch's indexing wakes threads for a few thousand numbers.

    It may evict other rows than the reference: a clock hand goes round the slots instead of a sort.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        super().__init__(num_rows, num_slots, torch.device("cpu"))
        self._hand = 0
        """The slot at which the search for rows to evict continues."""

    def plan(self, rows: Tensor, number: int, *, oldest: int) -> Moves:
        self._halve_if_due(number)
        missing = self._mark(rows, number)
        slot_of, row_in, used = self.slot_of.numpy(), self._row_in.numpy(), self._used.numpy()
        slots = np.empty(max(0, self._num_taken + len(missing) - self.num_kept), np.int64)
        num_out, self._hand = evict_rows(self._hand, oldest, row_in, used, self._uses.numpy(), slots)
        out_slots = slots[:num_out]
        out_slots = out_slots[np.argsort(row_in[out_slots])]
        out_rows = row_in[out_slots]
        slot_of[out_rows] = -1
        row_in[out_slots] = -1
        self.give_back(torch.from_numpy(out_slots))
        in_slots = self.borrow(len(missing)).numpy()
        row_in, used = self._row_in.numpy(), self._used.numpy()  # `borrow` may have grown them
        row_in[in_slots] = missing
        used[in_slots] = number
        slot_of[missing] = in_slots
        self._count_taken(len(missing) - num_out)
        return Moves(*(torch.from_numpy(part) for part in (missing, in_slots, out_rows, out_slots)))

    def missing(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(self._mark(rows, -1))

    def _mark(self, rows: Tensor, number: int) -> NDArray[np.int64]:
        """`missing`, and unless it is negative, count the rows as used by batch `number`."""
        found = np.empty(rows.numel(), np.int64)
        arrays = rows.numpy(), self.slot_of.numpy(), self._used.numpy(), self._uses.numpy()
        return np.sort(found[: mark_rows(*arrays, number, found)])

    def _concatenate(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.from_numpy(np.concatenate([first.numpy(), second.numpy()]))


def plan_set(
    batches: Sequence[Sparse],
    mapper: IdMapper,
    groups: Sequence[CacheSlots],
    *,
    number: int,
    oldest: int,
    grow: Callable[[], None],
) -> tuple[list[Moves], list[Tensor]]:
    """Assign slots to the rows of a set of batches up to `number`; rows that batches from `oldest` on use stay.

    Returns the moves of each group, and the ids of each batch as slots. Calls `grow` after each group.
    """
    rows = [mapper.rows(sparse) for sparse in batches]
    moves = []
    for slots, some in zip(groups, mapper.split_by_group(rows[0] if len(rows) == 1 else torch.cat(rows)), strict=True):
        moves.append(slots.plan(some, number, oldest=oldest))
        grow()
    slot_of = [slots.slot_of for slots in groups]
    return moves, [mapper.slots(sparse, some, slot_of) for sparse, some in zip(batches, rows, strict=True)]
