"""Parquet files of a split: bounded sizes, all or none, and clear words when the disk says no."""

from __future__ import annotations

import errno
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowstead.data.write import SplitWriter, disk_errors
from rowstead.spec.errors import DataError

SCHEMA = pa.schema([("x", pa.int64())])


def rows(first: int, last: int) -> pa.Table:
    return pa.table({"x": pa.array(range(first, last), pa.int64())})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_rows_keep_their_order_over_files_and_groups(tmp_path: Path) -> None:
    with SplitWriter(tmp_path / "out", SCHEMA, rows_per_file=100, rows_per_group=30) as writer:
        for first in range(0, 245, 7):
            writer.write("train", rows(first, first + 7))
        writer.write("eval", rows(0, 5))
    summary = writer.summary(num_bytes_read=1)
    assert names(tmp_path / "out") == [
        "eval-00000.parquet",
        "train-00000.parquet",
        "train-00001.parquet",
        "train-00002.parquet",
    ]
    assert summary.num_rows == {"train": 245, "eval": 5}
    assert [path.name for path in summary.files["eval"]] == ["eval-00000.parquet"]
    assert summary.num_bytes_written == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    first = pq.ParquetFile(tmp_path / "out" / "train-00000.parquet")
    assert [first.metadata.row_group(i).num_rows for i in range(first.num_row_groups)] == [30, 30, 30, 10]
    together = pa.concat_tables(pq.read_table(path) for path in summary.files["train"])
    assert together["x"].to_pylist() == list(range(245))


def test_one_large_table_is_cut_into_files(tmp_path: Path) -> None:
    with SplitWriter(tmp_path, SCHEMA, rows_per_file=10, rows_per_group=1000) as writer:
        writer.write("train", rows(0, 35))
    assert [pq.read_metadata(tmp_path / name).num_rows for name in names(tmp_path)] == [10, 10, 10, 5]


def test_nothing_has_its_final_name_before_the_end(tmp_path: Path) -> None:
    with SplitWriter(tmp_path, SCHEMA, rows_per_file=10) as writer:
        writer.write("train", rows(0, 25))
        assert names(tmp_path) == ["train-00000.parquet.tmp", "train-00001.parquet.tmp"]


def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, SCHEMA, rows_per_file=10)
    writer.write("train", rows(0, 25))
    with pytest.raises(KeyboardInterrupt), writer:
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_files_of_an_earlier_conversion_are_refused_and_named(tmp_path: Path) -> None:
    with SplitWriter(tmp_path, SCHEMA) as writer:
        writer.write("train", rows(0, 5))
    with pytest.raises(DataError, match=r"already has train-00000.parquet; .*--overwrite"):
        SplitWriter(tmp_path, SCHEMA)


def test_overwrite_replaces_all_files_only_on_success(tmp_path: Path) -> None:
    with SplitWriter(tmp_path, SCHEMA, rows_per_file=5) as writer:
        writer.write("train", rows(0, 15))
    with pytest.raises(KeyboardInterrupt), SplitWriter(tmp_path, SCHEMA, overwrite=True) as writer:
        raise KeyboardInterrupt
    assert len(names(tmp_path)) == 3
    with SplitWriter(tmp_path, SCHEMA, overwrite=True) as writer:
        writer.write("train", rows(100, 102))
    assert names(tmp_path) == ["train-00000.parquet"]
    assert pq.read_table(tmp_path / "train-00000.parquet")["x"].to_pylist() == [100, 101]


def test_leftovers_of_a_killed_conversion_are_removed(tmp_path: Path) -> None:
    (tmp_path / "train-00007.parquet.tmp").write_bytes(b"half")
    with SplitWriter(tmp_path, SCHEMA) as writer:
        writer.write("train", rows(0, 5))
    assert names(tmp_path) == ["train-00000.parquet"]


def test_a_full_disk_is_a_data_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = SplitWriter(tmp_path, SCHEMA, rows_per_group=10)
    writer.write("train", rows(0, 10))
    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(DataError, match="the disk is full while writing to"), writer:
        writer.write("train", rows(0, 10))
    assert names(tmp_path) == []


def test_a_disk_that_is_really_full_is_a_data_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(DataError, match="disk is full"), disk_errors(Path("here")):
        Path("/dev/full").write_bytes(b"x")


@pytest.mark.parametrize("name", ["rows_per_file", "rows_per_group"])
def test_sizes_must_be_positive(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"{name} must be at least 1"):
        SplitWriter(tmp_path, SCHEMA, **{name: 0})  # type: ignore[arg-type]


def test_a_file_in_place_of_the_folder_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(DataError, match="is a file; give a folder"):
        SplitWriter(tmp_path / "out", SCHEMA)
