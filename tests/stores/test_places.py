"""Which rows are in fast memory: every row that a batch needs, and of the others the warm ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.stores.places import Places
from rowstead.stores.places_cpu import CompiledPlaces


def plain(num_rows: int, num_places: int) -> Places:
    """What the compiled places are held against."""
    return Places(num_rows, num_places, torch.device("cpu"))


@pytest.mark.parametrize("make", [CompiledPlaces, plain])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 60), num_places=st.integers(1, 12))
def test_every_wanted_row_has_a_place_of_its_own_and_rows_in_use_stay(
    make: Callable[[int, int], Places], data: st.DataObject, num_rows: int, num_places: int
) -> None:
    places = make(num_rows, num_places)
    here: dict[int, int] = {}
    in_use: list[set[int]] = []
    for number in range(data.draw(st.integers(1, 8))):
        rows = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=30))
        oldest = max(0, number - data.draw(st.integers(0, 2)))
        moves = places.plan(torch.tensor(rows, dtype=torch.int64), number, oldest=oldest)
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
        needed = set().union(*in_use[oldest:])
        assert len(here) <= max(num_places, len(needed))


@pytest.mark.parametrize("make", [CompiledPlaces, plain])
def test_rows_that_are_used_often_outlast_those_used_once(make: Callable[[int, int], Places]) -> None:
    places = make(10_000, 100)
    hot = torch.arange(50)
    for number in range(200):
        cold = torch.arange(1000 + 40 * number, 1040 + 40 * number)
        wanted = torch.cat([hot[number % 3 :: 3], cold])
        moves = places.plan(wanted, number, oldest=number)
        if number > 20:
            assert moves.in_rows.min() >= 1000, "a hot row had been sent away"
