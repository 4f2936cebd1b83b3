"""A recipe or a log that cannot be right is named with what to do about it, never with a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.commands import Command, assert_refused, changed, parquet_recipe, recipe, with_values


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("train.bach_size=1", "train.bach_size: unknown key: did you mean `batch_size`?"),
        ("train.batch_size=many", "train.batch_size: expected whole number, got 'many'"),
        ("train.batch_size=0", "train.batch_size: must be at least 1, got 0"),
        ("features.sparse.0.num_rows=-1", "features.sparse[0].num_rows: must be at least 1, got -1"),
        ("features.sparse.0={name: x, table: t}", "features.sparse[0].table: no table `t`"),
        ("features.sparse.0.width=3", "`interaction: dot` needs every table as wide as model.width, 8"),
        ("nonsense", "cannot read `nonsense`: write it as key.path=value"),
        ("=1", "write it as key.path=value"),
        ("seed={", "the value in `seed={` is not valid YAML"),
        ("scale=.inf", "scale: must be above 0 and finite"),
        ("data.parquet.train=x", "give exactly one of `synth`, `interests`, `parquet` and `csv`"),
        ("features.dense.0.name=other_{i}", "the synthetic log has no column `other_0`"),
        ("features.sparse.0.num_rows=1e12", "--set scale="),
    ],
)
def test_train_refuses_a_recipe_that_cannot_be_right(rowstead: Command, assignment: str, says: str) -> None:
    assert_refused(rowstead("train", recipe(), "--set", assignment), says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", "bad.yaml is not valid YAML"),
        ("", "bad.yaml: expected a mapping of keys, got None"),
        ("just words", "bad.yaml: expected a mapping of keys, got 'just words'"),
        ("name: a\nname: b\n", "key `name` is given twice"),
    ],
)
def test_train_refuses_a_file_that_is_no_recipe(rowstead: Command, text: str, says: str) -> None:
    Path("bad.yaml").write_text(text)
    assert_refused(rowstead("train", "bad.yaml"), says)


def test_train_refuses_a_binary_file(rowstead: Command) -> None:
    Path("bad.yaml").write_bytes(bytes(range(256)))
    assert_refused(rowstead("train", "bad.yaml"), "cannot read bad.yaml")


@pytest.mark.parametrize("command", ["train", "recipes"])
def test_an_unknown_recipe_names_the_nearest(rowstead: Command, command: str) -> None:
    assert_refused(rowstead(command, "quikstart"), "no recipe `quikstart`, shipped or as a file: did you mean `quickstart`?")


def test_missing_files_are_named(rowstead: Command, tmp_path: Path) -> None:
    done = rowstead("train", parquet_recipe(tmp_path / "nowhere"))
    assert_refused(done, "nowhere/train-*.parquet")


def test_files_without_rows_are_named(rowstead: Command, log: Path) -> None:
    empty = changed(log, lambda table: table.slice(0, 0), "train-*")
    assert_refused(rowstead("train", parquet_recipe(empty)), "no rows for the train split", "train-*.parquet")


@pytest.mark.parametrize("content", [b"", b"not Parquet at all", b"PAR1" + bytes(100)])
def test_a_file_that_is_no_parquet_is_named(rowstead: Command, log: Path, content: bytes) -> None:
    broken = changed(log, lambda table: table)
    (broken / "train-00000.parquet").write_bytes(content)
    assert_refused(rowstead("train", parquet_recipe(broken)), "train-00000.parquet` is not a Parquet file")


@pytest.mark.parametrize(
    ("column", "kind"),
    [("dense_0", pa.string()), ("label", pa.string()), ("true_p", pa.string())],
)
def test_a_column_of_the_wrong_type_is_named(rowstead: Command, log: Path, column: str, kind: pa.DataType) -> None:
    wrong = changed(log, with_values(column, kind))
    assert_refused(rowstead("train", parquet_recipe(wrong)), f"`{column}`", "train-00000.parquet")


def test_a_column_that_is_not_there_is_named_with_the_nearest(rowstead: Command, log: Path) -> None:
    done = rowstead("train", parquet_recipe(log), "--set", "data.parquet.label=lable")
    assert_refused(done, "`lable`", "did you mean `label`?")


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("dense_2", np.nan, "has a missing value; set the feature's `missing`"),
        ("dense_2", None, "has a missing value; set the feature's `missing`"),
        ("dense_2", np.inf, "contains inf; set the feature's `clip: [low, high]`"),
        ("label", 2.0, "contains 2.0; labels must be between 0 and 1"),
        ("label", -1.0, "label column `label` contains -1.0"),
        ("label", np.nan, "label column `label` contains nan"),
    ],
)
def test_a_bad_value_is_named_by_file_row_and_column(
    rowstead: Command, log: Path, column: str, value: float, says: str
) -> None:
    good = pq.read_table(log / "train-00000.parquet")[column].to_pylist()[:7]
    bad = changed(log, with_values(column, [*good, value]), "train-*")
    done = rowstead("train", parquet_recipe(bad))
    assert_refused(done, "train-00000.parquet", "row 7", f"`{column}`", says, "on_bad_row: skip")


def test_skipped_rows_are_counted_and_reported(rowstead: Command, log: Path) -> None:
    bad = changed(log, with_values("dense_2", [np.nan, 0.0, np.inf]), "train-*")
    done = rowstead("train", parquet_recipe(bad, "data.parquet.on_bad_row=skip"))
    assert done.code == 0
    assert "skipped 2 bad rows of the training split" in done.out


def test_equal_labels_leave_ne_undefined_and_say_so(rowstead: Command, log: Path) -> None:
    equal = changed(log, with_values("label", [0.0] * 200), "eval-*")
    done = rowstead("train", parquet_recipe(equal))
    assert done.code == 0
    assert "NE undefined (all labels are equal)" in done.out
    assert re.search(r"NE +│ undefined: all labels are equal", done.out)
    assert "AUC" not in done.out


def as_text(table: pa.Table) -> pa.Table:
    texts = pa.array([[str(i) for i in ids] for ids in table["sparse_0"].to_pylist()])
    return table.set_column(table.schema.get_field_index("sparse_0"), "sparse_0", texts)


def test_text_ids_where_integers_were_before_are_refused(rowstead: Command, runs: Path, log: Path) -> None:
    folder = changed(log, as_text, only="eval-*")
    assert_refused(
        rowstead("train", parquet_recipe(folder)),
        "`sparse_0` was an integer in training but is text here; convert it to integers",
    )
    for command in (("evaluate",), ("predict", "--out", "p.parquet")):
        done = rowstead(command[0], "last", *command[1:], "--runs", str(runs), "--data", f"{folder}/eval-*.parquet")
        assert_refused(done, "`sparse_0` was an integer in training but is text here; convert it to integers")


def test_text_ids_cannot_be_rows_or_share_a_table_with_integers(rowstead: Command, log: Path) -> None:
    folder = changed(log, as_text)
    assert_refused(rowstead("train", parquet_recipe(folder, "features.sparse.0.hash=modulo")), "use `hash: mix`")
    sharing = "{sparse: [{name: sparse_0, table: t}, {name: sparse_1, table: t}], tables: [{name: t, num_rows: 9}]}"
    done = rowstead("train", parquet_recipe(folder, f"features={sharing}"))
    assert_refused(done, "share table `t`", "sparse_1")


def test_columns_of_the_same_name_are_refused(rowstead: Command, log: Path) -> None:
    folder = changed(log, lambda table: table.append_column("dense_0", table["dense_1"]))
    assert_refused(rowstead("train", parquet_recipe(folder)), "two columns are named `dense_0`")


def test_describe_names_a_file_that_is_no_parquet(rowstead: Command) -> None:
    Path("junk.parquet").write_bytes(b"junk" * 100)
    assert_refused(rowstead("data", "describe", "junk.parquet"), "`junk.parquet` is not a Parquet file")


def test_a_log_is_packed_once_and_trained_on(rowstead: Command) -> None:
    done = rowstead("data", "pack", recipe(), "--out", "packed")
    assert done.code == 0, done.text
    assert "6,400 rows" in done.text
    assert_refused(rowstead("data", "pack", recipe(), "--out", "packed"), "packed is a packed log already")
    trained = rowstead("train", recipe(), "--set", "data.cache=packed", "--set", "train.max_steps=2")
    assert trained.code == 0, trained.text
    assert "packing the log" not in trained.text


def test_describe_says_that_a_log_is_sorted(rowstead: Command) -> None:
    random = np.random.default_rng(1)
    users = random.integers(0, 200, 20_000)
    for name, column in (("sorted", np.sort(users)), ("random", users)):
        table = pa.table({"label": random.integers(0, 2, 20_000), "user": column, "item": random.integers(0, 50, 20_000)})
        pq.write_table(table, f"{name}.parquet")
    done = rowstead("data", "describe", "sorted.parquet")
    assert re.search(
        r"the rows are not in random order: those with the same value of `user` are 1[56]\.\d times as often", done.out
    )
    assert "shuffle the rows, or set `shuffle_rows` of the recipe's log to their number" in done.out
    assert '"clustered": [{"name": "`user`"' in rowstead("data", "describe", "sorted.parquet", "--json").out
    assert "random order" not in rowstead("data", "describe", "random.parquet").out
