"""Statistics of a log, against brute force."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rowstead.data.block import RawBlock
from rowstead.data.columns import ColumnReader
from rowstead.data.count_ids import Budget, IdCounter, top_shares
from rowstead.data.describe import describe, expected_collisions, infer_features, length_bins
from rowstead.data.hashing import hash_to_rows
from rowstead.spec.errors import DataError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, TableSpec
from rowstead.spec.parse import parse, to_plain
from rowstead.spec.statistics import QUANTILES, LogStatistics


def block_of(
    bags: list[list[int]], dense: NDArray[np.float32] | None = None, labels: NDArray[np.float32] | None = None
) -> RawBlock:
    return RawBlock(
        dense=np.zeros((len(bags), 0), np.float32) if dense is None else dense,
        ids=(np.array([i for bag in bags for i in bag], np.int64),),
        offsets=(np.cumsum([0, *map(len, bags)]).astype(np.int64),),
        labels=labels,
    )


def one_sparse(num_rows: int = 100, **options: Any) -> FeaturesSpec:
    return FeaturesSpec(sparse=(SparseFeatureSpec(name="s", num_rows=num_rows, **options),))


ids = st.one_of(st.integers(-5, 20), st.integers(-(2**63), 2**63 - 1))
bags_lists = st.lists(st.lists(ids, max_size=40), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(bags=bags_lists, cut=st.integers(0, 30), num_rows=st.integers(1, 50), hash=st.sampled_from(["mix", "modulo"]))
def test_sparse_figures_equal_brute_force(bags: list[list[int]], cut: int, num_rows: int, hash: str) -> None:
    blocks = [block_of(bags[:cut]), block_of(bags[cut:])]
    found = describe(blocks, one_sparse(num_rows, hash=hash)).sparse[0]
    counts = Counter(i for bag in bags for i in bag)
    lengths = [len(bag) for bag in bags]
    assert found.exact
    assert (found.num_distinct, found.num_accesses) == (len(counts), sum(lengths))
    assert found.length_mean == pytest.approx(np.mean(lengths))
    assert found.empty_share == pytest.approx(lengths.count(0) / len(bags))
    quantiles = np.quantile(lengths, [0.5, 0.9, 0.99, 1.0], method="inverted_cdf").tolist()
    assert [found.length_p50, found.length_p90, found.length_p99, found.length_max] == quantiles
    ends = [*found.length_bins, 10**9]
    shares = [sum(low <= n < high for n in lengths) / len(bags) for low, high in itertools.pairwise(ends)]
    assert found.length_shares == pytest.approx(shares)
    falling = sorted(counts.values(), reverse=True)
    if not counts:
        assert found.top_1_percent_share is None
        assert found.expected_collisions is None
        assert found.actual_collisions is None
        return
    for top, share in ((0.01, found.top_1_percent_share), (0.1, found.top_10_percent_share)):
        num_top = max(1, -(-len(falling) * int(top * 100) // 100))
        assert share == pytest.approx(sum(falling[:num_top]) / sum(falling))
    assert found.skew_top[-1] == 1.0
    assert found.skew_accesses[-1] == pytest.approx(1.0)
    on_row = Counter(hash_to_rows(np.array(list(counts), np.int64), num_rows, hash).tolist())  # type: ignore[arg-type]
    assert found.actual_collisions == pytest.approx(sum(n for n in on_row.values() if n > 1) / len(counts))


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.lists(st.floats(width=32), min_size=2, max_size=2), min_size=1, max_size=50),
    cut=st.integers(0, 50),
)
def test_dense_figures_equal_brute_force(values: list[list[float]], cut: int) -> None:
    dense = np.array(values, np.float32)
    features = FeaturesSpec(dense=(DenseFeatureSpec(name="d{i}", repeat=2),))
    blocks = [RawBlock(dense=part, ids=(), offsets=()) for part in (dense[:cut], dense[cut:])]
    found = describe(blocks, features)
    assert found.label_mean is None
    for column, one in zip(dense.T.astype(np.float64), found.dense, strict=True):
        finite = column[np.isfinite(column)]
        assert one.missing_share == pytest.approx(np.isnan(column).mean())
        assert one.infinite_share == pytest.approx(np.isinf(column).mean())
        if not finite.size:
            assert (one.mean, one.std, one.min, one.max, one.quantiles) == (None, None, None, None, ())
            continue
        size = np.abs(finite).max()
        assert one.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-12 * size)
        assert one.std == pytest.approx(finite.std(), rel=1e-6, abs=1e-9 * size)
        assert (one.min, one.max) == (finite.min(), finite.max())
        assert list(one.quantiles) == np.quantile(finite, QUANTILES, method="inverted_cdf").tolist()


def test_labels_rows_and_progress() -> None:
    steps: list[int] = []
    blocks = [
        block_of([[1]] * 4, labels=np.array([0, 1, 1, np.nan], np.float32)),
        block_of([[]] * 2, labels=np.ones(2, np.float32)),
    ]
    found = describe(blocks, one_sparse(), progress=steps.append)
    assert (found.num_rows, found.label_mean, found.num_labels_missing) == (6, 0.8, 1)
    assert steps == [4, 6]


def zipf_ids(num: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).zipf(1.3, num).astype(np.int64) % 10**12


def test_counts_that_do_not_fit_are_estimated_within_their_stated_error() -> None:
    ids = zipf_ids(1_000_000)
    exact = np.unique(ids, return_counts=True)[1]
    counter = IdCounter(Budget(1 << 19, 1))
    for part in np.array_split(ids, 7):
        counter.add(part)
    kept_ids, kept = counter.items()
    assert counter.level > 0
    assert kept_ids.size <= (1 << 19) // 16
    assert 0 < counter.distinct_error < 0.02
    assert abs(counter.num_distinct / exact.size - 1) < 4 * counter.distinct_error
    truth = list(top_shares(exact, np.array([0.01, 0.1]), 1, ids.size))
    guess = list(top_shares(kept, np.array([0.01, 0.1]), 1 << counter.level, ids.size))
    assert guess == pytest.approx(truth, abs=0.02)
    whole = dict(zip(*np.unique(ids, return_counts=True), strict=True))
    assert all(whole[i] == n for i, n in zip(kept_ids.tolist()[:500], kept.tolist()[:500], strict=True))


def test_estimated_figures_leave_out_what_a_sample_cannot_know() -> None:
    ids = np.arange(200_000, dtype=np.int64)
    block = RawBlock(dense=np.zeros((ids.size, 0), np.float32), ids=(ids,), offsets=(np.arange(ids.size + 1),))
    found = describe([block], one_sparse(1 << 20), memory_bytes=1 << 20).sparse[0]
    assert not found.exact
    assert found.actual_collisions is None
    assert found.expected_collisions == pytest.approx(1 - np.exp(-ids.size / (1 << 20)), rel=0.05)
    assert found.top_10_percent_share == pytest.approx(0.1, abs=0.02)
    assert min(found.skew_top) * found.num_distinct > 100


def test_counters_share_their_memory() -> None:
    budget = Budget(1 << 22, 4)
    counters = [IdCounter(budget) for _ in range(4)]
    for seed, counter in enumerate(counters):
        counter.add(np.random.default_rng(seed).integers(0, 2**62, 300_000))
    assert sum(counter._keys.size for counter in counters) * 16 <= 1 << 22
    assert min(counter._keys.size for counter in counters) * 16 >= 1 << 18


def test_expected_collisions_match_the_hash() -> None:
    rng = np.random.default_rng(0)
    ids = np.unique(rng.integers(0, 2**62, 20_000))
    found = describe([block_of([ids.tolist()])], one_sparse(50_000)).sparse[0]
    assert found.expected_collisions is not None
    assert found.actual_collisions == pytest.approx(found.expected_collisions, abs=0.02)
    assert expected_collisions(1, 1) == 0
    assert expected_collisions(2, 1) == 1


def test_collisions_are_at_the_shared_table_or_at_the_size_asked_for() -> None:
    features = FeaturesSpec(
        sparse=(SparseFeatureSpec(name="s", table="t", hash="none"),), tables=(TableSpec(name="t", num_rows=7),)
    )
    assert describe([block_of([[1, 2]])], features).sparse[0].num_rows == 7
    assert describe([block_of([[1, 2]])], features, num_rows=3).sparse[0].num_rows == 3
    assert describe([block_of([[1, 900]])], features).sparse[0].actual_collisions is None


def test_quantiles_of_a_long_log_come_from_a_sample() -> None:
    rng = np.random.default_rng(1)
    dense = rng.normal(size=(200_000, 1)).astype(np.float32)
    features = FeaturesSpec(dense=(DenseFeatureSpec(name="d"),))
    found = describe([RawBlock(dense=part, ids=(), offsets=()) for part in np.array_split(dense, 9)], features)
    assert 9_000 < found.num_rows_sampled <= 20_000
    assert found.dense[0].quantiles == pytest.approx(np.quantile(dense, QUANTILES).tolist(), abs=0.12)


def test_statistics_go_through_json_unchanged() -> None:
    dense = np.array([[1.5], [np.nan]], np.float32)
    features = FeaturesSpec(dense=(DenseFeatureSpec(name="d"),), sparse=(SparseFeatureSpec(name="s", num_rows=9),))
    found = describe([block_of([[1, 2, 2], []], dense, np.ones(2, np.float32))], features)
    assert parse(LogStatistics, json.loads(json.dumps(to_plain(found), allow_nan=False))) == found


def test_an_empty_log_is_a_data_error() -> None:
    with pytest.raises(DataError, match="no rows"):
        describe([block_of([])], one_sparse())


def test_length_bins_rise_to_the_longest() -> None:
    assert length_bins(0) == (0,)
    assert length_bins(3) == (0, 1, 2, 3)
    assert length_bins(40)[14:] == (14, 15, 16, 20, 24, 28, 32, 40)


def test_features_are_inferred_from_the_types_of_columns() -> None:
    table = pa.table(
        {
            "label": pa.array([1], pa.int8()),
            "timestamp": pa.array([1]),
            "rating": pa.array([1.0]),
            "true_p": pa.array([0.5]),
            "price": pa.array([1.5]),
            "user": pa.array([7]),
            "city": pa.array(["a"]),
            "shop": pa.array(["b"]).dictionary_encode(),
            "tags": pa.array([["a", "b"]]),
            "when": pa.array([0], pa.timestamp("s")),
            "on": pa.array([True]),
            "vector": pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)),
            "curve": pa.array([[1.0]]),
            "blob": pa.array([b"x"]),
            "n{i}": pa.array([1]),
        }
    )
    features, left_out = infer_features(table.schema)
    assert [f.name for f in features.expanded_dense()] == ["price", "when", "vector[0]", "vector[1]"]
    assert [f.name for f in features.sparse] == ["user", "city", "shop", "tags", "on"]
    columns = {str(f.column) for f in (*features.dense, *features.sparse)}
    assert {*columns, *left_out} == set(table.column_names)  # none without a word
    assert left_out["blob"] == "type binary is not supported"
    assert "a recipe that says its `length`" in left_out["curve"]
    assert left_out["n{i}"] == "`{i}` in a name stands for a number in recipes; rename it"
    found = describe([ColumnReader(features, label="label").block(table)], features)
    assert [s.length_max for s in found.sparse] == [1, 1, 1, 2, 1]
    assert found.label_mean == 1.0
    assert [f.name for f in infer_features(table.schema, label="price")[0].dense] == ["when", "vector"]
    with pytest.raises(DataError, match=r"no column can be a feature.*blob"):
        infer_features(table.select(["label", "blob"]).schema)
