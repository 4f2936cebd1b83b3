"""Rows in random order: all of them, the same for a seed, and with or without files."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rowstead.data.order_test import OrderSample
from rowstead.data.shuffle import RowShuffler

SCHEMA = pa.schema([pa.field("row", pa.int64()), pa.field("genres", pa.list_(pa.string()))])


def shuffled(folder: Path, num_rows: int, *, num_parts: int = 3, **options: int) -> pa.Table:
    shuffler = RowShuffler(folder / "train", SCHEMA, **{"seed": 1, **options})
    table = pa.table({"row": np.arange(num_rows), "genres": [["a"] * (row % 3) for row in range(num_rows)]}, schema=SCHEMA)
    borders = [num_rows * part // num_parts for part in range(num_parts + 1)]
    for start, stop in itertools.pairwise(borders):
        shuffler.add(table.slice(start, stop - start))
    return pa.concat_tables(shuffler.shuffled())


@pytest.mark.parametrize("num_rows", [0, 1, 5000])
def test_every_row_is_there_once_and_whole(tmp_path: Path, num_rows: int) -> None:
    found = shuffled(tmp_path, num_rows)
    assert sorted(found["row"].to_pylist()) == list(range(num_rows))
    assert all(
        len(genres) == row % 3 for row, genres in zip(found["row"].to_pylist(), found["genres"].to_pylist(), strict=True)
    )


def test_the_order_depends_on_the_seed_alone(tmp_path: Path) -> None:
    one = shuffled(tmp_path, 5000)
    assert one == shuffled(tmp_path, 5000, num_parts=7)
    assert one == shuffled(tmp_path, 5000, max_rows_in_memory=700)
    assert not list(tmp_path.iterdir()), "temporary files are removed"
    assert one["row"].to_pylist() != shuffled(tmp_path, 5000, seed=2)["row"].to_pylist()


def test_the_order_is_random(tmp_path: Path) -> None:
    rows = shuffled(tmp_path, 40_000)["row"].to_numpy()
    sample = OrderSample(["user"])
    sample.add([rows // 100])
    assert sample.find_clustered() == []
    assert abs(np.corrcoef(rows, np.arange(len(rows)))[0, 1]) < 0.03
    assert (np.diff(rows) == 1).sum() < 10


def test_a_shuffle_that_is_given_up_leaves_no_files(tmp_path: Path) -> None:
    shuffler = RowShuffler(tmp_path / "train", SCHEMA, 1, max_rows_in_memory=10)
    shuffler.add(pa.table({"row": np.arange(100), "genres": [[]] * 100}, schema=SCHEMA))
    assert list(tmp_path.iterdir())
    shuffler.discard()
    assert not list(tmp_path.iterdir())
