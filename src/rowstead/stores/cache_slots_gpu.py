"""`CacheSlots` in GPU memory, by kernels over ids, slots and bitmaps of rows; the host waits once per plan.

Letters: N rows, P slots, F features, n rows that a batch misses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.kernels.gpu import bitmaps
from rowstead.kernels.gpu import cache_slots as kernels
from rowstead.stores.cache_slots import CacheSlots, Moves
from rowstead.stores.groups import IdMapper

MAX_TAG = 255
"""Plans that a byte can number."""
ALIGNED_BYTES = 16
"""Alignment of tensors that are not views."""


class GpuCacheSlots(CacheSlots):
    """The same on a GPU; it may evict other rows than the reference, since it sorts them into bins of similar heat."""

    def __init__(self, num_rows: int, num_slots: int, device: torch.device) -> None:
        super().__init__(num_rows, num_slots, device)
        self._heat = torch.zeros(num_slots, dtype=torch.uint8, device=device)
        """Use count of each slot's row, in place of `_uses`: neighbouring slots are read together."""
        self._seen = torch.zeros(num_slots, dtype=torch.uint8, device=device)
        """Tag of the last plan whose batches use each slot's row."""
        self._tag = 0
        words = bitmaps.num_words(num_rows)
        self._wanted = torch.zeros(words, dtype=torch.int32, device=device)
        """Bitmap of the rows that need slots; empty between plans."""
        self._evicted = torch.zeros(words, dtype=torch.int32, device=device)
        """Bitmap of the rows to evict; empty between plans."""
        blocks = bitmaps.word_blocks(words)
        self._wanted_counts, self._evicted_counts = torch.zeros(2, blocks, dtype=torch.int32, device=device)
        self._bins = torch.zeros(kernels.MAX_SLOT_BLOCKS, kernels.BINS, dtype=torch.int32, device=device)
        self._sums = torch.zeros(kernels.BINS + 3, dtype=torch.int32, device=device)
        """Slots per bin; then counts of missing rows, candidates for eviction, and evicted rows."""

    def mark(
        self, number: int, ids: Tensor, offsets: Tensor, first_rows: Tensor, start: int = 0, into: Tensor | None = None
    ) -> None:
        """Mark the rows of batches up to `number` (see `mark_ids`), and write to `into` the slots of ids that have one.

        first_rows int64 [F], the first row of each feature, or -1 for those of other groups; `start` is the number of rows of the
        groups before this one.
        """
        self._halve_if_due(number)
        if self._tag == MAX_TAG:
            self._seen.zero_()
            self._tag = 0
        self._tag += 1
        kernels.mark_ids(
            ids, offsets, first_rows, self.slot_of, self._wanted, seen=self._seen, tag=self._tag, into=into, start=start
        )

    def plan_marked(self, number: int, *, oldest: int) -> Moves:
        """Assign a slot to every marked row; rows that batches from `oldest` on use stay."""
        bins, wanted, candidates, evicted = self._sums.zero_().split([kernels.BINS, 1, 1, 1])
        bitmaps.count_bits(self._wanted, self._wanted_counts, wanted)
        kernels.count_candidates(
            self._used, self._heat, self._seen, self._bins, bins, candidates, tag=self._tag, number=number, oldest=oldest
        )
        num_in, num_candidates = self._sums[kernels.BINS : kernels.BINS + 2].tolist()
        num_out = min(max(0, self._num_taken + num_in - self.num_kept), num_candidates)
        assert num_out <= num_in, "no more rows have slots than may stay"
        device = self.slot_of.device
        in_rows, out_rows, out_slots = (
            torch.empty(count, dtype=torch.int64, device=device) for count in (num_in, num_out, num_out)
        )
        if num_out:
            kernels.choose_evicted(
                self._used, self._heat, self._row_in, self._bins, bins, self._evicted, count=num_out, oldest=oldest
            )
            bitmaps.count_bits(self._evicted, self._evicted_counts, evicted)
            kernels.evict_rows(self._evicted, self._evicted_counts, self.slot_of, self._heat, self._uses, out_rows, out_slots)
        if num_in == num_out:  # always so once all slots are taken
            in_slots = out_slots
        else:
            self._free = torch.cat([out_slots, self._free])
            in_slots = self.borrow(num_in)
        if num_in:
            kernels.assign_slots(
                self._wanted, self._wanted_counts, in_slots, self.slot_of, self._row_in, self._used, self._heat, self._uses,
                in_rows, number=number,
            )  # fmt: skip
        self._count_taken(num_in - num_out)
        return Moves(in_rows, in_slots, out_rows, out_slots)

    def fill_slots(self, into: Tensor, start: int) -> None:
        """Write to `into` the slots of ids that had none when `mark` ran."""
        kernels.fill_slots(into, self.slot_of, start)

    def plan(self, rows: Tensor, number: int, *, oldest: int) -> Moves:
        self.mark(number, rows, *_as_one_bag(rows))
        return self.plan_marked(number, oldest=oldest)

    def missing(self, rows: Tensor) -> Tensor:
        kernels.mark_ids(rows, *_as_one_bag(rows), self.slot_of, self._wanted)
        total = self._sums[:1].zero_()
        bitmaps.count_bits(self._wanted, self._wanted_counts, total)
        found = torch.empty(int(total), dtype=torch.int64, device=rows.device)
        if found.numel():
            bitmaps.list_rows(self._wanted, self._wanted_counts, found)
        return found

    def _halve_uses(self) -> None:
        super()._halve_uses()
        self._heat >>= 1

    def clear(self) -> None:
        super().clear()
        for part in (self._heat, self._seen):
            part.zero_()

    def _grow(self, capacity: int) -> None:
        zeros = torch.zeros(capacity - self.capacity, dtype=torch.uint8, device=self.slot_of.device)
        super()._grow(capacity)
        self._heat, self._seen = torch.cat([self._heat, zeros]), torch.cat([self._seen, zeros])


def _as_one_bag(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets and first row of one feature that has all `rows`."""
    return torch.tensor([0, rows.numel()], device=rows.device), torch.zeros(1, dtype=torch.int64, device=rows.device)


def plan_set_on_gpu(
    batches: Sequence[Sparse],
    mapper: IdMapper,
    groups: Sequence[CacheSlots],
    *,
    number: int,
    oldest: int,
    grow: Callable[[], None],
) -> tuple[list[Moves], list[Tensor]]:
    """`plan_set` for `GpuCacheSlots`: the pass that marks rows also maps the ids of cached rows to slots; the rest follow."""
    ids, offsets = _concatenate(batches)
    mapped, moves = mapper.empty_slots(ids), []
    launched = list(zip(cast("Sequence[GpuCacheSlots]", groups), mapper.first_rows, mapper.starts, strict=True))
    for slots, first_rows, start in launched:
        slots.mark(number, ids, offsets, first_rows, start, mapped)
        moves.append(slots.plan_marked(number, oldest=oldest))
        grow()
    for slots, _, start in launched:
        slots.fill_slots(mapped, start)
    of_each = mapped.split([sparse.ids.numel() for sparse in batches])
    # Triton compiles a kernel again for unaligned tensors.
    return moves, [some if some.data_ptr() % ALIGNED_BYTES == 0 else some.clone() for some in of_each]


def _concatenate(batches: Sequence[Sparse]) -> tuple[Tensor, Tensor]:
    """The ids of all batches, and the offsets of each: of bags for one batch, of features for several.

    One launch for all batches is cheaper than one per batch.
    """
    some = [sparse for sparse in batches if sparse.ids.numel()]
    if len(some) < 2:
        return (some or batches)[0].ids, (some or batches)[0].offsets
    return torch.cat([sparse.ids for sparse in some]), torch.stack([sparse.offsets[:: sparse.num_samples] for sparse in some])
