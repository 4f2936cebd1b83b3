"""What the benchmark of sharded training takes for the least possible, by hand for cases small enough."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.sharded import CASES, Case, least_bytes

TWO = Case("two", ("table",), num_rows=10, mean_ids=1, num_features=2, width=8, batch_size=4)
VECTOR = 2 * 4 * 8
"""Bytes of a vector and of its gradient."""


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # Each process has two examples, and one of the tables is with the other: two ids, two vectors, no lengths.
        (TWO, 2 * 2 * (4 + VECTOR)),
        (dataclasses.replace(TWO, wire="bf16"), 2 * 2 * (4 + VECTOR // 2)),
        # Each process asks the other for half of each of its four vectors; what is added up for each distinct row is counted below.
        (dataclasses.replace(TWO, shards=("column",)), None),
        (dataclasses.replace(TWO, shards=("replicate",)), 2 * 4 * 2 * 10 * 8),
    ],
)
def test_least_bytes_by_hand(case: Case, expected: int | None) -> None:
    batch = case.draw(1)
    if expected is None:
        ids = batch.sparse.ids
        distinct = ids[:4].unique().numel() + ids[4:].unique().numel()
        expected = 2 * 4 * (4 + VECTOR // 2) + 2 * 4 * distinct
    assert least_bytes(case, batch, num_parameters=0) == expected
    element = 4 if case.wire == "fp32" else 2
    assert least_bytes(case, batch, num_parameters=100) == expected + 2 * element * 100


def test_rows_cost_what_is_asked_of_the_other() -> None:
    case = dataclasses.replace(TWO, shards=("row",))
    batch = case.draw(1)
    halves = batch.sparse.ids.view(2, 2, 2)  # feature, process, example
    expected = 0
    for feature in range(2):
        for rank in range(2):
            asked = int((halves[feature, rank] // 5 != rank).sum())
            expected += asked * (4 + VECTOR) + (2 if asked == 1 else 0)  # lengths only where they differ
    assert least_bytes(case, batch, num_parameters=0) == expected


def test_every_sharding_is_measured() -> None:
    assert {shard for case in CASES for shard in case.shards} == {"table", "row", "column", "replicate"}
    assert len({case.name for case in CASES}) == len(CASES)
