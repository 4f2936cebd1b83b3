"""Every Arrow type that a log may have becomes the same RawBlock that plain Python lists would."""

from __future__ import annotations

import math
from datetime import date, datetime, timedelta, timezone
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rowstead.data.column_values import to_bags, to_floats
from rowstead.data.columns import ColumnReader
from rowstead.spec.errors import DataError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec

FEATURES = FeaturesSpec(
    dense=(DenseFeatureSpec(name="age"), DenseFeatureSpec(name="price")),
    sparse=(SparseFeatureSpec(name="city", num_rows=10), SparseFeatureSpec(name="likes", num_rows=10)),
)

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]


@st.composite
def value_types(draw):
    """An Arrow type for ids and a strategy for its values."""
    text = st.text("aé€𝄞", max_size=12)
    kind, values = draw(
        st.sampled_from(
            [(pa.string(), text), (pa.large_string(), text)]
            + [
                (
                    t,
                    st.integers(
                        *(0, 2**t.bit_width - 1) if "u" in str(t) else (-(2 ** (t.bit_width - 1)), 2 ** (t.bit_width - 1) - 1)
                    ),
                )
                for t in INTEGERS
            ]
        )
    )
    return (pa.dictionary(pa.int32(), kind) if draw(st.booleans()) else kind), values


@st.composite
def sparse_columns(draw):
    """A sparse column, perhaps sliced and chunked, and the bags that it means."""
    kind, values = draw(value_types())
    item = st.one_of(st.none(), values)
    shape = draw(st.sampled_from(["scalar", "list", "large_list", "fixed"]))
    if shape == "fixed":
        size = draw(st.integers(0, 3))
        items = draw(st.lists(st.one_of(st.none(), st.lists(item, min_size=size, max_size=size)), max_size=12))
        whole = pa.list_(kind, size)
    else:
        items = draw(st.lists(item if shape == "scalar" else st.one_of(st.none(), st.lists(item, max_size=5)), max_size=12))
        whole = {"scalar": kind, "list": pa.list_(kind), "large_list": pa.large_list(kind)}[shape]
    array = _array(items, whole)
    start = draw(st.integers(0, len(items)))
    stop = draw(st.integers(start, len(items)))
    array, items = array.slice(start, stop - start), items[start:stop]
    bags = [[item] if shape == "scalar" else (item or []) for item in items]
    if draw(st.booleans()):
        middle = draw(st.integers(0, len(array)))
        array = pa.chunked_array([array.slice(0, middle), array.slice(middle)], type=array.type)
    return array, [[_id64(x) for x in bag if x is not None] for bag in bags]


def _array(items, kind):
    """pa.array cannot build lists of dictionaries itself."""
    if pa.types.is_dictionary(kind):
        return pa.array(items, kind.value_type).dictionary_encode()
    value = getattr(kind, "value_type", None)
    if value is None or not pa.types.is_dictionary(value):
        return pa.array(items, kind)
    if pa.types.is_fixed_size_list(kind):
        flat = pa.array([x for item in items for x in (item or [None] * kind.list_size)], value.value_type)
        mask = pa.array([item is None for item in items], pa.bool_())
        if kind.list_size == 0 or not items:
            return pa.array(items, pa.list_(value.value_type, kind.list_size))
        return pa.FixedSizeListArray.from_arrays(flat.dictionary_encode(), kind.list_size, mask=mask)
    plain = pa.array(items, pa.large_list(value.value_type) if pa.types.is_large_list(kind) else pa.list_(value.value_type))
    cls = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    return cls.from_arrays(plain.offsets, plain.values.dictionary_encode(), mask=plain.is_null())


def _id64(value):
    unsigned = xxhash.xxh64_intdigest(value.encode()) if isinstance(value, str) else value % 2**64
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


@given(sparse_columns())
def test_any_sparse_column_becomes_its_bags(column):
    array, bags = column
    ids, offsets = to_bags(array, "x")
    assert ids.dtype == offsets.dtype == np.int64
    assert offsets[0] == 0
    assert len(offsets) == len(array) + 1
    assert [ids[a:b].tolist() for a, b in pairwise(offsets)] == bags


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 1)), max_size=20),
    st.sampled_from([*INTEGERS, pa.bool_(), pa.float16(), pa.float32(), pa.float64(), pa.decimal128(9, 2)]),
    st.integers(0, 3),
)
def test_any_numeric_column_becomes_floats_and_null_becomes_nan(values, kind, start):
    array = pa.array(
        [None if v is None else v if "bool" not in str(kind) else bool(v) for v in values],
        pa.bool_() if "bool" in str(kind) else pa.int64(),
    )
    array = (array if kind == pa.bool_() else array.cast(pa.float64()).cast(kind)).slice(start)
    expected = np.array([math.nan if v is None else float(v) for v in values[start:]], np.float32)
    for column in (array, pa.chunked_array([array.slice(0, 2), array.slice(2)], type=array.type)):
        got = to_floats(column, "x")
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, expected)


@given(st.integers(0, 200), st.integers(0, 40))
def test_dense_columns_stand_side_by_side(num_rows, num_columns):
    features = FeaturesSpec(
        dense=(DenseFeatureSpec(name="d{i}", repeat=num_columns),) if num_columns else (),
        sparse=(SparseFeatureSpec(name="s", num_rows=3),),
    )
    table = {f"d{i}": np.arange(num_rows, dtype=np.float32) + 1000 * i for i in range(num_columns)}
    block = ColumnReader(features).block(table | {"s": np.zeros(num_rows, np.int64)})
    assert block.dense.flags.c_contiguous
    np.testing.assert_array_equal(block.dense, np.arange(num_rows)[:, None] + 1000 * np.arange(num_columns)[None])


def test_plain_lists_make_a_block():
    block = ColumnReader(FEATURES, label="click", weight="w", true_p="p").block(
        {"age": [1, None], "price": [True, False], "city": ["Rome", None], "likes": [[1, None, 2], None]}
        | {"click": [0, 1], "w": [1.0, 2.0], "p": [0.5, 0.25], "never read": [object(), object()]}
    )
    np.testing.assert_array_equal(block.dense, np.array([[1, 1], [np.nan, 0]], np.float32))
    assert block.ids[0].tolist() == [_id64("Rome")]
    assert block.offsets[0].tolist() == [0, 1, 1]
    assert block.ids[1].tolist() == [1, 2]
    assert block.offsets[1].tolist() == [0, 2, 2]
    assert block.labels.tolist() == [0, 1]
    assert block.weights.tolist() == [1, 2]
    assert block.true_p.tolist() == [0.5, 0.25]


def test_a_two_dimensional_array_is_a_column_of_lists():
    block = ColumnReader(FEATURES).block({"age": [1], "price": [2], "city": [3], "likes": np.array([[4, 5]])})
    assert block.ids[1].tolist() == [4, 5]


def test_columns_that_are_all_null_are_missing_values_and_empty_bags():
    block = ColumnReader(FEATURES).block({"age": [None], "price": [None], "city": [None], "likes": [[]]})
    assert np.isnan(block.dense).all()
    assert [len(ids) for ids in block.ids] == [0, 0]


def test_int64_ids_share_memory_with_arrow():
    ids = pa.array([5, 6, 7])
    got, _ = to_bags(pa.array([0, *range(100)]).slice(1), "x")
    assert not got.flags.owndata
    assert to_bags(ids.slice(1), "x")[0].tolist() == [6, 7]


ROWS = {"age": [1], "price": [1], "city": [1], "likes": [[1]]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"age": [1], "prise": [1], "city": [1], "likes": [1]}, r"no column `price`: did you mean `prise`\?"),
        (ROWS | {"age": ["old"]}, r"column `age` has type string, but a dense feature.*features\.sparse"),
        (ROWS | {"city": [1.5]}, r"column `city` contains 1.5, which is not whole.*features\.dense"),
        (ROWS | {"city": [math.inf]}, r"column `city` contains inf"),
        (
            ROWS | {"city": [2.0**60]},
            r"column `city` contains 1.15.*, which is beyond 9,007,199,254,740,992, where double is not exact",
        ),
        (ROWS | {"age": [[1.0, 2.0]]}, r"column `age` has type list<item: double>; .* set the dense feature's `length`"),
        (ROWS | {"city": [{"a": 1}]}, r"column `city` has type struct<a: int64>, but a sparse feature must be integers, text"),
        (ROWS | {"likes": [[[1]]]}, r"column `likes` has type list<item: list<item: int64>>"),
        (ROWS | {"age": [1, 2]}, r"columns differ in length: `price` has 1 rows, `age` has 2"),
        (ROWS | {"age": [1, "x"], "price": [1, 2]}, r"column `age` cannot be read"),
        (ROWS | {"city": [2**64]}, r"column `city` cannot be read"),
    ],
)
def test_wrong_columns_are_named_with_what_is_allowed(rows, message):
    with pytest.raises(DataError, match=message):
        ColumnReader(FEATURES).block(rows)


def test_check_finds_wrong_types_from_the_schema_alone():
    schema = pa.table(ROWS | {"label": ["yes"]}).schema
    ColumnReader(FEATURES).check(schema)
    with pytest.raises(DataError, match="column `label` has type string"):
        ColumnReader(FEATURES, label="label").check(schema)
    with pytest.raises(DataError, match="no column `lable`: did you mean `label`"):
        ColumnReader(FEATURES, label="lable").check(schema)


TIMES = st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1))


@given(st.lists(st.one_of(st.none(), TIMES), max_size=9), st.sampled_from(["s", "ms", "us", "ns", "date", "text"]))
def test_times_become_days_seconds_and_their_parts(times, unit):
    if unit in ("s", "ms"):
        times = [t and t.replace(microsecond=0) for t in times]
    if unit == "date":
        column, exact = pa.array([t and t.date() for t in times], pa.date32()), 86_400
    elif unit == "text":
        column, exact = pa.array([t and t.isoformat(" ") for t in times], pa.string()), 1
    else:
        column, exact = pa.array(times, pa.timestamp("us")).cast(pa.timestamp(unit), safe=False), 1
    known = [t for t in times if t is not None]
    seconds = [(t - datetime(1970, 1, 1)) // timedelta(seconds=1) for t in known]
    parts = {"day": [s // 86_400 for s in seconds], "weekday": [t.weekday() for t in known], "hour": [t.hour for t in known]}
    for part, expected in parts.items() if known else ():
        if (unit, part) != ("date", "hour"):
            assert to_bags(column, "x", part)[0].tolist() == expected
            assert [x for x in to_floats(column, "x", part).tolist() if x == x] == expected
    if unit != "text":
        assert to_bags(column, "x")[0].tolist() == [s // exact for s in seconds]
        found = to_floats(column, "x")
        assert np.isnan(found).tolist() == [t is None for t in times]
        np.testing.assert_allclose(
            found[~np.isnan(found)], np.array([s // exact * exact / 86_400 for s in seconds]), rtol=1e-6, atol=1e-4
        )


def test_a_timestamp_counts_in_its_own_zone():
    noon = datetime(2026, 11, 1, 12, tzinfo=timezone.utc)
    for zone, hour in (("UTC", 12), ("Asia/Tokyo", 21), ("+02:30", 14)):
        assert to_bags(pa.array([noon], pa.timestamp("us", zone)), "x", "hour")[0].tolist() == [hour]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([3.0, None, 5.0]),
        pa.array([3.0, math.nan, 5.0], pa.float32()),
        pa.array([3, None, 5]).cast(pa.decimal128(19, 0)),
        pa.array([3, None, 5]).cast(pa.float16()).dictionary_encode(),
    ],
)
def test_whole_numbers_of_any_type_are_the_ids_of_integers(column):
    ids, offsets = to_bags(column, "x")
    assert (ids.tolist(), offsets.tolist()) == ([3, 5], [0, 1, 1, 2])


def test_booleans_are_ids_0_and_1():
    assert to_bags(pa.array([True, None, False]), "x")[0].tolist() == [1, 0]


@given(st.lists(st.one_of(st.none(), st.lists(st.one_of(st.none(), st.floats(width=32)), min_size=3, max_size=3)), max_size=6))
def test_lists_of_one_length_are_as_many_dense_features(rows):
    features = FeaturesSpec(
        dense=(DenseFeatureSpec(name="v", length=3), DenseFeatureSpec(name="y", column="v", length=3, element=1))
    )
    assert [f.name for f in features.expanded_dense()] == ["v[0]", "v[1]", "v[2]", "y"]
    expected = [[math.nan] * 3 if row is None else [math.nan if x is None else x for x in row] for row in rows]
    expected = np.array(expected, np.float32).reshape(-1, 3)[:, [0, 1, 2, 1]]
    for kind in (pa.list_(pa.float32()), pa.list_(pa.float64(), 3), pa.large_list(pa.float64())):
        array = pa.array([None, *rows], kind).slice(1)
        for column in (array, pa.chunked_array([array.slice(0, 1), array.slice(1)], type=kind)):
            np.testing.assert_array_equal(ColumnReader(features).block(pa.table({"v": column})).dense, expected)


def test_a_list_of_another_length_is_named():
    features = FeaturesSpec(dense=(DenseFeatureSpec(name="v", length=3),))
    with pytest.raises(DataError, match="column `v` has a list of 2 numbers where `length` says 3"):
        ColumnReader(features).block({"v": [[1.0, 2.0, 3.0], [1.0, 2.0]]})


def test_a_part_needs_times():
    for column, says in (
        (pa.array([1]), "needs timestamps or dates"),
        (pa.array([date(2026, 1, 1)]), "dates, which have no hour"),
    ):
        with pytest.raises(DataError, match=says):
            to_bags(column, "x", "hour")
    with pytest.raises(DataError, match="column `x` is text that is not all timestamps"):
        to_floats(pa.array(["noon"]), "x", "hour")
