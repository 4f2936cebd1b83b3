"""Placement is balanced by predicted time: as good as brute force on small cases, quick on large ones."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.plan.balance import Item, _improved, _least_loaded, balance
from rowstead.spec.errors import RowsteadError


def items_of(seconds: list[float], sizes: list[float]) -> list[Item]:
    return [Item(name=f"t{i}", costs=(s,), num_bytes=b) for i, (s, b) in enumerate(zip(seconds, sizes, strict=True))]


def brute_force(items: list[Item], num_devices: int, capacity: float) -> float:
    """The shortest longest queue over every assignment of whole tables; infinite where none fits."""
    chosen = np.array(list(itertools.product(range(num_devices), repeat=len(items))))
    seconds, sizes = np.array([i.costs[0] for i in items]), np.array([i.num_bytes for i in items])
    loads = np.stack([(chosen == device) @ seconds for device in range(num_devices)], axis=1)
    held = np.stack([(chosen == device) @ sizes for device in range(num_devices)], axis=1)
    return float(np.where(held.max(axis=1) <= capacity * (1 + 1e-12), loads.max(axis=1), np.inf).min())


def random_items(rng: np.random.Generator, num_tables: int) -> list[Item]:
    return items_of(rng.lognormal(0, 1, num_tables).tolist(), rng.lognormal(0, 1, num_tables).tolist())


def test_small_cases_cost_what_brute_force_finds() -> None:
    rng = np.random.default_rng(1)
    for _ in range(30):
        num_tables, num_devices = int(rng.integers(1, 9)), int(rng.integers(1, 5))
        items = random_items(rng, num_tables)
        capacity = sum(item.num_bytes for item in items) / num_devices * float(rng.uniform(1.0, 2.0))
        expected = brute_force(items, num_devices, capacity)
        if expected == float("inf"):
            with pytest.raises(RowsteadError, match="no placement fits"):
                balance(items, num_devices, capacity, split=False)
        else:
            found = balance(items, num_devices, capacity, split=False)
            assert found.max_load == pytest.approx(expected)


def test_what_is_used_for_many_tables_is_near_brute_force_on_few() -> None:
    rng = np.random.default_rng(2)
    over = []
    for _ in range(40):
        items = random_items(rng, 7)
        seconds, sizes = np.array([i.costs[0] for i in items]), np.array([i.num_bytes for i in items])
        start = _least_loaded(seconds[:, None], sizes, 3, 1e9, order=np.argsort(-seconds))
        assert start is not None
        chosen = _improved(seconds[:, None], sizes, start, 3, 1e9)
        max_load = np.bincount(chosen, weights=seconds, minlength=3).max()
        over.append(max_load / brute_force(items, 3, 1e9))
    assert np.mean(np.array(over) < 1.001) >= 0.8
    assert max(over) < 1.1


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=40),
    st.integers(1, 6),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_table_is_placed_whole_and_within_memory(
    tables: list[tuple[float, float]], num_devices: int, split: bool
) -> None:
    items = items_of([s for s, _ in tables], [b for _, b in tables])
    capacity = sum(item.num_bytes for item in items) / num_devices + max(item.num_bytes for item in items)
    found = balance(items, num_devices, capacity, split=split)
    for item in items:
        assert sum(part.share for part in found.slices if part.table == item.name) == pytest.approx(1)
    assert max(found.held_bytes) <= capacity * (1 + 1e-9)
    assert sum(found.held_bytes) == pytest.approx(sum(item.num_bytes for item in items))
    assert sum(found.loads) >= sum(item.costs[0] for item in items) * (1 - 1e-9)


def test_a_table_larger_than_a_device_is_split_by_rows() -> None:
    found = balance(items_of([1.0, 1.0], [30.0, 5.0]), 4, 10.0)
    assert len([part for part in found.slices if part.table == "t0"]) >= 3


def longest_by_bytes(items: list[Item], num_devices: int) -> float:
    """The highest load of whole tables that are balanced by memory alone, the largest first."""
    seconds, held = np.zeros(num_devices), np.zeros(num_devices)
    for item in sorted(items, key=lambda item: -item.num_bytes):
        device = held.argmin()
        seconds[device] += item.costs[0]
        held[device] += item.num_bytes
    return float(seconds.max())


def test_time_is_balanced_better_than_by_bytes() -> None:
    rng = np.random.default_rng(3)
    better = []
    for _ in range(50):
        items = random_items(rng, 60)
        capacity = sum(item.num_bytes for item in items)
        better.append(balance(items, 8, capacity).max_load <= longest_by_bytes(items, 8))
    assert np.mean(better) >= 0.9


def test_a_thousand_tables_on_128_devices_take_under_5_s() -> None:
    rng = np.random.default_rng(4)
    items = random_items(rng, 1000)
    start = time.perf_counter()
    found = balance(items, 128, sum(item.num_bytes for item in items) / 128 * 1.5)
    assert time.perf_counter() - start < 5
    assert found.imbalance < 1.2


@pytest.mark.slow
def test_ten_thousand_tables_on_1024_devices_take_under_60_s() -> None:
    rng = np.random.default_rng(5)
    items = random_items(rng, 10_000)
    start = time.perf_counter()
    found = balance(items, 1024, sum(item.num_bytes for item in items) / 1024 * 1.5)
    assert time.perf_counter() - start < 60
    assert found.imbalance < 1.2
