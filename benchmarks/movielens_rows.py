"""The rows of MovieLens-1M that `benchmarks.real_quality` trains on: one encoding and one split for rowstead and for FuxiCTR.

Rows are sorted by time, user and item; row r is in tenth `(r * 11400714819323198485 mod 2^64 >> 40) % 10` of the hash split, and in tenth
10 r / R of the time split. Tenths 0 to 7 are for training, 8 for validation, 9 for the test. The training rows are then shuffled.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rowstead.data.movielens import convert

Split = Literal["hash", "time"]
PARTS = ("train", "eval", "test")
ONE_ID = ("user", "item", "gender", "age", "occupation", "zip_prefix", "hour", "weekday", "year")
"""Columns of which each value is an id; `genres` is a list of them."""


def fetch_archive(folder: Path) -> Path:
    """ml-1m.zip, out of a package of the index that has it among its examples."""
    words = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "scikit-rec==0.3.0", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    (package,) = folder.glob("scikit*rec-0.3.0.tar.gz")
    name = f"{package.name.removesuffix('.tar.gz')}/examples/data/movielens-1m/ml-1m.zip"
    subprocess.run(["tar", "-xzf", str(package), "-C", str(folder), name], check=True)
    return folder / name


def write_rows(archive: Path, folder: Path) -> dict[str, int]:
    """Write each part of each split to `folder/SPLIT/PART.parquet`, ids as `c_NAME` from 1; returns the number of ids of each column."""
    convert(archive, folder / "converted", eval_fraction=0.0, overwrite=True)
    table = pq.read_table(folder / "converted").sort_by(
        [("timestamp", "ascending"), ("user", "ascending"), ("item", "ascending")]
    )
    sizes = dict[str, int]()
    for name in (*ONE_ID, "genres"):
        column = table[name].combine_chunks()
        values = column.flatten() if name == "genres" else column
        codes = pc.fill_null(values.dictionary_encode("encode").indices.cast(pa.int64()), 0)
        codes = pc.add(codes, 1)
        sizes[name] = pc.max(codes).as_py() + 1
        if name == "genres":
            codes = pa.ListArray.from_arrays(column.offsets, codes)
        table = table.append_column(f"c_{name}", codes)
    for split in ("hash", "time"):
        tenth = tenths(table.num_rows, split)  # type: ignore[arg-type]
        for part, rows in zip(PARTS, (tenth < 8, tenth == 8, tenth == 9), strict=True):
            index = np.flatnonzero(rows)
            if part == "train":
                index = np.random.default_rng(1).permutation(index)
            (folder / split).mkdir(exist_ok=True)
            pq.write_table(table.take(index), folder / split / f"{part}.parquet", row_group_size=50_000)
    return sizes


def tenths(num_rows: int, split: Split) -> NDArray[np.int64]:
    """The tenth that each row is in."""
    rows = np.arange(num_rows, dtype=np.uint64)
    if split == "time":
        return (rows * 10 // num_rows).astype(np.int64)
    with np.errstate(over="ignore"):
        return ((rows * np.uint64(11400714819323198485) >> np.uint64(40)) % np.uint64(10)).astype(np.int64)
