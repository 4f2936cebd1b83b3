"""The benchmark on MovieLens-1M splits as it says, and describes the runs of both sides alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.movielens_rows import ONE_ID, PARTS, tenths, write_rows
from benchmarks.real_quality import MODELS, SHARED, default_spec, own_spec, summary_of
from tests.test_recipes import write_movielens


def test_tenths_are_equal_parts_and_those_by_time_follow_the_order() -> None:
    assert np.bincount(tenths(100_000, "hash")) / 100_000 == pytest.approx(np.full(10, 0.1), abs=1e-3)
    assert [(row * 11400714819323198485 % 2**64 >> 40) % 10 for row in range(50)] == tenths(50, "hash").tolist()
    assert tenths(20, "time").tolist() == [row // 2 for row in range(20)]


def test_each_rating_is_in_one_part_with_ids_below_the_number_of_rows_and_every_run_is_described(tmp_path: Path) -> None:
    write_movielens(tmp_path / "converted")
    sizes = write_rows(tmp_path / "ml-1m.zip", tmp_path / "rows")
    for split in ("hash", "time"):
        parts = [pq.read_table(tmp_path / "rows" / split / f"{part}.parquet") for part in PARTS]
        pairs = [pair for part in parts for pair in zip(part["user"].to_pylist(), part["item"].to_pylist(), strict=True)]
        assert len(set(pairs)) == len(pairs) == 400
        for name in ONE_ID:
            ids = np.concatenate([part[f"c_{name}"].to_numpy() for part in parts])
            assert 1 <= ids.min() <= ids.max() == sizes[name] - 1
    latest = max(pq.read_table(tmp_path / "rows" / "time" / "train.parquet")["timestamp"].to_pylist())
    assert latest <= min(pq.read_table(tmp_path / "rows" / "time" / "test.parquet")["timestamp"].to_pylist())
    for model in MODELS:
        spec = own_spec(model, tmp_path / "rows", "hash", sizes, seed=3, settings=SHARED)
        assert (spec.model.network, spec.model.top, spec.seed) == (model, tuple(SHARED["hidden"]), 3)
    assert default_spec(tmp_path / "rows", "hash").name == "movielens"


def test_the_summary_has_the_worst_gap_between_means() -> None:
    rows = [
        {"by": by, "model": model, "split": "hash", "auc": auc, "ne": 0.8}
        for by, model, auc in (
            ("rowstead", "dlrm", 0.81),
            ("rowstead", "dlrm", 0.83),
            ("fuxictr", "dlrm", 0.80),
            ("rowstead", "deepfm", 0.79),
            ("fuxictr", "deepfm", 0.80),
            ("rowstead", "movielens", 0.805),
        )
    ]
    found = summary_of(rows)
    assert found == pytest.approx({"movielens_default_auc": 0.805, "movielens_default_ne": 0.8, "vs_fuxictr_auc_min": -0.01})
