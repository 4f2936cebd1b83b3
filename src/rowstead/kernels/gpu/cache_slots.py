"""What a GPU does to plan a batch of a cache: marks the rows that it needs, picks rows that make room, and gives places.

Sets of rows are maps of one bit a row (`row_maps_gpu.py`), so the same batches lead to the same plan.

Letters: B examples, F features, N rows, P places, nnz ids, n rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rowstead.kernels.cpu.cache import MOST_USES, WANTED
from rowstead.kernels.gpu import bitmaps as maps
from rowstead.kernels.gpu.bitmaps import bit_of, bits_before, bits_of, lowest

IDS, PLACES = 1024, 2048
"""Ids and places that a program takes at a time."""
SAMPLES, MANY_IDS = (1, 8, 64), 64
"""Where features have so many times IDS ids, first one part of each is marked, then up to eight and 64, then the rest: else all programs
of a feature would find its hot rows unmarked at once, and mark them thousands of times over."""
MOST_PLACE_BLOCKS = 1024
"""Programs among which places are divided at most: each adds up what those before it found."""
LEVELS, BINS = 2, 128
"""Places are told apart by the uses of their rows and, in so many levels, by how long ago the last was; the last bin is of places
that stay."""


def place_blocks(count: int) -> int:
    """Programs that share `count` places."""
    return max(1, triton.cdiv(count, PLACES * _place_chunks(count)))


def _place_chunks(count: int) -> int:
    """How many times each of them takes some."""
    return max(1, triton.cdiv(count, PLACES * MOST_PLACE_BLOCKS))


def mark_ids(
    ids: Tensor,
    offsets: Tensor,
    first_rows: Tensor,
    place_of: Tensor,
    wanted: Tensor,
    *,
    seen: Tensor | None = None,
    tag: int = 0,
    into: Tensor | None = None,
    start: int = 0,
) -> None:
    """Say which rows a batch needs, and name its ids by their places.

    ids int32 or int64 [nnz]; offsets int64 [F*B + 1], or [batches, F*B + 1] where ids of several follow each other, each row as if its
    batch were alone; first_rows int64 [F], the first row of each feature's table, or -1 for
    features whose ids are left alone; place_of int32 [N], with -1 for none. Rows without a place get WANTED there, and a bit in
    the map `wanted`. `seen` uint8 [P] of the places of the others becomes `tag`. `into` [nnz] gets the place of each id, or
    -1 - row - `start` where it has none yet. What is marked is not written again: many ids name few rows.
    """
    if not ids.numel():
        return
    num_features, num_batches = first_rows.numel(), offsets.shape[0] if offsets.dim() > 1 else 1
    num_parts = num_features * num_batches
    has_many = ids.numel() >= MANY_IDS * num_parts * IDS
    begin = 0
    for end in (*SAMPLES, None) if has_many else (None,):
        # Features differ in how many ids they have: programs for twice the mean, which begin anew where that is not enough.
        programs = end - begin if end is not None else max(1, triton.cdiv(2 * ids.numel(), num_parts * IDS))
        # Programs that run at the same time are of few features, whose rows and places are near each other and stay in caches.
        _mark[(num_parts * programs,)](
            ids, offsets, first_rows, place_of, wanted, seen if seen is not None else wanted,
            into if into is not None else wanted, programs, num_features, (offsets.shape[-1] - 1) // num_features, begin * IDS,
            programs * IDS if end is None else ids.numel(), tag, start,
            SEES=seen is not None, NAMES=into is not None, WANTED_PLACE=WANTED, BLOCK=IDS, num_warps=4,
        )  # fmt: skip
        begin = end or 0


@triton.jit(do_not_specialize=["num_programs", "skipped", "stride", "tag", "start_row"])
def _mark(ids, offsets, first_rows, place_of, wanted, seen, into, num_programs, num_features, num_samples, skipped, stride, tag, start_row, SEES: tl.constexpr, NAMES: tl.constexpr, WANTED_PLACE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    part, program = tl.program_id(0) // num_programs, tl.program_id(0) % num_programs
    batch, feature = part // num_features, (part % num_features).to(tl.int64)
    first = tl.load(first_rows + feature)
    if first >= 0:
        for _ in range(batch):  # ids of those before it
            num_ids = tl.load(offsets + num_features * num_samples)
            ids += num_ids
            into += num_ids
            offsets += num_features * num_samples + 1
        begin = tl.load(offsets + feature * num_samples)
        end = tl.load(offsets + (feature + 1) * num_samples)
        place_of += first
        for start in range(begin + skipped + program * BLOCK, end, stride):
            at = tl.arange(0, BLOCK)
            is_id = at < tl.minimum(end - start, BLOCK).to(tl.int32)  # ids are told apart by 32 bits where that is enough
            row = tl.load(ids + start + at, mask=is_id, other=0, eviction_policy="evict_first")
            place = tl.load(place_of + row, mask=is_id, other=WANTED_PLACE)
            has_place = place >= 0
            if SEES:
                last = tl.load(seen + place, mask=has_place, other=0)
                tl.store(seen + place, (tl.zeros_like(place) + tag).to(tl.uint8), mask=has_place & (last.to(tl.int32) != tag))
            if NAMES:
                kind = into.dtype.element_ty
                named = tl.where(has_place, place.to(kind), (-1 - first - start_row).to(kind) - row.to(kind))
                tl.store(into + start + at, named, mask=is_id, eviction_policy="evict_first")
            is_new = is_id & (place == -1)
            if tl.max(is_new.to(tl.int32), 0) > 0:
                tl.store(place_of + row, tl.zeros_like(place) + WANTED_PLACE, mask=is_new)
                row_of_all = row + first
                tl.atomic_or(wanted + (row_of_all >> 5), bit_of(row_of_all), mask=is_new, sem="relaxed")


def name_left(into: Tensor, place_of: Tensor, start: int) -> None:
    """Name the ids that `mark_ids` left, once their rows have places."""
    if into.numel():
        _name_left[(triton.cdiv(into.numel(), 4 * IDS),)](
            into, place_of, into.numel(), start, place_of.numel(), BLOCK=4 * IDS, num_warps=8
        )


@triton.jit(do_not_specialize=["count", "start_row"])
def _name_left(into, place_of, count, start_row, num_rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = -1 - tl.load(into + at, mask=at < count, other=0).to(tl.int64) - start_row
    is_left = (row >= 0) & (row < num_rows)
    tl.store(into + at, tl.load(place_of + row, mask=is_left, other=0), mask=is_left)


def tally(
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
    """Count one more use, by batch `number`, of places that were seen, and count those that may go, by how cold they are.

    used int32 [P], the batch that needed a place last, or -1 where there is no row; heat uint8 [P]; seen uint8 [P] of `mark_ids`;
    bins int32 [blocks of places, BINS] is filled, totals int32 [BINS] and candidates int32 [1] rise by the sums over it, the
    latter without the last bin. Places may go that batches from `oldest` on do not use.
    """
    chunks, blocks = _place_chunks(used.numel()), place_blocks(used.numel())
    _tally[(blocks,)](
        used, heat, seen, bins, totals, candidates, used.numel(), chunks, tag, number, oldest,
        MOST=MOST_USES, LEVEL_COUNT=LEVELS, BIN_COUNT=BINS, BLOCK=PLACES, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tag", "number", "oldest"])
def _tally(used, heat, seen, bins, totals, candidates, num_places, chunks, tag, number, oldest, MOST: tl.constexpr, LEVEL_COUNT: tl.constexpr, BIN_COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    program = tl.program_id(0)
    bin = tl.arange(0, BIN_COUNT)
    found = tl.zeros((BIN_COUNT,), tl.int32)
    for chunk in range(chunks):
        at = (program * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
        is_place = at < num_places
        last = tl.load(used + at, mask=is_place, other=-1)
        warm = tl.load(heat + at, mask=is_place, other=0).to(tl.int32)
        is_seen = tl.load(seen + at, mask=is_place, other=0).to(tl.int32) == tag
        last = tl.where(is_seen, number, last)
        tl.store(used + at, last, mask=is_seen)
        tl.store(heat + at, tl.minimum(warm + 1, MOST).to(tl.uint8), mask=is_seen)
        found += tl.histogram(_bin_of(last, warm, oldest, LEVEL_COUNT, BIN_COUNT), BIN_COUNT)
    tl.store(bins + program * BIN_COUNT + bin, found)
    tl.atomic_add(totals + bin, found, mask=found > 0, sem="relaxed")
    tl.atomic_add(candidates, tl.sum(tl.where(bin < BIN_COUNT - 1, found, 0), 0), sem="relaxed")


def choose(
    used: Tensor, heat: Tensor, row_in: Tensor, bins: Tensor, totals: Tensor, going: Tensor, *, count: int, oldest: int
) -> None:
    """Set the bits of `count` rows in the map `going`: those of the coldest places that may go, and of equals the first.

    `count` is at most the candidates that `tally` counted; row_in [P] has the row of each place.
    """
    chunks, blocks = _place_chunks(used.numel()), place_blocks(used.numel())
    _choose[(blocks,)](
        used, heat, row_in, bins, totals, going, used.numel(), chunks, count, oldest,
        LEVEL_COUNT=LEVELS, BIN_COUNT=BINS, BLOCK=PLACES, BLOCKS=triton.next_power_of_2(blocks), num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "oldest"])
def _choose(used, heat, row_in, bins, totals, going, num_places, chunks, count, oldest, LEVEL_COUNT: tl.constexpr, BIN_COUNT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    program = tl.program_id(0)
    up_to = tl.cumsum(tl.load(totals + tl.arange(0, BIN_COUNT)), 0)
    border = tl.sum((up_to < count).to(tl.int32), 0)
    block = tl.arange(0, BLOCKS)
    before = tl.sum(tl.load(bins + block * BIN_COUNT + border, mask=block < program, other=0), 0)
    left = count - tl.max(tl.where(up_to < count, up_to, 0), 0) - before  # that go from here on, of those at the border
    for chunk in range(chunks):
        at = (program * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
        is_place = at < num_places
        last = tl.load(used + at, mask=is_place, other=-1)
        warm = tl.load(heat + at, mask=is_place, other=0).to(tl.int32)
        bin = _bin_of(last, warm, oldest, LEVEL_COUNT, BIN_COUNT)
        at_border = (bin == border).to(tl.int32)
        goes = (bin < border) | ((bin == border) & (tl.cumsum(at_border, 0) <= left))
        left -= tl.sum(at_border, 0)
        row = tl.load(row_in + at, mask=goes, other=0)
        tl.atomic_or(going + (row >> 5), bit_of(row), mask=goes, sem="relaxed")


def send_away(
    going: Tensor,
    counts: Tensor,
    place_of: Tensor,
    heat: Tensor,
    uses: Tensor,
    rows: Tensor,
    places: Tensor,
) -> None:
    """Take the rows of the map `going` out of their places, and list both in `rows` and `places`, int64 [n].

    uses uint8 [N] has what `heat` is for rows without a place; counts as `count_bits` filled it. The places get other rows at once
    (`settle`), so that nothing is said of them here.
    """
    blocks = maps.word_blocks(going.numel())
    _send_away[(blocks,)](
        going, counts, place_of, heat, uses, rows, places, going.numel(), maps.word_chunks(going.numel()),
        BLOCK=maps.WORDS, BLOCKS=triton.next_power_of_2(blocks), num_warps=maps.warps(),
    )  # fmt: skip


@triton.jit
def _send_away(going, counts, place_of, heat, uses, rows, places, num_words, chunks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    begin = bits_before(counts, BLOCKS)
    for chunk in range(chunks):
        at = (tl.program_id(0).to(tl.int64) * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
        word, number, into = bits_of(going, at, num_words, begin)
        begin += tl.sum(number, 0)
        turns = tl.max(number, 0)
        while turns > 0:
            is_row = word != 0
            row = at * 32 + lowest(word)
            place = tl.load(place_of + row, mask=is_row, other=0).to(tl.int64)
            tl.store(rows + into, row, mask=is_row)
            tl.store(places + into, place, mask=is_row)
            tl.store(place_of + row, tl.full((BLOCK,), -1, tl.int32), mask=is_row)
            tl.store(uses + row, tl.load(heat + place, mask=is_row, other=0), mask=is_row)
            word = word & (word - 1)
            into += 1
            turns -= 1


def settle(
    wanted: Tensor,
    counts: Tensor,
    lent: Tensor,
    place_of: Tensor,
    row_in: Tensor,
    used: Tensor,
    heat: Tensor,
    uses: Tensor,
    rows: Tensor,
    *,
    number: int,
) -> None:
    """Give the rows of the map `wanted`, which batch `number` needs, the places `lent` int64 [n], and list them in `rows`."""
    blocks = maps.word_blocks(wanted.numel())
    _settle[(blocks,)](
        wanted, counts, lent, place_of, row_in, used, heat, uses, rows, wanted.numel(), maps.word_chunks(wanted.numel()), number,
        MOST=MOST_USES, BLOCK=maps.WORDS, BLOCKS=triton.next_power_of_2(blocks), num_warps=maps.warps(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["number_of_batch"])
def _settle(wanted, counts, lent, place_of, row_in, used, heat, uses, rows, num_words, chunks, number_of_batch, MOST: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    begin = bits_before(counts, BLOCKS)
    for chunk in range(chunks):
        at = (tl.program_id(0).to(tl.int64) * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
        word, number, into = bits_of(wanted, at, num_words, begin)
        begin += tl.sum(number, 0)
        turns = tl.max(number, 0)
        while turns > 0:
            is_row = word != 0
            row = at * 32 + lowest(word)
            place = tl.load(lent + into, mask=is_row, other=0)
            warm = tl.load(uses + row, mask=is_row, other=0).to(tl.int32)
            tl.store(rows + into, row, mask=is_row)
            tl.store(place_of + row, place.to(tl.int32), mask=is_row)
            tl.store(row_in + place, row, mask=is_row)
            tl.store(used + place, tl.zeros_like(warm) + number_of_batch, mask=is_row)
            tl.store(heat + place, tl.minimum(warm + 1, MOST).to(tl.uint8), mask=is_row)
            word = word & (word - 1)
            into += 1
            turns -= 1


# What launches share


@triton.jit
def _bin_of(last, warm, oldest, LEVEL_COUNT: tl.constexpr, BIN_COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bin of places: uses of the row, and up to one more if the last was of late; the last bin where it stays."""
    level = LEVEL_COUNT // tl.maximum(oldest - last, 1)
    bin = tl.minimum(warm * LEVEL_COUNT + level, BIN_COUNT - 2)
    return tl.where((last >= 0) & (last < oldest), bin, BIN_COUNT - 1)
