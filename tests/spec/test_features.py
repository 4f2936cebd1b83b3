"""Features and tables: what may be said, and what it means once `repeat`, sharing and `scale` are written out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.spec.errors import SpecError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, TableSpec, tables_of
from rowstead.spec.parse import parse


def features(**plain: Any) -> FeaturesSpec:
    return parse(FeaturesSpec, plain)


def problem_of(**plain: Any) -> str:
    with pytest.raises(SpecError) as caught:
        features(**plain)
    return str(caught.value)


ONE = {"name": "x", "num_rows": 10}


def test_repeat_stands_for_features_that_differ_in_their_number() -> None:
    spec = features(
        dense=[{"name": "d_{i}", "repeat": 2, "column": "raw{i}"}, {"name": "d_{i}", "repeat": 2, "start": 2, "log": True}],
        sparse=[{"name": "s{i}", "repeat": 2, "num_rows": 5}],
    )
    dense = spec.expanded_dense()
    assert [f.name for f in dense] == ["d_0", "d_1", "d_2", "d_3"]
    assert [f.column for f in dense] == ["raw0", "raw1", "d_2", "d_3"]
    assert [f.log for f in dense] == [False, False, True, True]
    assert [(f.name, f.column, f.num_rows) for f in spec.expanded_sparse()] == [("s0", "s0", 5), ("s1", "s1", 5)]


@given(repeat=st.integers(1, 50), start=st.integers(0, 1000))
@settings(deadline=None)
def test_repeated_features_are_the_same_as_the_ones_written_out(repeat: int, start: int) -> None:
    short = features(sparse=[{"name": "s{i}", "repeat": repeat, "start": start, "num_rows": 7, "max_ids": 3}])
    long = features(sparse=[{"name": f"s{i}", "num_rows": 7, "max_ids": 3} for i in range(start, start + repeat)])
    assert short.expanded_sparse() == long.expanded_sparse()
    assert tables_of(short, width=4) == tables_of(long, width=4)


def test_a_repeated_feature_needs_a_number_in_its_name() -> None:
    assert problem_of(dense=[{"name": "d", "repeat": 3}]) == (
        "dense[0].name: with repeat: 3 the name needs `{i}`, such as `d_{i}`"
    )


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("dense", {"repeat": 0}, "dense[0].repeat: must be at least 1, got 0"),
        ("dense", {"name": ""}, "dense[0].name: must not be empty"),
        ("dense", {"clip": [2, 1]}, "dense[0].clip: must be [low, high] with low < high"),
        ("dense", {"clip": [1]}, "dense[0].clip: must be [low, high] with low < high"),
        ("dense", {"missing": float("inf")}, "dense[0].missing: must be finite, got inf"),
        ("sparse", {"num_rows": 0}, "sparse[0].num_rows: must be at least 1, got 0"),
        ("sparse", {"num_rows": -5}, "sparse[0].num_rows: must be at least 1, got -5"),
        ("sparse", {"num_rows": None}, "sparse[0].num_rows: set a hash size, or name a shared `table`"),
        ("sparse", {"width": 0}, "sparse[0].width: must be at least 1, got 0"),
        ("sparse", {"max_ids": 0}, "sparse[0].max_ids: must be at least 1, got 0"),
        ("sparse", {"table": "t"}, "sparse[0].num_rows: the shared table has its own num_rows"),
        ("sparse", {"table": "t", "num_rows": None, "width": 4}, "sparse[0].width: the shared table has its own width"),
        ("sparse", {"pooling": "max"}, "sparse[0].pooling: got 'max'; known here: `sum`, `mean`"),
        ("sparse", {"hash": "mixed"}, "sparse[0].hash: got 'mixed'; did you mean `mix`?"),
    ],
)
def test_a_feature_that_cannot_be_right_is_named_by_its_place(kind: str, change: dict[str, Any], says: str) -> None:
    base = {"name": "x"} if kind == "dense" else ONE
    assert says in problem_of(**{kind: [base | change]})


@pytest.mark.parametrize("table", [{"num_rows": 0}, {"width": 0}, {"name": ""}])
def test_a_shared_table_needs_a_name_and_positive_sizes(table: dict[str, Any]) -> None:
    assert f"tables[0].{next(iter(table))}: must" in problem_of(
        sparse=[{"name": "x", "table": "t"}], tables=[{"name": "t", "num_rows": 3} | table]
    )


def test_a_feature_that_names_no_table_is_refused_and_the_nearest_is_named() -> None:
    tables = [{"name": "movies", "num_rows": 3}]
    sparse = [{"name": "a", "table": "movies"}, {"name": "b", "table": "movie"}]
    assert problem_of(sparse=sparse, tables=tables) == "sparse[1].table: no table `movie`: did you mean `movies`?"
    assert problem_of(sparse=[{"name": "a", "table": "t"}]) == "sparse[0].table: no table `t`: nothing is known here"


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        ({}, "list at least one dense or sparse feature"),
        ({"dense": [{"name": "x"}], "sparse": [ONE]}, "feature `x` is listed twice"),
        ({"dense": [{"name": "d_{i}", "repeat": 3}, {"name": "d_1"}]}, "feature `d_1` is listed twice"),
        ({"sparse": [ONE], "tables": [{"name": "t", "num_rows": 1}]}, "table `t` is not used by any feature"),
        (
            {"sparse": [{"name": "a", "table": "t"}], "tables": [{"name": "t", "num_rows": 1}, {"name": "t", "num_rows": 2}]},
            "table `t` is listed twice",
        ),
        (
            {"sparse": [{"name": "a", "table": "x"}, ONE], "tables": [{"name": "x", "num_rows": 1}]},
            "`x` is a shared table and also a feature with its own table",
        ),
    ],
)
def test_names_must_be_clear(plain: dict[str, Any], says: str) -> None:
    assert says in problem_of(**plain)


def test_features_share_a_table_and_others_have_their_own() -> None:
    spec = features(
        sparse=[{"name": "a", "table": "t"}, {"name": "b", "num_rows": 7, "width": 3}, {"name": "c", "table": "t"}],
        tables=[{"name": "t", "num_rows": 9}],
    )
    shared, own = tables_of(spec, width=8)
    assert (shared.name, shared.num_rows, shared.width, shared.features) == ("t", 9, 8, (0, 2))
    assert (own.name, own.num_rows, own.width, own.features) == ("b", 7, 3, (1,))
    assert own.num_elements == 21


@given(sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=8), scale=st.floats(1e-9, 10))
@settings(deadline=None)
def test_scale_multiplies_every_hash_size_and_leaves_at_least_one_row(sizes: list[int], scale: float) -> None:
    spec = FeaturesSpec(
        sparse=(
            SparseFeatureSpec(name="s", table="t"),
            *(SparseFeatureSpec(name=f"x{i}", num_rows=n) for i, n in enumerate(sizes)),
        ),
        tables=(TableSpec(name="t", num_rows=1000),),
    )
    tables = tables_of(spec, width=4, scale=scale)
    for table, size in zip(tables, [1000, *sizes], strict=True):
        assert table.num_rows >= 1
        assert abs(table.num_rows - size * scale) <= 0.5 or table.num_rows == 1
        assert table.width == 4


def test_repeated_features_may_have_a_hash_size_each() -> None:
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f{i}", repeat=3, start=4, hash_sizes=(30, 500, 7)),))
    assert [(one.name, one.num_rows, one.hash_sizes) for one in features.expanded_sparse()] == [
        ("f4", 30, ()),
        ("f5", 500, ()),
        ("f6", 7, ()),
    ]
    assert [table.num_rows for table in tables_of(features, width=8, scale=0.1)] == [3, 50, 1]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hash_sizes": (1, 2)}, "hash_sizes: must be 3 numbers"),
        ({"hash_sizes": (1, 2, 0)}, "hash_sizes: must be from 1 to 1,000,000,000,000"),
        ({"hash_sizes": (1, 2, 3), "num_rows": 5}, "num_rows: `hash_sizes` has the rows"),
        ({"hash_sizes": (1, 2, 3), "table": "shared"}, "num_rows: the shared table has its own"),
    ],
)
def test_hash_sizes_that_cannot_be_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        SparseFeatureSpec(name="f{i}", repeat=3, **fields)


ITEM = {"name": "item", "table": "items"}
CLICKED = {"name": "clicked", "table": "items", "pooling": "none", "max_ids": 5, "encoder": {"kind": "din", "target": "item"}}
TABLES = [{"name": "items", "num_rows": 10}]


def test_a_history_shares_its_table_with_its_target() -> None:
    spec = features(sparse=[ITEM, CLICKED], tables=TABLES)
    assert spec.has_histories
    assert [feature.is_history for feature in spec.expanded_sparse()] == [False, True]
    assert not features(sparse=[ONE]).has_histories


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"encoder": None}, "encoder: `pooling: none` needs an encoder"),
        ({"max_ids": None}, "max_ids: `pooling: none` needs it"),
        ({"max_ids": 10**6}, "max_ids: of a history must be at most 100,000"),
        ({"pooling": "sum"}, "encoder: needs the rows in order"),
        ({"encoder": {"kind": "din", "target": "itme"}}, "did you mean `item`"),
        ({"encoder": {"kind": "din", "target": "clicked"}}, "`clicked` is a history itself"),
    ],
)
def test_histories_that_cannot_be_encoded_are_refused(change: dict[str, Any], problem: str) -> None:
    assert problem in problem_of(sparse=[ITEM, CLICKED | change], tables=TABLES)


def test_what_shares_a_table_with_a_history_is_summed() -> None:
    found = problem_of(sparse=[ITEM | {"pooling": "mean"}, CLICKED], tables=TABLES)
    assert "sparse[0].pooling: `mean` cannot share a table with the history `clicked`" in found


def test_a_history_is_as_wide_as_its_target_and_as_its_heads_allow() -> None:
    own = {key: value for key, value in CLICKED.items() if key != "table"} | {"num_rows": 9}
    apart = features(sparse=[ITEM, own | {"width": 3}], tables=TABLES)
    with pytest.raises(SpecError, match="rows of `item` have width 8 and those of the history 3"):
        tables_of(apart, width=8)
    heads = features(sparse=[own | {"encoder": {"kind": "attention", "heads": 3}}])
    with pytest.raises(SpecError, match="3 heads do not divide 8"):
        tables_of(heads, width=8)


def test_each_of_repeated_histories_has_the_target_of_its_number() -> None:
    items = {"name": "item_{i}", "repeat": 2, "num_rows": 9}
    clicked = {"name": "clicked_{i}", "repeat": 2, "num_rows": 9, "pooling": "none", "max_ids": 5}
    spec = features(sparse=[items, clicked | {"encoder": {"target": "item_{i}"}}])
    encoders = [feature.encoder for feature in spec.expanded_sparse() if feature.is_history]
    assert [encoder and encoder.target for encoder in encoders] == ["item_0", "item_1"]
    more = problem_of(sparse=[items, clicked | {"repeat": 3, "encoder": {"target": "item_{i}"}}])
    assert "sparse[1].encoder.target: no sparse feature `item_2`" in more
