"""Pages that are damaged, or too large to read, are refused with their file, row group and column."""

from __future__ import annotations

import os
import random
import socket
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowstead.data import criteo, page_checks, transforms
from rowstead.data.chunks import FIRST_READ, read_page_headers
from rowstead.data.page_headers import PACKED, START, page_headers
from rowstead.data.parquet import ParquetLog
from rowstead.data.rowgroup import chunk_start
from rowstead.data.synth import write_parquet
from rowstead.spec.data import ParquetSpec, SynthSpec
from rowstead.spec.errors import DataError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec

FEATURES = FeaturesSpec(
    dense=(DenseFeatureSpec(name="x"), DenseFeatureSpec(name="half")),
    sparse=tuple(SparseFeatureSpec(name=name, num_rows=100) for name in ("many", "city")),
)
NAMES = ("x", "half", "many", "city", "label")
"""Of which `half` and `city` are pyarrow's, the others our own decoder's."""


def write_log(path, num_rows=400, **options):
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "x": rng.standard_normal(num_rows).astype(np.float32),
            "half": rng.standard_normal(num_rows),
            "many": pa.array([rng.integers(0, 2**40, n + 1).tolist() for n in rng.integers(0, 5, num_rows)]),
            "city": [f"city {n}" for n in rng.integers(0, 2**40, num_rows)],
            "label": rng.integers(0, 2, num_rows).astype(np.float32),
        }
    )
    pq.write_table(table, path, row_group_size=num_rows // 2, data_page_size=800, write_batch_size=50, **options)


def open_log(path, features=FEATURES, **options):
    return ParquetLog(ParquetSpec(train=(str(path),), decode_threads=1, **options), features, split="all")


def read(path, features=FEATURES, **options):
    log = open_log(path, features, **options)
    return [piece.block for piece in log.pieces(log.spans, rows_ahead=0)]


def page_bytes(path, group, name):
    """The offsets of all bytes of a column's pages, without their headers."""
    metadata = pq.read_metadata(path)
    chunk = metadata.row_group(group).column(NAMES.index(name))
    start = chunk_start(chunk)
    data = np.fromfile(path, np.uint8)[start : start + chunk.total_compressed_size]
    return [start + int(h[START]) + i for h in page_headers(data) for i in range(h[PACKED])]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd", "gzip", "brotli", "lz4"])
def test_a_wrong_bit_in_a_page_with_a_checksum_is_refused_and_its_column_named(tmp_path, codec, dictionary, version):
    path, draw = tmp_path / "a.parquet", random.Random(f"{codec} {dictionary} {version}")
    write_log(path, compression=codec, use_dictionary=dictionary, data_page_version=version, write_page_checksum=True)
    read(path)
    whole = path.read_bytes()
    for name in NAMES:
        data = bytearray(whole)
        data[draw.choice(page_bytes(path, 1, name))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"a\.parquet`: row group 1 cannot be read: column `{name}`: .*Copy the file"):
            read(path)
        path.write_bytes(whole)


def test_a_wrong_checksum_is_refused_where_a_row_group_is_streamed(tmp_path):
    path = tmp_path / "a.parquet"
    write_log(path, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[page_bytes(path, 0, "many")[700]] ^= 1
    path.write_bytes(data)
    log = open_log(path)
    with pytest.raises(DataError, match=r"row group 0 cannot be read: column `many`"):
        list(log.raw_blocks(max_rows=20))  # too few rows for our own decoder


def test_a_page_header_with_fewer_values_is_refused_though_the_page_matches_its_checksum(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"many": [[7] * 5], "label": pa.array([1], pa.float32())}), path, write_page_checksum=True)
    data, at = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(0).column(0).data_page_offset
    at = data.index(b"\x1c\x15\x0a", at)  # the part of a data page's header that begins with the number of values
    data[at + 2] = 2  # one value instead of five
    path.write_bytes(data)
    with pytest.raises(DataError, match="column `many`: its pages have 1 values, but the file's footer says 5"):
        read(path, FeaturesSpec(sparse=(SparseFeatureSpec(name="many", num_rows=100),)))


def test_the_logs_that_we_write_have_checksums(tmp_path):
    write_parquet(SynthSpec(num_train_samples=300, num_eval_samples=10, num_dense=1, num_sparse=1), tmp_path)
    path = tmp_path / "train-00000.parquet"
    chunk = pq.read_metadata(path).row_group(0).column(0)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 4
    path.write_bytes(data)
    features = FeaturesSpec(dense=(DenseFeatureSpec(name="dense_0"),))
    with pytest.raises(DataError, match="column `dense_0`: page 0 does not match its checksum"):
        read(path, features)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_page_that_would_take_too_much_memory_is_refused(tmp_path, monkeypatch, streamed):
    path = tmp_path / "a.parquet"
    write_log(path)
    read(path)
    monkeypatch.setattr(page_checks, "MAX_PAGE_BYTES", 600)
    log = open_log(path)
    with pytest.raises(DataError, match=r"column `\w+`: page \d has [\d,]+ bytes when decompressed, and the limit is 600"):
        list(log.raw_blocks(max_rows=20 if streamed else None))


def test_pages_larger_than_the_footer_says_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    write_log(path, compression="none", use_dictionary=False)
    monkeypatch.setattr(page_checks, "SLACK_BYTES", 100)
    data, chunk = path.read_bytes(), pq.read_metadata(path).row_group(0).column(3)
    size, smaller = (varint(2 * n) for n in (chunk.total_uncompressed_size, chunk.total_uncompressed_size - 2000))
    footer_at = len(data) - 8 - struct.unpack("<I", data[-8:-4])[0]
    assert len(size) == len(smaller)
    path.write_bytes(data[:footer_at] + data[footer_at:].replace(size, smaller, 1))
    with pytest.raises(DataError, match=r"or more when decompressed, but the file's footer says [\d,]+"):
        read(path)


def test_page_headers_with_long_texts_are_read(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [letter * 3000 for letter in "abc"]
    pq.write_table(pa.table({"city": texts, "label": pa.array([0, 1, 1], pa.float32())}), path, use_dictionary=False)
    metadata = pq.read_metadata(path)
    data, chunk = np.fromfile(path, np.uint8), metadata.row_group(0).column(0)
    headers = page_headers(data[chunk.data_page_offset :][: chunk.total_compressed_size])
    assert headers[0, START] > FIRST_READ
    with path.open("rb") as file:
        found = read_page_headers(file.fileno(), chunk.data_page_offset, chunk.total_compressed_size)
    np.testing.assert_array_equal(found, headers)
    (block,) = read(path, FeaturesSpec(sparse=(SparseFeatureSpec(name="city", num_rows=100),)))
    assert block.num_rows == 3


def varint(number):
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def test_a_row_of_too_many_ids_is_a_bad_row_unless_max_ids_cuts_it_off(tmp_path, monkeypatch):
    monkeypatch.setattr(transforms, "MAX_IDS", 50)
    path = tmp_path / "a.parquet"
    lists = [[1], list(range(51)), list(range(50))]
    pq.write_table(pa.table({"many": lists, "label": pa.array([0, 1, 1], pa.float32())}), path)

    def features(max_ids):
        return FeaturesSpec(sparse=(SparseFeatureSpec(name="many", num_rows=100, max_ids=max_ids),))

    with pytest.raises(DataError, match=r"row 1 \(from 0\): sparse column `many` has 51 ids, and the limit for one row is 50"):
        read(path, features(None))
    log = open_log(path, features(None), on_bad_row="skip")
    (piece,) = log.pieces(log.spans, rows_ahead=0)
    assert piece.good.tolist() == [True, False, True]
    assert len(read(path, features(20))) == 1


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device"])
def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "a.parquet"
    server = socket.socket(socket.AF_UNIX)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        server.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    with server, pytest.raises(DataError, match=rf"a\.parquet` is {kind}; give a regular file"):
        open_log(path)
    with pytest.raises(DataError, match=rf"a\.parquet` is {kind}"):
        criteo.convert([path], tmp_path / "out")


def test_a_file_that_changes_while_it_is_read_is_refused_and_named(tmp_path):
    path = tmp_path / "a.parquet"
    write_log(path)
    log = open_log(path)
    os.utime(path, ns=(1, 1))  # touched, not changed
    assert sum(block.num_rows for block in log.raw_blocks()) == 400
    write_log(path, num_rows=402)
    with pytest.raises(DataError, match=r"a\.parquet` changed while it was being read: it had [\d,]+ bytes and now has"):
        list(log.raw_blocks())
    path.unlink()
    with pytest.raises(DataError, match=r"a\.parquet` cannot be opened: No such file"):
        list(log.raw_blocks())
    os.mkfifo(path)
    with pytest.raises(DataError, match=r"a\.parquet` is a pipe"):
        list(log.raw_blocks())
