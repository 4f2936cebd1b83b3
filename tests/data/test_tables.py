"""Tables in memory, and files, take the place of a recipe's log."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rowstead
from rowstead.data.tables import arrow_table, as_files, keep_table, list_files, read_given
from rowstead.spec.data import LOG_KINDS
from rowstead.spec.errors import DataError, RowsteadError
from rowstead.spec.run import RunSpec
from tests.small_runs import small_plain

FEATURES = {"dense": [{"name": "price", "log": True}], "sparse": [{"name": "user", "num_rows": 100}]}


def columns(num_rows: int = 600) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    user = rng.integers(0, 30, num_rows)
    return {
        "user": [f"u{number}" for number in user],
        "price": rng.exponential(5, num_rows),
        "at": [datetime.datetime(2026, 11, 1) + datetime.timedelta(minutes=i) for i in range(num_rows)],
        "clicked": (rng.random(num_rows) < 0.1 + 0.02 * user).astype(np.int64),
    }


def recipe(**data: Any) -> dict[str, Any]:
    model = {"width": 4, "bottom": [4], "top": [4]}
    plain = {"name": "shop", "features": FEATURES, "model": model, "train": {"batch_size": 32}, "threads": 1}
    return plain | ({"data": data} if data else {})


@pytest.mark.parametrize("kind", [dict, pd.DataFrame, pa.table, lambda rows: pa.RecordBatch.from_pydict(rows)])
def test_a_table_of_any_kind_is_written_once_and_is_the_same_log(tmp_path: Path, kind: Any) -> None:
    path = keep_table(kind(columns()), tmp_path)
    assert pq.read_table(path).cast(pa.table(columns()).schema).equals(pa.table(columns()))
    written = path.stat().st_mtime_ns
    assert keep_table(kind(columns()), tmp_path) == path
    assert path.stat().st_mtime_ns == written
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert keep_table(kind(columns(10)), tmp_path) != path


def test_named_levels_of_an_index_are_columns_and_others_are_not() -> None:
    frame = pd.DataFrame(columns(4))
    assert arrow_table(frame.set_index("user")).schema.names == ["price", "at", "clicked", "user"]
    assert arrow_table(frame[frame.price > 0]).schema.names == list(frame.columns)
    assert arrow_table(frame.set_axis(["a", "b", "c", "d"])).schema.names == list(frame.columns)


def test_a_dict_may_have_nan_for_missing_text_and_unsigned_ids() -> None:
    table = arrow_table({"city": ["Oslo", float("nan")], "id": [2**64 - 1, 5], "vector": np.zeros((2, 3))})
    assert table["city"].to_pylist() == ["Oslo", None]
    assert table["id"].to_pylist() == [2**64 - 1, 5]
    assert table["vector"].to_pylist() == [[0.0] * 3] * 2


def test_what_is_no_table_is_refused_with_what_to_give() -> None:
    mixed = pd.DataFrame({"user": ["a", 1, None]})
    for data in (mixed, 5, object(), {"a": [1, 2], "b": [1]}):
        with pytest.raises(DataError, match=r"the table cannot be read: .*Give a DataFrame, an Arrow table or a dict"):
            arrow_table(data)
    with pytest.raises(DataError, match="a list as data must be one of paths"):
        list_files([1, 2])


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the table has no rows"):
        keep_table({"a": []}, tmp_path / "tables")
    assert not (tmp_path / "tables").exists()


def test_a_string_is_one_path() -> None:
    assert list_files("log/*.parquet") == ("log/*.parquet",)
    assert list_files(Path("log")) == ("log",)
    assert list_files([Path("a"), "b"]) == ("a", "b")
    assert list_files({"a": [1]}) is None


def test_a_temporary_file_is_gone_after_use() -> None:
    with as_files(columns()) as files:
        assert files is not None
        assert pq.read_metadata(files[0]).num_rows == 600
    assert not Path(files[0]).parent.exists()


def test_a_dict_without_files_gets_those_of_the_data_and_keeps_its_settings(tmp_path: Path) -> None:
    split = {"by": "time", "column": "at"}
    spec = read_given(recipe(parquet={"label": "clicked", "split": split}), columns(), None, tmp_path)
    log = spec.data.parquet
    assert log is not None
    assert (log.label, log.split.column, len(log.train)) == ("clicked", "at", 1)
    assert read_given(recipe(), columns(), None, tmp_path).data.log.label == "label"
    cached = read_given(recipe(statistics_rows=10), "log/a.csv.gz", None, tmp_path).data
    assert (cached.statistics_rows, cached.csv and cached.csv.train) == (10, ("log/a.csv.gz",))


def test_data_replaces_the_log_of_a_recipe_of_any_kind(tmp_path: Path) -> None:
    csv = RunSpec.from_dict(
        recipe(
            csv={"train": "a.csv", "eval": "b.csv", "label": "clicked", "group": "user", "separator": ";", "test_fraction": 0.1}
        )
    )
    spec = read_given(csv, columns(), None, tmp_path)
    log = spec.data.parquet
    assert log is not None
    assert spec.data.csv is None
    assert (log.label, log.group, log.test_fraction, log.eval) == ("clicked", "user", 0.1, ())
    other = read_given(csv, ["c.csv", "d.csv"], "e.csv", tmp_path).data.csv
    assert other is not None
    assert (other.train, other.eval, other.separator) == (("c.csv", "d.csv"), ("e.csv",), ";")
    assert read_given(RunSpec.from_dict(small_plain()), "x.parquet", None, tmp_path).data.synth is None


def test_what_is_missing_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RowsteadError, match="give a recipe: a RunSpec, a dict, a path"):
        read_given(None, None, None, tmp_path)
    with pytest.raises(RowsteadError, match=r"data without a recipe: .*`rowstead.first_recipe\(data, label=...\)`"):
        read_given(None, columns(), None, tmp_path)
    with pytest.raises(RowsteadError, match="`eval_data` needs `data`"):
        read_given("quickstart", None, columns(), tmp_path)


def test_a_run_on_a_table_can_be_evaluated_and_resumed_and_scores_tables(tmp_path: Path) -> None:
    frame = pd.DataFrame(columns())
    plain = recipe(parquet={"label": "clicked", "split": {"by": "time", "column": "at"}})
    result = rowstead.train(plain, data=frame[:500], eval_data=frame[500:], root=tmp_path)
    assert result.quality is not None
    assert (result.folder.name, result.quality.num_samples) == ("shop-001", 100)
    files = rowstead.train(plain, data=keep_table(frame[:500], tmp_path), eval_data=frame[500:], root=tmp_path)
    assert files.quality == result.quality
    assert len(list((tmp_path / "tables").iterdir())) == 2
    assert rowstead.evaluate(result.folder).log_loss == result.quality.log_loss
    assert rowstead.evaluate(result.folder, data=frame[500:]).log_loss == pytest.approx(result.quality.log_loss, rel=1e-6)
    assert rowstead.resume(result.folder).quality == result.quality


def test_a_first_recipe_trains_as_it_is_and_is_what_init_writes(tmp_path: Path) -> None:
    frame = pd.DataFrame(columns())
    spec = rowstead.first_recipe(frame, label="clicked", root=tmp_path / "runs", out=tmp_path / "recipe.yaml")
    assert spec.name == "table"
    assert spec.data.parquet is not None
    assert (spec.data.parquet.label, spec.data.parquet.split.column) == ("clicked", "at")
    assert rowstead.load_recipe(str(tmp_path / "recipe.yaml")) == spec
    assert "# Written by `rowstead init` from 600 rows." in (tmp_path / "recipe.yaml").read_text()
    result = rowstead.train(spec, root=tmp_path / "runs")
    assert rowstead.train(spec, data=frame, root=tmp_path / "runs").quality == result.quality
    named = rowstead.first_recipe(list(spec.data.parquet.train), label="clicked", name="mine", max_rows=100)
    assert named.name == "mine"


def test_data_replaces_a_log_of_every_kind(tmp_path: Path) -> None:
    assert set(LOG_KINDS) == {"synth", "interests", "parquet", "csv"}
    data = read_given("din", "x.parquet", None, tmp_path).data
    assert (data.interests, data.parquet and data.parquet.train) == (None, ("x.parquet",))
