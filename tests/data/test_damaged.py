"""Files with wrong bytes in them are refused, or read as what they say; nothing else comes of it."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowstead.data.column_values import to_bags
from rowstead.data.open_log import open_sources
from rowstead.spec.errors import RowsteadError
from tests.small_runs import parquet_spec, written_log

DAMAGES = 40
"""Of each kind of file."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_log(tmp_path_factory.mktemp("log"))


def damaged(whole: bytes, draw: random.Random) -> bytes:
    """Some bytes of the pages are others; the footer stays (`test_fuzz` has damaged ones too)."""
    bytes_ = bytearray(whole)
    end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little") - 8
    for _ in range(draw.randint(1, 4)):
        at, size = draw.randrange(4, end), draw.choice((1, 4, 8))
        bytes_[at : at + size] = draw.choice((bytes([255] * size), draw.randbytes(size)))
    return bytes(bytes_)


@pytest.mark.parametrize("has_dictionary", [True, False])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["snappy", "none", "zstd"])
def test_wrong_bytes_in_pages_are_refused_or_read(
    log: Path, tmp_path: Path, codec: str, version: str, has_dictionary: bool
) -> None:
    table = pq.read_table(sorted(log.glob("train-*.parquet"))[0])
    file = tmp_path / "train-0.parquet"
    pq.write_table(table, file, compression=codec, data_page_version=version, use_dictionary=has_dictionary, row_group_size=400)
    (tmp_path / "eval-0.parquet").write_bytes(whole := file.read_bytes())
    draw, refused = random.Random(f"{codec} {version} {has_dictionary}"), 0
    for _ in range(DAMAGES):
        file.write_bytes(damaged(whole, draw))
        try:
            for batch, _ in open_sources(parquet_spec(tmp_path, "data.parquet.shuffle_rows=500")).train.batches(128):
                assert batch.sparse.offsets[-1] == len(batch.sparse.ids)
        except RowsteadError:
            refused += 1
    assert 0 < refused < DAMAGES


def test_lists_that_overlap_are_refused() -> None:
    lists = pa.ListArray.from_arrays(pa.array([0, 3, 1], pa.int32()), pa.array([1, 2, 3]))
    with pytest.raises(pa.ArrowInvalid):
        to_bags(lists, "ids")
