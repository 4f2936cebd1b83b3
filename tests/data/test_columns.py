"""Every Arrow type that a log may have becomes the same RawBlock that plain Python lists would."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rowstead.data.columns import ColumnReader, to_bags, to_floats
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
        (ROWS | {"city": [1.5]}, r"column `city` has type double, but a sparse feature must be integers, text"),
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
