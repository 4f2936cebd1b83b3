"""Which rows are in fast memory: every row that a batch needs, and of the others the warm ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.kernels.choose import has_triton
from rowstead.spec.caching import GROWTH
from rowstead.stores.cache_slots import CacheSlots, CpuCacheSlots
from tests.stores.reference_cache_slots import ReferenceCacheSlots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the GPU kernels run; without a GPU in Triton's interpreter."""
needs_triton = pytest.mark.skipif(not has_triton(), reason="needs Triton")


def launched(num_rows: int, num_slots: int) -> CacheSlots:
    """The GPU kernels."""
    from rowstead.stores.cache_slots_gpu import GpuCacheSlots

    return GpuCacheSlots(num_rows, num_slots, DEVICE)


@pytest.mark.parametrize("make", [CpuCacheSlots, ReferenceCacheSlots])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 60), num_slots=st.integers(1, 12))
def test_every_wanted_row_has_its_own_slot_and_rows_in_use_stay(
    make: Callable[[int, int], CacheSlots], data: st.DataObject, num_rows: int, num_slots: int
) -> None:
    check_plans(make(num_rows, num_slots), data, most_batches=8)


@needs_triton
@settings(max_examples=4, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 60), num_slots=st.integers(1, 12))
def test_kernels_give_every_wanted_row_its_own_slot_and_rows_in_use_stay(
    data: st.DataObject, num_rows: int, num_slots: int
) -> None:
    check_plans(launched(num_rows, num_slots), data, most_batches=4)


@needs_triton
@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 1500), num_slots=st.integers(1, 40))
def test_kernels_with_small_blocks_do_the_same(data: st.DataObject, num_rows: int, num_slots: int) -> None:
    from rowstead.stores import cache_slots, cache_slots_gpu
    from tests.kernels.blocks import few_at_a_time

    with few_at_a_time(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(cache_slots_gpu, "MAX_TAG", 2)
        patched.setattr(cache_slots, "HALVING_BATCHES", 3)
        check_plans(launched(num_rows, num_slots), data, most_batches=6)


def check_plans(slots: CacheSlots, data: st.DataObject, *, most_batches: int) -> None:
    num_rows, num_slots = slots.slot_of.numel(), slots.num_slots
    here: dict[int, int] = {}
    in_use: list[set[int]] = []
    most = 0
    for number in range(data.draw(st.integers(1, most_batches))):
        rows = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=30))
        oldest = max(0, number - data.draw(st.integers(0, 2)))
        moves = slots.plan(torch.tensor(rows, dtype=torch.int64, device=slots.slot_of.device), number, oldest=oldest)
        for row, slot in zip(moves.out_rows.tolist(), moves.out_slots.tolist(), strict=True):
            assert here.pop(row) == slot
            assert not any(row in used for used in in_use[oldest:])
        taken = set(here.values())
        for row, slot in zip(moves.in_rows.tolist(), moves.in_slots.tolist(), strict=True):
            assert row not in here
            assert slot not in taken
            here[row] = slot
            taken.add(slot)
        shared = min(len(moves.in_slots), len(moves.out_slots))
        assert torch.equal(moves.in_slots[:shared], moves.out_slots[:shared])
        in_use.append(set(rows))
        assert set(rows) <= set(here)
        assert all(int(slots.slot_of[row]) == slot for row, slot in here.items())
        assert max(taken, default=-1) < slots.capacity
        most = max(most, len(set().union(*in_use[oldest:])))
        assert len(here) <= max(num_slots, most if most <= num_slots else GROWTH * most)
        assert len(here) <= slots.num_kept <= slots.capacity


@pytest.mark.parametrize(
    "make", [CpuCacheSlots, ReferenceCacheSlots, pytest.param(launched, marks=[pytest.mark.slow, needs_triton])]
)
def test_rows_that_are_used_often_outlast_those_used_once(make: Callable[[int, int], CacheSlots]) -> None:
    slots = make(10_000, 100)
    hot = torch.arange(50)
    for number in range(40 if make is launched else 200):
        cold = torch.arange(1000 + 40 * number, 1040 + 40 * number)
        wanted = torch.cat([hot[number % 3 :: 3], cold])
        moves = slots.plan(wanted.to(slots.slot_of.device), number, oldest=number)
        if number > 20:
            assert moves.in_rows.min() >= 1000, "a hot row had been sent away"


@pytest.mark.parametrize("make", [CpuCacheSlots, ReferenceCacheSlots, pytest.param(launched, marks=[needs_triton])])
def test_as_many_rows_stay_as_were_in_flight_at_once_and_a_quarter_more(make: Callable[[int, int], CacheSlots]) -> None:
    slots = make(400, 10)

    def wants(number: int, first: int, last: int) -> None:
        slots.plan(torch.arange(first, last, device=slots.slot_of.device), number, oldest=number)

    wants(0, 0, 8)
    assert (slots.num_kept, len(slots.taken()[0])) == (10, 8)
    wants(1, 100, 140)  # 40 at once
    assert slots.num_kept == int(GROWTH * 40)
    slots.give_back(slots.borrow(30, temporarily=True))
    for number in range(2, 8):
        wants(number, 200 + 8 * number, 208 + 8 * number)
    assert slots.num_kept == len(slots.taken()[0]) == int(GROWTH * 40)


@needs_triton
def test_the_same_batches_lead_to_the_same_slots() -> None:
    draws = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 300, (40,), generator=draws).to(DEVICE) for _ in range(4)]
    one, two = launched(300, 60), launched(300, 60)
    for number, rows in enumerate(batches):
        oldest = max(0, number - 1)
        first = one.plan(rows, number, oldest=oldest)
        second = two.plan(rows.flip(0), number, oldest=oldest)
        assert all(torch.equal(vars(first)[name], part) for name, part in vars(second).items())
