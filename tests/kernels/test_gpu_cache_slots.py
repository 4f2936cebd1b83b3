"""Kernels that plan a batch, against plain torch; without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

triton = pytest.importorskip("triton")

from rowstead.data.batch import Sparse  # noqa: E402
from rowstead.kernels.cpu.cache import WANTED  # noqa: E402
from rowstead.kernels.gpu import bitmaps, cache_slots  # noqa: E402
from rowstead.stores.cache_slots_gpu import _concatenate  # noqa: E402
from tests.kernels.blocks import few_at_a_time  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def bitmap_of(is_set: Tensor) -> Tensor:
    """The bitmap whose bits are `is_set` [N]."""
    bits = torch.zeros(bitmaps.num_words(is_set.numel()) * 32, dtype=torch.int64)
    bits[: is_set.numel()] = is_set
    words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
    return torch.where(words < 2**31, words, words - 2**32).int().to(DEVICE)


def listed(bits: Tensor) -> Tensor:
    """List and clear the rows of a bitmap."""
    counts = torch.zeros(bitmaps.word_blocks(bits.numel()), dtype=torch.int32, device=DEVICE)
    total = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    bitmaps.count_bits(bits, counts, total)
    rows = torch.empty(int(total), dtype=torch.int64, device=DEVICE)
    bitmaps.list_rows(bits, counts, rows)
    assert not bits.any()
    return rows.cpu()


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000), num_rows=st.integers(1, 1000), share=st.sampled_from([0.0, 0.02, 0.5, 1.0]))
def test_a_bitmap_lists_each_row_once_in_ascending_order(seed: int, num_rows: int, share: float) -> None:
    is_set = torch.rand(num_rows, generator=torch.Generator().manual_seed(seed)) < share
    with few_at_a_time():
        assert torch.equal(listed(bitmap_of(is_set)), is_set.nonzero().flatten())


@settings(max_examples=12, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    into_dtype=st.sampled_from([torch.int32, torch.int64]),
    in_parts=st.booleans(),
)
def test_ids_are_marked_and_mapped_as_in_plain_torch(
    data: st.DataObject, dtype: torch.dtype, into_dtype: torch.dtype, in_parts: bool
) -> None:
    draws = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    firsts = data.draw(st.lists(st.sampled_from([-1, 0, 20, 40]), min_size=1, max_size=4))
    counts = torch.tensor([[data.draw(st.integers(0, 9)) for _ in range(2)] for _ in firsts])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.flatten().cumsum(0)])
    ids = torch.randint(0, 20, (int(offsets[-1]),), generator=draws, dtype=dtype)
    slot_of = torch.full((60,), -1, dtype=torch.int32)
    slot_of[torch.randperm(60, generator=draws)[:25]] = torch.arange(25, dtype=torch.int32)
    seen = torch.randint(0, 3, (25,), generator=draws, dtype=torch.uint8)
    before, tag, start = slot_of.clone(), 2, 7

    first = torch.repeat_interleave(torch.tensor(firsts), counts.sum(1))
    rows = (ids.long() + first)[first >= 0]
    into = ids.to(into_dtype)
    wanted_into = into.clone()
    wanted_into[first >= 0] = torch.where(before[rows] >= 0, before[rows].long(), -1 - rows - start).to(into_dtype)
    wanted_seen = seen.clone()
    wanted_seen[before[rows][before[rows] >= 0].long()] = tag
    missing = torch.unique(rows[before[rows] < 0])
    wanted_place_of = before.clone()
    wanted_place_of[missing] = WANTED

    there = [part.to(DEVICE) for part in (ids, offsets, torch.tensor(firsts), slot_of, bitmap_of(torch.zeros(60)))]
    into, seen = into.to(DEVICE), seen.to(DEVICE)
    with few_at_a_time() if in_parts else contextlib.nullcontext():
        cache_slots.mark_ids(*there, seen=seen, tag=tag, into=into, start=start)
    assert torch.equal(into.cpu(), wanted_into)
    assert torch.equal(seen.cpu(), wanted_seen)
    assert torch.equal(there[3].cpu(), wanted_place_of)
    assert torch.equal(listed(there[4]), missing)

    given_slots = wanted_place_of.clone()
    given_slots[missing] = torch.arange(100, 100 + missing.numel(), dtype=torch.int32)
    cache_slots.fill_slots(into, given_slots.to(DEVICE), start)
    wanted_into[first >= 0] = given_slots[rows].to(into_dtype)
    assert torch.equal(into.cpu(), wanted_into)


@settings(max_examples=4, deadline=None)
@given(data=st.data(), in_parts=st.booleans())
def test_batches_marked_together_are_marked_as_one_after_the_other(data: st.DataObject, in_parts: bool) -> None:
    draws = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    firsts = torch.tensor(data.draw(st.lists(st.sampled_from([-1, 0, 20, 40]), min_size=1, max_size=3)))
    batches = []
    for num_samples in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)):
        lengths = torch.randint(0, 4, (len(firsts) * num_samples,), generator=draws)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = torch.randint(0, 20, (int(offsets[-1]),), generator=draws)
        batches.append(Sparse(ids=ids, offsets=offsets, num_features=len(firsts)).to(DEVICE))
    slots = torch.full((60,), -1, dtype=torch.int32)
    slots[torch.randperm(60, generator=draws)[:25]] = torch.arange(25, dtype=torch.int32)
    found = []
    for some in ([_concatenate(batches)], [(batch.ids, batch.offsets) for batch in batches]):
        slot_of, wanted, seen = (
            part.to(DEVICE) for part in (slots.clone(), bitmap_of(torch.zeros(60)), torch.zeros(25).byte())
        )
        named = []
        for ids, offsets in some:
            named.append(torch.full_like(ids, -99))
            with few_at_a_time() if in_parts else contextlib.nullcontext():
                cache_slots.mark_ids(
                    ids, offsets, firsts.to(DEVICE), slot_of, wanted, seen=seen, tag=3, into=named[-1], start=7
                )
        found.append([part.cpu() for part in (torch.cat(named), slot_of, wanted, seen)])
    for at_once, one_by_one in zip(*found, strict=True):
        assert torch.equal(at_once, one_by_one)


@settings(max_examples=6, deadline=None)
@given(data=st.data(), num_slots=st.integers(1, 300))
def test_the_coldest_slots_are_evicted_and_of_equals_the_first(data: st.DataObject, num_slots: int) -> None:
    draws = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    hottest = data.draw(st.sampled_from([2, 255]))
    number, oldest, tag = 30, 28, 5
    used = torch.randint(-1, number, (num_slots,), generator=draws, dtype=torch.int32)
    heat = torch.randint(0, hottest + 1, (num_slots,), generator=draws, dtype=torch.uint8)
    seen = torch.where(used >= 0, torch.randint(4, 6, (num_slots,), generator=draws), 0).to(torch.uint8)
    row_in = torch.where(used >= 0, torch.randperm(num_slots, generator=draws), -1)

    wanted_used = torch.where(seen == tag, number, used).int()
    wanted_heat = torch.where(seen == tag, (heat.int() + 1).clamp(max=255), heat.int()).to(torch.uint8)
    level = cache_slots.LEVELS // (oldest - wanted_used).clamp(min=1)
    bins = (heat.int() * cache_slots.LEVELS + level).clamp(max=cache_slots.BINS - 2)
    is_candidate = (wanted_used >= 0) & (wanted_used < oldest)
    order = torch.where(is_candidate, bins, cache_slots.BINS).sort(stable=True).indices
    count = data.draw(st.integers(0, int(is_candidate.sum())))

    with few_at_a_time():
        used, heat, seen, row_in = (part.to(DEVICE) for part in (used, heat, seen, row_in))
        found = torch.zeros(cache_slots.MAX_SLOT_BLOCKS, cache_slots.BINS, dtype=torch.int32, device=DEVICE)
        sums = torch.zeros(cache_slots.BINS + 1, dtype=torch.int32, device=DEVICE)
        totals, candidates = sums.split([cache_slots.BINS, 1])
        cache_slots.count_candidates(used, heat, seen, found, totals, candidates, tag=tag, number=number, oldest=oldest)
        assert torch.equal(used.cpu(), wanted_used)
        assert torch.equal(heat.cpu(), wanted_heat)
        assert int(candidates) == int(is_candidate.sum())
        if count:
            evicted = bitmap_of(torch.zeros(num_slots))
            cache_slots.choose_evicted(used, heat, row_in, found, totals, evicted, count=count, oldest=oldest)
            assert torch.equal(listed(evicted), row_in.cpu()[order[:count]].sort().values)
