"""Which rows are in fast memory: every row that a batch needs, and of the others the warm ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.kernels.choose import has_triton
from rowstead.stores.cache_slots import GROWTH, CacheSlots
from rowstead.stores.cache_slots_cpu import CpuCacheSlots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Of what a GPU launches; without one it runs in Triton's interpreter."""
needs_triton = pytest.mark.skipif(not has_triton(), reason="needs Triton")


def plain(num_rows: int, num_places: int) -> CacheSlots:
    """What the compiled places are held against."""
    return CacheSlots(num_rows, num_places, torch.device("cpu"))


def launched(num_rows: int, num_places: int) -> CacheSlots:
    """What a GPU launches."""
    from rowstead.stores.cache_slots_gpu import GpuCacheSlots

    return GpuCacheSlots(num_rows, num_places, DEVICE)


@pytest.mark.parametrize("make", [CpuCacheSlots, plain])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 60), num_places=st.integers(1, 12))
def test_every_wanted_row_has_a_place_of_its_own_and_rows_in_use_stay(
    make: Callable[[int, int], CacheSlots], data: st.DataObject, num_rows: int, num_places: int
) -> None:
    check_plans(make(num_rows, num_places), data, most_batches=8)


@needs_triton
@settings(max_examples=4, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 60), num_places=st.integers(1, 12))
def test_launches_give_every_wanted_row_a_place_of_its_own_and_rows_in_use_stay(
    data: st.DataObject, num_rows: int, num_places: int
) -> None:
    check_plans(launched(num_rows, num_places), data, most_batches=4)


@needs_triton
@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 1500), num_places=st.integers(1, 40))
def test_so_do_many_launches_that_take_few_at_a_time(data: st.DataObject, num_rows: int, num_places: int) -> None:
    from rowstead.stores import cache_slots_gpu
    from tests.kernels.blocks import few_at_a_time

    with few_at_a_time(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(cache_slots_gpu, "MOST_TAGS", 2)
        patched.setattr(cache_slots_gpu, "HALF_LIFE", 3)
        check_plans(launched(num_rows, num_places), data, most_batches=6)


def check_plans(places: CacheSlots, data: st.DataObject, *, most_batches: int) -> None:
    num_rows, num_places = places.place_of.numel(), places.num_places
    here: dict[int, int] = {}
    in_use: list[set[int]] = []
    most = 0
    for number in range(data.draw(st.integers(1, most_batches))):
        rows = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=30))
        oldest = max(0, number - data.draw(st.integers(0, 2)))
        moves = places.plan(torch.tensor(rows, dtype=torch.int64, device=places.place_of.device), number, oldest=oldest)
        for row, place in zip(moves.out_rows.tolist(), moves.out_places.tolist(), strict=True):
            assert here.pop(row) == place
            assert not any(row in used for used in in_use[oldest:])
        taken = set(here.values())
        for row, place in zip(moves.in_rows.tolist(), moves.in_places.tolist(), strict=True):
            assert row not in here
            assert place not in taken
            here[row] = place
            taken.add(place)
        shared = min(len(moves.in_places), len(moves.out_places))
        assert torch.equal(moves.in_places[:shared], moves.out_places[:shared])
        in_use.append(set(rows))
        assert set(rows) <= set(here)
        assert all(int(places.place_of[row]) == place for row, place in here.items())
        assert max(taken, default=-1) < places.capacity
        most = max(most, len(set().union(*in_use[oldest:])))
        assert len(here) <= max(num_places, most if most <= num_places else GROWTH * most)
        assert len(here) <= places.num_kept <= places.capacity


@pytest.mark.parametrize("make", [CpuCacheSlots, plain, pytest.param(launched, marks=[pytest.mark.slow, needs_triton])])
def test_rows_that_are_used_often_outlast_those_used_once(make: Callable[[int, int], CacheSlots]) -> None:
    places = make(10_000, 100)
    hot = torch.arange(50)
    for number in range(40 if make is launched else 200):
        cold = torch.arange(1000 + 40 * number, 1040 + 40 * number)
        wanted = torch.cat([hot[number % 3 :: 3], cold])
        moves = places.plan(wanted.to(places.place_of.device), number, oldest=number)
        if number > 20:
            assert moves.in_rows.min() >= 1000, "a hot row had been sent away"


@pytest.mark.parametrize("make", [CpuCacheSlots, plain, pytest.param(launched, marks=[needs_triton])])
def test_as_many_rows_stay_as_were_under_way_at_once_and_a_quarter_more(make: Callable[[int, int], CacheSlots]) -> None:
    places = make(400, 10)

    def wants(number: int, first: int, last: int) -> None:
        places.plan(torch.arange(first, last, device=places.place_of.device), number, oldest=number)

    wants(0, 0, 8)
    assert (places.num_kept, len(places.taken()[0])) == (10, 8)
    wants(1, 100, 140)  # 40 at once
    assert places.num_kept == int(GROWTH * 40)
    places.give_back(places.lend(30, is_aside=True))
    for number in range(2, 8):
        wants(number, 200 + 8 * number, 208 + 8 * number)
    assert places.num_kept == len(places.taken()[0]) == int(GROWTH * 40)


@needs_triton
def test_the_same_batches_lead_to_the_same_places() -> None:
    draws = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 300, (40,), generator=draws).to(DEVICE) for _ in range(4)]
    one, two = launched(300, 60), launched(300, 60)
    for number, rows in enumerate(batches):
        oldest = max(0, number - 1)
        first = one.plan(rows, number, oldest=oldest)
        second = two.plan(rows.flip(0), number, oldest=oldest)
        assert all(torch.equal(vars(first)[name], part) for name, part in vars(second).items())
