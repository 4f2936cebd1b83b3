"""Predictions on disk are those that evaluation scores, row for row, and a file is whole or not there."""

from __future__ import annotations

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rowstead
from rowstead.records.run_folder import RunFolder
from rowstead.spec.data import ParquetSpec
from rowstead.spec.errors import RowsteadError
from tests.serve.conftest import NUM_ROWS, raw_columns, spec_for

NUM_EVAL = round(0.4 * NUM_ROWS)


def log_loss(table: pa.Table, negative_keep_rate: float) -> tuple[float, float]:
    """Log loss and NE of a predictions file, negatives weighed as evaluation does."""
    p, y = table["p"].to_numpy(), table["label"].to_numpy().astype(np.float64)
    weight = np.where(y == 1, 1, 1 / negative_keep_rate)
    loss = -(weight * (y * np.log(p) + (1 - y) * np.log1p(-p))).sum() / weight.sum()
    mean = (weight * y).sum() / weight.sum()
    return loss, loss / -(mean * np.log(mean) + (1 - mean) * np.log1p(-mean))


def test_predictions_are_those_that_evaluate_scores(run, tmp_path):
    done = rowstead.predict(run, tmp_path / "p.parquet", keep=["row", "city"])
    table = pq.read_table(tmp_path / "p.parquet")
    assert table.column_names == ["p", "label", "row", "city"]
    assert (done.num_rows, done.num_skipped) == (table.num_rows, 0) == (NUM_EVAL, 0)
    assert table["row"].to_pylist() == list(range(NUM_ROWS - NUM_EVAL, NUM_ROWS))
    quality = rowstead.evaluate(run)
    assert log_loss(table, 0.5) == pytest.approx((quality.log_loss, quality.ne), rel=1e-12)


def test_other_files_are_predicted_in_order_with_their_label(run, log, tmp_path):
    files = [str(log / "part-1.parquet"), str(log / "part-0.parquet")]
    rowstead.predict(run, tmp_path / "p.parquet", data=files, keep=["row"])
    table = pq.read_table(tmp_path / "p.parquet")
    columns = raw_columns(NUM_ROWS, seed=0)
    order = [*range(2000, NUM_ROWS), *range(2000)]
    assert table["row"].to_pylist() == order
    assert table["label"].to_pylist() == columns["click"][order].tolist()
    model = rowstead.load(run)
    expected = model.predict(model.encode(pa.table(columns).take(pa.array(order))))
    np.testing.assert_allclose(table["p"].to_numpy(), expected.numpy(), rtol=0, atol=1e-6)
    quality = rowstead.evaluate(run, data=files)
    assert log_loss(table, 0.5)[1] == pytest.approx(quality.ne, rel=1e-9)


def test_raw_rows_of_any_kind_are_predicted_as_an_array(run, exported):
    columns = raw_columns(50, seed=1)
    table, model = pa.table(columns), rowstead.load(run)
    expected = model.predict(model.encode(columns)).numpy()
    for rows in (columns, table, table.to_pandas()):
        for predict in (model.predict, rowstead.load_exported(exported).predict):
            found = predict(rows)
            assert isinstance(found, np.ndarray)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_missing_text_may_be_nan_as_in_pandas(run):
    columns = {name: list(values) for name, values in raw_columns(5, seed=1).items()}
    model, missing, none = rowstead.load(run), dict(columns), dict(columns)
    missing["city"] = [float("nan"), *columns["city"][1:]]
    none["city"] = [None, *columns["city"][1:]]
    np.testing.assert_array_equal(model.predict(missing), model.predict(none))


def test_a_single_path_is_one_path(run, exported, log, tmp_path):
    path = str(log / "part-0.parquet")
    for model in (run, str(exported)):
        done = rowstead.predict(model, tmp_path / "p.parquet", data=path, overwrite=True)
        assert done.num_rows == pq.read_metadata(path).num_rows
    assert rowstead.evaluate(run, data=path) == rowstead.evaluate(run, data=[path])
    assert ParquetSpec(train=path, eval=path) == ParquetSpec(train=(path,), eval=(path,))


def test_exported_folder_predicts_what_its_run_does(run, exported, log, tmp_path):
    for name, model in (("run", run), ("exported", str(exported))):
        rowstead.predict(model, tmp_path / name, data=[str(log / "part-*.parquet")], keep=["row"])
    ours, theirs = pq.read_table(tmp_path / "exported"), pq.read_table(tmp_path / "run")
    assert ours.schema == theirs.schema
    assert ours.drop(["p"]) == theirs.drop(["p"])
    np.testing.assert_allclose(ours["p"].to_numpy(), theirs["p"].to_numpy(), rtol=0, atol=1e-6)


def test_log_without_label_or_with_missing_ones_is_predicted(run, log, tmp_path):
    table = pq.read_table(log / "part-1.parquet")
    pq.write_table(table.drop(["click"]), tmp_path / "none.parquet")
    half = pa.array([None if i % 2 else 1 for i in range(table.num_rows)], pa.int64())
    pq.write_table(table.set_column(table.schema.get_field_index("click"), "click", half), tmp_path / "half.parquet")
    rowstead.predict(run, tmp_path / "p.parquet", data=[str(tmp_path / "none.parquet")])
    assert pq.read_schema(tmp_path / "p.parquet").names == ["p"]
    rowstead.predict(run, tmp_path / "p.parquet", data=[str(tmp_path / "half.parquet")], overwrite=True)
    assert pq.read_table(tmp_path / "p.parquet")["label"].null_count == table.num_rows // 2


def test_skipped_rows_are_counted_and_kept_columns_stay_in_step(run, log, tmp_path):
    bad = raw_columns(300, seed=5)
    bad["price"][[3, 100, 299]] = np.nan
    pq.write_table(pa.table(bad), tmp_path / "bad.parquet", row_group_size=100)
    data = [str(tmp_path / "bad.parquet")]
    with pytest.raises(RowsteadError, match=r"row 3 .*`price` has a missing value"):
        rowstead.predict(run, tmp_path / "p.parquet", data=data)
    assert [file.name for file in tmp_path.iterdir()] == ["bad.parquet"]
    skipping = RunFolder(tmp_path / "skipping")
    skipping.path.mkdir()
    skipping.write_spec(spec_for(log, on_bad_row="skip"))
    shutil.copytree(RunFolder.open(run, ".").checkpoints, skipping.checkpoints)
    done = rowstead.predict(str(skipping.path), tmp_path / "p.parquet", data=data, keep=["row"])
    assert (done.num_rows, done.num_skipped) == (297, 3)
    assert pq.read_table(tmp_path / "p.parquet")["row"].to_pylist() == [i for i in range(300) if i not in (3, 100, 299)]


def test_existing_file_is_replaced_only_when_asked(run, tmp_path):
    out = tmp_path / "p.parquet"
    out.write_text("mine")
    with pytest.raises(RowsteadError, match="pass --overwrite"):
        rowstead.predict(run, out)
    assert out.read_text() == "mine"
    rowstead.predict(run, out, overwrite=True)
    assert pq.read_metadata(out).num_rows == NUM_EVAL
    assert list(tmp_path.iterdir()) == [out]


def test_mistakes_are_named(run, exported, log, tmp_path):
    out = tmp_path / "p.parquet"
    for arguments, said in (
        ({"run": str(exported)}, "name the log with --data"),
        ({"run": run, "keep": ["rows"]}, "no column `rows` to copy: did you mean `row`"),
        ({"run": run, "keep": ["p"]}, "its own column `p`"),
        ({"run": run, "data": [str(tmp_path / "no.parquet")]}, "no file"),
        ({"run": str(tmp_path)}, "is not the folder of a run"),
        ({"run": run, "out": tmp_path}, "is a folder"),
        ({"run": run, "out": tmp_path / "no" / "p"}, "there is no folder"),
    ):
        with pytest.raises(RowsteadError, match=said):
            rowstead.predict(**{"out": out, **arguments})
    other = pq.read_table(log / "part-1.parquet")
    text = other.set_column(0, "row", other["row"].cast(pa.string()))
    pq.write_table(text, tmp_path / "text.parquet")
    with pytest.raises(RowsteadError, match="convert one of them to copy it"):
        rowstead.predict(run, out, data=[str(log / "part-0.parquet"), str(tmp_path / "text.parquet")], keep=["row"])
    assert not out.exists()
