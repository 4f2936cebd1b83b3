"""Folders and Hive partitions: the same rows as their files, with a column for each `key=value`."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowstead.data.column_values import to_bags
from rowstead.data.file_log import FileLog, open_file_log
from rowstead.data.files import choose_file_log, find_files
from rowstead.data.partitions import read_partitions
from rowstead.spec.data import CsvSpec, FileLogSpec, ParquetSpec, SplitSpec
from rowstead.spec.errors import DataError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec

FEATURES = FeaturesSpec(
    dense=(DenseFeatureSpec(name="x"), DenseFeatureSpec(name="hour"), DenseFeatureSpec(name="day", column="date", part="day")),
    sparse=(
        SparseFeatureSpec(name="u", num_rows=9),
        SparseFeatureSpec(name="weekday", column="date", part="weekday", num_rows=7),
        SparseFeatureSpec(name="site", num_rows=9),
    ),
)
PARTS = [("2026-11-01", 7, "a%20b"), ("2026-11-02", 8, "__HIVE_DEFAULT_PARTITION__"), ("2026-11-03", 9, "c")]


def write_log(folder: Path, kind: str = "parquet", rows: int = 4) -> list[pa.Table]:
    """A file per partition, and files that Spark leaves; returns the tables with the columns of the folders."""
    tables = []
    for number, (day, hour, site) in enumerate(PARTS):
        path = folder / f"date={day}" / f"hour={hour}" / f"site={site}"
        path.mkdir(parents=True)
        table = pa.table(
            {
                "x": pa.array(np.arange(rows) + rows * number, pa.float32()),
                "u": pa.array(np.arange(rows), pa.int64()),
                "label": pa.array([0, 1] * (rows // 2)),
            }
        )
        if kind == "csv":
            (path / "part-0.csv").write_text(
                "\n".join(["x,u,label", *(f"{r['x']},{r['u']},{r['label']}" for r in table.to_pylist())])
            )
        else:
            pq.write_table(table, path / "part-0.parquet", row_group_size=3)
        columns = [
            [date.fromisoformat(day)] * rows,
            [hour] * rows,
            [{"a%20b": "a b"}.get(site, site) if site[0] != "_" else None] * rows,
        ]
        for name, values, type_ in zip(("date", "hour", "site"), columns, (pa.date32(), pa.int64(), pa.string()), strict=True):
            table = table.append_column(name, pa.array(values, type_))
        tables.append(table)
        (path / "_SUCCESS").write_text("")
        (path / ".part-0.parquet.crc").write_text("crc")
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / f"x.{kind}").write_text("half written")
    return tables


def open_all(spec: FileLogSpec, split: str = "all") -> FileLog:
    return open_file_log(spec, FEATURES, split=split)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_hive_folder_is_its_files_with_the_columns_of_their_folders(tmp_path: Path, kind: str, threads: int) -> None:
    whole = pa.concat_tables(write_log(tmp_path / "log", kind))
    pq.write_table(whole, tmp_path / "whole.parquet")
    spec = {"parquet": ParquetSpec, "csv": CsvSpec}[kind](train=(str(tmp_path / "log"),), decode_threads=threads)
    log, expected = open_all(spec), open_all(ParquetSpec(train=(str(tmp_path / "whole.parquet"),)))
    assert log.id_kinds == expected.id_kinds == {"u": "integers", "site": "text"}
    found, wanted = [list(each.raw_blocks()) for each in (log, expected)]
    assert np.array_equal(np.concatenate([b.dense for b in found]), np.concatenate([b.dense for b in wanted]))
    assert np.array_equal(np.concatenate([b.labels for b in found]), np.concatenate([b.labels for b in wanted]))  # type: ignore[arg-type]
    for f in range(3):
        assert np.concatenate([b.ids[f] for b in found]).tolist() == np.concatenate([b.ids[f] for b in wanted]).tolist()
    tables = pa.concat_tables(log.tables(["site", "x", "date"]))
    assert tables.column("site").to_pylist() == whole.column("site").to_pylist()
    assert tables.column("date").to_pylist() == whole.column("date").to_pylist()
    assert pa.concat_tables(log.tables(["hour"])).column("hour").to_pylist() == whole.column("hour").to_pylist()


def test_a_log_is_split_by_a_column_of_its_folders(tmp_path: Path) -> None:
    write_log(tmp_path)
    spec = ParquetSpec(train=(str(tmp_path),), split=SplitSpec(by="time", column="date"), eval_fraction=0.3)
    assert [span.file for span in open_all(spec, "eval").spans] == [2, 2]
    assert {span.file for span in open_all(spec, "train").spans} == {0, 1}


def test_the_column_of_a_file_is_used_before_that_of_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "hour=5" / "date=2026-11-01" / "site=a" / "x.parquet"
    path.parent.mkdir(parents=True)
    table = pa.table({"x": [1.0], "u": [1], "hour": [9], "label": [1]})
    pq.write_table(table, path)
    assert next(open_all(ParquetSpec(train=(str(tmp_path),))).raw_blocks()).dense[0, 1] == 9


def test_values_of_folders_are_integers_or_dates_if_all_are() -> None:
    found = read_partitions(["a=1/b=2026-01-01/c=x/f", "s3://bucket/a=02/b=__HIVE_DEFAULT_PARTITION__/c=3/f?a=1"])
    assert [value.as_py() for value in found[0].values()] == [1, date(2026, 1, 1), "x"]
    assert [value.as_py() for value in found[1].values()] == [2, None, "3"]
    assert [value.as_py() for value in read_partitions(["a=1/f", "f"])[1].values()] == [None]
    assert to_bags(pa.repeat(found[1]["b"], 2), "b")[0].tolist() == []
    with pytest.raises(DataError, match="101 folders"):
        read_partitions(["/".join(f"k{i}=1" for i in range(101)) + "/f"])


def test_what_a_folder_or_glob_has_instead_is_named(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    with pytest.raises(DataError, match=r"folder `.*` has no files that end in `\.csv`.*; it has 3 that end in `\.parquet`"):
        find_files([str(tmp_path / "log")], CsvSpec.suffixes)
    with pytest.raises(
        DataError, match=r"no file matches `.*/log/\*\.parquet`; name the folder itself for all files below it: `.*/log`"
    ):
        find_files([str(tmp_path / "log" / "*.parquet")], ParquetSpec.suffixes)
    with pytest.raises(DataError, match=r"no file matches .*: there is no folder"):
        find_files([str(tmp_path / "logs" / "*.parquet")], ParquetSpec.suffixes)


@pytest.mark.parametrize("name", [b"\xff.csv", b"day=\xff/a.csv", b"\xff=1/a.csv"])
def test_a_name_that_is_not_utf_8_is_refused(tmp_path: Path, name: bytes) -> None:
    path = tmp_path / os.fsdecode(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("x,label\n1,0\n")
    with pytest.raises(DataError, match=r"\\xff.* has a name that is not UTF-8; rename it"):
        find_files([str(tmp_path)], CsvSpec.suffixes)


def test_the_kind_of_a_log_is_that_of_its_files(tmp_path: Path) -> None:
    write_log(tmp_path / "text", "csv")
    like = ParquetSpec(train=("x",), label="clicked", shuffle_rows=5, test_fraction=0.2)
    assert choose_file_log((str(tmp_path / "text"),)) == CsvSpec(train=(str(tmp_path / "text"),))
    assert choose_file_log(("a.tsv.gz",), like=like) == CsvSpec(train=("a.tsv.gz",), label="clicked", shuffle_rows=5)
    assert choose_file_log(("s3://b/x",), like=like) == ParquetSpec(train=("s3://b/x",), label="clicked", shuffle_rows=5)
    text = CsvSpec(train=("x",), types={"a": "string"}, quotes=False)
    assert choose_file_log(("b.txt",), like=text) == CsvSpec(train=("b.txt",), types={"a": "string"}, quotes=False)
