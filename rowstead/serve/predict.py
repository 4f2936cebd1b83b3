"""Click probabilities of a whole log, written to Parquet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowstead import run as runs
from rowstead.contracts.batch import Batch
from rowstead.records.run_folder import RunFolder
from rowstead.spec.errors import DataError
from rowstead.training.evaluate import log_odds_of


def predict(
    run: str,
    out: Path | str,
    *,
    data: list[str] | None = None,
    overwrite: bool = False,
    root: Path | str = runs.DEFAULT_ROOT,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write `p`, and `label` where the log has one, for each row of the log in its order; returns the number of rows.

    The log is the run's evaluation split, or the Parquet files of `data`.
    """
    out = Path(out)
    if out.exists() and not overwrite:
        raise DataError(f"{out} exists: choose another --out, or pass --overwrite")
    if not out.parent.is_dir():
        raise DataError(f"there is no folder {out.parent} to write {out.name} into")
    num_rows = 0
    unfinished = out.with_name(f".{out.name}.tmp")
    writer = None
    try:
        for table in _predictions(run, data, root):
            writer = writer or pq.ParquetWriter(unfinished, table.schema)
            writer.write_table(table)
            num_rows += table.num_rows
            if progress is not None:
                progress(num_rows, 0)
        if writer is None:
            raise DataError("there is nothing to predict: the log has no rows")
        writer.close()
        os.replace(unfinished, out)
    finally:
        if writer is not None and writer.is_open:
            writer.close()
        unfinished.unlink(missing_ok=True)
    return num_rows


def _predictions(run: str, data: list[str] | None, root: Path | str) -> Iterator[pa.Table]:
    spec = RunFolder.open(run, root).read_spec()
    model = runs.load(run, root=root)
    source = runs.source_for(spec, runs.transforms_of(run, root=root), data=data, needs_label=False)
    device = runs.device_of(spec)
    model.to(device)
    for batch, log_odds in log_odds_of(model, source, device=device):
        yield _table(batch, log_odds + np.float32(model.log_keep_rate))


def _table(batch: Batch, log_odds: np.ndarray) -> pa.Table:
    columns = {"p": 1 / (1 + np.exp(-log_odds.astype(np.float64)))}
    if batch.labels is not None:
        columns["label"] = batch.labels.numpy()
    return pa.table(columns)
