"""Our decoder of Parquet pages against pyarrow's, over writers' options and over damaged bytes."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowstead.data import chunks
from rowstead.data.buffer_pool import BufferPool
from rowstead.data.columns import ColumnReader
from rowstead.data.page_checks import DamagedColumnError
from rowstead.data.pages import CODECS, decode_bags, decode_floats
from rowstead.data.rowgroup import find_leaves, plan_group, read_row_group
from rowstead.data.snappy import unpack_snappy
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec

COLUMNS = ColumnReader(
    FeaturesSpec(
        dense=(DenseFeatureSpec(name="x"), DenseFeatureSpec(name="y")),
        sparse=(SparseFeatureSpec(name="one", num_rows=9), SparseFeatureSpec(name="many", num_rows=9)),
    ),
    label="label",
)

on_files = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def tables(draw):
    """ColumnReader of both kinds with and without nulls, few or many distinct values, long runs or none."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_rows = draw(st.integers(1, 300))
    distinct = draw(st.sampled_from([1, 2, 5, 300, 2**40]))
    null_share = draw(st.sampled_from([0.0, 0.0, 0.1, 1.0]))
    mean_length = draw(st.sampled_from([0, 1, 5, 40]))

    def nulls(size):
        return rng.random(size) < null_share

    def ids(size):
        return pa.array(rng.integers(0, distinct, size), mask=nulls(size) & draw(st.booleans()))

    def floats():
        return pa.array((rng.integers(0, distinct, num_rows) / 7).astype(np.float32), mask=nulls(num_rows))

    offsets = np.concatenate([[0], np.cumsum(rng.poisson(mean_length, num_rows))]).astype(np.int32)
    many = pa.ListArray.from_arrays(pa.array(offsets), ids(offsets[-1]), mask=pa.array(nulls(num_rows)))
    if draw(st.booleans()):  # pages then start with long runs of equal levels
        many = pa.array([None] * num_rows, many.type)
    columns = {"x": floats(), "y": floats(), "one": ids(num_rows), "many": many, "label": floats()}
    nullable = draw(st.booleans()) or any(c.null_count for c in columns.values())
    schema = pa.schema([pa.field(name, column.type, nullable=nullable) for name, column in columns.items()])
    return pa.table(list(columns.values()), schema=schema)


options = st.fixed_dictionaries(
    {
        "compression": st.sampled_from(["none", "snappy", "zstd", "gzip", "brotli", "lz4"]),
        "use_dictionary": st.booleans(),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
        "data_page_size": st.sampled_from([64, 1024, 1 << 20]),
        "dictionary_pagesize_limit": st.sampled_from([64, 1 << 20]),
        "write_batch_size": st.sampled_from([7, 1024]),
        "write_page_checksum": st.booleans(),
    }
)


def plain_columns(leaves):
    return {name for name, leaf in leaves.items() if leaf.is_plain}


def read_all(path, metadata, columns, leaves):
    """The first row group of a file."""
    plan = plan_group(columns, metadata, 0, leaves)
    return read_row_group(path, plan, columns, lambda: metadata, max_bytes=1 << 30, buffers=BufferPool())


def read_at_once(path, plan):
    """Which of the columns the calls that need no Python can read."""
    num_values = plan.bags[:, chunks.NUM_VALUES]
    done, counts = np.empty(len(plan.floats), np.bool_), np.empty(len(plan.bags), np.int64)
    dense = np.empty((plan.num_rows, len(plan.floats) - 1), np.float32)
    offsets = np.empty((len(plan.bags), plan.num_rows + 1), np.int64)
    firsts = np.concatenate([[0], np.cumsum(num_values)])
    with open(path, "rb") as file:
        chunks.read_floats(file.fileno(), plan.floats, dense, np.empty((1, plan.num_rows), np.float32), done)
        chunks.read_bags(file.fileno(), plan.bags, firsts, np.empty(firsts[-1], np.int64), offsets, counts)
    return [*done.tolist(), *(counts >= 0).tolist()]


def assert_same(block, other):
    np.testing.assert_array_equal(block.dense, other.dense)
    np.testing.assert_array_equal(block.labels, other.labels)
    for f in range(len(other.ids)):
        np.testing.assert_array_equal(block.ids[f], other.ids[f])
        np.testing.assert_array_equal(block.offsets[f], other.offsets[f])


@on_files
@given(tables(), options)
def test_our_decoder_agrees_with_pyarrow(tmp_path, table, options):
    path = str(tmp_path / "a.parquet")
    pq.write_table(table, path, **options)
    metadata = pq.read_metadata(path)
    leaves = find_leaves(COLUMNS, metadata.schema)
    assert plain_columns(leaves) == {"x", "y", "one", "many", "label"}
    for name, leaf in leaves.items():  # and did it itself, without falling back
        chunk = metadata.row_group(0).column(leaf.index)
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        data = np.fromfile(path, np.uint8)[start : start + chunk.total_compressed_size]
        codec = CODECS[chunk.compression]
        if name in ("one", "many"):
            ids, offsets = np.empty(chunk.num_values, np.int64), np.empty(table.num_rows + 1, np.int64)
            assert decode_bags(data, codec, leaf.max_def, leaf.max_rep, ids, offsets) >= 0
        else:
            assert decode_floats(data, codec, leaf.max_def, np.empty(table.num_rows, np.float32))
    if options["compression"] in ("none", "snappy"):  # all in one call, without Python
        plan = plan_group(COLUMNS, metadata, 0, leaves)
        assert read_at_once(path, plan) == [True] * 5
    assert_same(read_all(path, metadata, COLUMNS, leaves), COLUMNS.block(table))


def test_columns_of_other_kinds_are_left_to_pyarrow(tmp_path):
    table = pa.table(
        {
            "x": pa.array([1, 2], pa.int32()),
            "y": pa.array([1.5, None], pa.float32()),
            "one": pa.array(["a", None]),
            "many": pa.array([[1], [2, 3]], pa.list_(pa.int64())),
            "label": pa.array([True, False]),
        }
    )
    path = str(tmp_path / "a.parquet")
    pq.write_table(table, path, column_encoding={"y": "BYTE_STREAM_SPLIT"}, use_dictionary=["many"])
    metadata = pq.read_metadata(path)
    leaves = find_leaves(COLUMNS, metadata.schema)
    assert plain_columns(leaves) == {"y", "many"}
    assert_same(read_all(path, metadata, COLUMNS, leaves), COLUMNS.block(table))


@pytest.mark.parametrize("compression", ["none", "snappy"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_damaged_bytes_never_lead_outside(tmp_path, compression, version):
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, 50, n).tolist() or None for n in rng.integers(0, 6, 400)]
    table = pa.table({"x": rng.standard_normal(400).astype(np.float32), "many": lists})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression=compression, data_page_version=version, data_page_size=512)
    group = pq.read_metadata(path).row_group(0)
    for index, name in enumerate(table.column_names):
        chunk = group.column(index)
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        whole = np.fromfile(path, np.uint8)[start : start + chunk.total_compressed_size]
        for _ in range(400):
            data = whole.copy()
            data[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
            data = data[: rng.integers(1, len(data) + 1)] if rng.random() < 0.3 else data
            codec, code = CODECS[chunk.compression], list(CODECS).index(chunk.compression)
            scratch = np.empty(0, np.uint8)
            if name == "x":
                expected, values = guarded(400, np.float32), guarded(400, np.float32)
                readable = decode_floats(data, codec, 1, expected[GUARD:-GUARD])
                ok, _, _ = chunks.decode_float_chunk(data, 1, code, values[GUARD:-GUARD], scratch, np.empty(0, np.float32))
                if ok:  # it may well refuse more
                    assert readable
                    np.testing.assert_array_equal(values, expected)
                assert untouched(values)
                assert untouched(expected)
            else:
                bags = guarded(chunk.num_values, np.int64), guarded(401, np.int64)
                expected = decode_bags(data, codec, 3, 1, *(array[GUARD:-GUARD] for array in bags))
                assert expected < 0 or (np.diff(bags[1][GUARD:-GUARD]) >= 0).all()
                ids, offsets = guarded(chunk.num_values, np.int64), guarded(401, np.int64)
                buffers = (ids[GUARD:-GUARD], offsets[GUARD:-GUARD])
                count, _, _ = chunks.decode_bag_chunk(data, 3, 1, code, *buffers, scratch, np.empty(0, np.int64))
                if count >= 0:
                    assert count == expected
                    np.testing.assert_array_equal(ids[GUARD : GUARD + count], bags[0][GUARD : GUARD + count])
                    np.testing.assert_array_equal(offsets, bags[1])
                assert all(map(untouched, (ids, offsets, *bags)))


GUARD = 64
"""Numbers before and after an array that must not change."""


def guarded(size, dtype):
    return np.full(size + 2 * GUARD, 77, dtype)


def untouched(array):
    return (array[:GUARD] == 77).all() and (array[-GUARD:] == 77).all()


@given(st.lists(st.tuples(st.binary(max_size=80), st.integers(1, 90)), max_size=12))
def test_snappy_is_unpacked_as_by_pyarrow(parts):
    plain = b"".join(piece * times for piece, times in parts)
    packed = np.frombuffer(pa.Codec("snappy").compress(plain, asbytes=True), np.uint8)
    out = guarded(len(plain), np.uint8)
    assert unpack_snappy(packed, out[GUARD:-GUARD])
    assert out[GUARD:-GUARD].tobytes() == plain
    assert untouched(out)
    assert not unpack_snappy(packed, np.empty(len(plain) + 1, np.uint8)), "it has another length"


@given(st.binary(max_size=60), st.integers(0, 200))
def test_damaged_snappy_never_leads_outside(packed, size):
    length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
    data, out = np.frombuffer(length + packed, np.uint8), guarded(size, np.uint8)
    unpacked = unpack_snappy(data, out[GUARD:-GUARD])
    assert untouched(out)
    try:
        theirs = pa.Codec("snappy").decompress(data.tobytes(), size, asbytes=True)
    except (pa.ArrowException, OSError):
        theirs = None
    assert (out[GUARD:-GUARD].tobytes() if unpacked else None) == theirs


def test_a_file_that_was_cut_off_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {name: np.arange(2000, dtype=np.float32) for name in ("x", "y", "label")}
    ids = {name: np.arange(2000) for name in ("one", "many")}
    pq.write_table(pa.table(columns | ids), path, compression="none")
    metadata = pq.read_metadata(path)
    plan = plan_group(COLUMNS, metadata, 0, find_leaves(COLUMNS, metadata.schema))
    with open(path, "r+b") as file:
        file.truncate(int(plan.bags[:, chunks.AT].min()) + 100)
    assert read_at_once(str(path), plan) == [True, True, True, False, False]
    with pytest.raises(DamagedColumnError, match="column `one`: the file ends before its pages do"):
        read_all(str(path), metadata, COLUMNS, find_leaves(COLUMNS, metadata.schema))


def test_a_dot_in_a_column_name_does_not_confuse_columns(tmp_path):
    path = str(tmp_path / "dots.parquet")
    features = FeaturesSpec(
        sparse=(SparseFeatureSpec(name="user", num_rows=9), SparseFeatureSpec(name="user.country", num_rows=9))
    )
    columns = ColumnReader(features)
    table = pa.table({"user": pa.array([[1, 2], [3]]), "user.country": pa.array([7, 8])})
    pq.write_table(table, path)
    metadata = pq.read_metadata(path)
    block = read_all(path, metadata, columns, find_leaves(columns, metadata.schema))
    assert [ids.tolist() for ids in block.ids] == [[1, 2, 3], [7, 8]]


def calls_to_read(path, num_dense, compression):
    """Calls that Python makes to read a row group of so many dense columns, of a file whose plan is known."""
    columns = ColumnReader(FeaturesSpec(dense=(DenseFeatureSpec(name="x_{i}", repeat=num_dense),)), label="label")
    values = np.arange(500, dtype=np.float32)
    pq.write_table(pa.table(dict.fromkeys(columns.names, values)), path, compression=compression)
    metadata, buffers = pq.read_metadata(path), BufferPool()
    plan = plan_group(columns, metadata, 0, find_leaves(columns, metadata.schema))
    calls = []
    for _ in range(2):  # the first compiles
        calls.clear()
        sys.setprofile(lambda _, event, __: calls.append(event))
        try:
            block = read_row_group(path, plan, columns, lambda: metadata, max_bytes=1 << 30, buffers=buffers)
        finally:
            sys.setprofile(None)
    assert (block.dense == values[:, None]).all()
    return len(calls)


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_python_does_nothing_for_each_column(tmp_path, compression):
    path = str(tmp_path / "a.parquet")
    assert calls_to_read(path, 300, compression) == calls_to_read(path, 20, compression)
