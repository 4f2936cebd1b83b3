"""`rowstead init` writes a recipe that trains as it is, and says why it left columns out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rowstead import run
from rowstead.data.describe import describe
from rowstead.data.file_log import open_file_log
from rowstead.data.survey import choose_num_rows, refine, survey
from rowstead.spec.data import ParquetSpec
from rowstead.spec.errors import DataError
from rowstead.spec.parse import parse, to_plain
from rowstead.spec.run import RunSpec, load_recipe
from tests.cli.commands import Command, assert_refused
from tests.newcomer import COMMANDS, check_results, clicks


def test_a_recipe_has_types_sizes_transforms_and_a_split_and_says_what_it_left_out(rowstead: Command) -> None:
    clicks(600).to_csv("clicks.csv", index=False)
    done = rowstead("init", "clicks.csv", "--label", "clicked")
    assert done.code == 0, done.text
    assert "rowstead train recipe.yaml" in done.out
    text = Path("recipe.yaml").read_text()
    spec = load_recipe("recipe.yaml")
    assert spec.data.csv is not None
    assert spec.data.csv.types["user"] == "float64"
    assert spec.data.csv.split.column == "at"
    assert [(f.name, f.log, f.standardise, f.missing) for f in spec.features.dense] == [
        ("price", True, True, "mean"),
        ("age", False, True, "mean"),
    ]
    assert [f.name for f in spec.features.sparse] == ["at_hour", "at_weekday", "user", "item", "city", "member"]
    assert spec.features.sparse[4].num_rows == choose_num_rows(3) == 100
    for column, why in {
        "event_id": "every row has a value of its own",
        "country": "it has the same value in every row",
        "click_time": "it says what the label is",
        "dwell": "it says what the label is",
    }.items():
        assert f"#   {column}: {why}" in text
        assert f"{column} " in done.out
    assert_refused(rowstead("init", "clicks.csv", "--label", "clicked"), "recipe.yaml exists")
    run.train("recipe.yaml")


def test_a_recipe_for_csv_by_day_gives_the_columns_of_paths_no_type(rowstead: Command) -> None:
    for day, rows in clicks(900).groupby(np.repeat([1, 2, 3], 300)):
        folder = Path(f"log/date=2026-10-0{day}")
        folder.mkdir(parents=True)
        rows.to_csv(folder / "clicks.csv", index=False)
    assert rowstead("init", "log", "--label", "clicked").code == 0
    spec = load_recipe("recipe.yaml")
    assert spec.data.csv is not None
    assert "date" not in spec.data.csv.types
    assert any(feature.column == "date" for feature in spec.features.sparse)
    run.train("recipe.yaml")


def test_other_logs_give_recipes_too(rowstead: Command) -> None:
    rng = np.random.default_rng(0)
    rows = 300
    table = pa.table(
        {
            "vector": pa.array(list(rng.normal(size=(rows, 3))), pa.list_(pa.float64())),
            "likes": pa.array([rng.integers(0, 40, size).tolist() for size in rng.integers(0, 6, rows)]),
            "blob": pa.array([b"x"] * rows),
            "num_views": pa.array(rng.integers(0, 5, rows)),
            "yes": pa.array(rng.integers(0, 2, rows)),
            "odd: name\n#": pa.array(rng.integers(0, 9, rows).astype(str)),
            "label": pa.array(rng.integers(0, 2, rows)),
        }
    )
    for day in (1, 2):
        folder = Path(f"log/date=2026-11-0{day}")
        folder.mkdir(parents=True)
        pq.write_table(table.slice((day - 1) * 150, 150), folder / "part-0.parquet")
    done = rowstead("init", "log", "--out", "mine.yaml")
    assert done.code == 0, done.text
    spec = load_recipe("mine.yaml")
    assert spec.data.parquet is not None
    assert spec.data.parquet.split.column == "date"
    assert [f.name for f in spec.features.expanded_dense()] == ["vector[0]", "vector[1]", "vector[2]", "num_views"]
    assert [f.name for f in spec.features.sparse] == ["likes", "yes", "odd: name\n#", "date_weekday"]
    assert "#   blob: type binary is not supported" in Path("mine.yaml").read_text()
    assert (spec.features.sparse[0].pooling, spec.features.sparse[0].max_ids) == ("mean", 5)
    assert parse(RunSpec, yaml.safe_load(yaml.safe_dump(to_plain(spec)))) == spec
    run.train("mine.yaml")


ODD = (
    "tab\t",
    "esc\x1b[2J",
    "del\x7f",
    "next\x85",
    "line\u2028",
    "mark\ufeff",
    "right\u202e",
    'quote"\\',
    "{a: *b}",
    "# no",
    "😀",
)
"""Names that YAML or a terminal could take for something else."""


def test_a_log_with_odd_names_gives_a_recipe_with_those_names(rowstead: Command) -> None:
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 9, 300).astype(str) for name in (*ODD, "x{i}", "long" * 300)}
    pd.DataFrame(columns | {"label": rng.integers(0, 2, 300)}).to_csv("log.csv", index=False)
    done = rowstead("init", "log.csv")
    assert done.code == 0, done.text
    assert "\x1b" not in done.out
    spec = load_recipe("recipe.yaml")
    assert tuple(feature.name for feature in spec.features.sparse) == ODD
    assert spec.data.csv is not None
    assert spec.data.csv.types == dict.fromkeys((*ODD, "label"), "int64")
    text = Path("recipe.yaml").read_text()
    assert "its name has more than 200 characters" in text
    assert "#   x{i}: `{i}` in a name stands for a number in recipes" in text
    assert_refused(rowstead("init", "log.csv", "--label", "long" * 300, "--overwrite"), "has more than 200 characters")


def test_columns_without_a_name_are_left_out_and_two_of_them_are_refused(rowstead: Command) -> None:
    for name, header in (("one", ",x,label"), ("two", ",x,label,")):
        rows = "".join(f"{row},{row * 7 % 13},{row % 3 % 2}{',' * (name == 'two')}\n" for row in range(200))
        Path(f"{name}.csv").write_text(f"{header}\n{rows}")
    done = rowstead("init", "one.csv")
    assert done.code == 0, done.text
    assert "it has no name" in done.out
    assert_refused(rowstead("init", "two.csv", "--overwrite"), "two columns are named ``; rename one of them")


@pytest.mark.parametrize(
    ("label", "says"),
    [
        ("clickd", "no column `clickd`: did you mean `clicked`? Name its label column with --label"),
        ("stars", "the label column `stars` has values from 1 to 5; labels must be between 0 and 1"),
        ("none", "the label column `none` is empty"),
        ("one", "the label column `one` is 1 in every row"),
        ("text", "column `text` has type string"),
    ],
)
def test_a_label_that_cannot_be_is_named(rowstead: Command, label: str, says: str) -> None:
    columns = {"clicked": [0, 1] * 30, "stars": [1, 5] * 30, "none": [None] * 60, "one": [1] * 60, "text": ["a", "b"] * 30}
    pd.DataFrame(columns).to_csv("log.csv", index=False)
    assert_refused(rowstead("init", "log.csv", "--label", label), says)


def test_a_log_of_which_nothing_can_be_learned_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [0, 1] * 50, "copy": [0.0, 1.0] * 50, "same": [1] * 100}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="no column of the log can be a feature: `copy`: it says what the label is; `same`"):
        _ = survey(ParquetSpec(train=(str(tmp_path / "x.parquet"),))).features


def test_infinite_values_are_clipped_and_long_tails_logged(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tail, flat = np.exp(rng.normal(5, 2, 500)), rng.normal(0, 1, 500)
    flat[7] = np.inf
    log = pa.table({"tail": tail, "flat": flat, "label": rng.integers(0, 2, 500)})
    pq.write_table(log, tmp_path / "x.parquet")
    spec = ParquetSpec(train=(str(tmp_path / "x.parquet"),))
    found = survey(spec)
    better = refine(found, describe(open_file_log(spec, found.features, split="all").raw_blocks(), found.features))
    long, other = better.features.dense
    assert (long.log, long.standardise, long.clip) == (True, True, None)
    assert (other.log, other.standardise) == (False, False)
    assert other.clip is not None
    assert other.clip[1] < 10


def test_hash_sizes_grow_with_ids_and_keep_few_of_them_in_one_row() -> None:
    sizes = [choose_num_rows(n) for n in (0, 3, 1000, 99_000, 10**6, 10**9)]
    assert sizes == [100, 100, 10_000, 990_000, 2_000_000, 2_000_000_000]


def test_unscaled_input_is_warned_of_by_name(rowstead: Command) -> None:
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "hash": pa.array(rng.integers(2**62, 2**63, 200, np.uint64)),
            "fine": pa.array(rng.normal(size=200)),
            "label": pa.array(rng.integers(0, 2, 200)),
        }
    )
    pq.write_table(table, "log.parquet")
    features = {"dense": [{"name": "hash"}, {"name": "fine"}]}
    plain = {"name": "x", "data": {"parquet": {"train": "log.parquet"}}, "features": features, "train": {"batch_size": 64}}
    Path("x.yaml").write_text(yaml.safe_dump(plain))
    done = rowstead("train", "x.yaml")
    assert (
        "values of dense feature `hash` are around 7.1e+18, so that training may diverge: set `standardise: true`" in done.text
    )
    done = rowstead("train", "x.yaml", "--set", "features.dense.0.standardise=true")
    assert "may diverge" not in done.text


@pytest.mark.slow
def test_a_newcomer_gets_a_good_model_without_an_edit(rowstead: Command) -> None:
    clicks(16_000).to_csv("clicks.csv", index=False)
    for arguments in COMMANDS:
        done = rowstead(*arguments)
        assert done.code == 0, done.text
    check_results(16_000)
