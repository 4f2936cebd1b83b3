"""One small run over a Parquet log of every kind of column, and its exports: made once for all tests here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings

import rowstead
from rowstead.spec.parse import parse
from rowstead.spec.run import RunSpec

settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

NUM_ROWS = 3000


def raw_columns(num_rows: int, seed: int) -> dict[str, Any]:
    """A log with numbers, missing numbers, text, lists, empty lists and nulls."""
    rng = np.random.default_rng(seed)
    words = [None, "", "a", "ärger", "a text of more than thirty-two bytes, to take the long way"]
    age = rng.normal(40, 9, num_rows)
    return {
        "row": np.arange(num_rows),
        "age": [None if value < 25 else float(value) for value in age],
        "price": rng.exponential(50, num_rows).astype(np.float32),
        "user": rng.integers(-(2**63), 2**63 - 1, num_rows),
        "city": [words[i] for i in rng.integers(0, len(words), num_rows)],
        "seen": [rng.integers(0, 10**6, n).tolist() for n in rng.poisson(2, num_rows)],
        "tags": [[words[1 + i] for i in rng.integers(0, 4, n)] for n in rng.poisson(3, num_rows)],
        "slot": [[int(i) for i in rng.integers(0, 20, n)] for n in rng.integers(0, 3, num_rows)],
        "click": (rng.random(num_rows) < 0.3).astype(np.int64),
    }


@pytest.fixture(scope="session")
def log(tmp_path_factory) -> Path:
    """A log of 3,000 rows in two files."""
    folder = tmp_path_factory.mktemp("log")
    table = pa.table(raw_columns(NUM_ROWS, seed=0))
    pq.write_table(table.slice(0, 2000), folder / "part-0.parquet", row_group_size=700)
    pq.write_table(table.slice(2000), folder / "part-1.parquet")
    return folder


def spec_for(log: Path, **data: Any) -> RunSpec:
    return parse(
        RunSpec,
        {
            "name": "small",
            "data": {
                "parquet": {"train": [str(log / "part-*.parquet")], "label": "click", "eval_fraction": 0.4, **data},
                "negative_keep_rate": 0.5,
            },
            "features": {
                "dense": [
                    {"name": "age", "missing": "mean", "standardise": True},
                    {"name": "price", "clip": [0, 300], "log": True},
                ],
                "sparse": [
                    {"name": "user", "num_rows": 97},
                    {"name": "city", "num_rows": 50, "width": 3},
                    {"name": "seen", "table": "items", "pooling": "mean"},
                    {"name": "last_seen", "column": "seen", "table": "items", "max_ids": 1, "hash": "modulo"},
                    {"name": "tags", "num_rows": 31, "pooling": "mean", "max_ids": 2},
                    {"name": "slot", "num_rows": 20, "hash": "none", "max_ids": 2},
                ],
                "tables": [{"name": "items", "num_rows": 101}],
            },
            "model": {"width": 8, "bottom": [8], "top": [8], "interaction": {"kind": "cross", "cross_rank": 4}},
            "train": {"batch_size": 128, "max_steps": 10},
            "device": "cpu",
        },
    )


@pytest.fixture(scope="session")
def run(log, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "small"
    rowstead.train(spec_for(log), out=folder)
    return str(folder)


@pytest.fixture(scope="session")
def exported(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "fp32"
    rowstead.export(run, folder)
    return folder
