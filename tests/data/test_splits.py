"""Training files are split by file order, by a hash or by time; each row is in one split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.data.open_log import open_sources
from rowstead.data.parquet import ParquetLog
from rowstead.data.source import Source
from rowstead.spec.data import ParquetSpec, SplitSpec
from rowstead.spec.errors import DataError, SpecError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec
from tests.data.source_contract import NUM_SAMPLES, SourceContract
from tests.small_runs import parquet_spec

FEATURES = FeaturesSpec(
    dense=(DenseFeatureSpec(name="row"),),
    sparse=(SparseFeatureSpec(name="bag", num_rows=100), SparseFeatureSpec(name="user", num_rows=9)),
)
NAMES = ("train", "eval", "test")


def table_of(num_rows: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    days = rng.permutation(num_rows)
    return pa.table(
        {
            "row": pa.array(np.arange(num_rows), pa.float32()),
            "bag": [list(range(i % 4)) for i in range(num_rows)],
            "user": rng.integers(0, 8, num_rows),
            "name": [f"user {i % 11}" if i % 13 else None for i in range(num_rows)],
            "day": days,
            "moment": pa.array(days * 86_400_000_000, pa.timestamp("us")),
            "date": pa.array(days, pa.int32()).cast(pa.date32()),
            "text": [str(np.datetime64(int(day), "D")) for day in days],
            "label": pa.array(rng.integers(0, 2, num_rows), pa.float32()),
        }
    )


def write(folder: Path, num_rows: int = 400, row_group_size: int = 37) -> str:
    pq.write_table(table_of(num_rows), folder / "a.parquet", row_group_size=row_group_size)
    return str(folder / "a.parquet")


def rows_of(file: str, name: str, **options: Any) -> list[int]:
    """Which rows a split has, in its order."""
    spec = ParquetSpec(train=(file,), **options)
    log = ParquetLog(spec, FEATURES, split=name)  # type: ignore[arg-type]
    blocks = list(log.raw_blocks())
    for block in blocks:
        rows = block.dense[:, 0].astype(int)
        assert block.offsets[0].tolist() == [0, *np.cumsum(rows % 4).tolist()]
        assert block.ids[0].tolist() == [id for row in rows for id in range(row % 4)]
    found = [int(row) for block in blocks for row in block.dense[:, 0]]
    assert len(found) == log.num_samples
    return found


@pytest.mark.parametrize(
    "split",
    [
        SplitSpec(),
        SplitSpec(by="hash"),
        SplitSpec(by="hash", column="user"),
        SplitSpec(by="hash", column="name"),
        SplitSpec(by="time", column="day"),
        SplitSpec(by="time", column="moment", eval_from="1970-07-01"),
    ],
)
def test_each_row_is_in_one_split(tmp_path: Path, split: SplitSpec) -> None:
    file = write(tmp_path)
    found = {name: rows_of(file, name, split=split, eval_fraction=0.2, test_fraction=0.25) for name in NAMES}
    assert all(found.values())
    assert all(rows == sorted(rows) for rows in found.values())
    assert sorted(row for rows in found.values() for row in rows) == list(range(400))
    assert rows_of(file, "all", split=split, test_fraction=0.25) == list(range(400))


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 0.45), st.floats(0.05, 0.45))
def test_a_hash_of_rows_holds_out_about_the_shares(tmp_path_factory: Any, evaluation: float, test: float) -> None:
    file = write(tmp_path_factory.mktemp("log"), num_rows=3000, row_group_size=1000)
    for name, share in (("eval", evaluation), ("test", test)):
        rows = rows_of(file, name, split=SplitSpec(by="hash"), eval_fraction=evaluation, test_fraction=test)
        assert len(rows) / 3000 == pytest.approx(share, abs=4 * (share / 3000) ** 0.5)


@pytest.mark.parametrize("column", ["user", "name"])
def test_rows_with_the_same_value_go_to_the_same_split(tmp_path: Path, column: str) -> None:
    file = write(tmp_path)
    values = pq.read_table(file)[column].to_pylist()
    split = SplitSpec(by="hash", column=column)
    seen = [{values[row] for row in rows_of(file, name, split=split, eval_fraction=0.3)} for name in ("train", "eval")]
    assert not seen[0] & seen[1]


@pytest.mark.parametrize(
    ("column", "eval_from", "test_from"),
    [
        ("day", 200, 300.5),
        ("moment", "1970-07-20", "1970-10-28T12:00"),
        ("date", "1970-07-20", "1970-10-28T12:00"),
        ("text", "1970-07-20", "1970-10-28T12:00"),
    ],
)
def test_times_from_a_bound_on_are_held_out(tmp_path: Path, column: str, eval_from: Any, test_from: Any) -> None:
    file = write(tmp_path)
    days = np.array(pq.read_table(file)["day"])
    split = SplitSpec(by="time", column=column, eval_from=eval_from, test_from=test_from)
    assert rows_of(file, "train", split=split) == np.flatnonzero(days < 200).tolist()
    assert rows_of(file, "eval", split=split) == np.flatnonzero((days >= 200) & (days <= 300)).tolist()
    assert rows_of(file, "test", split=split) == np.flatnonzero(days > 300).tolist()


def test_without_a_bound_the_latest_rows_are_held_out(tmp_path: Path) -> None:
    file = write(tmp_path)
    days = np.array(pq.read_table(file)["day"])
    options = {"split": SplitSpec(by="time", column="moment"), "eval_fraction": 0.1, "test_fraction": 0.2}
    assert rows_of(file, "test", **options) == np.flatnonzero(days >= 320).tolist()
    assert rows_of(file, "eval", **options) == np.flatnonzero((days >= 280) & (days < 320)).tolist()


def test_a_split_with_files_of_its_own_takes_nothing_from_the_training_files(tmp_path: Path) -> None:
    file = write(tmp_path)
    split = SplitSpec(by="hash")
    assert rows_of(file, "eval", eval=(file,), split=split) == list(range(400))
    assert rows_of(file, "train", eval=(file,), split=split) == list(range(400))
    train = rows_of(file, "train", eval=(file,), split=split, test_fraction=0.3)
    assert sorted([*train, *rows_of(file, "test", eval=(file,), split=split, test_fraction=0.3)]) == list(range(400))


def test_a_bad_row_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path)
    row = rows_of(file, "eval", split=SplitSpec(by="hash"))[5]
    table = pq.read_table(file)
    labels = np.array(table["label"])
    labels[row] = 7
    pq.write_table(table.set_column(table.schema.get_field_index("label"), "label", pa.array(labels)), file, row_group_size=37)
    log = ParquetLog(ParquetSpec(train=(file,), split=SplitSpec(by="hash")), FEATURES, split="eval")
    with pytest.raises(DataError, match=f"row {row} "):
        list(log.pieces(log.spans, rows_ahead=0))


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        (SplitSpec(by="hash", column="usr"), "no column `usr`.*user"),
        (SplitSpec(by="hash", column="bag"), "integers or text"),
        (SplitSpec(by="time", column="bag"), "numbers or times"),
        (SplitSpec(by="time", column="name"), "not a time"),
        (SplitSpec(by="time", column="day", eval_from=300, test_from=200), "begins after"),
    ],
)
def test_a_column_that_cannot_split_is_refused(tmp_path: Path, split: SplitSpec, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        rows_of(write(tmp_path), "eval", split=split)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"by": "time"}, "name the column"),
        ({"column": "user"}, "applies only"),
        ({"by": "hash", "eval_from": 3}, "applies only"),
        ({"by": "time", "column": "day", "eval_from": "soon"}, "neither a number nor a date"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        SplitSpec(**options)


class TestSplitSource(SourceContract):
    """Rows of the training split among others, shuffled, in windows and row groups that the split cuts through."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        num_rows = 640
        rng = np.random.default_rng(4)
        table = {f"dense_{i}": pa.array(rng.normal(size=num_rows), pa.float32()) for i in range(4)}
        table |= {f"sparse_{i}": [rng.integers(0, 50, rng.integers(0, 4)).tolist() for _ in range(num_rows)] for i in range(3)}
        table |= {"label": pa.array(rng.integers(0, 2, num_rows), pa.float32()), "day": pa.array(rng.permutation(num_rows))}
        for name in ("train", "eval"):
            pq.write_table(pa.table(table), tmp_path / f"{name}-00000.parquet", row_group_size=120)
        changes = (
            "data.parquet.eval=[]",
            "data.parquet.true_p=null",
            "data.parquet.split.by=time",
            "data.parquet.split.column=day",
        )
        bounds = (
            f"data.parquet.split.eval_from={NUM_SAMPLES}",
            "data.parquet.shuffle_rows=150",
            "data.parquet.decode_threads=3",
        )
        return open_sources(parquet_spec(tmp_path, *changes, *bounds)).train


@pytest.mark.parametrize("column", ["user", "name"])
def test_evaluated_rows_carry_their_group_and_training_rows_do_not(tmp_path: Path, column: str) -> None:
    file = write(tmp_path)
    values = pq.read_table(file)[column].to_pylist()
    spec = ParquetSpec(train=(file,), split=SplitSpec(by="hash"), eval_fraction=0.3, group=column)
    pairs = set()
    for block in ParquetLog(spec, FEATURES, split="eval").raw_blocks():
        assert block.groups is not None
        assert len(block.ids) == 2
        pairs |= {(values[int(row)], int(group)) for row, group in zip(block.dense[:, 0], block.groups[:, 0], strict=True)}
    assert len({value for value, _ in pairs}) == len({group for _, group in pairs}) == len(pairs)
    assert all(block.groups is None for block in ParquetLog(spec, FEATURES, split="train").raw_blocks())
