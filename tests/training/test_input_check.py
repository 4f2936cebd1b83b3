"""Training says that a log is sorted, and says nothing of one that is shuffled enough."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowstead.data.describe import describe
from rowstead.data.open_log import read_raw_blocks
from rowstead.run import resume, train
from rowstead.spec.run import load_recipe, recipe_names
from tests.small_runs import RecordingCallback, parquet_spec, small_spec, written_log

SENTENCE = "the rows are not in random order: those with the same value of `sparse_0`"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The small log as it is, and with its training rows sorted by a column of ids."""
    folders = {}
    for name in ("random", "sorted"):
        folders[name] = written_log(tmp_path_factory.mktemp(name))
        table = pa.concat_tables(pq.read_table(path) for path in sorted(folders[name].glob("train-*.parquet")))
        firsts = [ids[0] if ids else -1 for ids in table["sparse_0"].to_pylist()]
        order = np.argsort(firsts, kind="stable") if name == "sorted" else np.arange(table.num_rows)
        for path in folders[name].glob("train-*.parquet"):
            path.unlink()
        pq.write_table(table.take(pa.array(order)), folders[name] / "train-00000.parquet", row_group_size=2000)
    return folders


def said(log: Path, folder: Path, *changes: str) -> list[str]:
    callback = RecordingCallback()
    train(parquet_spec(log, *changes), out=folder / "run", callback=callback)
    return [text for text in callback.messages if "random order" in text]


def test_the_first_epoch_says_that_a_log_is_sorted_and_what_to_do(logs: dict[str, Path], tmp_path: Path) -> None:
    (text,) = said(logs["sorted"], tmp_path, "data.parquet.shuffle_rows=300", "train.epochs=3")
    assert text.startswith(SENTENCE)
    assert "set `data.parquet.shuffle_rows: 6400`, all rows, with `data.cache` if they do not fit in memory" in text


@pytest.mark.parametrize(
    ("log", "shuffle_rows"), [("sorted", 6400), ("random", 300), ("random", 0)], ids=["remedied", "random", "file order"]
)
def test_nothing_is_said_of_a_log_that_is_shuffled_enough(
    logs: dict[str, Path], tmp_path: Path, log: str, shuffle_rows: int
) -> None:
    assert said(logs[log], tmp_path, f"data.parquet.shuffle_rows={shuffle_rows}") == []


def test_a_packed_log_is_looked_at_too(logs: dict[str, Path], tmp_path: Path) -> None:
    changes = (f"data.cache={tmp_path / 'pack'}", "data.parquet.shuffle_rows=300")
    assert len(said(logs["sorted"], tmp_path, *changes)) == 1
    assert said(logs["sorted"], tmp_path / "again", changes[0], "data.parquet.shuffle_rows=6400") == []


def test_a_resumed_run_does_not_look_again(logs: dict[str, Path], tmp_path: Path) -> None:
    spec = parquet_spec(logs["sorted"], "data.parquet.shuffle_rows=300")
    train(spec, out=tmp_path / "run", callback=RecordingCallback(stop_after=20))
    callback = RecordingCallback()
    resume(str(tmp_path / "run"), callback=callback)
    assert not [text for text in callback.messages if "random order" in text]


@pytest.mark.slow
def test_no_shipped_synthetic_log_is_reported() -> None:
    specs = [load_recipe(name) for name in recipe_names()]
    synthetic = [spec for spec in specs if spec.data.synth is not None and len(spec.features.expanded_sparse()) < 100]
    assert len(synthetic) > 3
    for spec in [*synthetic, small_spec("data.synth.drift=1")]:
        num_rows = min(16_384, 400_000 // max(1, len(spec.features.expanded_sparse())))
        assert describe(read_raw_blocks(spec, None, num_rows), spec.features).clustered == (), spec.name
