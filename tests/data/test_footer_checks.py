"""Footers over which pyarrow would end the process are refused before it is asked for their column chunks."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowstead.data.files import LogFile
from rowstead.data.footer_checks import find_footer_problem
from rowstead.data.footers import Footers
from rowstead.spec.errors import DataError

SNAPPY = b"\x18\x01x\x15\x02"
"""In the footer of a file with one column: its name, and its codec."""


def build_file(values, **options) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": values}), sink, **options)
    return sink.getvalue()


def footer_of(data: bytes) -> bytes:
    return data[-8 - int.from_bytes(data[-8:-4], "little") :]


@pytest.mark.parametrize("num_columns", [1, 40])
def test_footers_of_whole_files_have_no_problem(num_columns):
    sink = io.BytesIO()
    columns = {f"x{i}": [[1, 2], None, []] if i % 2 else ["a", None, "b"] for i in range(num_columns)}
    pq.write_table(pa.table(columns), sink, row_group_size=2, write_page_index=True)
    data = sink.getvalue()
    assert find_footer_problem(footer_of(data), pq.read_metadata(io.BytesIO(data))) is None


@pytest.mark.parametrize("codec", [8, 23, -56])
def test_an_unknown_codec_is_refused(tmp_path, codec):
    data = build_file([1, 2, 3])
    footer = footer_of(data)
    assert footer.count(SNAPPY) == 1
    zigzag = 2 * codec if codec >= 0 else -2 * codec - 1
    path = tmp_path / "a.parquet"
    path.write_bytes(data[: -len(footer)] + footer.replace(SNAPPY, SNAPPY[:-1] + bytes([zigzag])))
    with pytest.raises(DataError, match=r"a\.parquet` has a damaged footer: it has an unknown codec. Copy the file again"):
        Footers().read_metadata(LogFile(str(path)))


def test_a_histogram_of_other_levels_is_refused():
    lists, numbers = build_file([[1], [2, 3]]), build_file([1, 2])
    whole = pq.read_metadata(io.BytesIO(numbers))
    assert find_footer_problem(footer_of(lists), whole) == "it has a histogram of levels that do not exist"
