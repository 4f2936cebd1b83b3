"""Kernels that plan a set of batches for a cache in GPU memory: mark the rows needed, choose rows to evict, assign slots.

Sets of rows are bitmaps (`bitmaps.py`), so that equal batches give equal plans whatever the order of the programs.

Letters: B examples, F features, N rows, P slots, nnz ids, n rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rowstead.kernels.cpu.cache import WANTED
from rowstead.kernels.gpu import bitmaps
from rowstead.kernels.gpu.bitmaps import bit_of, bits_before, bits_of, lowest
from rowstead.spec.caching import MAX_USES

IDS, SLOTS = 1024, 2048
"""Ids and slots that a program processes at a time."""
SAMPLES, MANY_IDS = (1, 8, 64), 64
"""Features with more than MANY_IDS * IDS ids are marked in stages: 1 block of ids, then up to 8 and 64, then the rest. Otherwise all programs
of a feature would find its hot rows unmarked at once, and mark them thousands of times."""
MAX_SLOT_BLOCKS = 1024
"""Programs that share the slots at most: each adds up the counts of those before it."""
LEVELS, BINS = 2, 128
"""Slots are binned by the use count of their rows and, in this many levels, by recency; the last bin holds slots that stay."""


def slot_blocks(count: int) -> int:
    """Programs that share `count` slots."""
    return max(1, triton.cdiv(count, SLOTS * _slot_chunks(count)))


def _slot_chunks(count: int) -> int:
    """How many blocks of slots each program processes."""
    return max(1, triton.cdiv(count, SLOTS * MAX_SLOT_BLOCKS))


def mark_ids(
    ids: Tensor,
    offsets: Tensor,
    first_rows: Tensor,
    slot_of: Tensor,
    wanted: Tensor,
    *,
    seen: Tensor | None = None,
    tag: int = 0,
    into: Tensor | None = None,
    start: int = 0,
) -> None:
    """Mark the rows that a batch needs, and map its ids to slots.

    ids int32 or int64 [nnz]; offsets int64 [F*B + 1], or [batches, F*B + 1] for the concatenated ids of several batches, each starting
    at 0; first_rows int64 [F], the first row of each feature's table, or -1 for features to skip; slot_of int32 [N], with -1 for
    none. Rows without a slot get WANTED there, and a bit in the bitmap `wanted`; of the other rows' slots, `seen` uint8 [P] becomes
    `tag`. `into` [nnz] gets the slot of each id, or -1 - row - `start` where it has none yet. Marks are not written twice: many ids
    share few rows.
    """
    if not ids.numel():
        return
    num_features, num_batches = first_rows.numel(), offsets.shape[0] if offsets.dim() > 1 else 1
    num_parts = num_features * num_batches
    has_many = ids.numel() >= MANY_IDS * num_parts * IDS
    begin = 0
    for end in (*SAMPLES, None) if has_many else (None,):
        # Features differ in their number of ids: launch programs for twice the mean, and loop where that is not enough.
        programs = end - begin if end is not None else max(1, triton.cdiv(2 * ids.numel(), num_parts * IDS))
        # Programs that run at the same time belong to few features, whose slots stay in the L2 cache.
        _mark[(num_parts * programs,)](
            ids, offsets, first_rows, slot_of, wanted, seen if seen is not None else wanted,
            into if into is not None else wanted, programs, num_features, (offsets.shape[-1] - 1) // num_features, begin * IDS,
            programs * IDS if end is None else ids.numel(), tag, start,
            SEES=seen is not None, MAPS=into is not None, WANTED_SLOT=WANTED, BLOCK=IDS, num_warps=4,
        )  # fmt: skip
        begin = end or 0


@triton.jit(do_not_specialize=["num_programs", "skipped", "stride", "tag", "start_row"])
def _mark(ids, offsets, first_rows, slot_of, wanted, seen, into, num_programs, num_features, num_samples, skipped, stride, tag, start_row, SEES: tl.constexpr, MAPS: tl.constexpr, WANTED_SLOT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    part, program = tl.program_id(0) // num_programs, tl.program_id(0) % num_programs
    batch, feature = part // num_features, (part % num_features).to(tl.int64)
    first = tl.load(first_rows + feature)
    if first >= 0:
        for _ in range(batch):  # skip the ids of earlier batches
            num_ids = tl.load(offsets + num_features * num_samples)
            ids += num_ids
            into += num_ids
            offsets += num_features * num_samples + 1
        begin = tl.load(offsets + feature * num_samples)
        end = tl.load(offsets + (feature + 1) * num_samples)
        slot_of += first
        for start in range(begin + skipped + program * BLOCK, end, stride):
            at = tl.arange(0, BLOCK)
            is_id = at < tl.minimum(end - start, BLOCK).to(tl.int32)  # 32 bits where that is enough
            row = tl.load(ids + start + at, mask=is_id, other=0, eviction_policy="evict_first")
            slot = tl.load(slot_of + row, mask=is_id, other=WANTED_SLOT)
            has_slot = slot >= 0
            if SEES:
                last = tl.load(seen + slot, mask=has_slot, other=0)
                tl.store(seen + slot, (tl.zeros_like(slot) + tag).to(tl.uint8), mask=has_slot & (last.to(tl.int32) != tag))
            if MAPS:
                kind = into.dtype.element_ty
                mapped = tl.where(has_slot, slot.to(kind), (-1 - first - start_row).to(kind) - row.to(kind))
                tl.store(into + start + at, mapped, mask=is_id, eviction_policy="evict_first")
            is_new = is_id & (slot == -1)
            if tl.max(is_new.to(tl.int32), 0) > 0:
                tl.store(slot_of + row, tl.zeros_like(slot) + WANTED_SLOT, mask=is_new)
                row_of_all = row + first
                tl.atomic_or(wanted + (row_of_all >> 5), bit_of(row_of_all), mask=is_new, sem="relaxed")


def fill_slots(into: Tensor, slot_of: Tensor, start: int) -> None:
    """Map the ids that `mark_ids` left unmapped, once their rows have slots."""
    if into.numel():
        _fill_slots[(triton.cdiv(into.numel(), 4 * IDS),)](
            into, slot_of, into.numel(), start, slot_of.numel(), BLOCK=4 * IDS, num_warps=8
        )


@triton.jit(do_not_specialize=["count", "start_row"])
def _fill_slots(into, slot_of, count, start_row, num_rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = -1 - tl.load(into + at, mask=at < count, other=0).to(tl.int64) - start_row
    is_left = (row >= 0) & (row < num_rows)
    tl.store(into + at, tl.load(slot_of + row, mask=is_left, other=0), mask=is_left)


def count_candidates(
    used: Tensor,
    heat: Tensor,
    seen: Tensor,
    bins: Tensor,
    totals: Tensor,
    candidates: Tensor,
    *,
    tag: int,
    number: int,
    oldest: int,
) -> None:
    """Count one use, by batch `number`, of each slot seen, and count the eviction candidates per bin.

    used int32 [P], the batch that needed a slot last, or -1 where there is no row; heat uint8 [P]; seen uint8 [P] of `mark_ids`;
    bins int32 [blocks of slots, BINS] is filled, totals int32 [BINS] and candidates int32 [1] rise by the sums over it, the
    latter without the last bin. Candidates are slots that batches from `oldest` on do not use.
    """
    chunks, blocks = _slot_chunks(used.numel()), slot_blocks(used.numel())
    _count_candidates[(blocks,)](
        used, heat, seen, bins, totals, candidates, used.numel(), chunks, tag, number, oldest,
        MAX_COUNT=MAX_USES, LEVEL_COUNT=LEVELS, BIN_COUNT=BINS, BLOCK=SLOTS, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tag", "number", "oldest"])
def _count_candidates(used, heat, seen, bins, totals, candidates, num_slots, chunks, tag, number, oldest, MAX_COUNT: tl.constexpr, LEVEL_COUNT: tl.constexpr, BIN_COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    program = tl.program_id(0)
    bin = tl.arange(0, BIN_COUNT)
    found = tl.zeros((BIN_COUNT,), tl.int32)
    for chunk in range(chunks):
        at = (program * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
        is_slot = at < num_slots
        last = tl.load(used + at, mask=is_slot, other=-1)
        warm = tl.load(heat + at, mask=is_slot, other=0).to(tl.int32)
        is_seen = tl.load(seen + at, mask=is_slot, other=0).to(tl.int32) == tag
        last = tl.where(is_seen, number, last)
        tl.store(used + at, last, mask=is_seen)
        tl.store(heat + at, tl.minimum(warm + 1, MAX_COUNT).to(tl.uint8), mask=is_seen)
        found += tl.histogram(_bin_of(last, warm, oldest, LEVEL_COUNT, BIN_COUNT), BIN_COUNT)
    tl.store(bins + program * BIN_COUNT + bin, found)
    tl.atomic_add(totals + bin, found, mask=found > 0, sem="relaxed")
    tl.atomic_add(candidates, tl.sum(tl.where(bin < BIN_COUNT - 1, found, 0), 0), sem="relaxed")


def choose_evicted(
    used: Tensor, heat: Tensor, row_in: Tensor, bins: Tensor, totals: Tensor, evicted: Tensor, *, count: int, oldest: int
) -> None:
    """Set the bits of `count` rows in the bitmap `evicted`: the coldest candidates, and of equals the first.

    `count` is at most the candidates that `count_candidates` counted; row_in [P] has the row of each slot.
    """
    chunks, blocks = _slot_chunks(used.numel()), slot_blocks(used.numel())
    _choose_evicted[(blocks,)](
        used, heat, row_in, bins, totals, evicted, used.numel(), chunks, count, oldest,
        LEVEL_COUNT=LEVELS, BIN_COUNT=BINS, BLOCK=SLOTS, BLOCKS=triton.next_power_of_2(blocks), num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "oldest"])
def _choose_evicted(used, heat, row_in, bins, totals, evicted, num_slots, chunks, count, oldest, LEVEL_COUNT: tl.constexpr, BIN_COUNT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    program = tl.program_id(0)
    up_to = tl.cumsum(tl.load(totals + tl.arange(0, BIN_COUNT)), 0)
    border = tl.sum((up_to < count).to(tl.int32), 0)
    block = tl.arange(0, BLOCKS)
    before = tl.sum(tl.load(bins + block * BIN_COUNT + border, mask=block < program, other=0), 0)
    left = (
        count - tl.max(tl.where(up_to < count, up_to, 0), 0) - before
    )  # rows of the border bin still to evict, from this block on
    for chunk in range(chunks):
        at = (program * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
        is_slot = at < num_slots
        last = tl.load(used + at, mask=is_slot, other=-1)
        warm = tl.load(heat + at, mask=is_slot, other=0).to(tl.int32)
        bin = _bin_of(last, warm, oldest, LEVEL_COUNT, BIN_COUNT)
        at_border = (bin == border).to(tl.int32)
        goes = (bin < border) | ((bin == border) & (tl.cumsum(at_border, 0) <= left))
        left -= tl.sum(at_border, 0)
        row = tl.load(row_in + at, mask=goes, other=0)
        tl.atomic_or(evicted + (row >> 5), bit_of(row), mask=goes, sem="relaxed")


def evict_rows(
    evicted: Tensor, counts: Tensor, slot_of: Tensor, heat: Tensor, uses: Tensor, rows: Tensor, slots: Tensor
) -> None:
    """Remove the rows of the bitmap `evicted` from their slots, and list both in `rows` and `slots`, int64 [n].

    uses uint8 [N] holds the use counts of rows without a slot; counts as `count_bits` filled it. `row_in`, `used` and `heat` of the slots
    stay as they are: `assign_slots` overwrites them at once.
    """
    blocks = bitmaps.word_blocks(evicted.numel())
    _evict_rows[(blocks,)](
        evicted, counts, slot_of, heat, uses, rows, slots, evicted.numel(), bitmaps.word_chunks(evicted.numel()),
        BLOCK=bitmaps.WORDS, BLOCKS=triton.next_power_of_2(blocks), num_warps=bitmaps.warps(),
    )  # fmt: skip


@triton.jit
def _evict_rows(evicted, counts, slot_of, heat, uses, rows, slots, num_words, chunks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    begin = bits_before(counts, BLOCKS)
    for chunk in range(chunks):
        at = (tl.program_id(0).to(tl.int64) * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
        word, number, into = bits_of(evicted, at, num_words, begin)
        begin += tl.sum(number, 0)
        turns = tl.max(number, 0)
        while turns > 0:
            is_row = word != 0
            row = at * 32 + lowest(word)
            slot = tl.load(slot_of + row, mask=is_row, other=0).to(tl.int64)
            tl.store(rows + into, row, mask=is_row)
            tl.store(slots + into, slot, mask=is_row)
            tl.store(slot_of + row, tl.full((BLOCK,), -1, tl.int32), mask=is_row)
            tl.store(uses + row, tl.load(heat + slot, mask=is_row, other=0), mask=is_row)
            word = word & (word - 1)
            into += 1
            turns -= 1


def assign_slots(
    wanted: Tensor,
    counts: Tensor,
    slots: Tensor,
    slot_of: Tensor,
    row_in: Tensor,
    used: Tensor,
    heat: Tensor,
    uses: Tensor,
    rows: Tensor,
    *,
    number: int,
) -> None:
    """Assign `slots` int64 [n] to the rows of the bitmap `wanted`, which batch `number` needs, and list them in `rows`."""
    blocks = bitmaps.word_blocks(wanted.numel())
    _assign_slots[(blocks,)](
        wanted, counts, slots, slot_of, row_in, used, heat, uses, rows, wanted.numel(), bitmaps.word_chunks(wanted.numel()), number,
        MAX_COUNT=MAX_USES, BLOCK=bitmaps.WORDS, BLOCKS=triton.next_power_of_2(blocks), num_warps=bitmaps.warps(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["number_of_batch"])
def _assign_slots(wanted, counts, slots, slot_of, row_in, used, heat, uses, rows, num_words, chunks, number_of_batch, MAX_COUNT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    begin = bits_before(counts, BLOCKS)
    for chunk in range(chunks):
        at = (tl.program_id(0).to(tl.int64) * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
        word, number, into = bits_of(wanted, at, num_words, begin)
        begin += tl.sum(number, 0)
        turns = tl.max(number, 0)
        while turns > 0:
            is_row = word != 0
            row = at * 32 + lowest(word)
            slot = tl.load(slots + into, mask=is_row, other=0)
            warm = tl.load(uses + row, mask=is_row, other=0).to(tl.int32)
            tl.store(rows + into, row, mask=is_row)
            tl.store(slot_of + row, slot.to(tl.int32), mask=is_row)
            tl.store(row_in + slot, row, mask=is_row)
            tl.store(used + slot, tl.zeros_like(warm) + number_of_batch, mask=is_row)
            tl.store(heat + slot, tl.minimum(warm + 1, MAX_COUNT).to(tl.uint8), mask=is_row)
            word = word & (word - 1)
            into += 1
            turns -= 1


# Shared by the kernels


@triton.jit
def _bin_of(last, warm, oldest, LEVEL_COUNT: tl.constexpr, BIN_COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bin of each slot: the use count of its row, plus up to one for recency; the last bin if it stays."""
    level = LEVEL_COUNT // tl.maximum(oldest - last, 1)
    bin = tl.minimum(warm * LEVEL_COUNT + level, BIN_COUNT - 2)
    return tl.where((last >= 0) & (last < oldest), bin, BIN_COUNT - 1)
