"""The test of order: what it finds, how rarely it is wrong, and that it is the definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from rowstead.data import order_test
from rowstead.data.order_test import NUM_CHUNKS, OrderSample

Ids = NDArray[np.int64]


def clustering_of(*columns: Ids, block: int = 1000, max_rows: int = 65_536) -> dict[str, float]:
    sample = OrderSample([str(i) for i in range(len(columns))], max_rows)
    for start in range(0, len(columns[0]), block):
        sample.add([column[start : start + block] for column in columns])
    return {one.name: one.clustering for one in sample.find_clustered()}


def users(num_rows: int, num_users: int, seed: int = 1) -> Ids:
    """Some users have many rows, most have few."""
    random = np.random.default_rng(seed)
    return np.minimum(random.exponential(num_users / 5, num_rows), num_users).astype(np.int64)


def test_pairs_are_counted_as_defined() -> None:
    values = np.sort(users(NUM_CHUNKS * 64, 50))
    m = 64
    pairs = [(i, j) for i, j in itertools.combinations(range(len(values)), 2) if values[i] == values[j]]
    together = sum(i // m == j // m for i, j in pairs)
    q = (m - 1) / (len(values) - 1)
    found = order_test._test("user", values, 1)
    assert found is not None
    assert found.likelier == pytest.approx(together / (q * len(pairs)))


@pytest.mark.parametrize("num_users", [2, 30, 5000, 200_000])
def test_a_sorted_column_is_found_and_its_shuffled_one_is_not(num_users: int) -> None:
    ids = np.sort(users(300_000, num_users))
    assert clustering_of(ids)["0"] > 0.75
    assert clustering_of(np.random.default_rng(2).permutation(ids)) == {}


def test_groups_in_any_order_are_found() -> None:
    ids = users(100_000, 3000)
    order = np.random.default_rng(3).permutation(ids.max() + 1)
    assert clustering_of(np.sort(order[ids]))["0"] > 0.9


def test_a_window_that_holds_a_small_part_of_the_log_is_found_and_one_of_half_of_it_is_not() -> None:
    random = np.random.default_rng(4)
    ids = np.sort(users(200_000, 3000))
    for share, is_found in ((0.02, True), (0.5, False)):
        window = int(len(ids) * share)
        shuffled = np.concatenate([random.permutation(ids[i : i + window]) for i in range(0, len(ids), window)])
        assert bool(clustering_of(shuffled)) == is_found, share


def test_a_click_rate_that_drifts_a_little_is_not_reported_and_sorted_labels_are() -> None:
    random = np.random.default_rng(5)
    rising = (random.random(200_000) < np.linspace(0.2, 0.3, 200_000)).astype(np.int64)
    assert clustering_of(rising) == {}
    assert clustering_of(np.sort(rising))["0"] > 0.9


def test_random_order_is_reported_less_often_than_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the other condition off and a rate of 0.2: the bound holds for skewed, uniform and rare values alike."""
    monkeypatch.setattr(order_test, "LEAST_CLUSTERING", 0.0)
    monkeypatch.setattr(order_test, "FALSE_ALARM_RATE", 0.2)
    random = np.random.default_rng(6)
    logs = [users(2048, 40), random.integers(0, 2, 2048), random.zipf(1.3, 2048) % 1000, random.integers(0, 1000, 2048)]
    for ids in logs:
        alarms = sum(bool(clustering_of(random.permutation(ids))) for _ in range(150))
        assert alarms <= 0.2 * 150


def test_a_sample_is_bounded_and_evenly_spaced() -> None:
    sample = OrderSample(["row"], max_rows=1000)
    rows = np.arange(50_000)
    for part in np.array_split(rows, 77):
        sample.add([part])
    kept = np.concatenate(sample._parts)[:, 0]
    assert 500 <= len(kept) <= 1000
    assert set(np.diff(kept)) == {64}


def test_short_logs_and_columns_without_values_are_not_judged() -> None:
    assert clustering_of(np.zeros(100, np.int64)) == {}
    assert clustering_of(np.full(100_000, order_test._MISSING)) == {}
    assert clustering_of(np.arange(100_000)) == {}
