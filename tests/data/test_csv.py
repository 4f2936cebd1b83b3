"""CSV and TSV give the batches of Parquet, bit for bit; hostile and damaged text ends with an error, in bounded memory."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import string
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowstead import run
from rowstead.data import csv_index
from rowstead.data.csv_cells import CsvFormat, convert_cells, guess_type, read_rows, type_name
from rowstead.data.csv_index import find_groups
from rowstead.data.encode import Encoder
from rowstead.data.file_log import open_file_log
from rowstead.data.file_source import FileSource
from rowstead.data.open_log import open_sources
from rowstead.data.source import Source
from rowstead.data.transforms import DenseTransforms
from rowstead.serve.predict import predict
from rowstead.spec.data import CsvSpec, FileLogSpec, ParquetSpec
from rowstead.spec.errors import DataError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.parse import parse
from rowstead.spec.run import RunSpec
from rowstead.training.trained import evaluate
from tests.data.source_contract import NUM_SAMPLES, SourceContract, assert_same

FEATURES = FeaturesSpec(
    dense=(
        DenseFeatureSpec(name="price", missing=0),
        DenseFeatureSpec(name="member"),
        DenseFeatureSpec(name="age", log=True, missing="mean", standardise=True),
        DenseFeatureSpec(name="day", column="when", part="day"),
        DenseFeatureSpec(name="vector", length=2),
    ),
    sparse=(
        SparseFeatureSpec(name="user", num_rows=100),
        SparseFeatureSpec(name="hash", num_rows=100),
        SparseFeatureSpec(name="city", num_rows=100),
        SparseFeatureSpec(name="likes", num_rows=100),
        SparseFeatureSpec(name="tags", num_rows=100),
        SparseFeatureSpec(name="hour", column="when", part="hour", num_rows=24),
    ),
)
LISTS = {"likes": "list<int64>", "tags": "list<string>", "vector": "list<float64>"}
on_files = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def log_of(num_rows: int, seed: int = 0) -> pa.Table:
    """Rows of every type, with nulls where pandas would have them."""
    rng = np.random.default_rng(seed)

    def some(values: list[object]) -> list[object]:
        return [None if missing else value for value, missing in zip(values, rng.random(num_rows) < 0.2, strict=True)]

    cities = ['say "hi"', "Łódź", "two\nlines", "a, b", "x"]
    when = np.datetime64("2026-11-01T00:00:00", "us") + rng.integers(0, 10**12, num_rows)
    return pa.table(
        {
            "price": pa.array(some(rng.normal(0, 1e3, num_rows).tolist())),
            "member": pa.array((rng.random(num_rows) < 0.5).tolist()),
            "age": pa.array(some(rng.integers(1, 90, num_rows).astype(float).tolist())),
            "when": pa.array(when, pa.timestamp("us")),
            "vector": pa.array([[float(x), float(y)] for x, y in rng.normal(size=(num_rows, 2))]),
            "user": pa.array(some(rng.integers(0, 1000, num_rows).astype(float).tolist())),
            "hash": pa.array(rng.integers(2**63, 2**64, num_rows, np.uint64)),
            "city": pa.array(some([cities[i] for i in rng.integers(0, len(cities), num_rows)])),
            "likes": pa.array(
                [rng.integers(0, 50, size).tolist() or None for size in rng.integers(0, 4, num_rows)], pa.list_(pa.int64())
            ),
            "tags": pa.array([["a", "b c"][:size] or None for size in rng.integers(0, 3, num_rows)], pa.list_(pa.string())),
            "weight": pa.array(rng.random(num_rows).tolist()),
            "label": pa.array(rng.integers(0, 2, num_rows)),
        }
    )


def text_of(table: pa.Table, separator: str = ",", line_end: str = "\n") -> bytes:
    """The table as Python's own writer of CSV writes it."""
    out = io.StringIO(newline="")
    quoting = csv.QUOTE_ALL if line_end == "\r" else csv.QUOTE_MINIMAL
    writer = csv.writer(out, delimiter=separator, lineterminator=line_end, quoting=quoting)
    writer.writerow(table.column_names)
    for row in zip(*(column.to_pylist() for column in table.columns), strict=True):
        writer.writerow(["" if x is None else "|".join(map(str, x)) if isinstance(x, list) else x for x in row])
    return out.getvalue().encode()


def source_of(spec: FileLogSpec, features: FeaturesSpec = FEATURES, split: str = "train") -> FileSource:
    log = open_file_log(spec, features, split=split)
    blocks = open_file_log(spec, features, split="train").raw_blocks()
    return FileSource(log, Encoder(features, tables_of(features, width=4), DenseTransforms.learn(features, blocks)), seed=7)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(csv_index, "GROUP_ROWS", 40)
    return 40


@pytest.mark.parametrize(
    ("name", "separator", "line_end", "pack"),
    [
        ("log.csv", ",", "\n", lambda text: text),
        ("log.tsv", "\t", "\r\n", lambda text: text),
        ("log.csv.gz", ";", "\n", lambda text: gzip.compress(text[:999]) + gzip.compress(text[999:])),
        ("log.txt.zst", "|", "\r", lambda text: pa.compress(text, codec="zstd", asbytes=True)),
    ],
)
def test_equal_content_gives_the_batches_of_parquet(
    tmp_path: Path, small_groups: int, name: str, separator: str, line_end: str, pack: object
) -> None:
    table = log_of(300)
    if separator == "|":  # lists have it, too
        table, lists = table.drop_columns([*LISTS]), {}
        features = FeaturesSpec(dense=FEATURES.dense[:4], sparse=(*FEATURES.sparse[:3], FEATURES.sparse[5]))
    else:
        lists, features = LISTS, FEATURES
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=small_groups)
    (tmp_path / name).write_bytes(pack(text_of(table, separator, line_end).replace(b"\r\nlines", b"\nlines")))  # type: ignore[operator]
    shared = {"weight": "weight", "shuffle_rows": 90, "decode_threads": 2}
    for split in ("train", "eval"):
        text = source_of(CsvSpec(train=(str(tmp_path / name),), types=lists, **shared), features, split)  # type: ignore[arg-type]
        expected = source_of(ParquetSpec(train=(str(tmp_path / "log.parquet"),), **shared), features, split)  # type: ignore[arg-type]
        assert text.log.id_kinds == expected.log.id_kinds
        for where in ({}, {"epoch": 2}, {"rank": 1, "world_size": 3}):
            pairs = list(zip(text.batches(32, **where), expected.batches(32, **where), strict=True))  # type: ignore[arg-type]
            assert len(pairs) > 0
            for (found, after), (batch, cursor) in pairs:
                assert after == cursor
                assert all(torch.equal(*both) for both in zip(found.tensors(), batch.tensors(), strict=True))


class TestCsvSource(SourceContract):
    """Shuffled in small windows, by several threads, from a compressed file."""

    @pytest.fixture
    def source(self, tmp_path: Path, small_groups: int) -> Source:
        (tmp_path / "log.csv.gz").write_bytes(gzip.compress(text_of(log_of(NUM_SAMPLES + 50))))
        files, other = (str(tmp_path / "log.csv.gz"),), tmp_path / "other.csv"
        other.write_bytes(text_of(log_of(20)))
        spec = CsvSpec(train=files, eval_fraction=50 / 550, types=LISTS, weight="weight", shuffle_rows=150, decode_threads=3)  # type: ignore[arg-type]
        return source_of(spec)


# What is a row

text = st.text('ab,;"\n\r', max_size=30).map(str.encode)


@settings(deadline=None)
@given(text, st.booleans(), st.integers(1, 9), st.integers(1, 4))
def test_rows_are_those_of_pyarrow_wherever_the_text_is_cut(text: bytes, quotes: bool, step: int, group_rows: int) -> None:
    blocks = [text[at : at + step] for at in range(0, len(text), step)]
    before, csv_index.GROUP_ROWS = csv_index.GROUP_ROWS, group_rows
    try:
        groups = list(find_groups("x", blocks, separator=",", quotes=quotes, has_header=False, keep=True))
    except DataError:
        assert quotes
        assert b'"' in text  # it is not closed
        return
    finally:
        csv_index.GROUP_ROWS = before
    assert b"".join(group.text for group in groups) == text[: sum(group.num_bytes for group in groups)]
    assert all(group.num_rows == group_rows for group in groups[:-1])
    form = CsvFormat(names=("x", "y"), separator=",", quotes=quotes, list_separator="|")
    for group in groups:  # `read_rows` asserts that pyarrow counts as many rows
        table, problems = read_rows(group.text, form, {"x": pa.string(), "y": pa.int64()}, num_rows=group.num_rows)
        assert table.num_rows == group.num_rows
        assert set(problems) <= set(range(group.num_rows))


def test_rows_that_cannot_be_read_are_named_and_stand_in_their_place() -> None:
    form = CsvFormat(names=("x", "y"), separator=",", quotes=True, list_separator="|")
    rows = b"1,2\n\n1,2,3\nx,4\n,5\n7,oops\n8\n9,1|2\n10,1|b\n"
    table, problems = read_rows(rows, form, {"x": pa.int64(), "y": pa.list_(pa.int64())}, num_rows=8)
    assert table.column("x").to_pylist() == [1, None, None, None, 7, None, 9, 10]
    assert table.column("y").to_pylist() == [[2], None, [4], [5], [None], None, [1, 2], [1, None]]
    assert problems == {
        1: "it has 3 cells instead of 2",
        2: "column `x` has `x`, which cannot be read as int64",
        4: "column `y` has `oops`, which cannot be read as list<int64>",
        5: "it has 1 cells instead of 2",
        7: "column `y` has `1|b`, which cannot be read as list<int64>",
    }


cells = st.one_of(
    st.integers(-(2**64), 2**64).map(str),
    st.floats().map(repr),
    st.dates().map(str),
    st.datetimes().map(str),
    st.sampled_from(["", "NA", "nan", " 7", "true", "False", "1e5", "0x1F", "-", "007", "1_0", "inf"]),
    st.text(
        string.printable.replace("\r", "")
        .replace("\n", "")
        .replace('"', "")
        .replace(",", "")
        .replace("\x0b", "")
        .replace("\x0c", "")
    ),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(cells, min_size=1, max_size=5), st.sampled_from(["int64", "uint64", "float64", "bool", "date", "timestamp"]))
def test_cells_are_converted_as_pyarrow_converts_columns(values: list[str], name: str) -> None:
    """The slow way finds the same values, and the same cells that are wrong, as reading each cell on its own."""
    kind = guess_type(
        [],
        as_id=False,
        among=[
            {"float64": pa.float64(), "bool": pa.bool_(), "date": pa.date32()}.get(name)
            or (pa.timestamp("us") if name == "timestamp" else getattr(pa, name)())
        ],
    )
    found, wrong = convert_cells(pa.chunked_array([pa.array(values, pa.string())]), kind)
    form = CsvFormat(names=("x", "y"), separator=",", quotes=True, list_separator="|")
    for row, cell in enumerate(values):
        table, problems = read_rows(f"{cell},\n".encode(), form, {"x": kind}, num_rows=1)
        assert (row in wrong) == bool(problems), cell
        assert pa.array([found[row].as_py()], kind).equals(table.column("x").combine_chunks()) or cell.lower().strip(" \t") in (
            "nan",
            "-nan",
        )


@pytest.mark.parametrize(
    ("cells", "as_id", "expected"),
    [
        (["1", "", "22"], True, "int64"),
        (["1", "18446744073709551615"], True, "uint64"),
        (["1.0", "NA"], True, "float64"),
        (["007", "8"], True, "string"),
        (["007", "8"], False, "int64"),
        (["12e4", "99"], True, "string"),
        (["12e4", "99"], False, "float64"),
        (["true", "False"], True, "bool"),
        (["2026-11-01"], True, "date"),
        (["2026-11-01 12:00:00", "2026-11-01"], True, "timestamp"),
        (["2026-11-01T12:00:00.123456789Z"], True, "timestamp"),
        (["2026-11-01", "soon"], True, "string"),
    ],
)
def test_types_are_guessed_from_the_first_rows(cells: list[str], as_id: bool, expected: str) -> None:
    assert type_name(guess_type(cells, as_id=as_id)) == expected


# Files that are not as they should be

X = FeaturesSpec(dense=(DenseFeatureSpec(name="x", missing=0),), sparse=(SparseFeatureSpec(name="u", num_rows=9),))


def read(path: Path, features: FeaturesSpec = X, **spec: object) -> list[float]:
    source = source_of(CsvSpec(train=(str(path),), shuffle_rows=0, **spec), features, "all")  # type: ignore[arg-type]
    return [float(x) for batch, _ in source.batches(4) for x in batch.dense[:, 0]]


def written(folder: Path, text: bytes | str, name: str = "log.csv") -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


def test_bad_rows_are_named_or_skipped_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path, "x,u,label\n1,2,0\n2,3,1,9\n3,4,5\nfour,5,1\n5,6,1\n")
    with pytest.raises(
        DataError, match=r"log\.csv`, row 1 \(from 0\): it has 4 cells instead of 3\. .* data\.csv\.on_bad_row: skip"
    ):
        read(path)
    source = source_of(CsvSpec(train=(str(path),), on_bad_row="skip", types={"x": "float64"}), X, "all")
    assert sorted(float(x) for batch, _ in source.batches(4) for x in batch.dense[:, 0]) == [1, 5]
    assert source.num_skipped == 3
    path = written(tmp_path, "x,u,label\n1,2,0\nfour,5,1\n5,6,1\n")
    with pytest.raises(DataError, match=r"row 1 \(from 0\): column `x` has `four`, which cannot be read as float64"):
        read(path, types={"x": "float64"})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"x,u,label\n", "no rows in"),
        (b"a,b,c\n1,2,3\n", "no column `x`"),
        (b"x,u,x,label\n1,2,3,0\n", "two columns are named `x`"),
        (b'x,u,label\n1,"2,0\n', "in the last row a quote is not closed.*quotes: false"),
        (b"PAR1" + bytes(20), "is a Parquet file; name it under data.parquet"),
        (b"PK\x03\x04" + bytes(20), "is a zip archive"),
        ("x,u,label\n1,2,0\n".encode("utf-16"), "UTF-16"),
        (b"\xff\x00\xf0,u,label\n1,2,0\n", "its first line cannot be read"),
        (gzip.compress(b"x,u,label\n1,2,0\n" * 99, mtime=0)[:-9], "cannot be read"),
        (b"\x1f\x8b" + bytes(30), "cannot be read"),
    ],
)
def test_what_is_no_log_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(DataError, match=rf"log\.csv`.*{says}|{says}.*log\.csv`"):
        read(written(tmp_path, content))


def test_rows_columns_and_unpacked_bytes_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_index, "MAX_ROW_BYTES", 1000)
    with pytest.raises(DataError, match=r"row 1 \(from 0\) has more than 1,000 bytes; a quote is not closed"):
        read(written(tmp_path, 'x,u,label\n1,2,0\n1,"' + "2,0\n" * 1000))
    monkeypatch.setattr(csv_index, "_SMALL_BYTES", 1 << 16)
    with pytest.raises(DataError, match=r"becomes more than 1,000 times larger"):
        read(written(tmp_path, gzip.compress(b"x,u,label\n1,2,0\n" + b"\n" * (1 << 23)), "log.csv.gz"))
    monkeypatch.setattr("rowstead.data.csv_log.MAX_FEATURES", 3)
    with pytest.raises(DataError, match="has 4 columns, and at most 3 are allowed"):
        read(written(tmp_path, "x,u,label,z\n1,2,0,0\n"))
    monkeypatch.setattr("rowstead.data.csv_log.SAMPLE_BYTES", 20)
    with pytest.raises(DataError, match=r"log\.csv`: there is no header in its first 20 bytes"):
        read(written(tmp_path, "x,u,label" + "," * 40))


@on_files
@given(st.binary(max_size=60), st.integers(0, 40), st.integers(0, 3))
def test_whatever_the_bytes_are_reading_ends_with_rows_or_an_error(tmp_path: Path, junk: bytes, at: int, kind: int) -> None:
    text = b"x,u,label\n1,2,0\n3,4,1\n5,6,1\n"
    text = [lambda b: b, gzip.compress, lambda b: pa.compress(b, codec="zstd", asbytes=True), lambda b: b][kind](text)
    path = written(tmp_path, text[:at] + junk + text[at + len(junk) :])
    with contextlib.suppress(DataError):
        read(path, on_bad_row="skip")


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, small_groups: int) -> None:
    path = written(tmp_path, "x,u,label\n" + "1,2,0\n" * 200)
    batches = source_of(CsvSpec(train=(str(path),), decode_threads=1, shuffle_rows=40), X).batches(8)
    next(batches)
    path.write_text("x,u,label\n" + "1,2,0\n" * 300)
    with pytest.raises(DataError, match="changed while it was being read: it had"):
        list(batches)


def test_a_byte_order_mark_names_without_a_header_and_null_words_are_understood(tmp_path: Path) -> None:
    assert read(written(tmp_path, b"\xef\xbb\xbfx,u,label\n1,2,0\nNA,,1\nnull,3,1\n")) == [1, 0, 0]
    assert read(written(tmp_path, "1,2,0\n4,5,1\n"), columns=("x", "u", "label")) == [1, 4]


def test_another_file_may_have_its_columns_in_another_order(tmp_path: Path) -> None:
    written(tmp_path, "x,u,label\n1,2,0\n", "a.csv")
    written(tmp_path, "label,u,more,x\n1,2,,8.5\n", "b.csv")
    with pytest.raises(DataError, match=r"column `x` has `8\.5`, which cannot be read as int64"):
        read(tmp_path)
    assert read(tmp_path, types={"x": "float64"}) == [1, 8.5]


def test_text_that_was_integers_in_training_is_read_as_what_it_was(tmp_path: Path) -> None:
    path = written(tmp_path, "x,u,label\n1,2,0\n")
    log = open_file_log(CsvSpec(train=(str(path),)), X, split="all", id_kinds={"u": "text"})
    assert log.id_kinds == {"u": "text"}


def test_pyarrow_reads_what_the_reference_writes() -> None:
    """So that the comparison with Parquet compares the content that was meant."""
    table = log_of(50)
    found = pa_csv.read_csv(pa.BufferReader(text_of(table)), parse_options=pa_csv.ParseOptions(newlines_in_values=True))
    assert found.column("label").to_pylist() == table.column("label").to_pylist()
    assert found.column("city").to_pylist() == [city or "" for city in table.column("city").to_pylist()]


def test_text_without_a_label_is_scored_by_a_model_whose_recipe_has_its_type(tmp_path: Path) -> None:
    table = log_of(300).select(["price", "user", "label"])
    written(tmp_path, text_of(table))
    plain: dict[str, Any] = {
        "name": "x",
        "data": {"csv": {"train": str(tmp_path / "log.csv"), "types": {"user": "float64", "label": "int64"}}},
        "features": {"dense": [{"name": "price", "missing": 0}], "sparse": [{"name": "user", "num_rows": 99}]},
        "model": {"width": 4, "bottom": [4], "top": [4]},
        "train": {"batch_size": 64, "max_steps": 2},
        "threads": 1,
    }
    done = run.train(parse(RunSpec, plain), out=tmp_path / "run")
    (tmp_path / "new.csv").write_bytes(text_of(table.drop_columns(["label"])))
    for name in ("log.csv", "new.csv"):
        predict(str(done.folder), tmp_path / f"{name}.p.parquet", data=str(tmp_path / name))
    with_labels, without = (pq.read_table(tmp_path / f"{name}.p.parquet") for name in ("log.csv", "new.csv"))
    assert with_labels.column("p").equals(without.column("p"))
    plain["data"]["csv"]["types"] = {"usr": "int64"}
    with pytest.raises(DataError, match="no column `usr`"):
        run.train(parse(RunSpec, plain), out=tmp_path / "other")


def test_a_run_on_parquet_scores_text_and_a_run_on_text_is_packed(tmp_path: Path) -> None:
    """Every way that data come in takes either kind."""
    table = log_of(400).select(["price", "age", "user", "city", "when", "label"])
    pq.write_table(table, tmp_path / "log.parquet")
    written(tmp_path, text_of(table))
    plain: dict[str, Any] = {
        "name": "x",
        "data": {"parquet": {"train": str(tmp_path / "log.parquet")}},
        "features": {
            "dense": [{"name": "price", "missing": 0, "standardise": True}],
            "sparse": [{"name": "user", "num_rows": 99}, {"name": "city", "num_rows": 9}, {"name": "age", "num_rows": 99}],
        },
        "model": {"width": 4, "bottom": [4], "top": [4]},
        "train": {"batch_size": 64},
        "threads": 1,
    }
    done = run.train(parse(RunSpec, plain), out=tmp_path / "run")
    expected = evaluate(str(done.folder), data=str(tmp_path / "log.parquet"))
    assert evaluate(str(done.folder), data=str(tmp_path / "log.csv")) == expected
    for name in ("log.parquet", "log.csv"):
        out = tmp_path / f"{name}.p.parquet"
        predict(str(done.folder), out, data=str(tmp_path / name), keep=["city", "when"])
    assert pq.read_table(tmp_path / "log.csv.p.parquet").equals(pq.read_table(tmp_path / "log.parquet.p.parquet"))
    plain["data"] = {"csv": {"train": str(tmp_path / "log.csv")}}
    direct = open_sources(parse(RunSpec, plain)).train.batches(64)
    plain["data"]["cache"] = str(tmp_path / "packed")
    assert_same(open_sources(parse(RunSpec, plain)).train.batches(64), direct)
    again = run.train(parse(RunSpec, plain), out=tmp_path / "again")
    assert again.quality == done.quality
